"""What a guard compares a method with: the source model, asked about some images of a batch.

In networks with BatchNorm most methods normalise by the present batch. That alone changes many predictions, mostly for
the better. There the source is asked about whole batches and normalises as the method does, so that the two differ only
by what was learned. In very small batches such statistics are poor: the source uses its own, and if the method blends
statistics a little of each image's, as the method does (models/blended.py), also where classes come in turn (turns.py).

In networks that consist of such layers the batch's statistics are most of what a method gains, and the source is far
too sure. There the source is also asked as it predicts by itself. What may be lost are those predictions, and an image
is steady if, moved, it gets by itself the class that it has under the statistics of the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.method import Method
from mgtta.adaptation.normalising import Normalisation, predicted_by_image
from mgtta.adaptation.turns import FEW_IMAGES
from mgtta.adaptation.wrapper import Wrapper, find, source_model, unlearned_model
from mgtta.models.classifier import Classifier
from mgtta.models.norms import batch_norms, normalises_like_a_resnet

SAMPLE_IMAGES = 32  # of a batch that are asked about; of a smaller one, all
MOVED_IMAGES = 8  # which the source also sees moved
MOVED = 32  # part of its side by which an image is moved


class Asked(NamedTuple):
    """What the source says of k images of a batch."""

    judge: Tensor  # (k, C) logits of the source, which normalises as the method does
    own: Tensor | None  # (k, C) the source's logits by itself; None if they were not asked for
    steady: Tensor  # (few,) True for the images of which the source keeps the class if it sees them otherwise


class Reference(nn.Module):
    """The source model, and how it is asked.

    Attributes:
        source: the model as it was before it adapted.
        unlearned: the same, normalising by the batch; None if the method does not.
        of_batch_norms: True if the network consists of layers that normalise by the batch; a ViT may have a few.
    """

    def __init__(self, method: Method | Wrapper):
        super().__init__()
        self.source = source_model(method)
        self.unlearned: Classifier | None = None
        self.normalisation: Normalisation | None = None  # the method's, if it gathers
        gathered = find(method, Gathered)
        if gathered is not None:
            self.normalisation = gathered.normalisation
            self.unlearned = gathered.normalisation.unlearned
        adapting = method.model
        if self.unlearned is None and adapting._uses_batch_statistics and batch_norms(adapting.net):
            self.unlearned = unlearned_model(method)
        self.of_batch_norms = self.unlearned is not None and normalises_like_a_resnet(self.source.net)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the source's own logits (n, C)."""
        return self.source(x)

    def by_batch(self, n: int) -> bool:
        """Return whether a batch of n images is normalised by its own statistics."""
        by_image = self.normalisation is not None and self.normalisation.by_image(n)
        return self.unlearned is not None and n >= FEW_IMAGES and not by_image

    def sample(self, n: int, seed: int) -> Tensor:
        """Return the numbers of the images of a batch of n that are asked about (k,): a fair sample, or all.

        Args:
            seed: chooses them. They are the same again after a resume, and no other random numbers change.
        """
        if n <= SAMPLE_IMAGES or self.by_batch(n):
            return torch.arange(n)
        random = torch.Generator().manual_seed(seed)
        return torch.randperm(n, generator=random)[:SAMPLE_IMAGES].sort().values

    @torch.no_grad()
    def ask(self, x: Tensor, which: Tensor) -> Asked:
        """Return what the source says of these images of x; it also sees the first few of them moved.

        If the batch's own statistics are used, all images must be asked about.
        """
        chosen = x[which.to(x.device)]
        if x.ndim != 4:
            judge = self.source(chosen)
            return Asked(judge, judge, torch.ones(0, dtype=torch.bool))
        few = chosen[:MOVED_IMAGES]
        pixels = max(round(x.shape[-1] / MOVED), 1)
        moved = few.roll((pixels, pixels), (-2, -1))
        if self.unlearned is None or not self.by_batch(len(x)):
            blends = self.unlearned is not None and self.unlearned.source_share > 0
            judge, again = self._by_image(torch.cat([chosen, moved])).split([len(chosen), len(few)])
            own = None if blends else judge
            still = judge[: len(few)]
        elif self.of_batch_norms:
            judge = self.unlearned(chosen)
            own, again = self.source(torch.cat([chosen, moved])).split([len(chosen), len(few)])
            still = judge[: len(few)]
        else:  # nothing may be added to the batch
            judge = self.unlearned(chosen)
            own = None
            still, again = self.source(torch.cat([few, moved])).chunk(2)
        return Asked(judge, own, still.argmax(-1) == again.argmax(-1))

    def _by_image(self, x: Tensor) -> Tensor:
        """Return logits (n, C) that do not depend on the other images of x."""
        if self.unlearned is None or not self.unlearned.source_share:
            return self.source(x)
        return predicted_by_image(self.unlearned, x)
