"""Batches of clean images, from one tensor or from an iterable of batches."""

import os
from collections.abc import Iterable, Iterator, Mapping
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
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise TypeError(f"images are a tensor, or batches of tensors such as a DataLoader, not {type(given).__name__}")
    count = 0
    for batch in given:
        is_tuple = not isinstance(batch, Tensor | Mapping | str) and hasattr(batch, "__getitem__")
        x = batch[0] if is_tuple else batch
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise TypeError(f"a batch of images is a tensor (N, ...), or a tuple that starts with one, not {kind}")
        if max_images is not None:
            x = x[: max_images - count]
        count += len(x)
        if len(x):
            yield from x.split(batch_size)
        if count == max_images:
            return
