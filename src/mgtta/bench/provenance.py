"""What a run reads from disk: is it unchanged, and are test images kept apart from others."""

import hashlib
import os
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from mgtta.bench.cells import Cell, Setup
from mgtta.data.shards import expand, files_of, is_tar
from mgtta.models.loading import load_model

FILES = 1000  # of a folder, whose names and sizes are hashed
CONTENT_BYTES = 2**24  # a file up to this size is hashed by its content


def seen(setup: Setup, cells: Iterable[Cell]) -> dict[str, str]:
    """Return a hash for each option that names something on this disk, keyed by the option and the name."""
    named = {
        ("--data", setup.data),
        ("--validation", setup.validation),
        ("--source", setup.source),
        ("--generator", setup.generator),
        ("--frost-textures", setup.frost_textures),
    }
    for cell in cells:
        named.add(("--variant", cell.data))
        named |= {("--variant", images) for _, images in cell.sets}
    found = {f"{option} {name}": _glance(name) for option, name in named if name is not None}
    return {key: value for key, value in sorted(found.items()) if value is not None}


def check_unchanged(protocols: list[dict[str, Any]], setup: Setup, cells: Iterable[Cell], path: Path) -> None:
    """Raise an error if what the options name has changed since the records were made: records go by names."""
    now = seen(setup, cells)
    for protocol in protocols:
        for key, value in (protocol.get("inputs") or {}).items():
            if now.get(key, value) != value:
                raise ValueError(f"{path} has records of another {key}, which has changed since: take another --out")
    same = [p for p in protocols if (p["model"], p["checkpoint"]) == (setup.model, setup.checkpoint)]
    if not same:
        return
    weights = load_model(setup.model, setup.checkpoint, **setup.head).fingerprint()
    other = next((p["weights"] for p in same if p["weights"] != weights), None)
    if other:
        name = setup.checkpoint or setup.model
        raise ValueError(
            f"{path} has records of {name} with other weights ({other}, now {weights}): take another --out"
        )


def check_apart(data: str | None, validation: str | None) -> None:
    """Reject test images that are also the validation images, whatever their names."""
    if data is not None and validation is not None and _places(data) & _places(validation):
        raise ValueError("the validation images are the test images: name others, or none")


def _glance(name: str) -> str | None:
    """Return a hash of a file's content; for a large file, a folder or tars, a hash of the first names and sizes."""
    files = list(islice(files_of(name), FILES))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        size = os.path.getsize(file)
        digest.update(f"{os.path.relpath(file, os.path.dirname(files[0]))} {size}".encode())
        if len(files) == 1 and size <= CONTENT_BYTES:
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def _places(name: str) -> set[Path]:
    names = expand(name) if is_tar(name) else [name]
    return {Path(each).expanduser().resolve() for each in names}
