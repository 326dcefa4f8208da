"""MGTTA: entropy and feature discrepancy lowered by a learned optimizer (arXiv 2412.16901, Eq. 7, Algorithm 1).

With SGD or Adam instead of the learned optimizer it is the paper's ablation "w/o MGG".
"""

import math
from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.losses import objective
from mgtta.methods._descent import Descent
from mgtta.methods.registry import GENERATOR, SOURCE, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters
from mgtta.models.source import Source, as_source

PAPER = Paper("Learning to Generate Gradients for Test-Time Adaptation via Test-Time Training Layers", "2412.16901")


def rate_of_the_paper(lr: float, images: int) -> float:
    """Return the learning rate for a batch of so many images: a tenth of it at batches of 4 or fewer."""
    if images <= 4:
        return lr / 10
    return lr


@register(
    "eq7_sgd",
    papers=[PAPER],
    needs=[SOURCE],
    descent=Descent(0.05, "sgd", momentum=0.0, fixed=True),
    what="MGTTA's objective with plain SGD: the paper's \"w/o MGG\".",
    code="github.com/keikeiqi/MGTTA",
    mgtta={"lr": 0.05},
)
@register(
    "eq7_adam",
    papers=[PAPER],
    needs=[SOURCE],
    descent=Descent(5e-3, "adam", fixed=True),
    what="MGTTA's objective with Adam, with which the paper does not compare.",
    rate_at=rate_of_the_paper,
)
@register(
    "mgtta",
    papers=[PAPER],
    needs=[SOURCE, GENERATOR],
    descent=Descent(1e-3, "mgg", fixed=True),
    code="github.com/keikeiqi/MGTTA",
    mgtta={"lr": 1e-3},
    rate_at=rate_of_the_paper,
)
class MGTTA(ObjectiveMethod):
    """Entropy and feature discrepancy, lowered by a learned optimizer (Deng et al., AAAI 2025).

    The paper takes lr 1e-4 at batch sizes 2 and 4, and trade_off 0.2 on ImageNet-R.

    decay: the learning rate of step t is lr / sqrt(1 + t / decay); the paper's does not fall.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        source: Source,
        trade_off: float = 0.4,
        decay: float = math.inf,
    ):
        super().__init__(model)
        self.learns(norm_parameters, optimizer, decay)
        self.source = as_source(source, model.name, self.fingerprint)
        self.trade_off = trade_off

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        return self.eq7(logits, features)

    def eq7(
        self,
        logits: Tensor,
        features: Sequence[Tensor],
        weight: Tensor | None = None,
        moved: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return Eq. 7.

        Args:
            weight: of each image's entropy (N,), if they differ.
            moved: how far from the source's mean each layer's is expected to be (d_i,); None: not at all.
        """
        source = self.source = self.source.to(logits)
        mean = source.mean
        if moved is not None:
            mean = [m + d for m, d in zip(mean, moved, strict=True)]
        return objective(logits, features, mean, source.std, self.trade_off, self.ranks, weight)


@register(
    "mgtta_lstm",
    papers=[PAPER],
    needs=[SOURCE, GENERATOR],
    descent=Descent(1e-3, "mgg", generator="imagenet-lstm", fixed=True),
    rate_at=rate_of_the_paper,
)
def mgtta_lstm(model: Classifier, optimizer: OptimizerFactory, *, source: Source, trade_off: float = 0.4) -> MGTTA:
    """MGTTA with an LSTM cell instead of the gradient memory: our LSTM variant, since the paper's is not public.

    Table 4 of the paper has such an ablation; its code and its generator were not released.
    """
    method = MGTTA(model, optimizer, source=source, trade_off=trade_off)
    kind = method.optimizer.generator.memory_kind  # type: ignore[union-attr]
    if kind != "lstm":
        raise ValueError(f"mgtta_lstm needs a generator with memory='lstm', not {kind!r}")
    return method
