"""ETA: entropy of reliable, non-redundant images (Niu et al., ICML 2022): EATA without its anti-forgetting term.

Followed: the authors' code, github.com/mr-eggplant/EATA: E_0 = 0.4 ln C, lr 2.5e-4 for ResNet-50, and for ViTs lr 1e-3
from the same authors' github.com/mr-eggplant/SAR.
Ours on purpose: eps follows the number of classes. The cosine of two predictions is the larger, the fewer classes there
are, so that the authors take 0.05 on ImageNet and 0.4 on CIFAR-10; in between, and beyond, it is the power of C through
these two. With 0.05 on few classes hardly an image would teach anything.

The equation numbers are the paper's.
Notation    E  entropy of one prediction; E_0 = margin * ln C; eps = redundancy; p  predicted probabilities (C,)
            m  moving average of the kept probabilities
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.adaptation.step import Pass
from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods._reliable import MOMENTUM, is_kept, weight_of
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters

CODE = "github.com/mr-eggplant/EATA; for ViTs github.com/mr-eggplant/SAR"
PAPER = Paper("Efficient Test-Time Model Adaptation without Forgetting", "2204.02610")


@register(
    "eta",
    papers=[PAPER],
    descent=Descent(lr=1e-3),
    code=CODE,
    resnets={"lr": 2.5e-4},
    tries={"redundancy": (0.05, 0.4)},
)
class ETA(ObjectiveMethod):
    """Entropy of reliable, non-redundant images (Niu et al., ICML 2022).

    margin: E_0, in units of ln C.
    redundancy: eps, the cosine above which an image is redundant; None: 0.05 for 1,000 classes and 0.4 for 10, the
    authors' values, and by a power law for other numbers.
    """

    reads_features = False
    probs: Tensor

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        margin: float = 0.4,
        redundancy: float | None = None,
    ):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)
        self.margin = margin
        self.redundancy = redundancy
        self.register_buffer("probs", torch.empty(0))  # m; see `_average`

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        E = self.uncertainty(logits)
        weight = weight_of(E, logits.shape[1], self.margin)
        return self._mean_of_kept((weight * E)[:, None], self.kept(logits))[0]  # Eq. 2

    def teaches(self, logits: Tensor) -> Tensor:
        return self.kept(logits).any()

    def uncertainty(self, logits: Tensor) -> Tensor:
        """Return E of each prediction, which is lowered and by which images are chosen: (N, C) -> (N,)."""
        return entropy(logits)

    def kept(self, logits: Tensor) -> Tensor:
        """Where S(x) > 0 (Eq. 6): (N,) of bool."""
        logits = logits.detach()
        E = self.uncertainty(logits)
        return is_kept(E, logits.softmax(-1), self._average(logits), self.margin, self.redundancy)

    @torch.no_grad()
    def learned(self, seen: Pass, made: Tensor | bool = True) -> None:
        p = seen.logits.softmax(-1)
        kept = self._mean_of_kept(p, self.kept(seen.logits))
        m = self._average(seen.logits)
        followed = torch.where(m.any(), MOMENTUM * m + (1 - MOMENTUM) * kept, kept)  # Eq. 4
        m.copy_(torch.where(torch.as_tensor(made, device=m.device), followed, m))

    def _average(self, logits: Tensor) -> Tensor:
        """Return m (C,), which has a place of its own from the first batch on; zeros before there is one."""
        if not len(self.probs):
            self.probs = torch.zeros_like(logits[0])
        return self.probs

    def _mean_of_kept(self, values: Tensor, kept: Tensor) -> Tensor:
        """Return the mean (D,) of the rows of values (N, D) that are kept, on all ranks; 0 if none is."""
        chosen = torch.where(kept[:, None], values, 0)
        found = self.ranks.mean(torch.cat([chosen, kept[:, None].to(values)], 1))
        assert found is not None  # a batch has at least one image, on some rank
        share = found[-1]
        return found[:-1] / torch.where(share > 0, share, 1)
