"""What the measurements on real ImageNet images share: the shards, their split, DeiT-Tiny and its statistics.

Shard 0 serves everything that may look at data before the test; shards 1 and 2 are the test stream.
"""

import argparse
from pathlib import Path

import torch

import mgtta
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.data.datasets import open_dataset
from mgtta.data.streams import corrupted, stream
from mgtta.training.meta import shifted_images

TRAINING = slice(0, 128)  # of shard 0: the generator's images
CHOOSING = slice(128, 1000)  # of shard 0: choosing generators and hyper-parameters


class Held:
    """Images and labels held in memory, as a data set."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x = x
        self.labels = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return self.x[i], int(self.labels[i])

    def part(self, where: slice) -> "Held":
        return Held(self.x[where], self.labels[where])


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="folder of the shards imagenet-val5k-0000{0,1,2}.tar")
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of deit_tiny_patch16_224")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is made")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def shard(folder: Path, *numbers: int) -> Held:
    pairs = [pair for k in numbers for pair in open_dataset(str(folder / f"imagenet-val5k-0000{k}.tar"))]
    return Held(torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))


def deit_tiny(checkpoint: Path, device: str) -> mgtta.Classifier:
    return mgtta.load_model("deit_tiny_patch16_224", checkpoint=checkpoint).to(device)


def source_of(model: mgtta.Classifier, shard0: Held) -> mgtta.SourceStatistics:
    """Return the statistics of all 1,000 clean images of shard 0, none of which is in the test stream."""
    return mgtta.source_statistics(model, shard0.x)


def validation_batches(shard0: Held, device: str, seed: int = 0) -> list:
    """Return batches of the four validation corruptions at severity 5, on the images of shard 0 for choosing."""
    domains = corrupted(shard0.part(CHOOSING), VALIDATION_CORRUPTIONS)
    return list(stream(domains, batch_size=64, seed=seed, device=device))


def training_images(shard0: Held, device: str) -> torch.Tensor:
    """Return 128 unlabelled images, 32 under each validation corruption."""
    return shifted_images(shard0.part(TRAINING), 128, shuffle=False, device=device)
