"""MGTTA+'s answer on the fast path: the same by few kernels, see mgtta.fast.answer. `MGTTAPlus.answer` says what it is.

Dozens of small operations for a single image would take a GPU as long as half a forward pass.
"""

from torch import Tensor

from mgtta.adaptation.step import Pass
from mgtta.methods import _neighbours
from mgtta.methods._class_mix import RECENT_IMAGES, USUAL_IMAGES, ClassMix
from mgtta.methods._neighbours import Neighbours
from mgtta.methods.mgtta import MGTTA
from mgtta.models.head import LOGITS, head_weight

CONSTANTS = (_neighbours.ALIKE, _neighbours.FADING, float(_neighbours.PRIOR_IMAGES), _neighbours.LEAST_STD)


class QuickAnswer(MGTTA):
    """MGTTA with what MGTTA+'s answer needs."""

    neighbours: Neighbours
    mix: ClassMix | None
    recentre: float
    _early: int
    _layer: str | None

    def quick_answer(self, seen: Pass, observe: bool) -> Tensor | None:
        if not self.recentre or self._layer == LOGITS or self.neighbours.values.dtype != seen.logits.dtype:
            return None
        from mgtta.fast.answer import add_through_head, join, moved_to, remember  # kernels, only for those who ask

        n = len(seen.logits)
        keys = seen.features[self._early]  # of all views
        own = (self.neighbours.keys, self.neighbours.values, self.neighbours.known)
        known = join(own, keys, seen.features[-1], n)
        mu = self.source.to(self.neighbours.values).before_head
        direction = moved_to(keys, known, mu, self._moved_by_classes(seen.logits, observe), n, CONSTANTS)
        if observe:
            remember(known, own)
        head = self.model.head if self._layer is None else self.model.net.get_submodule(self._layer)
        return add_through_head(seen.logits, direction, head_weight(head), self.model.classes, self.recentre)

    def _moved_by_classes(self, logits: Tensor, observe: bool) -> Tensor | None:
        """Return what ClassMix.of_stream does; None if there is no such map."""
        if self.mix is None:
            return None
        from mgtta.fast.answer import mixed

        mix = self.mix
        by_class = mix.by_class = mix.by_class.to(logits)
        means = (mix.recent, mix.usual, mix.images)
        up = by_class.up[:, -mix.widths[-1] :]
        return mixed(logits.softmax(1), means, by_class.down, up, observe, (RECENT_IMAGES, USUAL_IMAGES))
