"""COME: TENT, EATA and SAR with the entropy of an opinion (Zhang et al., ICLR 2025, arXiv 2410.10894).

Notation    x (C,) the logits of an image; e_k = exp(x_k) the evidence for class k; S = sum_k e_k + C
            b_k = e_k / S  the belief in class k; u = C / S  the uncertainty; sum_k b_k + u = 1

COME lowers the entropy of (b_1, ..., b_C, u) instead of that of the softmax. The norm of x is held: the gradient sees
x / ||x|| * ||x||, with the last factor as a constant. Since C = exp(ln C), (b, u) is the softmax of (x, ln C), so the
entropy is that of these C + 1 logits. The authors' code adds 1e-7 to each probability; ours is exact. Filters, learning
rates and recovery are those of their code: TENT's, EATA's and SAR's for ViTs, where COME's entropy takes the place of
the softmax's in filters and weights too. E_0 stays in units of ln C. Ours: `redundancy` follows the number of classes,
as in eta.py.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods.eata import EATA
from mgtta.methods.registry import FISHER, Paper, register
from mgtta.methods.sar import SAR
from mgtta.methods.tent import Tent

CODE = "github.com/BlueWhaleLab/COME"
RESNETS = {"lr": 2.5e-4}
PAPER = Paper("COME: Test-time adaption by Conservatively Minimizing Entropy", "2410.10894")


def opinion(logits: Tensor) -> Tensor:
    """Return the logarithms of evidences and of C, whose softmax is the opinion (b, u): (N, C) -> (N, C + 1)."""
    held = normalize(logits, dim=-1) * logits.detach().norm(dim=-1, keepdim=True)
    uncertainty = torch.full_like(logits[:, :1], math.log(logits.shape[1]))
    return torch.cat([held, uncertainty], 1)


@register("tent_come", papers=[PAPER], descent=Descent(lr=1e-3), code=CODE, resnets=RESNETS)
class TentCOME(Tent):
    """TENT with the entropy of an opinion (COME, Zhang et al., ICLR 2025)."""

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        return super().objective(opinion(logits), features)


@register("eata_come", papers=[PAPER], needs=[FISHER], descent=Descent(lr=1e-3), code=CODE, resnets=RESNETS)
class EATACOME(EATA):
    """EATA with the entropy of an opinion (COME, Zhang et al., ICLR 2025).

    margin: E_0, in units of ln C.
    redundancy: eps; None: 0.05 for 1,000 classes, and by a power law for other numbers.
    """

    def uncertainty(self, logits: Tensor) -> Tensor:
        return entropy(opinion(logits))


@register("sar_come", papers=[PAPER], descent=Descent(lr=1e-3), code=CODE, resnets=RESNETS, passes=(2, 2))
class SARCOME(SAR):
    """SAR with the entropy of an opinion (COME, Zhang et al., ICLR 2025).

    margin: E_0, in units of ln C.
    """

    def uncertainty(self, logits: Tensor) -> Tensor:
        return entropy(opinion(logits))
