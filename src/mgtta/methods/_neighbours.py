"""Where the features of images like this one lie: means over neighbours among the last images of the stream.

A stream may mix several kinds of shift, and each moves features its own way. So an image is compared with the last ones
by the features of an early layer, which tell how an image looks rather than what it shows. Those that look alike count
most.

Notation    n images; k (n, K) features of the early layer, the keys; f (n, d) features whose mean is wanted, the values
            s (K,) standard deviation of the keys over all images that are known
            D_ij = mean(((k_i - k_j) / s)^2); w_ij = exp(-max(D_ij - ALIKE, 0) / FADING); mu (d,) the source's mean of f
            m_i = (PRIOR mu + sum_j w_ij f_j) / (PRIOR + sum_j w_ij), the mean for image i
"""

import torch
from torch import Tensor, nn

from mgtta._lib.ranks import Alone

MEMORY_IMAGES = 160  # that are remembered: two batches and a half of 64
ALIKE = 1.0  # D up to which images are alike and count fully: one that is nearly the same counts no more than others
FADING = 0.5  # D beyond it over which the weight falls by a factor of e
PRIOR_IMAGES = 8  # for which the source's mean counts
LEAST_STD = 1e-6  # so that keys which are all alike can be divided by it


class Neighbours(nn.Module):
    """The last images of a stream, by their keys and values.

    Args:
        mu: the source's mean of the values.
        width: of the keys.
    """

    keys: Tensor
    values: Tensor
    known: Tensor

    def __init__(self, mu: Tensor, width: int):
        super().__init__()
        self.register_buffer("keys", mu.new_zeros(MEMORY_IMAGES, width))  # the oldest first
        self.register_buffer("values", mu.new_zeros(MEMORY_IMAGES, len(mu)))
        self.register_buffer("known", mu.new_zeros(MEMORY_IMAGES))  # 1 for an image, 0 for an empty place

    def means(self, keys: Tensor, values: Tensor, mu: Tensor, ranks: Alone) -> Tensor:
        """Return the mean for each image (n, d), these images included."""
        every, theirs, known = self._with(keys, values, ranks)
        count = known.sum().clamp(min=1)
        centre = known @ every / count
        std = (known @ (every - centre).square() / count).sqrt() + LEAST_STD
        distance = torch.cdist(keys.to(every) / std, every / std, compute_mode="donot_use_mm_for_euclid_dist")
        beyond = (distance.square() / keys.shape[1] - ALIKE).clamp(min=0)
        weight = known * (-beyond / FADING).exp()
        return (PRIOR_IMAGES * mu + weight @ theirs) / (PRIOR_IMAGES + weight.sum(1, keepdim=True))

    def mean(self, mu: Tensor) -> Tensor:
        """Return the mean over all images that are remembered (d,), alike or not."""
        return (PRIOR_IMAGES * mu + self.known @ self.values) / (PRIOR_IMAGES + self.known.sum())

    def remember(self, keys: Tensor, values: Tensor, ranks: Alone) -> None:
        """Take in the images of a batch, and forget the oldest."""
        found = self._with(keys, values, ranks)
        for own, now in zip((self.keys, self.values, self.known), found, strict=True):
            own.copy_(now[-MEMORY_IMAGES:])

    def _with(self, keys: Tensor, values: Tensor, ranks: Alone) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and `known` of what is remembered and then of a batch, of all ranks."""
        both = ranks.rows(torch.cat([keys.to(self.keys), values.to(self.values)], 1))
        finite = both.isfinite().all(1)
        both = torch.where(finite[:, None], both, 0)
        fresh = (*both.split([self.keys.shape[1], self.values.shape[1]], 1), finite.to(self.known))
        every, theirs, known = (
            torch.cat([own, new]) for own, new in zip((self.keys, self.values, self.known), fresh, strict=True)
        )
        return every, theirs, known
