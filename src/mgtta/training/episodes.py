"""Episodes of a training: which batches the model adapts to, and when it begins at the source again.

Moments and memory are kept within an episode and are empty at its start. `Passes` is the paper's: an episode is one
pass over all images, and the model never goes back. `Streams` is what a deployed model sees: an episode is a stretch of
one domain, of changing domains, or of mixed domains, and most episodes begin at the source model.

Episode k depends only on the seed and on k, so that a training can resume at any episode.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mgtta._lib.files import fingerprint

EPISODES = ("passes", "streams")
KINDS = ("domain", "changing", "mixed")
SEED_STRIDE = 1_000_003  # between the seeds of the orders of two trainings; more than there are episodes
FROM_SOURCE = 0.7  # share of the episodes of `Streams` that begin at the source model
STRETCHES = 4  # domains of a changing episode


class Episode(NamedTuple):
    """The batches of an episode, each of them images (N, 3, H, W)."""

    batches: Iterator[Tensor]
    from_source: bool = False  # True: the model's parameters go back to the source before the first batch
    kind: str = ""


class Episodes(Protocol):
    """Where the batches of a training come from."""

    decays: bool  # True: the outer learning rate falls linearly to zero
    judged_at_end: bool  # True: without validation batches, only the last generator is judged
    domains: list[Tensor]  # the images of each domain

    def episode(self, number: int) -> Episode:
        """Return the episode of this number."""

    def protocol(self) -> dict[str, Any]:
        """Return what defines the images and their order."""


class Passes:
    """One pass over all images after another, each in a random order: Algorithm 1 of the paper."""

    decays = False
    judged_at_end = False

    def __init__(self, images: Tensor, batch_size: int, seed: int):
        if not isinstance(images, Tensor) or images.ndim < 2 or len(images) == 0:
            raise ValueError("images must be one tensor of at least one image, (M, 3, H, W)")
        self.images = images
        self.domains = [images]
        self.batch_size = batch_size
        self.seed = seed

    def episode(self, number: int) -> Episode:
        index = torch.randperm(len(self.images), generator=_random(self.seed, number))
        return Episode(self.images[batch] for batch in index.split(self.batch_size))

    def protocol(self) -> dict[str, Any]:
        return {"images": len(self.images), "images' hash": fingerprint({"images": self.images.float()})}


class Streams:
    """Short streams of `steps` batches: of one domain, of changing domains, or of mixed domains, equally often."""

    decays = True
    judged_at_end = True

    def __init__(self, domains: Sequence[Tensor], batch_size: int, seed: int, steps: int):
        if isinstance(domains, Tensor) or not domains or not all(isinstance(x, Tensor) for x in domains):
            raise ValueError("episodes='streams' takes a list of images, one tensor (M, 3, H, W) for each domain")
        if any(x.ndim < 2 or len(x) < batch_size for x in domains):
            raise ValueError(f"each domain needs at least batch_size images, (M, 3, H, W) with M >= {batch_size}")
        if steps < 1:
            raise ValueError(f"episode_steps must be at least 1, not {steps}")
        self.domains = list(domains)
        self.batch_size = batch_size
        self.seed = seed
        self.steps = steps

    def episode(self, number: int) -> Episode:
        random = _random(self.seed, number)
        kind = KINDS[_draw(len(KINDS), random)]
        from_source = bool(torch.rand((), generator=random) < FROM_SOURCE)
        return Episode(self._batches(kind, random), from_source, kind)

    def _batches(self, kind: str, random: torch.Generator) -> Iterator[Tensor]:
        pool = self._pool(kind, random)
        for step in range(self.steps):
            if kind == "changing" and step and step % max(1, self.steps // STRETCHES) == 0:
                pool = self._pool(kind, random)
            rows = torch.randperm(len(pool), generator=random)[: self.batch_size]
            yield torch.stack([self.domains[d][i] for d, i in pool[rows].tolist()])

    def _pool(self, kind: str, random: torch.Generator) -> Tensor:
        """Return the images to draw from, (M, 2) int64: number of the domain, number of the image."""
        chosen = range(len(self.domains))
        if kind != "mixed":
            one = _draw(len(self.domains), random)
            chosen = range(one, one + 1)
        parts = []
        for d in chosen:
            index = torch.arange(len(self.domains[d]))
            parts.append(torch.stack([torch.full_like(index, d), index], 1))
        return torch.cat(parts)

    def protocol(self) -> dict[str, Any]:
        images = {str(d): x.float() for d, x in enumerate(self.domains)}
        return {
            "images": sum(len(x) for x in self.domains),
            "images' hash": fingerprint(images),
            "episodes": "streams",
            "domains": len(self.domains),
            "episode_steps": self.steps,
        }


def _random(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED_STRIDE * seed + number)


def _draw(n: int, random: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=random))
