"""MGTTA+: MGTTA with mirrored twins, re-centred predictions, and one setting for every stream. Ours: docs/research.md.

Notation    n images; f (n, d) what the head reads, which gives the logits h = W f + b; mu the source's mean of f
The mean m of f over the last images that look like one (see _neighbours.py) tells how far its features lie from the
source's. Since the head is linear, taking the shift back before it is the same as adding W (mu - m) to the logits. If
the logits do not come from one layer, f is the logits themselves and W is the identity.
Entropy may draw all images of one kind of shift into one class: hence `balance`. Classes that a stream shows more than
usual move the means, too (see _class_mix.py): that is not taken back.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from mgtta.adaptation.method import OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.losses import fair_share
from mgtta.methods._class_mix import class_mix_for
from mgtta.methods._descent import Descent, constant_rate
from mgtta.methods._head import check_head, through_head
from mgtta.methods._mirror import mirrors, with_mirror_images
from mgtta.methods._neighbours import Neighbours
from mgtta.methods._quick_answer import QuickAnswer
from mgtta.methods.registry import GENERATOR, SOURCE, register
from mgtta.models.classifier import Classifier
from mgtta.models.export import export_net
from mgtta.models.head import LOGITS
from mgtta.models.source import Source

EARLY = 0.25  # of the depth: the layer by whose features images are compared
OPTIONS = {"pull": 0.05, "gather": 16, "recall": 16}  # one setting for all kinds of stream
RESNETS = {"lr": 1e-2, "source_share": 0.3}  # docs/research.md


@register(
    "mgtta_plus",
    needs=[SOURCE, GENERATOR],
    descent=Descent(5e-3, "mgg", fixed=True),
    rate_at=constant_rate,
    resnets=RESNETS,
    options=OPTIONS,
    revision=7,
    passes=(2, 2),
)
class MGTTAPlus(QuickAnswer):
    """MGTTA+: MGTTA with mirrored twins and re-centred predictions; one setting for every stream (ours).

    With mirrored twins a step costs about two of MGTTA's. How settings were chosen: docs/research.md.

    recentre: share of the features' shift from the source that is taken back before the head.
    mirror: True, False (half the cost), or "auto": True if 3 of 4 clean images are predicted like their mirror images.
    balance: no class that is predicted has more than its share in the entropy.
    class_mix: more of a class than usual does not count as a shift. Needs statistics by class, which older files lack.
    source_share, own_share: what the source's and each image's own statistics count in BatchNorm layers; the batch's
    have the rest. With a source_share and `gather`, few images, or those of classes in turn, are normalised one by one.
    alike: in these layers, images of a batch that look alike count more. Needs looks, which older statistics lack.
    decay: the learning rate of step t is lr / sqrt(1 + t / decay); by default it does not fall.
    """

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        source: Source,
        trade_off: float = 0.8,
        recentre: float = 1.0,
        mirror: bool | str = "auto",
        balance: bool = True,
        class_mix: bool = True,
        source_share: float = 0.0,
        own_share: float = 0.0,
        alike: bool = False,
        decay: float = math.inf,
    ):
        super().__init__(model, optimizer, source=source, trade_off=trade_off, decay=decay)
        self.model.use_batch_statistics(source_share, own_share, self.source.looks_for(alike))
        self.recentre = recentre
        self.balance = balance
        self.mirror = mirrors(mirror, self.source)
        self._checked = not recentre or self.source.head is not None
        self._layer = None if self.source.head is None else self.source.head_layer  # the head
        if recentre and self.source.head_reads_last_layer is False:
            self.model.read_head(self.source.head_layer)
        like = next(iter(self.adapted.values()))
        self._early = int(EARLY * len(self.source.mean))
        self.neighbours = Neighbours(self.source.to(like).before_head.detach(), len(self.source.mean[self._early]))
        self.mix = class_mix_for(model, self.source, like) if class_mix else None

    def views(self, x: Tensor) -> Tensor:
        """Return the images, and with `mirror` after them their mirror images: (2n, 3, H, W)."""
        if not self._checked:
            check_head(self.model, x, "give recentre=0")
            self._checked = True
        return with_mirror_images(x, self.model) if self.mirror else x

    def merge(self, logits: Tensor) -> Tensor:
        """Average over an image and its mirror image: (2n, C) -> (n, C)."""
        return logits.unflatten(0, (2, -1)).mean(0) if self.mirror else logits

    def objective(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return Eq. 7 with fair shares of the entropy, and means as the classes of the batch let us expect them."""
        if self.model.reads_head:
            features = features[:-1]
        weight = fair_share(logits, self.ranks) if self.balance else None
        moved = None if self.mix is None else self.mix.of_batch(logits, self.ranks)
        if self.mirror and self.ranks.size > 1:  # ranks count images by their logits: one row for each view
            logits = logits.repeat(2, 1)
            weight = None if weight is None else weight.repeat(2)
        return self.eq7(logits, features, weight, moved)

    def answer(self, seen: Pass, observe: bool) -> Tensor:
        """Return the logits with the features' shift taken back, but for what comes of classes."""
        moved = 0.0 if self.mix is None else self.mix.of_stream(seen.logits, self.ranks, observe)
        if not self.recentre:
            return seen.logits
        keys = self.merge(seen.features[self._early])  # how each image looks: (n, K), means over its views
        values = self.merge(seen.features[-1])  # what the head reads of it: (n, d)
        known = self.neighbours.joined(keys, values, self.ranks)
        means = self.neighbours.means(keys, known, self._mu)
        if observe:
            self.neighbours.remember(known)
        return seen.logits + self._shift(means - moved).to(seen.logits)

    def _shift(self, mean: Tensor, every_class: bool = False) -> Tensor:
        """Return what is added to logits (..., C) if the mean (..., d) is this: recentre * W (mu - m)."""
        return self.recentre * through_head(self.model, self._mu - mean, every_class, self._layer)

    def domain_began(self) -> None:
        if self.mix is not None:
            _ = self.updates  # a GPU may still be learning
            self.mix.restart()

    @property
    def _mu(self) -> Tensor:
        return self.source.to(self.neighbours.values).before_head

    def export(self) -> nn.Module:
        """Return a copy of your own module with the adapted weights, and the mean shift in the bias of its head."""
        if not self.recentre:
            return super().export()
        if self._layer == LOGITS:
            raise ValueError(f"{self.model.name} has no layer whose bias takes the shift: give recentre=0 to export it")
        _ = self.updates  # a GPU may still be learning
        moved = 0.0 if self.mix is None else self.mix.now()
        shift = self._shift(self.neighbours.mean(self._mu) - moved, every_class=True)
        own = self.adapted
        return export_net(self.model, own, statistics=self.statistics, head_shift=shift, head_layer=self._layer)
