"""LAME: predictions made to agree with their neighbours in the batch (Boudiaf et al., CVPR 2022, arXiv 2201.05718).

Notation: q (N, C) the model's probabilities, z (N, C) the assignments that replace them, w (N, N) the affinity of
the images' features. The objective, KL(z_i || q_i) summed over images minus w_ij z_i . z_j summed over pairs, is
lowered by the paper's concave-convex procedure: z_i <- softmax(log q_i + sum_j w_ij z_j), to its fixed point.
Followed: the authors' code, github.com/fiveai/LAME, with its kNN affinity, k = 5.
Ours on purpose: the affinity is made symmetric, (w + w^T) / 2, since the paper's bound supposes that; in the authors'
code it is an option, off by default, and on in FOA's and MGTTA's. The result is log z, where the code gives z.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.methods.registry import HEAD, Paper, register
from mgtta.models.classifier import Classifier

PAPER = Paper("Parameter-free Online Test-time Adaptation", "2201.05718")


@register("lame", papers=[PAPER], needs=[HEAD], code="github.com/fiveai/LAME", mgtta={"neighbours": 5})
class LAME(Method):
    """Predictions smoothed over a batch's nearest neighbours (Boudiaf et al., CVPR 2022).

    It keeps nothing between batches: `updates` counts the batches it adjusted, and when a budget is spent it gives the
    model's own log-probabilities.
    """

    cannot_export = "it compares the images of a batch"

    def __init__(self, model: Classifier, *, neighbours: int = 5, steps: int = 100):
        super().__init__(model)
        if neighbours < 0 or steps < 1:
            raise ValueError(f"neighbours must be at least 0 and steps at least 1, not {neighbours} and {steps}")
        self.neighbours = neighbours
        self.steps = steps
        _ = self.model.head  # a model without one is refused here, not at the first batch

    def look(self, x: Tensor) -> Pass:
        return Pass(self.model(x).log_softmax(-1))

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        logits, features = self.model.embed(x)
        log_q = logits.log_softmax(-1)
        if not (log_q.isfinite().all() and features.isfinite().all()):  # one such image would spoil its neighbours
            self.engine.skipped += 1
            return Pass(log_q)
        self.engine.updates += 1
        return Pass(fixed_point(log_q, affinity(features, self.neighbours), self.steps))


def affinity(features: Tensor, neighbours: int) -> Tensor:
    """The symmetric k-nearest-neighbour kernel, (N, D) -> (N, N): 1/2 for each direction in which two are near."""
    features = F.normalize(features, dim=-1)
    nearness = (features @ features.T).fill_diagonal_(-torch.inf)  # of unit vectors: falls as the distance grows
    nearest = nearness.topk(min(neighbours, len(features) - 1)).indices  # (N, k), never the image itself
    w = torch.zeros_like(nearness).scatter_(1, nearest, 1.0)
    return (w + w.T) / 2


def fixed_point(log_q: Tensor, w: Tensor, steps: int, tolerance: float = 1e-6) -> Tensor:
    """log z where the iteration rests, or where it is after so many steps."""
    log_z = log_q
    z = log_q.exp()
    for _ in range(steps):
        before = z
        log_z = (log_q + w @ z).log_softmax(-1)
        z = log_z.exp()
        if (z - before).abs().max() <= tolerance:
            break
    return log_z
