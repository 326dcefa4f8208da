"""Images that are drawn by a function of a seed and a number: data sets without a download."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from multiprocessing import get_context
from typing import ClassVar

import numpy as np
import torch

# The seeds of the three splits. Seed 0, the default everywhere, is the test split: never train on it.
TEST_SEED = 0
TRAIN_SEED = 1
VALIDATION_SEED = 2
SIZE = 48  # pixels, of an image

_CHUNK = 256  # images that a process renders at a time

Render = Callable[[int, int], tuple[np.ndarray, int]]  # (index, seed) -> image, uint8 (3, SIZE, SIZE), and label


def _render_chunk(indices: range, render: Render, seed: int) -> np.ndarray:
    return np.stack([render(index, seed)[0] for index in indices])


class Rendered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The first `n` images of a seed, rendered on access.

    Attributes:
        kind: what an image shows, for its name.
        title: what the images are, for records.
        render: draws an image; a function of a module, so that other processes find it.
    """

    classes: ClassVar[tuple[str, ...]]
    kind: ClassVar[str]
    title: ClassVar[str]
    render: ClassVar[Render]

    def __init__(self, n: int, seed: int = TEST_SEED):
        if n < 0 or seed < 0:
            raise ValueError(f"n and seed must not be negative, got n={n}, seed={seed}")
        self.n = n
        self.seed = seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image, label = type(self).render(self._checked(i), self.seed)
        return torch.from_numpy(image), label

    @staticmethod
    def label_of(index: int, seed: int) -> int:
        """Return the label of an image without drawing it."""
        raise NotImplementedError

    def name(self, i: int) -> str:
        """Return the name of image i for records and file names."""
        return f"{self.kind}-{self.seed}-{self._checked(i)}"

    @cached_property
    def labels(self) -> torch.Tensor:
        """The labels, int64 (n,), found without rendering."""
        return torch.tensor([type(self).label_of(i, self.seed) for i in range(self.n)], dtype=torch.int64)

    def tensors(
        self, processes: int = 1, progress: Callable[[int, int], object] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all images, uint8 (n, 3, SIZE, SIZE), and labels (n,).

        Args:
            processes: number of processes. They are spawned, so CUDA may be in use, and the caller needs a
                `__main__` guard.
            progress: called with (images done, n) after each chunk.
        """
        images = torch.empty(self.n, 3, SIZE, SIZE, dtype=torch.uint8)
        done = 0
        for chunk in self._chunks(processes):
            images[done : done + len(chunk)] = torch.from_numpy(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, self.n)
        return images, self.labels

    def _chunks(self, processes: int) -> Iterator[np.ndarray]:
        work = [range(i, min(i + _CHUNK, self.n)) for i in range(0, self.n, _CHUNK)]
        draw = partial(_render_chunk, render=type(self).render, seed=self.seed)
        if processes == 1 or len(work) == 1:
            yield from map(draw, work)
            return
        with ProcessPoolExecutor(min(processes, len(work)), get_context("spawn")) as pool:
            yield from pool.map(draw, work)

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"image {i} of {self.n}")
        return int(i)
