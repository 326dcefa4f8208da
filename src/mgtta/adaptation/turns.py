"""Do the classes of a stream come in turn? Then the mean prediction changes from batch to batch by more than chance.

It matters to networks with BatchNorm: a batch of few classes has statistics that tell these classes from the others,
and whoever normalises by them takes that away. A model that predicts few classes for every batch, as many do under a
shift, shows no change; a new kind of shift shows one, once.

Notation    p_i (C,) probabilities of image i of a batch of n images; m (C,) their mean
            e = sum_i |p_i - m|^2 / (n (n - 1)), the variance of m by chance
            F = |m - m'|^2 / (e + e'), of a batch and the one before it: about 1 if both are drawn from the same classes
"""

import copy
import statistics
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.shift import Arriving, is_count

BATCHES = 8  # whose median F decides: a median does not see single changes
LEAST_BATCHES = 4  # that must be known
CHANGE = 1.4  # F above which classes come in turn
EVENTS = 1000  # that are kept, the first ones


class Turns:
    """Whether classes come in turn, by the predictions of a stream so far.

    Attributes:
        come: the answer when `settle` was last called. A GPU is read there, and not when a batch is followed.
        events: how the answer changed: dicts of plain values.
    """

    def __init__(self) -> None:
        self.come = False
        self.images = 0  # that were followed
        self.mean: Tensor | None = None  # m, of the last batch
        self.chance: Tensor | None = None  # e
        self.changes: list[float] = []  # F of the last batches, since the answer changed
        self.events: list[dict[str, Any]] = []
        self._arriving = Arriving()

    @torch.no_grad()
    def follow(self, logits: Tensor) -> None:
        """Take in the predictions of a batch (n, C) of more than one image."""
        n = len(logits)
        p = logits.float().softmax(1)
        p = torch.where(p.isfinite().all(1, keepdim=True), p, 1 / p.shape[1])
        mean = p.mean(0)
        chance = (p - mean).square().sum() / (n * (n - 1))
        if self.mean is not None and self.chance is not None:
            change = (mean - self.mean.to(mean)).square().sum() / (chance + self.chance.to(mean))
            self._arriving.send(change, None)
        self.mean = mean
        self.chance = chance
        self.images += n

    def settle(self) -> None:
        """Decide by all batches that were followed."""
        held = self._arriving.take()
        if held is None:
            return
        self.changes = [*self.changes[1 - BATCHES :], float(held[0].nan_to_num())]  # 0 / 0: nothing changed
        if len(self.changes) < LEAST_BATCHES:
            return
        change = statistics.median(self.changes)
        if (change > CHANGE) == self.come:
            return
        self.come = not self.come
        self.changes = []  # from now on images are normalised, and so predicted, in another way
        self.mean = None
        if len(self.events) < EVENTS:
            action = "one by one" if self.come else "by batch"
            self.events.append({"image": self.images, "action": action, "change": change})

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
        sound = isinstance(state["come"], bool) and is_count(state["images"]) and isinstance(state["events"], list)
        for name, shape in (("mean", (classes,)), ("chance", ())):
            found = state[name]
            if found is None:
                continue
            sound = sound and isinstance(found, Tensor) and found.shape == shape and bool(found.isfinite().all())
        changes = state["changes"]
        sound = sound and isinstance(changes, list) and all(isinstance(each, float) for each in changes)
        if not sound:
            raise ValueError("invalid gather state: its part on turns has values that are out of range")
        for name, value in copy.deepcopy(state).items():
            setattr(turns, name, value)
        return turns
