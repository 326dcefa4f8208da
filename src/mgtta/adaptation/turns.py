"""Do the classes of a stream come in turn? Then the mean prediction changes from batch to batch by more than chance.

It matters to networks with BatchNorm: a batch of few classes has statistics that tell these classes from the others,
and whoever normalises by them takes that away. A model that predicts few classes for every batch, as many do under a
shift, shows no change; a new kind of shift shows one, once.

If a batch has very few classes, predictions that were normalised by it show nothing any more. So now and then images
are also predicted one by one.

Notation    p_i (C,) probabilities of image i of a batch of n images; m (C,) their mean
            e = sum_i |p_i - m|^2 / (n (n - 1)), the variance of m by chance, and at least LEAST_CHANCE
            F = |m - m'|^2 / (e + e'), of a batch and the one before it: about 1 if both are drawn from the same classes
"""

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.shift import Arriving, is_count

BATCHES = 8  # whose median F decides: a median does not see single changes
LEAST_BATCHES = 3  # of F that must be known
BY_BATCH = 1.4  # F above which classes come in turn, of images that are normalised by the batch
ONE_BY_ONE = 2.0  # the same, of images that are normalised one by one: they show more of it
FIRST_BATCHES = 4  # that are also predicted one by one
PAIR_BATCHES = 32  # from one pair of batches that are to the next
LEAST_CHANCE = 1e-4  # so that a model that predicts all images alike shows no change if it learns
EVENTS = 1000  # that are kept, the first ones


class Turns:
    """Whether classes come in turn, by the predictions of a stream so far.

    Attributes:
        come: the answer when `settle` was last called. A GPU is read there, and not when a batch is followed.
        batches, images: that were followed.
        last: m and, behind it, e of the last batch, normalised by the batch and one by one (C + 1,); None: not known.
        changes: the latest F of both kinds, since the answer changed.
        events: how the answer changed: dicts of plain values.
    """

    def __init__(self) -> None:
        self.come = False
        self.batches = 0
        self.images = 0
        self.last: list[Tensor | None] = [None, None]
        self.changes: list[list[float]] = [[], []]
        self.events: list[dict[str, Any]] = []
        self._arriving = Arriving()

    @property
    def asks(self) -> bool:
        """True if the next batch should also be predicted one by one."""
        return not self.come and (self.batches < FIRST_BATCHES or self.batches % PAIR_BATCHES < 2)

    @torch.no_grad()
    def follow(self, by_batch: Tensor | None, one_by_one: Tensor | None) -> None:
        """Take in the predictions of a batch of more than one image (n, C); None: it was not predicted so."""
        seen = [None if logits is None else mean_and_chance(logits) for logits in (by_batch, one_by_one)]
        found = [change(now, before) for now, before in zip(seen, self.last, strict=True)]
        self.last = seen
        self.batches += 1
        self.images += max(len(logits) for logits in (by_batch, one_by_one) if logits is not None)
        known = [value for value in found if value is not None]
        if known:
            self._arriving.send(torch.stack(known), [value is not None for value in found])

    def settle(self) -> None:
        """Decide by all batches that were followed."""
        held = self._arriving.take()
        if held is None:
            return
        values = iter(held[0].tolist())
        for changes, known in zip(self.changes, held[1], strict=True):
            if known:
                changes.append(next(values))
                del changes[:-BATCHES]
        by_batch, one_by_one = (_median(changes) for changes in self.changes)
        if by_batch is None and one_by_one is None:
            return
        come = (by_batch or 0.0) > BY_BATCH or (one_by_one or 0.0) > ONE_BY_ONE
        if come == self.come:
            return
        if len(self.events) < EVENTS:
            action = "one by one" if come else "by batch"
            largest = max(by_batch or 0.0, one_by_one or 0.0)
            self.events.append({"image": self.images, "action": action, "change": largest})
        self.come = come
        self.changes = [[], []]

    def state(self) -> dict[str, Any]:
        """Return what is known, as plain values and tensors on the CPU."""
        self.settle()
        known = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {
            name: value.cpu() if isinstance(value, Tensor) else value for name, value in copy.deepcopy(known).items()
        }

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
    """Return m and, behind it, e, of logits (n, C): (C + 1,)."""
    n = len(logits)
    p = logits.float().softmax(1)
    p = torch.where(p.isfinite().all(1, keepdim=True), p, 1 / p.shape[1])
    mean = p.mean(0)
    chance = (p - mean).square().sum() / (n * (n - 1))
    return torch.cat([mean, chance[None].clamp(min=LEAST_CHANCE)])


def change(now: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Return F; None if one of both batches is not known."""
    if now is None or before is None:
        return None
    before = before.to(now)
    return (now - before)[:-1].square().sum() / (now[-1] + before[-1])


def _median(changes: list[float]) -> float | None:
    """Return the median; None if there are too few."""
    return statistics.median(changes) if len(changes) >= LEAST_BATCHES else None


def _is_mean(classes: int) -> Callable[[Any], bool]:
    """Return what tells whether a value may stand in `last`."""

    def fits(value: Any) -> bool:
        shaped = isinstance(value, Tensor) and value.shape == (classes + 1,) and bool(value.isfinite().all())
        return value is None or shaped

    return fits


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, float) for value in values)
