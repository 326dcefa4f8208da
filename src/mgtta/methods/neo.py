"""NEO: re-centre features before the head, and learn nothing else (Murphy et al., ICLR 2026, arXiv 2510.05635).

Notation    z (N, D) what the head takes, h = W z + b; m the mean of z over the stream so far; mu the source's mean of z

A shift moves all features alike, so z - m + mu replaces z. The head is linear: this adds W (mu - m) to the logits. A
network that was trained to the end has mu near 0, so the authors take mu = 0 and need no source. As in their code a
batch counts in m before it is predicted. (So the first image of a stream of single images gets the logits b.)
Ours: `source` gives mu itself.
"""

from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.step import Pass
from mgtta.methods._recentred import Recentred
from mgtta.methods.registry import HEAD, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.source import Source

PAPER = Paper("NEO: No-Optimization Test-Time Adaptation through Latent Re-Centering", "2510.05635")


@register("neo", papers=[PAPER], needs=[HEAD], code="github.com/awesomealex1/NEO")
class NEO(Recentred):
    """Features re-centred before the head, without a learning rate (Murphy et al., ICLR 2026).

    source: move the stream's mean to the source's; None: to the origin, as the authors do.
    alpha: share of a batch in the running mean; None: the mean of all images. The authors' variant for streams that
    shift again and again, NEO-Continual, has 0.1.
    """

    mean: Tensor

    def __init__(self, model: Classifier, *, source: Source | None = None, alpha: float | None = None):
        super().__init__(model, source, "take neo without source")
        if alpha is not None and not 0 < alpha <= 1:
            raise ValueError(
                f"alpha, the share of a batch in the running mean, must be above 0 and at most 1, not {alpha}"
            )
        self.alpha = alpha
        self.register_buffer("mean", torch.zeros_like(self.centre.data))  # m, (D,)
        self.images = 0  # of which m is the mean

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        logits, z = self.embed(x)
        self.learn_from(logits, z)
        return Pass(logits + self.shift())

    def follow(self, features: Tensor) -> None:
        self.images += len(features)
        share = len(features) / self.images if self.alpha is None else self.alpha
        self.mean = self.mean + share * (features.mean(0) - self.mean)

    def direction(self) -> Tensor:
        return self.centre - self.mean if self.images else torch.zeros_like(self.mean)

    def own_state(self) -> Any:
        return {**super().own_state(), "images": self.images}

    def load_own_state(self, own: Any) -> None:
        super().load_own_state(own)
        self.images = own["images"]
