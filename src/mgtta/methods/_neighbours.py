"""Where the features of images like this one lie: means over neighbours among the last images of the stream.

A stream may mix several kinds of shift, and each moves features its own way. So an image is compared with the last ones
by the features of an early layer, which tell how an image looks rather than what it shows. Those that look alike count
most.

Notation    n images; k (n, K) features of the early layer, the keys; f (n, d) features whose mean is wanted, the values
            s (K,) standard deviation of the keys over all images that are known
            D_ij = mean(((k_i - k_j) / s)^2); w_ij = exp(-max(D_ij - ALIKE, 0) / FADING); mu (d,) the source's mean of f
            m_i = (PRIOR mu + sum_j w_ij f_j) / (PRIOR + sum_j w_ij), the mean for image i
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mgtta._lib.ranks import Alone

MEMORY_IMAGES = 160  # that are remembered: two batches and a half of 64
ALIKE = 1.0  # D up to which images are alike and count fully: one that is nearly the same counts no more than others
FADING = 0.5  # D beyond it over which the weight falls by a factor of e
PRIOR_IMAGES = 8  # for which the source's mean counts
LEAST_STD = 1e-6  # so that keys which are all alike can be divided by it


class Known(NamedTuple):
    """Images that are known, the oldest first."""

    keys: Tensor
    values: Tensor
    there: Tensor  # 1 for an image, 0 for an empty place or for one that is not finite


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

    def joined(self, keys: Tensor, values: Tensor, ranks: Alone) -> Known:
        """Return what is remembered and then a batch, of all ranks."""
        both = ranks.rows(torch.cat([keys.to(self.keys), values.to(self.values)], 1))
        finite = both.isfinite().all(1)
        both = torch.where(finite[:, None], both, 0)
        new_keys, new_values = both.split([self.keys.shape[1], self.values.shape[1]], 1)
        return Known(
            torch.cat([self.keys, new_keys]),
            torch.cat([self.values, new_values]),
            torch.cat([self.known, finite.to(self.known)]),
        )

    def means(self, keys: Tensor, known: Known, mu: Tensor) -> Tensor:
        """Return the mean for each image of a batch (n, d), from its keys and all that is known, itself included."""
        count = known.there.sum().clamp(min=1)
        centre = known.there @ known.keys / count
        apart = known.keys - centre
        std = (known.there @ apart.square() / count).sqrt() + LEAST_STD
        distance = _squared_distances((keys.to(centre) - centre) / std, apart / std) / keys.shape[1]
        beyond = (distance - ALIKE).clamp(min=0)
        weight = known.there * (-beyond / FADING).exp()
        return (PRIOR_IMAGES * mu + weight @ known.values) / (PRIOR_IMAGES + weight.sum(1, keepdim=True))

    def mean(self, mu: Tensor) -> Tensor:
        """Return the mean over all images that are remembered (d,), alike or not."""
        return (PRIOR_IMAGES * mu + self.known @ self.values) / (PRIOR_IMAGES + self.known.sum())

    def remember(self, known: Known) -> None:
        """Keep the last images of what is known, and forget the oldest."""
        for own, now in zip((self.keys, self.values, self.known), known, strict=True):
            own.copy_(now[-MEMORY_IMAGES:])


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return |a_i - b_j|^2, (n, m), of rows (n, K) and (m, K).

    |a|^2 + |b|^2 - 2 a b is quick, but loses digits, and more of them where a GPU rounds products to TF32: so it is
    computed in float64.
    """
    dtype = a.dtype
    a = a.double()
    b = b.double()
    squares = a.square().sum(1, keepdim=True) + b.square().sum(1)
    return torch.addmm(squares, a, b.T, alpha=-2).clamp(min=0).to(dtype)
