"""FOA's activation shift without its prompts, for any network (Niu et al., ICML 2024, arXiv 2404.01650; Eqs. 7-9).

Notation    e (N, d) what the head takes; mu(t) its running mean over the stream; mu^S the source's

As in the authors' code a batch is shifted by what was known before it (the first batch: not at all), the first mean is
that of the first batch, and the step gamma is 1. `neo` differs: its mean has all images alike, and the present batch.
"""

import torch
from torch import Tensor

from mgtta.adaptation.step import Pass
from mgtta.methods._recentred import Recentred
from mgtta.methods.foa import PAPER
from mgtta.methods.registry import HEAD, SOURCE, register
from mgtta.models.classifier import Classifier
from mgtta.models.source import Source


@register("foa_shift", papers=[PAPER], needs=[SOURCE, HEAD], code="github.com/mr-eggplant/FOA")
class FOAShift(Recentred):
    """Activations shifted to the source, without prompts: one part of FOA (Niu et al., ICML 2024).

    momentum: share of the old running mean.
    """

    mean: Tensor

    def __init__(self, model: Classifier, *, source: Source, momentum: float = 0.9):
        super().__init__(model, source, "take mgtta+, which re-centres such logits")
        self.momentum = momentum
        self.register_buffer("mean", torch.empty(0).to(self.centre))  # mu(t); empty until there is one

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        logits, e = self.embed(x)
        shift = self.shift()
        self.learn_from(logits, e)
        return Pass(logits + shift)

    def follow(self, features: Tensor) -> None:
        mean = features.mean(0)
        if len(self.mean):
            mean = self.momentum * self.mean + (1 - self.momentum) * mean  # Eq. 9
        self.mean = mean

    def direction(self) -> Tensor:
        return self.centre - self.mean if len(self.mean) else torch.zeros_like(self.centre)  # Eqs. 7, 8
