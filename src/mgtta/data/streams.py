"""Ordered domains as a stream of batches: one after another, mixed, gradual, or with shifting labels.

A stream is planned first, as numbers of domains and images, and read second: the same seed gives the same
order, and neither batch size nor number of workers changes which image comes when or how it is corrupted.

Shapes: N images of a batch, (N, 3, H, W).
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mgtta._lib.errors import unknown
from mgtta._lib.profile import part
from mgtta._lib.ranks import Alone, share
from mgtta.data.corruptions import CORRUPTIONS, SEVERITIES, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.datasets import imagenet_c
from mgtta.data.images import ImageError

GRADUAL = (1, 2, 3, 4, 5, 4, 3, 2, 1)  # severities of the gradual setting


class Batch(NamedTuple):
    """Raw images and what is known of them; a method only ever sees `x`."""

    x: Tensor  # (N, 3, H, W), uint8 or float in [0, 1]
    y: Tensor | None  # (N,) int64
    domain: str
    index: Tensor  # type: ignore[assignment]  # (N,) int64, the number of each image in its data set


@dataclass(frozen=True)
class Domain:
    """A data set under a name, corrupted on the fly where a corruption is given."""

    name: str
    dataset: Any  # len(), and [i] -> (image, label); labels and class_indices where known
    corruption: str | None = None
    severity: int = 5
    frost_textures: str | os.PathLike | None = None  # as in `corrupt`


class Planned(NamedTuple):
    """A batch to be: its domain's name, and which images of which domains."""

    domain: str
    rows: Tensor  # (N, 2) int64: number of the domain, number of the image


def corrupted(images: Any, names: Sequence[str] | None = None, severity: int = 5, **options: Any) -> list[Domain]:
    """One domain for each corruption.

    Args:
        images: a clean data set, to be corrupted on the fly, or the folder of ImageNet-C as published.
        names: the corruptions; the 15 of ImageNet-C unless given.
        options: for the published folder, as in `open_dataset`; on the fly, `frost_textures`.
    """
    return [_domain(name, images, name, severity, options) for name in _known(names)]


def gradual(
    images: Any, names: Sequence[str] | None = None, severities: Sequence[int] = GRADUAL, **options: Any
) -> list[Domain]:
    """For each corruption a domain for each severity, rising and falling; arguments as in `corrupted`."""
    return [
        _domain(f"{name}/{severity}", images, name, severity, options)
        for name in _known(names)
        for severity in severities
    ]


def _known(names: Sequence[str] | None) -> Sequence[str]:
    known = (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)
    names = CORRUPTIONS if names is None else [names] if isinstance(names, str) else names
    for name in names:
        if name not in known:
            raise unknown("corruption", name, known)
    return names


def _domain(name: str, images: Any, corruption: str, severity: int, options: dict[str, Any]) -> Domain:
    if severity not in SEVERITIES:
        raise unknown("severity", severity, map(str, SEVERITIES))
    if isinstance(images, str | os.PathLike):
        return Domain(name, imagenet_c(images, corruption, severity, **options))
    return Domain(name, images, corruption, severity, **options)


def stream(
    domains: Any,
    *,
    batch_size: int = 64,
    domain: str = "test",
    mixed: bool = False,
    imbalance: float | None = None,
    first: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    workers: int = 0,
    device: torch.device | str | None = None,
    part: tuple[int, int] | None = None,
) -> "Stream":
    """The images of one domain after another, in batches; the last batch of each may be smaller.

    Args:
        domains: a data set, a Domain, or a list of Domains.
        domain: the name of the one domain, where a bare data set is given.
        mixed: mix all domains within each batch; the batch's domain is then "mixed".
        imbalance: order the images by class. The class whose turn it is is drawn this many times as often as
            each other class: 1 draws all alike, math.inf gives one class after another.
        first: only so many images of each domain, the same ones in each.
        workers: processes that load and corrupt; the batches are the same for any number.
        device: where images and labels go. Given one, corruption happens there and not in the workers.
        part: (rank, ranks): of every batch this rank's share alone, which may be none. The ranks' shares of a batch,
            one after another, are the batch.
    """
    if isinstance(domains, Domain):
        domains = [domains]
    elif not isinstance(domains, list | tuple):
        domains = [Domain(domain, domains)]
    plan = _plan(domains, batch_size, mixed, imbalance, first, shuffle, seed)
    if part is not None:
        plan = [planned._replace(rows=share(planned.rows, *part)) for planned in plan]
    return Stream(domains, plan, seed, workers, device, keeps_empty=part is not None)


