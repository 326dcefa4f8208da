"""What a guard compares a method with: the source model, asked about some images of a batch.

In networks with BatchNorm most methods normalise by the present batch. That alone changes many predictions, mostly for
the better. There the source is asked about whole batches and normalises as the method does, so that the two differ only
by what was learned. In very small batches such statistics are poor, and the source uses its own.
"""

import copy

import torch
from torch import Tensor, nn

from mgtta.adaptation.gathered import FEW_IMAGES
from mgtta.models.classifier import Classifier
from mgtta.models.norms import batch_norms

SMALL_BATCH = 32  # images; a batch of no more is asked about as a whole, of a larger one half, but no fewer than these
MOVED_IMAGES = 8  # which the source also sees moved
MOVED = 32  # part of its side by which an image is moved


class Reference(nn.Module):
    """The source model, and how it is asked.

    Attributes:
        source: the model as it was before it adapted.
        unlearned: the same, normalising by the batch; None if the method does not.
    """

    def __init__(self, source: Classifier, adapting: Classifier):
        super().__init__()
        self.source = source
        self.unlearned: Classifier | None = None
        if adapting._uses_batch_statistics and batch_norms(adapting.net):
            shared = {id(p): p for p in source.parameters()}
            self.unlearned = copy.deepcopy(source, shared).use_batch_statistics()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the source's own logits (n, C)."""
        return self.source(x)

    def by_batch(self, n: int) -> bool:
        """Return whether a batch of n images is normalised by its own statistics."""
        return self.unlearned is not None and n >= FEW_IMAGES

    def many(self, n: int) -> int:
        """Return how many images of a batch of n are asked about."""
        if self.by_batch(n):
            return n
        return min(n, max(SMALL_BATCH, n // 2))

    def worth_asking(self, logits: Tensor, many: int) -> Tensor:
        """Return the numbers of so many images (k,): the first few, and those of which the method is least sure.

        The latter are most likely to have changed, for good or ill. The first few show how steady the source is.

        Args:
            logits: of the method (n, C).
        """
        few = min(MOVED_IMAGES, len(logits))
        sure = logits[few:].softmax(-1).amax(-1)
        least = sure.topk(many - few, largest=False).indices.sort().values
        return torch.cat([torch.arange(few, device=logits.device), few + least])

    @torch.no_grad()
    def ask(self, x: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (k, C) of these images of x, and of which of the first few the class stays if they move.

        If the batch's own statistics are used, all images must be asked about.
        """
        chosen = x[which.to(x.device)]
        if x.ndim != 4:
            return self.source(chosen), torch.ones(0, dtype=torch.bool)
        few = chosen[:MOVED_IMAGES]
        pixels = max(round(x.shape[-1] / MOVED), 1)
        moved = few.roll((pixels, pixels), (-2, -1))
        if self.unlearned is None or not self.by_batch(len(x)):
            asked, again = self.source(torch.cat([chosen, moved])).split([len(chosen), len(few)])
            still = asked[: len(few)]
        else:  # nothing may be added to the batch
            asked = self.unlearned(chosen)
            still, again = self.source(torch.cat([few, moved])).chunk(2)
        return asked, still.argmax(-1) == again.argmax(-1)
