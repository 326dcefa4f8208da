"""NEO: re-centre features before the head, and learn nothing else (Murphy et al., ICLR 2026, arXiv 2510.05635).

Notation    z (N, D) what the head takes, h = W z + b; m the mean of z over the stream so far; mu the source's mean of z

A shift moves all features alike, so z - m + mu replaces z. The head is linear: this adds W (mu - m) to the logits. A
network that was trained to the end has mu near 0, so the authors take mu = 0 and need no source. As in their code a
batch counts in m before it is predicted. (So the first image of a stream of single images gets the logits b.)
Ours: `source` gives mu itself.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.methods._head import check_head, linear_centre, through_head
from mgtta.methods.registry import HEAD, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.source import Source, as_source

PAPER = Paper("NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering", "2510.05635")


@register("neo", papers=[PAPER], needs=[HEAD], code="github.com/awesomealex1/NEO")
class NEO(Method):
    """Features re-centred before the head, without a learning rate (Murphy et al., ICLR 2026).

    source: move the stream's mean to the source's; None: to the origin, as the authors do.
    alpha: share of a batch in the running mean; None: the mean of all images. The authors' variant for streams that
    shift again and again, NEO-Continual, has 0.1.
    """

    mean: Tensor

    def __init__(self, model: Classifier, *, source: Source | None = None, alpha: float | None = None):
        super().__init__(model)
        if alpha is not None and not 0 < alpha <= 1:
            raise ValueError(
                f"alpha, the share of a batch in the running mean, must be above 0 and at most 1, not {alpha}"
            )
        self.alpha = alpha
        weight = self.model.head.weight
        centre = torch.zeros_like(weight[0])
        self.checked = True
        if source is not None:
            statistics = as_source(source, model.name, self.fingerprint)
            centre = linear_centre(statistics, self.model, "take neo without source")
            self.checked = statistics.head is not None
        self.centre = nn.Parameter(centre, requires_grad=False)  # mu, (D,)
        self.register_buffer("mean", torch.zeros_like(weight[0]))  # m, (D,)
        self.images = 0  # of which m is the mean

    def look(self, x: Tensor) -> Pass:
        """Predict by the present mean; as the source model before the first batch."""
        return Pass(self.model(x) + self.shift())

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        if not self.checked:
            check_head(self.model, x, "take neo without source")
            self.checked = True
        logits, z = self.model.embed(x)
        if logits.isfinite().all() and z.isfinite().all():
            self.images += len(z)
            share = len(z) / self.images if self.alpha is None else self.alpha
            self.mean = self.mean + share * (z.mean(0) - self.mean)
            self.engine.updates += 1
        else:
            self.engine.skipped += 1
        return Pass(logits + self.shift())

    def shift(self, every_class: bool = False) -> Tensor:
        """Return what the re-centring adds to the logits (C,), of the scored classes or of every class of the head."""
        direction = self.centre - self.mean if self.images else torch.zeros_like(self.mean)
        return through_head(self.model, direction, every_class)

    def export(self) -> nn.Module:
        """Return a copy of your own module with the shift in the bias of its head."""
        return export_net(self.model, head_shift=self.shift(every_class=True))

    def own_state(self) -> Any:
        return {**super().own_state(), "images": self.images}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        self.images = own["images"]
