"""SAR: sharpness-aware and reliable entropy minimisation (Niu et al., ICLR 2023; its equation numbers).

Followed: the authors' code, github.com/mr-eggplant/SAR: lr 1e-3 for ViTs, 2.5e-4 for ResNets.
Ours on purpose: a batch without a reliable image is not learned from, where the authors' code still steps by its
momentum. After a recovery e_m starts again, where the authors' code keeps it, below e_0, and recovers at every batch
until it has risen. The logits are those from before the perturbation, as in the authors' code; the copies of it in
FOA's and MGTTA's code return the perturbed model's.

Notation    E  entropy of one prediction; E_0 = margin * ln C; S  the reliable images, E < E_0
            e_m  moving average of the second loss; e_0 = recovery, under which the model has collapsed
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.method import Method, OptimizerFactory
from mgtta.adaptation.step import EagerEngine, Pass
from mgtta.losses import entropy
from mgtta.methods._descent import Descent, doubled_at_one
from mgtta.methods._sam import SAM
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import early_norm_parameters

PAPER = Paper("Towards Stable Test-Time Adaptation in Dynamic Wild World", "2302.12400")


@register(
    "sar",
    papers=[PAPER],
    descent=Descent(lr=1e-3),
    code="github.com/mr-eggplant/SAR",
    resnets={"lr": 2.5e-4},
    mgtta={"lr": 1e-3},
    rate_at=doubled_at_one,
    passes=(2, 2),
)
class SAR(Method):
    """Sharpness-aware entropy minimisation on reliable images, with recovery (Niu et al., ICLR 2023).

    margin: E_0, in units of ln C.

    Attributes:
        recoveries: how often the model went back to the source since the last reset.
    """

    engine: EagerEngine
    optimizer: SAM
    may_be_rounded = True
    shares_batches = True

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        margin: float = 0.4,
        rho: float = 0.05,
        recovery: float = 0.2,
    ):
        super().__init__(model)
        self.learns(early_norm_parameters, partial(SAM, base=optimizer, rho=rho))
        self.margin = margin
        self.recovery = recovery
        self.average: float | None = None  # e_m
        self.recoveries = 0

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        logits = self.model(x)
        reliable = self.reliable(logits)  # Eq. 2
        return Pass(logits), self.ranks.mean(self.uncertainty(logits)[reliable])

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Return E of each prediction, which is lowered and by which images are chosen: (N, C) -> (N,)."""
        return entropy(logits)

    def reliable(self, logits: Tensor) -> Tensor:
        """S(x) of Eq. 2: (N,) of bool."""
        return self.uncertainty(logits.detach()) < self.margin * math.log(logits.shape[1])

    def adapt(self, x: Tensor) -> Pass:
        seen, loss = self.loss(x)
        if not self.ranks.all(seen.logits.isfinite().all()):
            self.engine.skipped += 1
        elif loss is not None:
            self._sharpness_aware_step(x, loss, self.reliable(seen.logits))
        return seen

    def _sharpness_aware_step(self, x: Tensor, loss: Tensor, reliable: Tensor) -> None:
        """Eq. 6: the step taken along the gradient at the perturbed point."""
        grads = self.engine.gradients(loss)
        second = None
        if grads is not None:
            for p, grad in zip(self.adapted.values(), grads, strict=True):
                p.grad = grad
            with self.optimizer.perturbed():  # Eq. 4
                logits = self.model(x)
                again = reliable & self.reliable(logits)  # the filter once more, at the perturbed point
                finite = self.ranks.all(logits.isfinite().all())
                second = self.ranks.mean(self.uncertainty(logits)[again]) if finite else None
                grads = self.engine.gradients(second) if second is not None else None  # Eq. 5
            self.optimizer.zero_grad()
            if finite and second is None:
                return
        if grads is None or second is None:
            self.engine.skipped += 1
            return
        self.engine.update(grads)
        value = second.item()
        self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        if self.average < self.recovery:
            self._recover()

    @torch.no_grad()
    def _recover(self) -> None:
        """Go back to the source model and a new optimizer state; e_m starts again, or it would do so at every batch."""
        assert self.start is not None
        for p, value in zip(self.adapted.values(), self.origin, strict=True):
            p.copy_(value)
        self.optimizer.load_state_dict(self.start["optimizer"])
        self.average = None
        self.recoveries += 1

    def own_state(self) -> Any:
        return {**super().own_state(), "average": self.average, "recoveries": self.recoveries}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        self.average = own["average"]
        self.recoveries = own["recoveries"]
