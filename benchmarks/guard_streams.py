"""The streams and cells of benchmarks/guard.py: which images come when, and which methods at which rates meet them."""

import argparse
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from mgtta.methods.registry import recipe

Row = tuple[str, int]  # a domain and an image of it; -1: an image without content, which is not scored
Cell = tuple[str, str, str]  # method, rate, stream
Settings = dict[str, float]  # of a guard
METHODS = ("tent", "eata", "sar", "deyo", "roid", "mgtta", "mgtta_plus")
TUNED = {  # learning rates of the README's table of version 0.1, chosen on validation images with resets
    "tent": 1e-3,
    "eata": 2.5e-3,
    "sar": 5e-3,
    "deyo": 5e-5,
    "roid": 2.5e-3,
    "mgtta": 5e-3,
    "mgtta_plus": 5e-3,
}
RATES = ("default", "tuned", "10 x")
FOUR = ("gaussian_noise", "fog", "contrast", "pixelate")
IMAGES = 2000  # of a stream, those without content not counted
STREAMS = {
    "mixed 64": "15 corruptions mixed, batches of 64",
    "continual 64": "15 corruptions one after another, batches of 64",
    "labels 64": "the same, each sorted by class",
    "noise 64": "gaussian noise, batches of 64",
    "fog": "fog, batches of 16",
    "contrast": "contrast, batches of 16",
    "mixed": "4 corruptions mixed, batches of 16",
    "turns": "4 corruptions in turn, 3 rounds, batches of 16",
    "classes": "4 corruptions mixed, one class after another, batches of 16",
    "grey": "4 corruptions mixed, batches of 16 in which three of four images are plain grey",
    "noise": "the same with random pixels",
    "one": "4 corruptions mixed, batches of one",
    "clean one": "clean images, batches of one",
}
CHANGED: tuple[Settings, ...] = (  # of the guard, one at a time
    {},
    {"tolerance": 0.02},
    {"tolerance": 0.08},
    {"doubt": 0.15},
    {"doubt": 1.0},
    {"window": 128},
    {"window": 512},
    {"every": 64},
    {"every": 1024},
    {"slower": 0.5},
    {"slower": 0.02},
)
FEW_METHODS = (  # that run with changed settings
    ("sar", "default"),
    ("deyo", "default"),
    ("mgtta_plus", "default"),
    ("tent", "10 x"),
)
FEW_STREAMS = ("mixed", "continual 64")
EARLIER = ("second", "first")  # data of the rows of earlier tests, of earlier guards; the last one first
TITLES = {
    "imagenet": "ImageNet images, DeiT-Tiny",
    EARLIER[0]: "ImageNet images, DeiT-Tiny: the guard of the second test, where the present one is not tested",
    "resnet50": "ImageNet images, ResNet-50",
    "cifar10": "CIFAR-10 images, ResNet-56",
    "characters": "Embedded characters, glyphs_vit",
}
BENIGN = ("mixed 64", "continual 64", "labels 64", "noise 64")  # at default rates
TIMED = ("mixed 64", "continual 64")  # of which the time is measured
SINGLE = ("one", "clean one")  # plain methods do not run there
LONG = (*SINGLE, "grey", "noise")  # plain methods run there at default rates, if at all


def plan(stream: str, labels: Tensor, four: Iterable[str], many: Iterable[str], seed: int = 0) -> list[list[Row]]:
    """Return the batches of a stream.

    Args:
        four: corruptions that are mixed, or come in turn.
        many: those of streams in batches of 64; the first is the noise.
    """
    random = torch.Generator().manual_seed(seed)
    four = list(four)
    many = list(many)

    def some(domain: str, images: int) -> list[Row]:
        return [(domain, i) for i in torch.randperm(len(labels), generator=random)[:images].tolist()]

    def mixed(domains: Iterable[str]) -> list[Row]:
        rows = [row for domain in domains for row in some(domain, len(labels))]
        return [rows[i] for i in torch.randperm(len(rows), generator=random)[:IMAGES].tolist()]

    def by_class(rows: list[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: int(labels[row[1]]))

    part = -(-IMAGES // len(many))
    turn = -(-IMAGES // (3 * len(four)))
    rows: dict[str, Callable[[], list[Row]]] = {
        "mixed": lambda: mixed(four),
        "turns": lambda: [row for _ in range(3) for name in four for row in some(name, turn)],
        "classes": lambda: by_class(mixed(four)),
        "one": lambda: mixed(four),
        "clean one": lambda: some("clean", IMAGES),
        "mixed 64": lambda: mixed(many),
        "continual 64": lambda: [row for name in many for row in some(name, part)],
        "labels 64": lambda: [row for name in many for row in by_class(some(name, part))],
        "noise 64": lambda: some(many[0], IMAGES),
    }
    if stream in ("grey", "noise"):
        found = [each for row in mixed(four) for each in (row, (stream, -1), (stream, -1), (stream, -1))]
    elif stream in rows:
        found = rows[stream]()
    else:
        found = some(stream, IMAGES)
    size = 16
    if stream.endswith("64"):
        size = 64
    if stream.endswith("one"):
        size = 1
    return [found[i : i + size] for i in range(0, len(found), size)]


def turn(cell: Cell) -> int:
    """Return when a cell is run: what matters most is first, in case time ends."""
    _, rate, stream = cell
    if stream in BENIGN:
        return 0 if rate == "default" else 1
    if stream not in (*LONG, "classes"):
        return 2
    if stream in SINGLE:
        return 3 if rate == "default" else 5
    return 4


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells; a tuned rate that is the default is left out."""
    found = [
        (method, rate, stream)
        for stream in STREAMS
        for method in METHODS
        for rate in RATES
        if rate != "tuned" or TUNED[method] != recipe(method).settings["lr"]
    ]
    if args.alone:
        return [cell for cell in found if cell[1] == "default" and cell[2] in TIMED]
    if args.what == "settings":
        return [(*method, stream) for stream in FEW_STREAMS for method in FEW_METHODS]
    if args.what != "imagenet":  # a quarter of them
        found = found[::4]
    return sorted(found, key=turn)
