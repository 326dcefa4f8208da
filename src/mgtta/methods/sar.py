"""SAR: sharpness-aware and reliable entropy minimisation (Niu et al., ICLR 2023; its equation numbers).

Notation    E  entropy of one prediction; E_0 = margin * ln C; S  the reliable images, E < E_0
            e_m  moving average of the second loss; e_0 = recovery, under which the model has collapsed
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import GradientMethod, OptimizerFactory
from mgtta.losses import entropy
from mgtta.methods._sam import SAM
from mgtta.models.classifier import Classifier
from mgtta.models.norms import early_norm_parameters


class SAR(GradientMethod):
    """Attributes:
    recoveries: how often the model went back to the source since the last reset.
    """

    optimizer: SAM
    shares_batches = True

    def __init__(self, model: Classifier, optimizer: OptimizerFactory, margin: float, rho: float, recovery: float):
        sam = partial(SAM, base=optimizer, rho=rho)
        super().__init__(model, _early, sam)
        self.margin = margin
        self.recovery = recovery
        self.average: float | None = None  # e_m
        self.recoveries = 0

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.model(x)
        reliable = self.reliable(logits)  # Eq. 2
        return logits, self.ranks.mean(entropy(logits)[reliable])

    def reliable(self, logits: Tensor) -> Tensor:
        """S(x) of Eq. 2: (N,) of bool."""
        return entropy(logits.detach()) < self.margin * math.log(logits.shape[1])

    def adapt(self, x: Tensor) -> Tensor:
        logits, loss = self.loss(x)
        if not self.ranks.all(logits.isfinite().all()):
            self.skipped += 1
        elif loss is not None:
            self._sharpness_aware_step(x, loss, self.reliable(logits))
        return logits

    def _sharpness_aware_step(self, x: Tensor, loss: Tensor, reliable: Tensor) -> None:
        """Eq. 6: the step taken along the gradient at the perturbed point."""
        grads = self.gradients(loss)
        second = None
        if grads is not None:
            for p, grad in zip(self.adapted.values(), grads, strict=True):
                p.grad = grad
            with self.optimizer.perturbed():  # Eq. 4
                logits = self.model(x)
                again = reliable & self.reliable(logits)  # the filter once more, at the perturbed point
                finite = self.ranks.all(logits.isfinite().all())
                second = self.ranks.mean(entropy(logits)[again]) if finite else None
                grads = self.gradients(second) if second is not None else None  # Eq. 5
            self.optimizer.zero_grad()
            if finite and second is None:
                return
        if grads is None or second is None:
            self.skipped += 1
            return
        self.step(grads)
        value = second.item()
        self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        if self.average < self.recovery:
            self._recover()

    @torch.no_grad()
    def _recover(self) -> None:
        """The source model again, its optimizer fresh; e_m starts anew, or it would call for this at every batch."""
        assert self._start is not None
        for name, value in self._start["params"].items():
            self.adapted[name].copy_(value)
        self.optimizer.load_state_dict(self._start["optimizer"])
        self.average = None
        self.recoveries += 1

    def get_extra_state(self) -> Any:
        return {**super().get_extra_state(), "average": self.average, "recoveries": self.recoveries}

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        self.average, self.recoveries = state["average"], state["recoveries"]


def _early(classifier: nn.Module) -> list[nn.Parameter]:
    return early_norm_parameters(classifier.get_submodule("net"))
