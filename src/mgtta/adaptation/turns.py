"""Do the classes of a stream come in turn? Then the mean prediction changes from batch to batch by more than chance.

It matters to networks with BatchNorm: a batch of few classes has statistics that tell these classes from the others,
and normalising by them takes that away. A model that predicts few classes for every batch, as many do under a shift,
shows no change; a new kind of shift shows one, once.

If a batch has very few classes, predictions that were normalised by it show nothing any more. So now and then the
source model also predicts its images one by one, and always where classes come in turn.

Notation    p_i (C,) probabilities of image i of a batch of n images; m (C,) their mean
            e (C,) = sum_i (p_i - m)^2 / (n (n - 1)), the variance of m by chance
            F = |m - m'|^2 / sum(e + e'), of a batch and the one before it: about 1 if both have the same classes
            k = sum(e + e')^2 / sum((e + e')^2), the number of classes that share the variance; by chance F has about
            the standard deviation sqrt(2 / k)
            change = F / L, where the limit L is a constant, or 1 + DEVIATIONS sqrt(2 / k) if that is more
Images whose prediction is not finite are left out. If too few remain, the batch is not known: m, e and F are NaN.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.shift import Arriving, is_count, is_positive

FEW_IMAGES = 16  # fewer have too poor a mean: of their activations to normalise by, and of their predictions
BATCHES = 8  # whose median change decides: a median does not see single ones
LEAST_BATCHES = 3  # of which the change must be known
BY_BATCH = 1.4  # limit for F, of images that are normalised by the batch
ONE_BY_ONE = 2.0  # the same, of the source and images one by one: they show more of it
DEVIATIONS = 3.0  # standard deviations above 1 up to which F may be chance
BACK = 0.6  # change below which classes are mixed again
BACK_BATCHES = 32  # whose median decides that: where little is predicted rightly, turns are hard to see
ASKED_BATCHES = 4  # in a row that the source also predicts one by one
ASKED_EVERY = 64  # batches
LEAST_CHANCE = 1e-4  # of sum(e), so that a model that predicts all images alike shows no change if it learns


@dataclass
class Series:
    """Predictions of one kind, batch by batch: by the method, or by the source and one by one.

    Attributes:
        limit: the least that L may be.
        last: m and e of the last batch (2, C); None if it has no such predictions.
        changes: the latest ones, since the answer changed.
    """

    limit: float
    last: Tensor | None = None
    changes: list[float] = field(default_factory=list)

    def follow(self, logits: Tensor | None) -> Tensor | None:
        """Return the change from the last batch to this one; None if one of them has no such predictions."""
        before = self.last
        self.last = None if logits is None else mean_and_chance(logits)
        if before is None or self.last is None or before.shape != self.last.shape:
            return None
        return change(self.last, before, self.limit)

    def state(self) -> dict[str, Any]:
        last = None
        if self.last is not None and bool(self.last.isfinite().all()):
            last = self.last.cpu().clone()
        return {"last": last, "changes": list(self.changes)}


class Turns:
    """Whether classes come in turn, by the predictions of a stream so far.

    Attributes:
        come: the answer when `decide` was last called. A GPU is read there, and not when a batch is followed.
        batches: that were followed since the answer changed.
        by_batch: the method's predictions, normalised by the batch.
        one_by_one: the source's, of images one by one.
    """

    def __init__(self) -> None:
        self.come = False
        self.batches = 0
        self.by_batch = Series(BY_BATCH)
        self.one_by_one = Series(ONE_BY_ONE)
        self._arriving = Arriving()

    @property
    def asks(self) -> bool:
        """True if the source should also predict the next batch, one by one."""
        return self.come or self.batches % ASKED_EVERY < ASKED_BATCHES

    @torch.no_grad()
    def follow(self, by_batch: Tensor | None, one_by_one: Tensor | None) -> None:
        """Take in the logits (n, C) of a batch of at least FEW_IMAGES images; `decide` comes before the next batch.

        Args:
            by_batch, one_by_one: None: it was not predicted so.
        """
        if not self.come and self.batches % ASKED_EVERY == 0:
            self.one_by_one.changes.clear()  # it is asked anew: what it said long ago does not count
        self.batches += 1
        found = [(self.by_batch.follow(by_batch), self.by_batch), (self.one_by_one.follow(one_by_one), self.one_by_one)]
        known = [(value, series) for value, series in found if value is not None]
        if known:
            values, whose = zip(*known, strict=True)
            self._arriving.send(torch.stack(values), whose)

    def decide(self) -> float | None:
        """Decide by all batches that were followed; return the change that decided, or None if the answer stays."""
        held = self._arriving.take()
        if held is None:
            return None
        values, whose = held
        most = BACK_BATCHES if self.come else BATCHES
        for value, series in zip(values.tolist(), whose, strict=True):
            if math.isfinite(value):
                series.changes.append(value)
                del series.changes[:-most]
        least = BACK_BATCHES if self.come else LEAST_BATCHES
        both = (self.by_batch.changes, self.one_by_one.changes)
        medians = [statistics.median(changes) for changes in both if len(changes) >= least]
        if not medians:
            return None
        largest = max(medians)
        come = largest > (BACK if self.come else 1.0)
        if come == self.come:
            return None
        self.come = come
        self.batches = 0
        for changes in both:
            changes.clear()
        return largest

    def state(self) -> dict[str, Any]:
        """Return what is known, as plain values and tensors on the CPU; all that was followed must be decided."""
        series = {"by_batch": self.by_batch.state(), "one_by_one": self.one_by_one.state()}
        return {"come": self.come, "batches": self.batches, **series}

    @classmethod
    def loaded(cls, state: Any) -> "Turns":
        """Return what is known by a state; a ValueError says what is invalid."""
        turns = cls()
        if not isinstance(state, dict) or state.keys() != turns.state().keys():
            raise ValueError("invalid gather state: its part on turns has other entries")
        sound = isinstance(state["come"], bool) and is_count(state["batches"])
        for series, found in ((turns.by_batch, state["by_batch"]), (turns.one_by_one, state["one_by_one"])):
            if not isinstance(found, dict) or found.keys() != series.state().keys():
                raise ValueError("invalid gather state: its part on turns has other entries")
            sound = sound and _is_mean(found["last"]) and _are_changes(found["changes"])
            if sound:
                series.last = None if found["last"] is None else found["last"].clone()
                series.changes = list(found["changes"])
        if not sound:
            raise ValueError("invalid gather state: its part on turns has values that are out of range")
        turns.come = state["come"]
        turns.batches = state["batches"]
        return turns


def mean_and_chance(logits: Tensor) -> Tensor:
    """Return m and e of logits (n, C): (2, C). If fewer than FEW_IMAGES of them are finite, all is NaN."""
    p = logits.float().softmax(1)
    known = p.isfinite().all(1, keepdim=True)  # (n, 1)
    n = known.sum()
    n = torch.where(n < FEW_IMAGES, math.nan, n)
    mean = torch.where(known, p, 0.0).sum(0) / n
    chance = torch.where(known, p - mean, 0.0).square().sum(0) / (n * (n - 1))
    return torch.stack([mean, chance])


def change(now: Tensor, before: Tensor, limit: float, deviations: float = DEVIATIONS) -> Tensor:
    """Return F in units of the limit L.

    Args:
        now, before: m and e (2, C) of a batch and of the one before it.
        limit: the least that L may be.
        deviations: standard deviations above 1 up to which F may be chance.
    """
    before = before.to(now)
    moved = (now[0] - before[0]).square().sum()
    chance = now[1] + before[1]  # (C,)
    total = chance.sum().clamp(min=2 * LEAST_CHANCE)
    deviation = (2 * chance.square().sum()).sqrt() / total  # of F by chance: sqrt(2 / k)
    return moved / total / (1 + deviations * deviation).clamp(min=limit)


def _is_mean(value: Any) -> bool:
    """Return whether a value may be the `last` of a series."""
    if value is None:
        return True
    shaped = isinstance(value, Tensor) and value.ndim == 2 and len(value) == 2
    return shaped and value.is_floating_point() and bool(value.isfinite().all())


def _are_changes(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_positive, values))
