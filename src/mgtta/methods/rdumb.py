"""RDumb: ETA that starts again from the source every so many batches (Press et al., NeurIPS 2023, arXiv 2306.05401).

The equations are those of ETA, see eta.py. Settings are those of the authors' code, which has one learning rate for
all networks and counts batches, whether they taught something or not. Its E_0 = ln(1000) / 2 - 1 is written here in
units of ln C. Ours: `redundancy` follows the number of classes, as in eta.py.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.methods._descent import Descent
from mgtta.methods.eta import ETA
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier

PAPER = Paper("RDumb: A simple approach that questions our progress in continual test-time adaptation", "2306.05401")
MARGIN = 0.5 - 1 / math.log(1000)  # E_0 / ln C, about 0.355


@register("rdumb", papers=[PAPER], descent=Descent(lr=2.5e-4), code="github.com/oripress/CCC")
class RDumb(ETA):
    """ETA, reset to the source every 1,000 batches (Press et al., NeurIPS 2023).

    margin: E_0, in units of ln C.
    redundancy: eps; None: 0.05 for 1,000 classes, and by a power law for other numbers.
    every: batches between two resets.

    Attributes:
        restarts: how often the model went back to the source since the last `reset`.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        margin: float = MARGIN,
        redundancy: float | None = None,
        every: int = 1000,
    ):
        super().__init__(model, optimizer, margin=margin, redundancy=redundancy)
        if every < 1:
            raise ValueError(f"every, the number of batches between two resets, must be at least 1, not {every}")
        self.every = every
        self.batches = 0  # since the last restart
        self.restarts = 0

    def begin_step(self, x: Tensor) -> None:
        self.model.check(x)
        if self.batches == self.every:
            self._restart()
        self.batches += 1

    @torch.no_grad()
    def _restart(self) -> None:
        """Go back to the source model, a new optimizer state and no average of predictions."""
        assert self.start is not None
        assert self.optimizer is not None
        for p, value in zip(self.adapted.values(), self.origin, strict=True):
            p.copy_(value)
        self.optimizer.load_state_dict(self.start["optimizer"])
        self.probs.zero_()
        self.batches = 0
        self.restarts += 1

    def own_state(self) -> Any:
        return {**super().own_state(), "batches": self.batches, "restarts": self.restarts}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        self.batches = own["batches"]
        self.restarts = own["restarts"]
