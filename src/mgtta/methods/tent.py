"""TENT: lower the entropy of the predictions through the norm layers (Wang et al., ICLR 2021)."""

from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import GradientMethod, OptimizerFactory
from mgtta.losses import entropy
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters


class Tent(GradientMethod):
    shares_batches = True
    learns_from_all = True
    static_step = True

    def __init__(self, model: Classifier, optimizer: OptimizerFactory):
        super().__init__(model, norm_parameters, optimizer)

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.model(x)
        return logits, self.ranks.mean(entropy(logits))

    def criterion(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        return entropy(logits).mean()
