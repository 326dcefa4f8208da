"""Batches of clean images, from one tensor or from an iterable of batches."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def image_batches(images: Tensor | Iterable[Any], batch_size: int, max_images: int | None = None) -> Iterator[Tensor]:
    """Yield batches of at most `batch_size` images, and at most `max_images` images in all.

    Args:
        images: one tensor of images, or an iterable of batches: tensors, or tuples that start with one.
    """
    if isinstance(images, str | os.PathLike):
        raise TypeError(
            f"images are tensors, not a path ({os.fspath(images)!r}): "
            "mgtta.data.streams.stream(mgtta.data.datasets.open_dataset(PATH, size=224)) reads a folder"
        )
    given = [images] if isinstance(images, Tensor) else images
    count = 0
    for batch in given:
        x = batch if isinstance(batch, Tensor) else batch[0]
        if max_images is not None:
            x = x[: max_images - count]
        count += len(x)
        if len(x):
            yield from x.split(batch_size)
        if count == max_images:
            return
