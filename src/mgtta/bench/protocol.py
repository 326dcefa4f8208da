"""What a record says besides its scores: the cell that was asked for, and the protocol by which it was run."""

import dataclasses
import platform
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mgtta import __version__
from mgtta._lib.files import command
from mgtta._lib.timm import timm
from mgtta.bench.cells import Cell, Setup, Training
from mgtta.bench.needs import (
    default_generator,
    default_mirror,
    is_moved_by_generator,
    needs_source,
    takes_generator,
)
from mgtta.data.corruptions import frost_source
from mgtta.data.embedded import images_for
from mgtta.evaluation.record import Record
from mgtta.methods._mirror import mirrors

if TYPE_CHECKING:
    from mgtta.bench.resources import Lab

TRAIN = "train"  # as the name of a generator: it is to be trained


def described(lab: "Lab", cell: Cell, record: Record, precision: str) -> dict[str, Any]:
    """Return a record of the cell with its protocol, as plain values."""
    model = lab.model()
    setup = lab.setup
    if setup.tf32 and precision == "fp32":
        precision = "tf32"
    protocol = {
        "model": model.name,
        "checkpoint": setup.checkpoint,
        "weights": lab.fingerprint,
        "mean": _values(model.mean),
        "std": _values(model.std),
        **_described_images(lab, cell, record.images),
        "reset": cell.reset,
        "seed": cell.seed,
        **_described_method(lab, cell),
        "chosen_from": list(cell.chosen_from) or None,
        "inputs": lab.seen(cell),
        "device": device_name(setup.device),
        "precision": precision,
        "ranks": setup.ranks,
        "threads": torch.get_num_threads(),
        "versions": {"mgtta": __version__, "torch": torch.__version__, "timm": timm.__version__},
        "command": command(),
    }
    return {**record.to_dict(), **asked(cell), "protocol": protocol}


def asked(cell: Cell) -> dict[str, Any]:
    """Return the cell's fields as a record has them."""
    fields = dataclasses.asdict(cell)
    lists = {name: list(fields[name]) for name in ("domains", "without")}
    sets = [list(pair) for pair in cell.sets]
    return {**fields, **lists, "sets": sets, "settings": dict(cell.settings)}


def _described_images(lab: "Lab", cell: Cell, images: int) -> dict[str, Any]:
    setup = lab.setup
    validation = setup.validation
    if setup.data is None and not validation:
        validation = f"other {images_for(setup.model).title}"
    corruptions: str | None = f"mgtta, on the fly; frost: {frost_source(setup.frost_textures)}"
    if setup.constants != Setup.constants:
        corruptions = f"{corruptions}; constants: {setup.constants}"
    if cell.severity == 0:
        corruptions = None
    elif isinstance(lab.images(cell.split, cell.data), str):
        corruptions = "as published"
    order = f"shuffled, seed {cell.seed}"
    if cell.mixed:
        order += ", corruptions mixed within batches"
    if cell.by_class:
        order += ", then sorted by class"
    return {
        "data": setup.data or images_for(setup.model).title,
        "validation": validation,
        "corruptions": corruptions,
        "images": images,
        "order": order,
    }


def _described_method(lab: "Lab", cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("source images", "generator", "mirror", "hidden_size", "training_images"))
    found["generator"] = generator_of(cell, lab.setup)
    training = training_of(cell, lab.setup)
    if training is not None:
        found["hidden_size"] = training.hidden_size
        found["training_images"] = training.images
        if takes_generator(cell.method):
            found["generator"] = str(training)
    if needs_source(cell.method):
        found["source images"] = lab.source.images
    mirror = dict(cell.settings).get("mirror", default_mirror(cell.method))
    if mirror is not None:
        found["mirror"] = mirrors(mirror, lab.source)
    return found


def training_of(cell: Cell, setup: Setup) -> Training | None:
    """Return how the cell's generator is trained; None if it needs none or has one already."""
    if cell.training is not None:
        return cell.training
    own = is_moved_by_generator(cell.method) and default_generator(cell.method) == Setup.generator
    if own and setup.generator == TRAIN:
        return Training()
    return None


def generator_of(cell: Cell, setup: Setup) -> str | None:
    """Return the name or the file of the cell's generator; None if it needs none, or one that is trained."""
    if not is_moved_by_generator(cell.method) or training_of(cell, setup) is not None:
        return None
    own = default_generator(cell.method)
    if own == Setup.generator:
        return setup.generator
    return own


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the kind of CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _values(tensor: Tensor | None) -> list[float] | None:
    if tensor is None:
        return None
    return tensor.flatten().tolist()
