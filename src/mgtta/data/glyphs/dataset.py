"""The drawn characters as a data set."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from multiprocessing import get_context

import numpy as np
import torch

from mgtta.data.glyphs.drawing import CLASSES, SIZE, TEST_SEED, render, start

_CHUNK = 256  # images that a process renders at a time


def _render_chunk(indices: range, seed: int) -> np.ndarray:
    return np.stack([render(index, seed)[0] for index in indices])


class Glyphs(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The first `n` images of a seed, rendered on access."""

    classes = CLASSES

    def __init__(self, n: int, seed: int = TEST_SEED):
        if n < 0 or seed < 0:
            raise ValueError(f"n and seed must not be negative, got n={n}, seed={seed}")
        self.n = n
        self.seed = seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image, label = render(self._checked(i), self.seed)
        return torch.from_numpy(image), label

    def name(self, i: int) -> str:
        """Return the name of image i for records and file names."""
        return f"glyph-{self.seed}-{self._checked(i)}"

    @cached_property
    def labels(self) -> torch.Tensor:
        """The labels, int64 (n,), found without rendering."""
        return torch.tensor([start(self.seed, i)[1] for i in range(self.n)], dtype=torch.int64)

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
        draw = partial(_render_chunk, seed=self.seed)
        if processes == 1 or len(work) == 1:
            yield from map(draw, work)
            return
        with ProcessPoolExecutor(min(processes, len(work)), get_context("spawn")) as pool:
            yield from pool.map(draw, work)

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"image {i} of {self.n}")
        return int(i)
