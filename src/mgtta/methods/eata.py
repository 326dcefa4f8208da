"""EATA: entropy of reliable, non-redundant images, with an anti-forgetting term (Niu et al., ICML 2022).

The equation numbers are that paper's.
Notation    E  entropy of one prediction; E_0 = margin * ln C; eps = redundancy; p  predicted probabilities (C,)
            m  moving average of the kept probabilities; w  Fisher importance; theta_o  the source's parameters
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mgtta.adaptation.method import GradientMethod, OptimizerFactory, frozen
from mgtta.losses import entropy
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher
from mgtta.models.norms import norm_parameters

MOMENTUM = 0.9  # of m


class EATA(GradientMethod):
    """Without `fisher` it is the paper's ETA."""

    needs = ("gradients", "Fisher information of source images")
    shares_batches = True
    probs: Tensor

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        fisher: Fisher | None,
        margin: float,
        redundancy: float,
        fisher_weight: float,
    ):
        super().__init__(model, norm_parameters, optimizer)
        self.margin = margin
        self.redundancy = redundancy
        self.fisher_weight = fisher_weight
        self.register_buffer("probs", torch.empty(0))  # m; empty until there is one
        self.importance = self.source = None
        if fisher is not None:
            fisher.check(model.name, self.fingerprint)
            params = self.adapted.values()
            self.source = frozen(params)
            self.importance = frozen(fisher.values[name].to(p) for name, p in self.adapted.items())

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.model(x)
        kept = self.kept(logits)
        E = entropy(logits)
        weight = (self.margin * math.log(logits.shape[1]) - E.detach()).exp()  # Eq. 3
        loss = self.ranks.mean((weight * E)[kept])
        return logits, None if loss is None else loss + self.forgetting()  # Eqs. 2, 8

    def kept(self, logits: Tensor) -> Tensor:
        """Where S(x) > 0 (Eq. 6): (N,) of bool."""
        logits = logits.detach()
        reliable = entropy(logits) < self.margin * math.log(logits.shape[1])  # Eq. 3
        if not len(self.probs):
            return reliable
        similarity = cosine_similarity(logits.softmax(-1), self.probs[None], dim=1)
        return reliable & (similarity < self.redundancy)  # Eq. 5

    def forgetting(self) -> Tensor | float:
        """beta * R: the squared way from the source, weighed by importance (Eq. 7)."""
        if self.importance is None or self.source is None:
            return 0.0
        terms = zip(self.importance, self.adapted.values(), self.source, strict=True)
        return self.fisher_weight * sum((w * (p - p_o).square()).sum() for w, p, p_o in terms)

    def learned(self, logits: Tensor) -> None:
        probs = self.ranks.mean(logits[self.kept(logits)].softmax(-1))
        assert probs is not None  # or there would have been no update
        self.probs = MOMENTUM * self.probs + (1 - MOMENTUM) * probs if len(self.probs) else probs  # Eq. 4
