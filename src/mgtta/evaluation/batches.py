"""Batches in the forms that users have: those of `mgtta.data.streams`, of a DataLoader, or plain pairs (x, y)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mgtta.data.streams import Batch

DOMAIN = "test"  # of batches that do not name one
KINDS_OF_BATCH = "a Batch of mgtta.data.streams, a pair (images, labels), or a tensor of images"


def as_batches(stream: Iterable[Any]) -> Iterator[Any]:
    """Yield each batch with x, y, domain and index; one that has a domain is yielded as it is."""
    seen = 0
    for item in stream:
        batch = item
        if not hasattr(item, "domain"):
            x, y = _pair(item)
            batch = Batch(x, y, DOMAIN, torch.arange(seen, seen + len(x)))
        yield batch
        seen += len(batch.x)


def _pair(item: Any) -> tuple[Tensor, Tensor | None]:
    """Return images and labels of a DataLoader's batch; None for labels that it does not have."""
    if isinstance(item, Tensor):
        return item, None
    if not isinstance(item, list | tuple) or len(item) != 2 or not isinstance(item[0], Tensor):
        raise TypeError(f"a stream gives batches: each is {KINDS_OF_BATCH}, not {_described(item)}")
    x, y = item
    if y is None:
        return x, None
    labels = torch.as_tensor(y)
    if labels.shape != (len(x),) or labels.is_floating_point():
        raise ValueError(
            f"labels must be {len(x)} class numbers, one for each image of the batch, not {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    return x, labels.long()


def check_labels(y: Tensor | None, classes: int) -> None:
    """Reject labels that are not numbers of scored classes; those on a GPU are not read back."""
    if y is None or y.is_cuda or not y.numel():
        return
    wrong = y[(y < 0) | (y >= classes)]
    if wrong.numel():
        raise ValueError(
            f"labels must be numbers of the {classes} scored classes, from 0 to {classes - 1}, not {int(wrong[0])}; "
            "y=None is a batch without labels"
        )


def _described(item: Any) -> str:
    if isinstance(item, list | tuple):
        return f"a {type(item).__name__} of {', '.join(type(part).__name__ for part in item) or 'nothing'}"
    return f"a {type(item).__name__}"
