"""Streams of batches over domains: one after another, mixed, gradual, or with shifting labels.

A stream is first planned (see `mgtta.data.plan`) and then read. The same seed gives the same order. Neither the batch
size nor the number of workers changes which image comes when, or how it is corrupted.

Shapes: N images of a batch, (N, 3, H, W).
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mgtta._lib import profile
from mgtta._lib.errors import unknown
from mgtta._lib.ranks import Alone, share
from mgtta.data.corruptions import CORRUPTIONS, SEVERITIES, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.datasets import cifar_c, imagenet_c, is_cifar_c
from mgtta.data.images import ImageError
from mgtta.data.on_device import decoded, file_or_image
from mgtta.data.plan import Planned, label_shift, plan_batches

__all__ = [
    "GRADUAL",
    "STREAM_KINDS",
    "Batch",
    "Domain",
    "Stream",
    "corrupted",
    "gradual",
    "label_shift",
    "split_stream",
    "stream",
]

DECODERS = ("cpu", "device")
GRADUAL = (1, 2, 3, 4, 5, 4, 3, 2, 1)  # severities of the gradual setting
STREAM_KINDS = {  # what a deployed method may meet
    "reset": "one corruption after another, reset before each",
    "continual": "one corruption after another, never reset",
    "rounds": "all corruptions in several rounds, never reset",
    "mixed": "all corruptions mixed within each batch",
    "labels": "as continual, each corruption sorted by class",
    "one": "as continual, in batches of one image",
    "gradual": "each corruption rises to severity 5 and falls again, never reset",
    "clean": "the images as they are",
}


Failure = tuple[int, int, str]  # number of the domain, number of the image, and why it cannot be read


class Batch(NamedTuple):
    """Raw images and what is known about them; a method sees only `x`."""

    x: Tensor  # (N, 3, H, W), uint8 or float in [0, 1]
    y: Tensor | None  # (N,) int64
    domain: str
    index: Tensor  # type: ignore[assignment]  # (N,) int64, the number of each image in its data set


@dataclass(frozen=True)
class Domain:
    """A data set with a name, corrupted on the fly if a corruption is given."""

    name: str
    dataset: Any  # len(), and [i] -> (image, label); labels and class_indices if known
    corruption: str | None = None
    severity: int = 5
    frost_textures: str | os.PathLike | None = None  # as in `corrupt`
    constants: str = "imagenet"  # as in `corrupt`


def corrupted(images: Any, names: Sequence[str] | None = None, severity: int = 5, **options: Any) -> list[Domain]:
    """Return one domain for each corruption.

    Args:
        images: a clean data set, which is corrupted on the fly, or the folder of ImageNet-C or CIFAR-C as published.
        names: the corruptions; by default the 15 of ImageNet-C.
        options: for the published folder those of `open_dataset`; on the fly `frost_textures` and `constants`.
    """
    return [_domain(name, images, name, severity, options) for name in _known(names)]


def gradual(
    images: Any, names: Sequence[str] | None = None, severities: Sequence[int] = GRADUAL, **options: Any
) -> list[Domain]:
    """Return a domain for each corruption and severity, rising and falling; arguments as in `corrupted`."""
    return [
        _domain(f"{name}/{severity}", images, name, severity, options)
        for name in _known(names)
        for severity in severities
    ]


def _known(names: Sequence[str] | None) -> Sequence[str]:
    known = (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)
    if names is None:
        return CORRUPTIONS
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name not in known:
            raise unknown("corruption", name, known)
    return names


def _domain(name: str, images: Any, corruption: str, severity: int, options: dict[str, Any]) -> Domain:
    if severity not in SEVERITIES:
        raise unknown("severity", severity, map(str, SEVERITIES))
    if isinstance(images, str | os.PathLike):
        published = cifar_c if is_cifar_c(Path(images)) else imagenet_c
        return Domain(name, published(images, corruption, severity, **options))
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
    decode: str = "cpu",
) -> "Stream":
    """Return the images of one domain after another, in batches; the last batch of each may be smaller.

    Args:
        domains: a data set, a Domain, or a list of Domains.
        domain: the name of the only domain, if `domains` is a data set.
        mixed: mix all domains within each batch; the batch's domain is then "mixed".
        imbalance: order the images by class, one class dominating after another. The dominating class is drawn this
            many times as often as each other class: 1 draws all classes alike, math.inf gives pure classes.
        first: only this many images of each domain, the same ones in each.
        workers: number of processes that load and corrupt; it does not change the batches.
        device: where images and labels go. If given, images are corrupted there and not in the workers.
        part: (rank, ranks): only this rank's share of every batch, which may be empty. The shares of all ranks, in
            order, make up the batch.
        decode: "cpu", or "device": JPEGs are decoded, resized and cropped on the device, a GPU. Their pixels differ
            from the CPU's by some levels.
    """
    if decode not in DECODERS:
        raise unknown("decode", decode, DECODERS)
    if decode == "device" and device is None:
        raise ValueError('decode="device" needs a device: give device="cuda"')
    if isinstance(domains, Domain):
        domains = [domains]
    elif not isinstance(domains, list | tuple):
        domains = [Domain(domain, domains)]
    _check(domains)
    labels = None
    if imbalance is not None:
        labels = [_labels(d) for d in domains]
    batches = plan_batches(
        [d.name for d in domains],
        [len(d.dataset) for d in domains],
        labels=labels,
        batch_size=batch_size,
        mixed=mixed,
        imbalance=imbalance,
        first=first,
        shuffle=shuffle,
        seed=seed,
    )
    if part is not None:
        batches = [planned._replace(rows=share(planned.rows, *part)) for planned in batches]
    return Stream(domains, batches, seed, workers, device, part is not None, decode)


def _check(domains: Sequence[Domain]) -> None:
    if not domains or not all(isinstance(domain, Domain) for domain in domains):
        raise TypeError("a stream needs a data set, a Domain, or a list of at least one Domain")
    if len({tuple(getattr(d.dataset, "class_indices", None) or ()) for d in domains}) > 1:
        raise ValueError("these domains score different classes: make a stream, and a model, for each")


def _labels(domain: Domain) -> Tensor:
    labels = getattr(domain.dataset, "labels", None)
    if labels is None:
        raise ValueError(f"label shift needs labels, and {domain.name} has none")
    return torch.as_tensor(labels)


def split_stream(
    dataset: Any,
    ranks: Alone,
    *,
    batch_size: int = 64,
    domain: str = "test",
    first: int | None = None,
    **options: Any,
) -> "Stream":
    """Return a stream over a data set that only this rank has, as `open_dataset(..., part=...)` returns it.

    A batch of all ranks together has `batch_size` images as long as all of them have some. A rank that has no more
    images gives empty batches until the others have finished. `first` counts the images of all ranks; `options` are
    those of `stream`.
    """
    if batch_size < ranks.size or (first is not None and first < ranks.size):
        raise ValueError(f"{ranks.size} ranks need as many images: batch_size is {batch_size}, first {first}")

    def own(n: int) -> int:
        return len(share(torch.arange(n), ranks.rank, ranks.size))

    few = None if first is None else own(first)
    mine = stream(dataset, batch_size=own(batch_size), domain=domain, first=few, **options)
    empty = Planned(domain, torch.empty(0, 2, dtype=torch.int64))
    missing = int(ranks.most(len(mine))) - len(mine)
    mine.plan = [*mine.plan, *[empty] * missing]
    mine.keeps_empty = ranks.size > 1
    return mine


class Stream:
    """An iterable of Batch; every pass is the same.

    Attributes:
        plan: the batches to read, see `mgtta.data.plan`.
        keeps_empty: True if a batch without images is yielded too, since other ranks have images and wait.
        decode: where JPEGs are decoded, as in `stream`.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        plan: Sequence[Planned],
        seed: int = 0,
        workers: int = 0,
        device: torch.device | str | None = None,
        keeps_empty: bool = False,
        decode: str = "cpu",
    ):
        self.domains = list(domains)
        self.plan = plan
        self.seed = seed
        self.workers = workers
        self.device = None if device is None else torch.device(device)
        self.keeps_empty = keeps_empty
        self.decode = decode

    def __len__(self) -> int:
        """Return the number of planned batches; one without a readable image is left out unless `keeps_empty`."""
        return len(self.plan)

    def after(self, batches: int) -> "Stream":
        """Return the stream without its first planned batches."""
        rest = self.plan[batches:]
        return Stream(self.domains, rest, self.seed, self.workers, self.device, self.keeps_empty, self.decode)

    def __iter__(self) -> Iterator[Batch]:
        seed_of_workers = self.seed if self.device is None else None  # on a device, images are corrupted there
        loader = DataLoader(
            _Loaded(self.domains, self.plan, seed_of_workers, self.decode),
            batch_size=None,
            num_workers=self.workers,
            pin_memory=self.device is not None and self.device.type == "cuda",
        )
        batches = iter(loader)
        while True:
            with profile.part("loading"):
                found = next(batches, None)
            if found is None:
                return
            batch, rows, failed = found
            if self.decode == "device":
                with profile.part("loading"):
                    batch, rows, failed = self._decoded(batch, rows, failed)
            for d, i, reason in failed:
                _skip(self.domains[d].dataset, i, reason)
            if not len(rows) and not self.keeps_empty:
                continue
            if self.device is not None:
                with profile.part("moving"):
                    x = batch.x.to(self.device, non_blocking=True)
                    y = None if batch.y is None else batch.y.to(self.device, non_blocking=True)
                with profile.part("corrupting"):
                    batch = batch._replace(x=_corrupt(x, rows, self.domains, self.seed), y=y)
            yield batch

    def _decoded(self, batch: Batch, rows: Tensor, failed: list[Failure]) -> tuple[Batch, Tensor, list[Failure]]:
        """Return a batch whose files are decoded, without those that cannot be read."""
        assert self.device is not None
        images = []
        kept = []
        files: Any = batch.x
        places = [(self.domains[d].dataset, i) for d, i in rows.tolist()]
        for k, image in enumerate(decoded(files, places, self.device)):
            if isinstance(image, ImageError):
                failed = [*failed, (int(rows[k, 0]), int(rows[k, 1]), str(image))]
            else:
                images.append(image)
                kept.append(k)
        x = torch.stack(images) if images else _no_images(self.domains[0].dataset)
        y = None if batch.y is None else batch.y[kept]
        return batch._replace(x=x, y=y, index=batch.index[kept]), rows[kept], failed


