"""Which classes a stream shows just now more than usual, and what that does to the mean of the features.

A stream may bring one class after another. Then the mean of the features moves because the classes do, and whoever
takes that for a shift of the domain takes away what tells the classes apart. A shift of the domain changes predictions,
too, but for as long as it lasts. So only what differs from the usual predictions counts as classes.

Notation    p (n, C) predicted probabilities of a batch
            recent (C,) their mean over about the last RECENT_IMAGES images
            usual (C,) their mean over all images so far, about the last USUAL_IMAGES at most. Before them, the source's
            mean on clean images counts for PRIOR_IMAGES. When another domain begins, all that came before it counts for
            EARLIER_IMAGES at most, so that `usual` soon is that of the domain
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mgtta._lib.ranks import Alone
from mgtta.models.class_map import ClassMap
from mgtta.models.classifier import Classifier
from mgtta.models.source import SourceStatistics

RECENT_IMAGES = 64
USUAL_IMAGES = 1280
PRIOR_IMAGES = 64
EARLIER_IMAGES = 256
LEARNED_SHARE = 0.75  # of what classes move, in the objective: not all, since predictions are not sure


class ClassMix(nn.Module):
    """Running means of the predicted probabilities, and the change of the features that goes with them.

    Args:
        by_class: how the features of all layers, and after them what the head reads, follow the classes.
        widths: of these features.
    """

    recent: Tensor
    usual: Tensor
    images: Tensor

    def __init__(self, by_class: ClassMap, widths: Sequence[int]):
        super().__init__()
        self.by_class = by_class
        self.widths = list(widths)
        self.register_buffer("recent", by_class.centre.clone())
        self.register_buffer("usual", by_class.centre.clone())
        self.register_buffer("images", torch.full_like(by_class.centre[0], PRIOR_IMAGES))  # for which `usual` counts

    def restart(self) -> None:
        """Let what was usual count for EARLIER_IMAGES at most, so that the next images decide: a domain has begun."""
        self.images.clamp_(max=EARLIER_IMAGES)

    def of_batch(self, logits: Tensor, ranks: Alone) -> Sequence[Tensor]:
        """Return LEARNED_SHARE of how far unusual classes of a batch move the mean of each layer (d_i,)."""
        mean, count = self._mean(logits, ranks)
        return self._features_moved(LEARNED_SHARE * (mean - self.usual) * (count > 0))[:-1]

    def of_stream(self, logits: Tensor, ranks: Alone, observe: bool) -> Tensor:
        """Return how far the classes of the last images, a batch included, move the mean of what the head reads (d,).

        Args:
            observe: take the batch into the running means.
        """
        mean, count = self._mean(logits, ranks)
        images = (self.images + count).clamp(max=USUAL_IMAGES)
        usual = self.usual.lerp(mean, (count / images).clamp(max=1))
        recent = self.recent.lerp(mean, 1 - (1 - 1 / RECENT_IMAGES) ** count)
        if observe:
            self.recent.copy_(recent)
            self.usual.copy_(usual)
            self.images.copy_(images)
        return self._features_moved(recent - usual)[-1]

    def now(self) -> Tensor:
        """Return how far the classes of the last images move the mean of what the head reads (d,)."""
        return self._features_moved(self.recent - self.usual)[-1]

    def _features_moved(self, change: Tensor) -> Sequence[Tensor]:
        """Return the change of each layer's features and of what the head reads, given that of the probabilities."""
        self.by_class = self.by_class.to(change)
        return self.by_class.features(change).split(self.widths)

    def _mean(self, logits: Tensor, ranks: Alone) -> tuple[Tensor, Tensor]:
        """Return the mean probabilities of all ranks' images that are finite (C,), and their number."""
        p = ranks.rows(logits.detach().to(self.usual).softmax(1))
        finite = p.isfinite().all(1)
        count = finite.sum().to(p)
        return torch.where(finite[:, None], p, 0).sum(0) / count.clamp(min=1), count


def class_mix_for(model: Classifier, source: SourceStatistics, like: Tensor) -> ClassMix | None:
    """Return the means for a stream that begins; None if the statistics do not tell how features follow these classes.

    Args:
        like: a tensor whose device and dtype they shall have.
    """
    by_class = source.by_class
    classes = None if model.classes is None else model.classes.tolist()
    if by_class is None or source.classes not in (None, classes):
        return None
    if classes != source.classes:  # the statistics are of all classes
        centre = by_class.centre[classes]
        by_class = ClassMap(centre / centre.sum(), by_class.down[classes], by_class.up)
    return ClassMix(by_class.to(like), [len(mean) for mean in (*source.mean, source.before_head)])
