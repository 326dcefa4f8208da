"""MGTTA: entropy and feature discrepancy lowered by a learned optimizer (arXiv 2412.16901, Eq. 7, Algorithm 1).

With SGD or Adam in the optimizer's place it is the paper's ablation "w/o MGG".
"""

import math
from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import GradientMethod, OptimizerFactory
from mgtta.losses import objective
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters
from mgtta.models.source import SourceStatistics


class MGTTA(GradientMethod):
    needs = ("gradients", "source statistics")
    shares_batches = True
    learns_from_all = True
    static_step = True

    def __init__(
        self,
        model: Classifier,
        source: SourceStatistics,
        optimizer: OptimizerFactory,
        trade_off: float,
        decay: float = math.inf,
    ):
        super().__init__(model, norm_parameters, optimizer, decay)
        source.check(model.name, self.fingerprint)
        self.source = source
        self.trade_off = trade_off

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = self.model.features(x)
        return logits, self.criterion(logits, features)

    def criterion(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        source = self.source = self.source.to(logits)
        return objective(logits, features, source.mean, source.std, self.trade_off, self.ranks)
