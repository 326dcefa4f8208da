"""When a method learns at all: budgets of updates and seconds, and the off switch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mgtta._lib.ranks import ALONE, Alone
from mgtta.adaptation.step import Engine


class Budgeted:
    """A method's budgets. When one is spent, or while the method is paused, it only predicts.

    Attributes:
        max_updates: updates since the last reset, at most; None: no limit.
        max_seconds: seconds spent in calls since the last reset, at most; None: no limit.
        seconds: seconds spent so far.
        paused: True between `pause` and `unpause`.
    """

    engine: Engine
    ranks: Alone = ALONE
    max_updates: int | None = None
    max_seconds: float | None = None
    seconds: float = 0.0
    paused: bool = False

    @property
    def updates(self) -> int:
        """Updates since the last reset."""
        return self.engine.updates

    @property
    def skipped(self) -> int:
        """Batches since the last reset that were predicted but not learned from: something was not finite."""
        return self.engine.skipped

    @property
    def precision(self) -> str:
        """What the frozen network computes in: "fp32", or the fast path's "bf16" or "fp8"."""
        return self.engine.precision

    @property
    def spent(self) -> bool:
        """True if a budget of updates or seconds is used up."""
        out_of_updates = self.max_updates is not None and self.updates >= self.max_updates
        return out_of_updates or (self.max_seconds is not None and self.seconds >= self.max_seconds)

    @property
    def learning(self) -> bool:
        """True if the next images are to be learned from."""
        return not self.paused and not self.spent

    def pause(self) -> None:
        """Only predict from now on; nothing that is learned or counted changes."""
        self.paused = True

    def unpause(self) -> None:
        """Adapt again."""
        self.paused = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Only predict within the block."""
        before = self.paused
        self.paused = True
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        """Add the seconds of the block; ranks that share batches agree, so that all stop at the same batch."""
        began = time.perf_counter()
        yield
        if self.max_seconds is None:
            self.seconds += time.perf_counter() - began
            return
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += self.ranks.most(time.perf_counter() - began)
