"""Do the classes of a stream come in turn? Then two images of one batch are predicted alike more often than two images
of different batches.

It matters to networks with BatchNorm: a batch of few classes has statistics that tell these classes from the others,
and whoever normalises by them takes that away. A model that predicts few classes, as many do under a shift, has many
pairs of both kinds.

Notation    p_i (C,) probabilities of image i of a batch of n images; m (C,) mean of p over the images before the batch
            within = mean of p_i . p_j over the pairs of a batch; across = mean of p_i . m
            Both are averaged over the latest RECENT_IMAGES.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.shift import Arriving, is_count

BEFORE_IMAGES = 3000  # over which m is averaged: longer than a class stays
RECENT_IMAGES = 512  # over which pairs are averaged
LEAST_IMAGES = 256  # whose pairs must be known for a decision
EXCESS = 0.002  # within - across, which must be above this
BEGIN_RATIO = 1.15  # within / across above which classes come in turn
END_RATIO = 1.5  # below which they do not any more: predictions one by one show more of it
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
        self.recent = 0  # in `pairs`, since the answer last changed
        self.mean: Tensor | None = None  # m
        self.pairs: Tensor | None = None  # within and across, (2,)
        self.events: list[dict[str, Any]] = []
        self._arriving = Arriving()

    @torch.no_grad()
    def follow(self, logits: Tensor) -> None:
        """Take in the predictions of a batch (n, C)."""
        n = len(logits)
        p = logits.float().softmax(1)
        p = torch.where(p.isfinite().all(1, keepdim=True), p, 1 / p.shape[1])
        mean = p.mean(0)
        self.images += n
        if self.mean is None:
            self.mean = mean
            return
        before = self.mean.to(mean)
        within = (p.sum(0).square().sum() - p.square().sum()) / (n * (n - 1))
        pairs = torch.stack([within, mean @ before])
        self.recent = min(self.recent + n, RECENT_IMAGES)
        if self.pairs is not None:
            pairs = self.pairs.to(pairs).lerp(pairs, min(n / self.recent, 1.0))
        self.pairs = pairs
        self.mean = before.lerp(mean, min(n / min(self.images, BEFORE_IMAGES), 1.0))
        if self.recent >= LEAST_IMAGES:
            self._arriving.send(pairs, None)

    def settle(self) -> None:
        """Decide by all batches that were followed."""
        held = self._arriving.take()
        if held is None:
            return
        within, across = held[0].tolist()
        ratio = END_RATIO if self.come else BEGIN_RATIO
        come = within - across > EXCESS and within > ratio * across
        if come != self.come:  # from now on images are normalised in another way, and predicted in another way
            self.come = come
            self.recent = 0
            self.pairs = None
            if len(self.events) < EVENTS:
                action = "one by one" if come else "by batch"
                self.events.append({"image": self.images, "action": action, "within": within, "across": across})

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
        sound = isinstance(state["come"], bool) and is_count(state["images"]) and is_count(state["recent"])
        for name, size in (("mean", classes), ("pairs", 2)):
            found = state[name]
            if found is None:
                continue
            sound = sound and isinstance(found, Tensor) and found.shape == (size,) and bool(found.isfinite().all())
        if not sound or not isinstance(state["events"], list):
            raise ValueError("invalid gather state: its part on turns has values that are out of range")
        for name, value in copy.deepcopy(state).items():
            setattr(turns, name, value)
        return turns
