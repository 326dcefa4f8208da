"""MGTTA+: MGTTA with mirrored twins, re-centred predictions and a step that shrinks. Ours: docs/research.md.

Notation    n images; f (n, d) what the head turns into logits, h = W f + b; mu the source's mean of f
A running mean m of f, over about MEMORY images, tells how far the stream's features lie from the source's. Since the
head is linear, taking the shift back before it is the same as adding W (mu - m) to the logits.
"""

import torch
from torch import Tensor

from mgtta.adaptation.method import OptimizerFactory
from mgtta.methods.mgtta import MGTTA
from mgtta.models.classifier import Classifier
from mgtta.models.source import SourceStatistics

MEMORY = 640  # images: ten batches of 64
PRIOR = 16  # images that the source's mean counts for at the start


class MGTTAPlus(MGTTA):
    shares_batches = False  # the running mean is of whole batches
    mean: Tensor
    images: Tensor

    def __init__(
        self,
        model: Classifier,
        source: SourceStatistics,
        optimizer: OptimizerFactory,
        trade_off: float,
        recentre: float,
        mirror: bool,
        decay: float,
    ):
        super().__init__(model, source, optimizer, trade_off, decay)
        self.recentre, self.mirror = recentre, mirror
        self._checked = not recentre
        self.register_buffer("mean", source.mean[-1].detach().clone())
        self.register_buffer("images", torch.zeros(()))  # that the mean is of

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, features = self._look(x)
        value = self.criterion(logits, features)
        mean, images = self._running(features[-1].detach())
        predicted = self._recentred(logits.detach(), mean)
        if mean.isfinite().all():
            self.mean, self.images = mean, images
        return predicted, value

    def predict(self, x: Tensor) -> Tensor:
        logits, features = self._look(x)
        return self._recentred(logits, self._running(features[-1])[0])

    def _look(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits (n, C), averaged over an image and its mirror image, and the features of both, (2n, d_i)."""
        if not self._checked:
            self._check_head(x)
        if not self.mirror:
            return self.model.features(x)
        x = self.model.pixels(x)
        logits, features = self.model.features(torch.cat([x, x.flip(-1)]))
        return logits.view(2, len(x), -1).mean(0), features

    @torch.no_grad()
    def _check_head(self, x: Tensor) -> None:
        """The source's mean is known where features are read: it serves if that is what the head takes."""
        last, taken = self.model.features(x[:1])[1][-1], self.model.embed(x[:1])[1]
        if last.shape != taken.shape or not torch.allclose(last, taken, equal_nan=True):
            raise ValueError(
                f"the head of {self.model.name} takes other features than its last normalisation layer gives, so the "
                "source's mean before the head is not known: give recentre=0"
            )
        self._checked = True

    def _running(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The running mean (d,) with these features in it, and of how many images it is."""
        n = len(f) / (2 if self.mirror else 1)
        rate = (n / (self.images + PRIOR + n)).clamp(min=n / (MEMORY + n))
        return self.mean.lerp(f.mean(0), rate.to(f)), self.images + n

    def _recentred(self, logits: Tensor, mean: Tensor) -> Tensor:
        if not self.recentre:
            return logits
        weight = self.model.head.weight if self.model.classes is None else self.model.head.weight[self.model.classes]
        return logits + self.recentre * (weight @ (self.source.to(logits).mean[-1] - mean))
