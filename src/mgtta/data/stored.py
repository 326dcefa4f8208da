"""Keeps corrupted images in a folder, so that each is made once for all methods, processes and runs.

A file is a plain .npy, uint8 (N, 3, H, W): the first images of a domain in the order of a stream with its seed. Its
name ends with a hash of all that decides its pixels. It is mapped into memory, so processes share what they read.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

from mgtta._lib.files import atomic, locked
from mgtta.data.cache import Around
from mgtta.data.shards import files_of
from mgtta.data.streams import Domain, Stream, stream

BATCH = 64  # images that are made at a time, as in most streams: a GPU may round otherwise in other batches
REPORT = 512  # images, after which `say` is told how far it is


class Stored(Around):
    """A data set of which some images are read from a file, and no others; labels and names are its own."""

    def __init__(self, dataset: Any, images: Tensor, numbers: Tensor):
        super().__init__(dataset)
        self.images = images  # (N, 3, H, W) uint8
        self._rows = np.full(len(dataset), -1)  # image number -> row of `images`
        self._rows[numbers.numpy()] = np.arange(len(numbers))
        self._labels = None if self.labels is None else self.labels.numpy()

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        row = int(self._rows[i])
        if row < 0:
            raise IndexError(f"image {i} is not among the {len(self.images)} that are stored")
        label = -1 if self._labels is None else int(self._labels[i])
        return self.images[row], label


class ImageStore:
    """A folder of clean and corrupted images.

    Args:
        made_with: plain values that decide the pixels besides domain and seed, such as the device's name.
        say: is told, as a sentence, how far the making of a file is.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        device: torch.device | str = "cpu",
        made_with: Any = None,
        say: Callable[[str], object] = lambda text: None,
    ):
        self.folder = Path(folder)
        self.device = device
        self.made_with = [_code(), torch.__version__, PIL.__version__, made_with]
        self.say = say
        self._opened: dict[Path, Stored] = {}

    def domain(self, domain: Domain, images: str, seed: int, first: int | None = None) -> Domain:
        """Return the domain with its images from the folder; the first that asks makes the file, others wait for it.

        Args:
            images: what tells the clean images from others, see `stamp`.
            seed: of the stream: it decides order and corruption.
            first: so many images of the domain, those that a stream with this seed shows first; by default all.
        """
        made = stream(domain, batch_size=BATCH, seed=seed, first=first, device=self.device)
        numbers = torch.cat([planned.rows[:, 1] for planned in made.plan])
        path = self._path(domain, [images, seed, len(domain.dataset), len(numbers)], seed)
        if path not in self._opened:
            with locked(path.with_suffix(".lock")):
                if not path.exists():
                    if domain.corruption is not None:  # decoded once, for all corruptions
                        clean = self.domain(dataclasses.replace(domain, corruption=None), images, seed, first)
                        made.domains = [dataclasses.replace(domain, dataset=clean.dataset)]
                    self._make(path, made, numbers)
            self._opened[path] = Stored(domain.dataset, _mapped(path), numbers)
        return dataclasses.replace(domain, dataset=self._opened[path], corruption=None)

    def _path(self, domain: Domain, parts: list[Any], seed: int) -> Path:
        name = "clean"
        if domain.corruption is not None:
            name = f"{domain.corruption}-{domain.severity}"
            parts = [*parts, domain.corruption, domain.severity, domain.constants]
        if domain.corruption == "frost" and domain.frost_textures is not None:
            parts = [*parts, stamp(os.fspath(domain.frost_textures))]
        text = json.dumps([self.made_with, *parts])
        return self.folder / f"{name}-seed{seed}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"

    def _make(self, path: Path, made: Stream, numbers: Tensor) -> None:
        """Write the images of a stream; the caller has the lock."""
        for left in self.folder.glob(f".{path.name}.*"):  # of a process that was killed
            left.unlink()
        image = made.domains[0].dataset[int(numbers[0])][0]
        if image.dtype != torch.uint8:
            raise TypeError(f"only uint8 images are stored, and these are {image.dtype}")
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(numbers), *image.shape)}
        size = len(numbers) * image.nbytes
        if size > shutil.disk_usage(self.folder).free:
            raise self._full(path, size)
        done = 0
        try:
            with atomic(path) as temporary, open(temporary, "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for batch in made:
                    file.write(batch.x.cpu().numpy().tobytes())
                    done += len(batch.x)
                    if done % REPORT == 0 or done == len(numbers):
                        self.say(f"{path.stem.rpartition('-')[0]}: {done} of {len(numbers)} images are stored")
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._full(path, size) from error

    def _full(self, path: Path, size: int) -> OSError:
        free = shutil.disk_usage(self.folder).free
        return OSError(
            f"{self.folder} has no room for {path.name}: it needs {size:,} bytes, and {free:,} are free; remove files, "
            "or name another folder with --cache"
        )


def stamp(name: str) -> str:
    """Return a hash of the paths, sizes and modification times of all files of a folder, a file or tars.

    What is not on this disk, such as a URL, counts by its name.
    """
    digest = hashlib.sha256(name.encode())
    for file in files_of(name):
        found = os.stat(file)
        digest.update(f"{os.path.abspath(file)} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@cache
def _code() -> str:
    """Return a hash of the code of this package, which reads, draws and corrupts images."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _mapped(path: Path) -> Tensor:
    try:
        images = np.load(path, mmap_mode="c", allow_pickle=False)  # "c": writable for torch, never written back
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and it is made again") from error
    return torch.from_numpy(images)
