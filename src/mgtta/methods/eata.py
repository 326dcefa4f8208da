"""EATA: entropy of reliable, non-redundant images, with an anti-forgetting term (Niu et al., ICML 2022).

The equation numbers are that paper's.
Notation    E  entropy of one prediction; E_0 = margin * ln C; eps = redundancy; p  predicted probabilities (C,)
            m  moving average of the kept probabilities; w  Fisher importance; theta_o  the source's parameters
"""

import math
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mgtta.adaptation.method import Method, OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods.registry import FISHER, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher, as_fisher
from mgtta.models.norms import norm_parameters

MOMENTUM = 0.9  # of m


PAPER = Paper("Efficient Test-Time Model Adaptation without Forgetting", "2204.02610")


@register("eata", papers=[PAPER], needs=[FISHER], descent=Descent(lr=2.5e-4))
class EATA(Method):
    """Entropy of reliable, non-redundant images, without forgetting (Niu et al., ICML 2022).

    fisher: what mgtta.fisher_information gave, or its file; None is the paper's ETA, without the last part.
    margin: E_0, in units of ln C.
    """

    shares_batches = True
    probs: Tensor

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        fisher: Fisher | str | os.PathLike | None = None,
        margin: float = 0.5,
        redundancy: float = 0.05,
        fisher_weight: float = 2000.0,
    ):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)
        self.margin = margin
        self.redundancy = redundancy
        self.fisher_weight = fisher_weight
        self.register_buffer("probs", torch.empty(0))  # m; empty until there is one
        self.importance: nn.ParameterList | None = None
        if fisher is not None:
            values = as_fisher(fisher, model.name, self.fingerprint).values
            found = [values[name].to(p) for name, p in self.adapted.items()]
            self.importance = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in found)

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        logits = self.model(x)
        kept = self.kept(logits)
        E = entropy(logits)
        weight = (self.margin * math.log(logits.shape[1]) - E.detach()).exp()  # Eq. 3
        loss = self.ranks.mean((weight * E)[kept])
        if loss is not None:
            loss = loss + self.forgetting()  # Eqs. 2, 8
        return Pass(logits), loss

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
        if self.importance is None:
            return 0.0
        terms = zip(self.importance, self.adapted.values(), self.origin, strict=True)
        return self.fisher_weight * sum((w * (p - p_o).square()).sum() for w, p, p_o in terms)

    @torch.no_grad()
    def learned(self, seen: Pass) -> None:
        logits = seen.logits
        probs = self.ranks.mean(logits[self.kept(logits)].softmax(-1))
        assert probs is not None  # or there would have been no update
        self.probs = MOMENTUM * self.probs + (1 - MOMENTUM) * probs if len(self.probs) else probs  # Eq. 4
