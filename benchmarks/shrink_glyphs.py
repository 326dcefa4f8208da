"""Rounds the matrices of an embedded model to 8 bits, so that the package stays small.

    python benchmarks/shrink_glyphs.py MODEL.safetensors --out src/mgtta/weights/models/glyphs_plain.safetensors

Each row of a matrix has one scale and whole numbers from -63 to 63. The metadata say how many predictions stay the
same, on test characters under each of the 15 corruptions. Then `python benchmarks/finish_glyphs.py` must make the
model's source statistics again.
"""

import argparse
import copy
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic, read_tensors
from mgtta._lib.shrunk import SCALE, widened
from mgtta.data.glyphs import TEST_SEED, Glyphs
from mgtta.data.streams import corrupted, stream

LEVELS = 63  # the largest whole number
SMALLEST = 4096  # numbers in a tensor, below which it keeps its 16 bits


def rounded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with large matrices in int8, each with a scale for every row."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or tensor.numel() < SMALLEST:
            found[name] = tensor
            continue
        rows = tensor.float().flatten(1)
        scale = rows.abs().amax(1).clamp_min(1e-8) / LEVELS
        found[name] = (rows / scale[:, None]).round().to(torch.int8).view_as(tensor)
        found[name + SCALE] = scale
    return found


@torch.no_grad()
def same_predictions(before: mgtta.Classifier, after: mgtta.Classifier, images: int) -> tuple[int, int]:
    """Return how many predictions agree, and of how many."""
    same = 0
    total = 0
    for batch in stream(corrupted(Glyphs(images, TEST_SEED)), batch_size=64):
        same += int(before(batch.x).argmax(1).eq(after(batch.x).argmax(1)).sum())
        total += len(batch.x)
    return same, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a file of benchmarks/train_glyphs.py, in 16 bits")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=64, help="images per corruption, to compare predictions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors, metadata = read_tensors(args.model)
    small = rounded(tensors)
    before = mgtta.load_model("glyphs_plain")
    before.net.load_state_dict(widened(tensors))
    after = copy.deepcopy(before)
    after.net.load_state_dict(widened(small))
    same, total = same_predictions(before, after, args.images)
    metadata["rounded"] = f"python benchmarks/shrink_glyphs.py: {same} of {total} predictions stay the same"
    with atomic(args.out) as path:
        save_file(small, path, metadata=metadata)
    print(metadata["rounded"])


if __name__ == "__main__":
    main()