class _Loaded(Dataset):
    """The planned batches by number, read and, if a seed is given, corrupted.

    With decode="device", `x` of a batch is a list, of files that a GPU decodes and of other images.
    """

    def __init__(self, domains: list[Domain], plan: Sequence[Planned], seed: int | None, decode: str = "cpu"):
        self.domains = domains
        self.plan = plan
        self.seed = seed
        self.decode = decode

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, k: int) -> tuple[Batch, Tensor, list[Failure]]:
        """Return the batch, its rows (N, 2), and the unreadable images."""
        planned = self.plan[k]
        images = []
        labels = []
        rows = []
        failed = []
        for d, i in planned.rows.tolist():
            try:
                image, label = self._read(self.domains[d].dataset, i)
            except ImageError as error:  # as a value, since DataLoader rewrites a worker's exceptions
                failed.append((d, i, str(error)))
                continue
            images.append(image)
            labels.append(-1 if label is None else int(label))
            rows.append((d, i))
        row = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)  # (N, 2)
        x: Any = images
        if self.decode == "cpu":
            x = torch.stack(images) if images else _no_images(self.domains[0].dataset)
        if images and self.seed is not None:
            x = _corrupt(x, row, self.domains, self.seed)
        y = None if -1 in labels else torch.tensor(labels, dtype=torch.int64)
        return Batch(x, y, planned.domain, row[:, 1]), row, failed

    def _read(self, dataset: Any, i: int) -> tuple[Tensor, Any]:
        if self.decode == "device":
            return file_or_image(dataset, i)
        return dataset[i]


def _no_images(dataset: Any) -> Tensor:
    """Return a tensor (0, 3, H, W) of the data set's size, or of its first image's."""
    if isinstance(side := getattr(dataset, "size", None), int):
        return torch.empty(0, 3, side, side, dtype=torch.uint8)
    image = dataset[0][0]
    return image.new_empty(0, *image.shape)


def _corrupt(x: Tensor, rows: Tensor, domains: Sequence[Domain], seed: int) -> Tensor:
    """Corrupt each image as its domain says, in place."""
    for d in rows[:, 0].unique().tolist():
        domain = domains[d]
        mine = rows[:, 0] == d
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
            constants=domain.constants,
        )
    return x


def _skip(dataset: Any, i: int, reason: str) -> None:
    if not hasattr(dataset, "skip"):
        raise ImageError(reason)
    dataset.skip(i, reason)
