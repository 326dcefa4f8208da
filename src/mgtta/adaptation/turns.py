"""Do the classes of a stream come in turn? Then the mean prediction changes from batch to batch by more than chance.

It matters to networks with BatchNorm: a batch of few classes has statistics that tell these classes from the others,
and whoever normalises by them takes that away. A model that predicts few classes for every batch, as many do under a
shift, shows no change; a new kind of shift shows one, once.

If a batch has very few classes, predictions that were normalised by it show nothing any more. So now and then the
source model also predicts its images one by one, and always where classes come in turn.

Notation    p_i (C,) probabilities of image i of a batch of n images; m (C,) their mean
            e (C,) = sum_i (p_i - m)^2 / (n (n - 1)), the variance of m by chance
            F = |m - m'|^2 / sum(e + e'), of a batch and the one before it: about 1 if both have the same classes
            k = sum(e + e')^2 / sum((e + e')^2): as many classes count, and F deviates by sqrt(2 / k) by chance
            change = F / L, where L is a limit for F, and at least 1 + DEVIATIONS sqrt(2 / k)
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.shift import Arriving, is_count

BATCHES = 8  # whose median change decides: a median does not see single ones
LEAST_BATCHES = 3  # of which the change must be known
BY_BATCH = 1.4  # limit for F, of images that are normalised by the batch
ONE_BY_ONE = 2.0  # the same, of the source and images one by one: they show more of it
DEVIATIONS = 3.0  # by chance, which are no change
BACK = 0.6  # change below which classes are mixed again
BACK_BATCHES = 32  # whose median decides that: where little is predicted rightly, turns are hard to see
ASKED_BATCHES = 4  # in a row that the source also predicts one by one
ASKED_EVERY = 64  # batches
LEAST_CHANCE = 1e-4  # of sum(e), so that a model that predicts all images alike shows no change if it learns
EVENTS = 1000  # that are kept, the first ones


class Turns:
    """Whether classes come in turn, by the predictions of a stream so far.

    Attributes:
        come: the answer when `settle` was last called. A GPU is read there, and not when a batch is followed.
        images: of the stream so far.
        batches: that were followed since the answer changed.
        last: m and e of the last batch, normalised by the batch and one by one (2, C); None: not known.
        changes: the latest ones of both kinds, since the answer changed.
        events: how the answer changed: dicts of plain values.
    """

    def __init__(self) -> None:
        self.come = False
        self.images = 0
        self.batches = 0
        self.last: list[Tensor | None] = [None, None]
        self.changes: list[list[float]] = [[], []]
        self.events: list[dict[str, Any]] = []
        self._arriving = Arriving()

    @property
    def asks(self) -> bool:
        """True if the source should also predict the next batch, one by one."""
        return self.come or self.batches % ASKED_EVERY < ASKED_BATCHES

    @torch.no_grad()
    def follow(self, by_batch: Tensor | None, one_by_one: Tensor | None) -> None:
        """Take in the predictions of a batch of more than one image (n, C); None: it was not predicted so."""
        seen = [None if logits is None else mean_and_chance(logits) for logits in (by_batch, one_by_one)]
        limits = (BY_BATCH, ONE_BY_ONE)
        found = [change(now, last, limit) for now, last, limit in zip(seen, self.last, limits, strict=True)]
        self.last = seen
        self.batches += 1
        known = [value for value in found if value is not None]
        if known:
            self._arriving.send(torch.stack(known), [value is not None for value in found])

    def settle(self) -> None:
        """Decide by all batches that were followed."""
        held = self._arriving.take()
        if held is None:
            return
        values = iter(held[0].tolist())
        most = BACK_BATCHES if self.come else BATCHES
        for changes, known in zip(self.changes, held[1], strict=True):
            if known:
                changes.append(next(values))
                del changes[:-most]
        least = BACK_BATCHES if self.come else LEAST_BATCHES
        medians = [statistics.median(changes) for changes in self.changes if len(changes) >= least]
        if not medians:
            return
        largest = max(medians)
        come = largest > (BACK if self.come else 1.0)
        if come == self.come:
            return
        if len(self.events) < EVENTS:
            action = "one by one" if come else "by batch"
            self.events.append({"image": self.images, "action": action, "change": largest})
        self.come = come
        self.batches = 0
        self.changes = [[], []]

    def state(self) -> dict[str, Any]:
        """Return what is known, as plain values and tensors on the CPU."""
        self.settle()
        known = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        last = [None if each is None else each.cpu() for each in self.last]
        return copy.deepcopy({**known, "last": last})

    @classmethod
    def loaded(cls, state: Any, classes: int) -> "Turns":
        """Return what is known by a state; a ValueError says what is invalid."""
        turns = cls()
        if not isinstance(state, dict) or state.keys() != turns.state().keys():
            raise ValueError("invalid gather state: its part on turns has other entries")
        sound = isinstance(state["come"], bool) and isinstance(state["events"], list)
        sound = sound and is_count(state["batches"]) and is_count(state["images"])
        for name, fits in (("last", _is_mean(classes)), ("changes", _are_numbers)):
            both = state[name]
            sound = sound and isinstance(both, list) and len(both) == 2 and all(map(fits, both))
        if not sound:
            raise ValueError("invalid gather state: its part on turns has values that are out of range")
        for name, value in copy.deepcopy(state).items():
            setattr(turns, name, value)
        return turns


def mean_and_chance(logits: Tensor) -> Tensor:
    """Return m and e of logits (n, C): (2, C)."""
    n = len(logits)
    p = logits.float().softmax(1)
    p = torch.where(p.isfinite().all(1, keepdim=True), p, 1 / p.shape[1])
    mean = p.mean(0)
    chance = (p - mean).square().sum(0) / (n * (n - 1))
    return torch.stack([mean, chance])


def change(now: Tensor | None, before: Tensor | None, limit: float, deviations: float = DEVIATIONS) -> Tensor | None:
    """Return F in units of its limit; None if one of both batches is not known.

    Args:
        limit: the least that it may be.
        deviations: by chance, which are no change.
    """
    if now is None or before is None:
        return None
    before = before.to(now)
    moved = (now[0] - before[0]).square().sum()
    chance = now[1] + before[1]  # (C,)
    total = chance.sum().clamp(min=2 * LEAST_CHANCE)
    deviation = (2 * chance.square().sum()).sqrt() / total  # of F by chance: sqrt(2 / k)
    return moved / total / (1 + deviations * deviation).clamp(min=limit)


def _is_mean(classes: int) -> Callable[[Any], bool]:
    """Return what tells whether a value may stand in `last`."""

    def fits(value: Any) -> bool:
        shaped = isinstance(value, Tensor) and value.shape == (2, classes) and bool(value.isfinite().all())
        return value is None or shaped

    return fits


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, float) for value in values)