def split_stream(
    dataset: Any,
    ranks: Alone,
    *,
    batch_size: int = 64,
    domain: str = "test",
    first: int | None = None,
    **options: Any,
) -> "Stream":
    """The images of a data set that is this rank's alone, as `open_dataset(..., part=...)` gives it.

    A batch of all ranks has `batch_size` images as long as all have some. A rank that is through gives empty batches
    until the others are. `first` counts the images of all ranks; `options` are those of `stream`.
    """
    if min(batch_size, batch_size if first is None else first) < ranks.size:
        raise ValueError(f"{ranks.size} ranks need as many images: batch_size is {batch_size}, first {first}")

    def part(n: int) -> int:
        return len(share(torch.arange(n), ranks.rank, ranks.size))

    few = None if first is None else part(first)
    mine = stream(dataset, batch_size=part(batch_size), domain=domain, first=few, **options)
    none = Planned(domain, torch.empty(0, 2, dtype=torch.int64))
    mine.plan = [*mine.plan, *[none] * (int(ranks.most(len(mine))) - len(mine))]
    mine.keeps_empty = ranks.size > 1
    return mine


class Stream:
    """An iterable of Batch; every pass is the same.

    Attributes:
        keeps_empty: whether a batch without images is given too, since other ranks have some and wait.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        plan: Sequence[Planned],
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str | None = None,
        keeps_empty: bool = False,
    ):
        self.domains, self.plan, self.seed, self.workers = list(domains), plan, seed, workers
        self.device = None if device is None else torch.device(device)
        self.keeps_empty = keeps_empty

    def __len__(self) -> int:
        """The number of batches, as planned: unless `keeps_empty`, one whose images are all unreadable is left out."""
        return len(self.plan)

    def after(self, batches: int) -> "Stream":
        """What comes after the first so many planned batches."""
        return Stream(self.domains, self.plan[batches:], self.seed, self.workers, self.device, self.keeps_empty)

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            _Loaded(self.domains, self.plan, self.seed if self.device is None else None),
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device is not None and self.device.type == "cuda",
        )
        batches = iter(loader)
        while True:
            with part("loading"):
                found = next(batches, None)
            if found is None:
                return
            batch, rows, failed = found
            for d, i, reason in failed:
                _skip(self.domains[d].dataset, i, reason)
            if not len(rows) and not self.keeps_empty:
                continue
            if self.device is not None:
                with part("moving"):
                    x = batch.x.to(self.device, non_blocking=True)
                    y = None if batch.y is None else batch.y.to(self.device, non_blocking=True)
                with part("corrupting"):
                    batch = batch._replace(x=_corrupt(x, rows, self.domains, self.seed), y=y)
            yield batch


class _Loaded(Dataset):
    """The planned batches by number, read and, given a seed, corrupted."""

    def __init__(self, domains: list[Domain], plan: Sequence[Planned], seed: int | None):
        self.domains, self.plan, self.seed = domains, plan, seed

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, k: int) -> tuple[Batch, Tensor, list[tuple[int, int, str]]]:
        planned = self.plan[k]
        images, labels, rows, failed = [], [], [], []
        for d, i in planned.rows.tolist():
            try:
                image, label = self.domains[d].dataset[i]
            except ImageError as error:  # as a value, since a worker's exceptions arrive mangled
                failed.append((d, i, str(error)))
                continue
            images.append(image)
            labels.append(-1 if label is None else int(label))
            rows.append((d, i))
        row = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)  # (N, 2)
        x = torch.stack(images) if images else _no_images(self.domains[0].dataset)
        if images and self.seed is not None:
            x = _corrupt(x, row, self.domains, self.seed)
        y = None if -1 in labels else torch.tensor(labels, dtype=torch.int64)
        return Batch(x, y, planned.domain, row[:, 1]), row, failed


def _no_images(dataset: Any) -> Tensor:
    """(0, 3, H, W), in the size that the data set names, or of its first image."""
    if isinstance(side := getattr(dataset, "size", None), int):
        return torch.empty(0, 3, side, side, dtype=torch.uint8)
    image = dataset[0][0]
    return image.new_empty(0, *image.shape)


def _corrupt(x: Tensor, rows: Tensor, domains: Sequence[Domain], seed: int) -> Tensor:
    """Each image under its domain's corruption."""
    for d in rows[:, 0].unique().tolist():
        domain, mine = domains[d], rows[:, 0] == d
        if domain.corruption is None:
            continue
        here = slice(None) if mine.all() else mine.to(x.device)
        x[here] = corrupt(
            x[here],
            domain.corruption,
            domain.severity,
            index=rows[mine, 1],
            seed=seed,
            frost_textures=domain.frost_textures,
        )
    return x


