"""Objectives, as functions of tensors. N images, C classes, d_i features of layer i."""

from collections.abc import Sequence

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """The softmax entropy of each prediction: (N, C) -> (N,)."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Of the softmax of `logits` under the softmax of `target`: (N, C), (N, C) -> (N,)."""
    return -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def symmetric_cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """The mean of the two cross-entropies of a pair of predictions: (N, C), (N, C) -> (N,)."""
    return (cross_entropy(a, b) + cross_entropy(b, a)) / 2


def discrepancy(features: Sequence[Tensor], mean: Sequence[Tensor], std: Sequence[Tensor]) -> Tensor:
    """The second line of Eq. 7: squared distance of batch statistics from the source's, summed over layers.

    std is the unbiased standard deviation. One image has none, so for a batch of one only the means count:
    the pull towards the source's mean is defined there, while the spread cannot be judged from one image.
    """
    if len(features) != len(mean):
        raise ValueError(f"features of {len(features)} layers, source statistics of {len(mean)}: not the same model")
    total = torch.zeros((), dtype=features[0].dtype, device=features[0].device)
    for f, mu, sigma in zip(features, mean, std, strict=True):  # (N, d_i), (d_i,), (d_i,)
        total = total + (f.mean(0) - mu).square().sum()
        if len(f) > 1:
            total = total + (f.std(0) - sigma).square().sum()
    return total


def objective(
    logits: Tensor,
    features: Sequence[Tensor],
    mean: Sequence[Tensor],
    std: Sequence[Tensor],
    trade_off: float = 0.4,
) -> Tensor:
    """Eq. 7 divided by 64: mean entropy plus trade_off / 64 times the discrepancy.

    At the paper's batch of 64 that is Eq. 7 up to a factor, which the generator's inputs do not see.
    """
    return entropy(logits).mean() + trade_off / 64 * discrepancy(features, mean, std)
