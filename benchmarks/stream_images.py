"""The images of benchmarks/streams.py: corrupted once, written to one file, which all its processes read."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagenet
import numpy as np
import pacs
import torch
from torch import Tensor

from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.datasets import open_dataset
from mgtta.data.streams import GRADUAL

GRADUAL_IMAGES = 100  # of each corruption and severity
CORRUPTED_AT_ONCE = 50 * 224 * 224  # pixels


@dataclass(frozen=True)
class Network:
    """A network with real weights.

    Attributes:
        words: for the page.
        test: its test images, in words.
        validation: the images for choosing, in words.
        data: which images: imagenet, cifar10 or pacs.
        constants: of the corruptions; "cifar": of images of 32 pixels.
        batch: images in a batch.
        trial: images of each corruption, in streams for choosing settings.
        classes: of the network, where its weights are not those of its name.
        is_resnet: it normalises by BatchNorm; False: by LayerNorm.
    """

    model: str
    words: str
    test: str
    validation: str
    data: str = "imagenet"
    constants: str = "imagenet"
    batch: int = 64
    trial: int = 320
    classes: int | None = None
    is_resnet: bool = True


IMAGENET = ("2,000 ImageNet validation images (shards 1 and 2)", "872 images of shard 0")
CIFAR10 = ("the 10,000 test images of CIFAR-10", "872 training images")
PACS = ("art and cartoons: benchmarks/pacs.py", "300 photographs of PACS")
NETWORKS = {
    "deit_tiny": Network("deit_tiny_patch16_224", "DeiT-Tiny", *IMAGENET, is_resnet=False),
    "resnet50": Network("keras_resnet50", "ResNet-50", *IMAGENET),
    "efficientnet_lite0": Network("tf_efficientnet_lite0", "EfficientNet-Lite0", *IMAGENET),
    "cifar10": Network("cifar_resnet56", "ResNet-56", *CIFAR10, "cifar10", "cifar", batch=200, trial=872),
    "pacs": Network(
        "deit_tiny_patch16_224", "DeiT-Tiny, fine-tuned on photographs", *PACS, "pacs", classes=7, is_resnet=False
    ),
}


def make(args: argparse.Namespace) -> Path:
    """Write the images under all corruptions, and what methods need; return the file."""
    args.folder.mkdir(parents=True, exist_ok=True)
    size = "" if args.images is None else f"_{args.images}"
    path = args.folder / f"{args.network}_{args.streams}{size}.pt"
    network = NETWORKS[args.network]
    clean, held = held_images(args)
    names = CORRUPTIONS if args.streams == "test" else VALIDATION_CORRUPTIONS
    most = args.images
    if args.streams == "trial" and most is None:
        most = network.trial
    held = held.part(slice(0, most))
    sets = {"clean": held.x}
    sets |= {name: corrupted(held.x, name, 5, network.constants, args.device) for name in names}
    if "gradual" in args.kinds.split(","):
        for name in names:
            for severity in sorted(set(GRADUAL)):
                few = held.x[:GRADUAL_IMAGES]
                sets[f"{name}/{severity}"] = corrupted(few, name, severity, network.constants, args.device)
    lengths = [len(images) for images in sets.values()]
    made = {
        "images": torch.cat(list(sets.values())),
        "sets": {
            name: (sum(lengths[:k]), lengths[k]) for k, name in enumerate(sets)
        },  # where it begins, and its length
        "names": names,
        "labels": held.labels,
        "clean": clean.x,
        "split": "test" if args.streams == "test" else "validation",
        "batch": network.batch,
        "model": network.model,
        "classes": network.classes,
        "checkpoint": str(args.checkpoint),
    }
    torch.save(made, path)
    return path


def held_images(args: argparse.Namespace) -> tuple[imagenet.Held, imagenet.Held]:
    """Return a network's clean images for statistics, and those that are corrupted: its test images, or others.

    Args:
        args: with `network`, a name in NETWORKS, `streams`, "test" or another word, and `data`, a folder.
    """
    return READERS[NETWORKS[args.network].data](args)


def _imagenet(args: argparse.Namespace) -> tuple[imagenet.Held, imagenet.Held]:
    """Return the clean images for statistics, shard 0, and those that are corrupted."""
    clean = imagenet.shard(args.data, 0)
    if args.streams == "test":
        return clean, imagenet.shard(args.data, 1, 2)
    return clean, clean.part(imagenet.CHOOSING)


def _cifar10(args: argparse.Namespace) -> tuple[imagenet.Held, imagenet.Held]:
    """The same for CIFAR-10: 1,000 training images are for statistics."""

    def held(name: str) -> imagenet.Held:
        found: Any = np.load(args.data / f"cifar10_{name}.npz")
        x = torch.from_numpy(found["images"]).permute(0, 3, 1, 2).contiguous()
        return imagenet.Held(x, torch.from_numpy(found["labels"]).long())

    clean = held("validation")
    if args.streams == "test":
        return clean, held("test")
    return clean, clean.part(imagenet.CHOOSING)


def _pacs(args: argparse.Namespace) -> tuple[imagenet.Held, imagenet.Held]:
    """The same for photographs: those of the training are for statistics, the last ones are corrupted."""
    if args.streams == "test":
        raise SystemExit("the test streams of PACS are those of benchmarks/pacs.py: give --streams validation")
    photos = open_dataset(str(args.data / "pacs-photo.tar"))
    every = imagenet.Held(torch.stack([image for image, _ in photos]), photos.labels)
    return every.part(slice(-pacs.CHOICES)), every.part(slice(-pacs.CHOICES, None))


READERS = {"imagenet": _imagenet, "cifar10": _cifar10, "pacs": _pacs}


def corrupted(x: Tensor, name: str, severity: int, constants: str, device: str) -> Tensor:
    """Return images x (n, 3, H, W) under a corruption, on the CPU; the device computes a few at a time."""
    at_once = CORRUPTED_AT_ONCE // (x.shape[-2] * x.shape[-1])
    parts = zip(x.split(at_once), torch.arange(len(x)).split(at_once), strict=True)
    return torch.cat(
        [corrupt(part.to(device), name, severity, index=index, constants=constants).cpu() for part, index in parts]
    )
