"""EATA: ETA, entropy of reliable, non-redundant images, with an anti-forgetting term (Niu et al., ICML 2022).

Whose settings these are, and where ours differ: see methods/eta.py. The MGTTA paper takes E_0 = 0.5 ln C and lr 2.5e-4.
The equation numbers are the paper's.
Notation    w  Fisher importance; theta_o  the source's parameters; beta = fisher_weight
"""

import os
from collections.abc import Sequence

from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.methods._descent import Descent
from mgtta.methods._reliable import forgetting, importance_of
from mgtta.methods.eta import CODE, ETA, PAPER
from mgtta.methods.registry import FISHER, register
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher


@register(
    "eata",
    papers=[PAPER],
    needs=[FISHER],
    descent=Descent(lr=1e-3),
    code=CODE,
    resnets={"lr": 2.5e-4},
    mgtta={"lr": 2.5e-4, "margin": 0.5, "redundancy": 0.05},
    tries={"redundancy": (0.05, 0.4)},
    revision=1,
)
class EATA(ETA):
    """Entropy of reliable, non-redundant images, without forgetting (Niu et al., ICML 2022).

    fisher: what mgtta.fisher_information returned, or its file: `mgtta fisher`, then `--set fisher=FILE`. eta is the
    method without it.
    margin: E_0, in units of ln C.
    redundancy: eps, the cosine above which an image is redundant; None: 0.05 for 1,000 classes and 0.4 for 10, the
    authors' values, and by a power law for other numbers.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        fisher: Fisher | str | os.PathLike,
        margin: float = 0.4,
        redundancy: float | None = None,
        fisher_weight: float = 2000.0,
    ):
        super().__init__(model, optimizer, margin=margin, redundancy=redundancy)
        self.fisher_weight = fisher_weight
        self.importance = importance_of(self, fisher)

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        return super().objective(logits, features) + self.forgetting()  # Eq. 8

    def forgetting(self) -> Tensor:
        """Return beta * R: the squared distance from the source, weighed by importance (Eq. 7)."""
        return self.fisher_weight * forgetting(self, self.importance)
