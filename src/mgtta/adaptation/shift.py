"""Is this still the same domain? One detector for the schedule and for recall.

A batch is known by a summary, a vector of means over its images. In one domain the summaries of batches scatter around
a centre, the less the more images a batch has. A batch that lies farther away than they scatter is of another domain.

Notation    s  summary of a batch of n images, (D,)
            c, v  mean of s, and mean of n |s - c|^2, over the latest batches of the domain
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHIFT = 3.0  # n |s - c|^2 / v above which a batch is of another domain, if v is well known
FEW_BATCHES = 3.0  # after which v is known to a factor of 2
MEMORY_BATCHES = 16  # that c and v look back on


@dataclass
class ShiftDetector:
    """Centre and spread of the present domain, and the rule by which a batch is of another one."""

    seen: int = 0  # batches in c
    centre: Tensor | None = None  # c, on the CPU
    spread: float = 0.0  # v

    def distance(self, s: np.ndarray, n: int) -> float:
        """Return n |s - c|^2; 0 if there is no centre yet."""
        if self.centre is None:
            return 0.0
        with np.errstate(all="ignore"):  # the caller passes over what is not finite
            away = s - self.centre.numpy()
            return n * float(away @ away)

    def shifted(self, distance: float) -> bool:
        """Return whether a batch at this distance is of another domain; False as long as the spread is not known."""
        return self.seen > 1 and distance > SHIFT * (1 + FEW_BATCHES / self.seen) * self.spread

    def follow(self, s: np.ndarray, n: int) -> None:
        """Take a batch of the present domain into centre and spread."""
        distance = self.distance(s, n)
        self.seen = min(self.seen + 1, MEMORY_BATCHES)
        if self.centre is None:
            self.centre = torch.from_numpy(s.copy())
            return
        centre = self.centre.numpy()
        self.centre = torch.from_numpy(centre + (s - centre) / self.seen)
        weight = 1 / (self.seen - 1)
        self.spread = (1 - weight) * self.spread + weight * distance * (self.seen - 1) / self.seen

    def state(self) -> dict[str, Any]:
        """Return the detector as plain values."""
        return dict(vars(self))

    @classmethod
    def loaded(cls, state: Any, what: str = "shift detector") -> "ShiftDetector":
        """Return the detector of a state; a ValueError says what is invalid.

        Args:
            what: the name of the state, for the error.
        """
        if not isinstance(state, dict) or state.keys() != cls().state().keys():
            raise ValueError(f"invalid {what} state: it has other entries")
        centre = state["centre"]
        sound = is_count(state["seen"]) and is_positive(state["spread"])
        if centre is not None:
            sound = sound and isinstance(centre, Tensor) and centre.ndim == 1 and bool(centre.isfinite().all())
        if not sound:
            raise ValueError(f"invalid {what} state: it has values that are out of range")
        if centre is not None:
            centre = centre.cpu().clone()
        return cls(state["seen"], centre, state["spread"])


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number of at least 0."""
    return type(value) is int and value >= 0


def is_positive(value: Any) -> bool:
    """Return whether a value is a finite float of at least 0."""
    return type(value) is float and 0 <= value < math.inf


class Arriving:
    """A tensor on its way from a GPU, with what belongs to it: it is read later, so that nobody waits for the GPU."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Any, Any] | None = None

    def send(self, tensor: Tensor, told: Any) -> None:
        """Begin to copy a tensor from its GPU, or hold one that is on the CPU; `told` comes back with it."""
        if not tensor.is_cuda:
            self._held = (tensor, None, told)
            return
        arrived = torch.cuda.Event()
        here = torch.empty_like(tensor, device="cpu", pin_memory=True)
        here.copy_(tensor, non_blocking=True)
        arrived.record(torch.cuda.current_stream(tensor.device))
        self._held = (here, arrived, told)

    @property
    def comes_later(self) -> bool:
        """True if a tensor is on its way from a GPU."""
        return self._held is not None and self._held[1] is not None

    def take(self) -> tuple[Tensor, Any] | None:
        """Return the tensor and what was told with it, once; None if there is none."""
        if self._held is None:
            return None
        tensor, arrived, told = self._held
        self._held = None
        if arrived is not None:
            arrived.synchronize()
        return tensor, told

    def __getstate__(self) -> dict[str, Any]:
        held = self.take()  # a copy has the tensor, and no event to wait for
        if held is not None:
            self._held = (held[0], None, held[1])
        return {"_held": self._held}
