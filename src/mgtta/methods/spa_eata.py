"""SPA joined with EATA: its authors' best results (Niu et al., ICML 2025, arXiv 2504.08010).

EATA's anti-forgetting term (its Eq. 7) is added to the loss of spa_eta. As in the released system the 0.1 of ETA's
loss also stands before this term, and the term counts when no image is kept.
"""

import os

from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.methods._descent import Descent
from mgtta.methods._reliable import forgetting, importance_of
from mgtta.methods.eta import PAPER as ETA_PAPER
from mgtta.methods.registry import FISHER, register
from mgtta.methods.spa import PAPER
from mgtta.methods.spa_eta import CODE, RESNETS, SPAETA
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher


@register(
    "spa_eata",
    papers=[PAPER, ETA_PAPER],
    needs=[FISHER],
    descent=Descent(lr=0.01),
    code=CODE,
    resnets=RESNETS,
    passes=(3, 3),
)
class SPAEATA(SPAETA):
    """SPA with EATA's entropy and anti-forgetting term (Niu et al., ICML 2025).

    margin: E_0, in units of ln C.
    redundancy: eps; None: 0.05 for 1,000 classes, and by a power law for other numbers.
    eta_weight: weight of EATA's loss, the anti-forgetting term included.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        fisher: Fisher | str | os.PathLike,
        fisher_weight: float = 2000.0,
        eta_weight: float = 0.1,
        margin: float = 0.4,
        redundancy: float | None = None,
        predictor_lr: float = 0.05,
        mask_ratio: float = 0.2,
        low_frequencies: float = 0.2,
        noise_ratio: float = 0.4,
        noise_lr: float = 1.0,
        seed: int = 0,
    ):
        super().__init__(
            model,
            optimizer,
            eta_weight=eta_weight,
            margin=margin,
            redundancy=redundancy,
            predictor_lr=predictor_lr,
            mask_ratio=mask_ratio,
            low_frequencies=low_frequencies,
            noise_ratio=noise_ratio,
            noise_lr=noise_lr,
            seed=seed,
        )
        self.importance = importance_of(self, fisher)
        self.fisher_weight = fisher_weight

    def eta(self, logits: Tensor) -> Tensor:
        """Return the weighted loss of EATA."""
        loss = self.eta_weight * self.fisher_weight * forgetting(self, self.importance)
        entropy = super().eta(logits)
        return loss if entropy is None else loss + entropy
