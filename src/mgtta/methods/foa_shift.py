"""FOA's activation shift without its prompts, for any network (Niu et al., ICML 2024, arXiv 2404.01650; Eqs. 7-9).

Notation    e (N, d) what the head takes; mu(t) its running mean over the stream; mu^S the source's

As in the authors' code a batch is shifted by what was known before it (the first batch: not at all), the first mean is
that of the first batch, and the step gamma is 1. `neo` differs: its mean has all images alike, and the present batch.
"""

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.methods._head import check_head, linear_centre, through_head
from mgtta.methods.foa import PAPER
from mgtta.methods.registry import HEAD, SOURCE, register
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.source import Source, as_source


@register("foa_shift", papers=[PAPER], needs=[SOURCE, HEAD], code="github.com/mr-eggplant/FOA")
class FOAShift(Method):
    """Activations shifted to the source, without prompts: one part of FOA (Niu et al., ICML 2024).

    momentum: share of the old running mean.
    """

    mean: Tensor

    def __init__(self, model: Classifier, *, source: Source, momentum: float = 0.9):
        super().__init__(model)
        weight = self.model.head.weight
        self.momentum = momentum
        statistics = as_source(source, model.name, self.fingerprint)
        self.checked = statistics.head is not None
        centre = linear_centre(statistics, self.model, "take mgtta+, which re-centres such logits")
        self.centre = nn.Parameter(centre, requires_grad=False)  # mu^S
        self.register_buffer("mean", torch.empty(0).to(weight))  # mu(t); empty until there is one

    def look(self, x: Tensor) -> Pass:
        return Pass(self.model(x) + self.shift())

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        if not self.checked:
            check_head(self.model, x, "take neo without source")
            self.checked = True
        logits, e = self.model.embed(x)
        shift = self.shift()
        if logits.isfinite().all() and e.isfinite().all():
            mean = e.mean(0)
            self.mean = self.momentum * self.mean + (1 - self.momentum) * mean if len(self.mean) else mean  # Eq. 9
            self.engine.updates += 1
        else:
            self.engine.skipped += 1
        return Pass(logits + shift)

    def shift(self, every_class: bool = False) -> Tensor:
        """Return what the move of e by mu^S - mu(t) adds to the logits (C,), of scored classes or of every class."""
        direction = self.centre - self.mean if len(self.mean) else torch.zeros_like(self.centre)  # Eqs. 7, 8
        return through_head(self.model, direction, every_class)

    def export(self) -> nn.Module:
        """Return a copy of your own module with the shift in the bias of its head."""
        return export_net(self.model, head_shift=self.shift(every_class=True))
