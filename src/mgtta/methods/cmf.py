"""CMF: a Kalman filter on the parameters (Lee & Chang, ICLR 2024, Continual Momentum Filtering; on OpenReview).

Losses, weights and prior correction are ROID's. After each update the parameters are filtered; with theta the adapted
ones, theta_0 the source's, h the hidden ones and v their variance (h = theta_0, v = 0 at the start):

    predict    h <- alpha h + (1 - alpha) theta_0;    v <- alpha^2 v + q
    update     beta = r / (v + r), r = 1 - q;    h <- beta h + (1 - beta) theta;    v <- beta v
    ensemble   theta <- gamma theta + (1 - gamma) h

Settings are those of the code of ROID's authors, who took CMF over from its authors' supplement. As there, beta is at
least 0.89, is 1 from 0.9999 on, and q grows with the number of adapted parameters: it is given for the 38,400 of a
ViT-B's norm layers. Ours: a reset also resets v.
"""

from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.methods._descent import Descent
from mgtta.methods.registry import Paper, register
from mgtta.methods.roid import ROID
from mgtta.models.classifier import Classifier

PAPER = Paper("Continual Momentum Filtering on Parameter Space for Online Test-time Adaptation")
PARAMETERS = 38_400  # of a ViT-B's norm layers
LOWEST_BETA = 0.89
ONE = 0.9999  # from which beta counts as 1


@register(
    "cmf",
    papers=[PAPER],
    descent=Descent(lr=2.5e-4, nesterov=True),
    code="github.com/mariodoebler/test-time-adaptation",
    passes=(2, 2),
)
class CMF(ROID):
    """ROID's losses, with parameters filtered over time instead of its weight ensembling (Lee & Chang, ICLR 2024).

    alpha: share of the hidden parameters that stays when they are drawn to the source.
    gamma: share of the adapted parameters that stays when they are drawn to the hidden ones.
    q: noise of the hidden parameters, for 38,400 adapted ones.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        alpha: float = 0.99,
        gamma: float = 0.99,
        q: float = 0.005,
        temperature: float = 1 / 3,
        probs_ema: float = 0.9,
        seed: int = 0,
    ):
        super().__init__(model, optimizer, temperature=temperature, source_ema=1.0, probs_ema=probs_ema, seed=seed)
        self.alpha = alpha
        self.gamma = gamma
        self.q = q * sum(p.numel() for p in self.adapted.values()) / PARAMETERS
        if not 0 <= self.q < 1:
            raise ValueError(
                f"q must be at least 0 and below 1, not {self.q:g}: that is q={q:g} times the adapted parameters / "
                f"{PARAMETERS}. Give a smaller q"
            )
        self.variance = 0.0  # v
        for i, p in enumerate(self.adapted.values()):
            self.register_buffer(f"hidden_{i}", p.detach().clone())

    @property
    def hidden(self) -> list[Tensor]:
        """The hidden parameters h, in the order of the adapted ones."""
        return [self.get_buffer(f"hidden_{i}") for i in range(len(self.adapted))]

    @torch.no_grad()
    def learned(self, seen: Pass) -> None:
        super().learned(seen)
        self.variance = self.alpha**2 * self.variance + self.q
        beta = self._beta()
        self.variance = beta * self.variance
        for p, p_0, h in zip(self.adapted.values(), self.origin, self.hidden, strict=True):
            h.copy_(self.alpha * h + (1 - self.alpha) * p_0)
            h.copy_(beta * h + (1 - beta) * p)
            p.copy_(self.gamma * p + (1 - self.gamma) * h)

    def _beta(self) -> float:
        """Return the share of the hidden parameters that stays when the adapted ones are taken in."""
        r = 1 - self.q
        beta = max(r / (self.variance + r), LOWEST_BETA)
        return 1.0 if beta >= ONE else beta

    def own_state(self) -> Any:
        return {**super().own_state(), "variance": self.variance}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        self.variance = own["variance"]