def _skip(dataset: Any, i: int, reason: str) -> None:
    if not hasattr(dataset, "skip"):
        raise ImageError(reason)
    dataset.skip(i, reason)


# --- plans


def _plan(
    domains: Sequence[Domain],
    batch_size: int,
    mixed: bool,
    imbalance: float | None,
    first: int | None,
    shuffle: bool,
    seed: int,
) -> list[Planned]:
    if batch_size < 1 or (first is not None and first < 1):
        raise ValueError(f"batch_size and first must be at least 1; got {batch_size} and {first}")
    if imbalance is not None and not imbalance >= 1:
        raise ValueError(f"imbalance must be at least 1, up to math.inf; got {imbalance}")
    if not domains or not all(isinstance(domain, Domain) for domain in domains):
        raise TypeError("a stream needs a data set, a Domain, or a list of at least one Domain")
    if len({tuple(getattr(d.dataset, "class_indices", None) or ()) for d in domains}) > 1:
        raise ValueError("these domains score different classes: make a stream, and a model, for each")
    pools = []  # (name, rows) of each stretch of the stream
    for d, domain in enumerate(domains):
        n = len(domain.dataset)
        chosen = (torch.randperm(n, generator=_generator(seed)) if shuffle else torch.arange(n))[:first]
        pools.append((domain.name, torch.stack([torch.full_like(chosen, d), chosen], 1)))
    if mixed:
        rows = torch.cat([rows for _, rows in pools])
        pools = [("mixed", rows[torch.randperm(len(rows), generator=_generator(seed))])]
    if imbalance is not None:
        pools = [(name, rows[label_shift(_labels(rows, domains), imbalance, seed)]) for name, rows in pools]
    return [Planned(name, batch) for name, rows in pools for batch in rows.split(batch_size)]


def label_shift(labels: Tensor, imbalance: float, seed: int = 0) -> Tensor:
    """An order of all images in which one class after another dominates, (N,) int64.

    The classes take turns, in a random order, each for as many images as it has. In its turn a class is drawn
    with `imbalance` times the weight of each other class, from what is left; within a class the order stays.
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


def _labels(rows: Tensor, domains: Sequence[Domain]) -> Tensor:
    labels = torch.empty(len(rows), dtype=torch.int64)
    for d in rows[:, 0].unique().tolist():
        known = getattr(domains[d].dataset, "labels", None)
        if known is None:
            raise ValueError(f"label shift needs labels, and {domains[d].name} has none")
        mine = rows[:, 0] == d
        labels[mine] = torch.as_tensor(known)[rows[mine, 1]]
    return labels


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
