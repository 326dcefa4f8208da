"""Objectives, as functions of tensors. N images, C classes, d_i features of layer i."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mgtta._lib.ranks import ALONE, Alone, Moments, moments


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
    _check_layers(features, mean)
    return _distance(moments(torch.cat(list(features), 1)), torch.cat(list(mean)), torch.cat(list(std)))


def objective(
    logits: Tensor,
    features: Sequence[Tensor],
    mean: Sequence[Tensor],
    std: Sequence[Tensor],
    trade_off: float = 0.4,
    ranks: Alone = ALONE,
) -> Tensor:
    """Eq. 7 divided by 64: mean entropy plus trade_off / 64 times the discrepancy.

    At the paper's batch of 64 that is Eq. 7 up to a factor, which the generator's inputs do not see.

    Args:
        ranks: those who hold a share of the batch each; means and deviations are over all of it.
    """
    _check_layers(features, mean)
    around = torch.cat(list(mean))
    mean_entropy, found = ranks.moments(entropy(logits), torch.cat(list(features), 1), around)
    return mean_entropy + trade_off / 64 * _distance(found, around, torch.cat(list(std)))


def _distance(found: Moments, mean: Tensor, std: Tensor) -> Tensor:
    """Of moments from others, all layers one after another, (D,)."""
    m, s = found
    total = (m - mean).square().sum()
    return total if s is None else total + (s - std).square().sum()


def _check_layers(features: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
    if len(features) != len(mean):
        raise ValueError(f"features of {len(features)} layers, source statistics of {len(mean)}: not the same model")
