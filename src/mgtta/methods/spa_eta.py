"""SPA joined with ETA (Niu et al., ICML 2025, arXiv 2504.08010).

The loss is SPA's plus 0.1 times ETA's: the weighted entropy of reliable, non-redundant images. The weight, E_0 = 0.4
ln C and the rest are those of the released system. See spa.py and eta.py; numbers of equations are EATA's. Ours:
`redundancy` follows the number of classes, as in eta.py.
"""

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods._reliable import MOMENTUM, is_kept, weight_of
from mgtta.methods.eta import PAPER as ETA_PAPER
from mgtta.methods.registry import register
from mgtta.methods.spa import PAPER, SPA
from mgtta.models.classifier import Classifier

CODE = "github.com/mr-eggplant/SPA"
RESNETS = {"lr": 2.5e-3, "predictor_lr": 0.025, "mask_ratio": 0.1, "noise_ratio": 0.1}  # as in spa.py


@register("spa_eta", papers=[PAPER, ETA_PAPER], descent=Descent(lr=0.01), code=CODE, resnets=RESNETS, passes=(3, 3))
class SPAETA(SPA):
    """SPA with ETA's entropy of reliable, non-redundant images (Niu et al., ICML 2025).

    margin: E_0, in units of ln C.
    redundancy: eps; None: 0.05 for 1,000 classes, and by a power law for other numbers.
    eta_weight: weight of ETA's loss.
    """

    probs: Tensor

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
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
            predictor_lr=predictor_lr,
            mask_ratio=mask_ratio,
            low_frequencies=low_frequencies,
            noise_ratio=noise_ratio,
            noise_lr=noise_lr,
            seed=seed,
        )
        self.eta_weight = eta_weight
        self.margin = margin
        self.redundancy = redundancy
        self.register_buffer("probs", torch.empty(0))  # empty until there is an average

    def _loss(self, x: Tensor, predictor: Tensor, noise: Tensor) -> tuple[Pass, Tensor | None]:
        seen, consistency = super()._loss(x, predictor, noise)
        terms = [consistency, self.eta(seen.logits)]
        found = [term for term in terms if term is not None]
        return seen, torch.stack(found).sum() if found else None

    def eta(self, logits: Tensor) -> Tensor | None:
        """Return the weighted loss of ETA; None if no image is kept."""
        E = entropy(logits)
        kept = self.kept(logits)
        if not kept.any():
            return None
        weight = weight_of(E, logits.shape[1], self.margin)
        return self.eta_weight * (weight * E)[kept].mean()

    def kept(self, logits: Tensor) -> Tensor:
        """Return which images are reliable (Eq. 3) and not redundant (Eq. 5): (N,) of bool."""
        logits = logits.detach()
        p = logits.softmax(-1)
        m = self.probs if len(self.probs) else torch.zeros_like(p[0])
        return is_kept(entropy(logits), p, m, self.margin, self.redundancy)

    def adapt(self, x: Tensor) -> Pass:
        before = self.engine.updates
        seen = super().adapt(x)
        if self.engine.updates > before:
            self._remember(seen.logits.detach())
        return seen

    @torch.no_grad()
    def _remember(self, logits: Tensor) -> None:
        """Take the kept predictions into their average (Eq. 4)."""
        kept = self.kept(logits)
        if not kept.any():
            return
        probs = logits[kept].softmax(-1).mean(0)
        if len(self.probs):
            probs = MOMENTUM * self.probs + (1 - MOMENTUM) * probs
        self.probs = probs
