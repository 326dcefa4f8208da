"""Plans a stream: which image comes when, as numbers only. Nothing is read here.

The same arguments give the same plan. The batch size does not change the order of the images.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Planned(NamedTuple):
    """A batch to be read: the name of its domain, and which images of which domains."""

    domain: str
    rows: Tensor  # (N, 2) int64: number of the domain, number of the image


def plan_batches(
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    labels: Sequence[Tensor] | None = None,
    batch_size: int = 64,
    mixed: bool = False,
    imbalance: float | None = None,
    first: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> list[Planned]:
    """Return the batches of a stream over domains, one domain after another.

    Args:
        names: the name of each domain.
        sizes: the number of images of each domain.
        labels: the labels of each domain's images; only needed with `imbalance`.
        mixed, imbalance, first, shuffle: see `mgtta.data.streams.stream`.
    """
    if batch_size < 1 or (first is not None and first < 1):
        raise ValueError(f"batch_size and first must be at least 1; got {batch_size} and {first}")
    if imbalance is not None and not imbalance >= 1:
        raise ValueError(f"imbalance must be at least 1, up to math.inf; got {imbalance}")
    pools = []  # (name, rows) of each stretch of the stream
    for d, (name, size) in enumerate(zip(names, sizes, strict=True)):
        order = torch.randperm(size, generator=_generator(seed)) if shuffle else torch.arange(size)
        chosen = order[:first]
        pools.append((name, torch.stack([torch.full_like(chosen, d), chosen], 1)))
    if mixed:
        rows = torch.cat([rows for _, rows in pools])
        pools = [("mixed", rows[torch.randperm(len(rows), generator=_generator(seed))])]
    if imbalance is not None:
        assert labels is not None, "imbalance needs labels"
        pools = [(name, rows[label_shift(_labels(rows, labels), imbalance, seed)]) for name, rows in pools]
    return [Planned(name, batch) for name, rows in pools for batch in rows.split(batch_size)]


def label_shift(labels: Tensor, imbalance: float, seed: int = 0) -> Tensor:
    """Return an order of all images in which one class after another dominates, (N,) int64.

    The classes take turns in a random order, each for as many images as it has. In its turn a class is drawn with
    `imbalance` times the weight of each other class that has images left. Within a class the order stays.
    """
    random = _generator(seed)
    left: dict[int, list[int]] = {c: [] for c in labels.unique().tolist()}
    for i, c in reversed(list(enumerate(labels.tolist()))):
        left[c].append(i)
    classes = list(left)
    turns = [classes[k] for k in torch.randperm(len(classes), generator=random).tolist()]
    draws = iter(torch.rand(len(labels), 2, generator=random, dtype=torch.float64).tolist())
    sizes = {c: len(images) for c, images in left.items()}
    order = []
    for turn in turns:
        others = [c for c in turns if c != turn and left[c]]
        for _ in range(sizes[turn]):
            u, v = next(draws)
            own = bool(left[turn]) and (math.isinf(imbalance) or u * (imbalance + len(others)) < imbalance)
            c = turn if own else others[int(v * len(others))]
            order.append(left[c].pop())
            if not own and not left[c]:
                others.remove(c)
    return torch.tensor(order, dtype=torch.int64)


def _labels(rows: Tensor, labels: Sequence[Tensor]) -> Tensor:
    """Return the label of each row, (N, 2) -> (N,) int64."""
    found = torch.empty(len(rows), dtype=torch.int64)
    for d in rows[:, 0].unique().tolist():
        mine = rows[:, 0] == d
        found[mine] = labels[d][rows[mine, 1]]
    return found


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
