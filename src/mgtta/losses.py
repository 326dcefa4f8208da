"""Objectives, as functions of tensors. N images, C classes, d_i features of layer i."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mgtta._lib.ranks import ALONE, Alone, Moments, moments


def entropy(logits: Tensor) -> Tensor:
    """Return the softmax entropy of each prediction: (N, C) -> (N,)."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    """Return the cross-entropy of softmax(logits) under softmax(target): (N, C), (N, C) -> (N,)."""
    return -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def symmetric_cross_entropy(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean of the two cross-entropies of a pair of predictions: (N, C), (N, C) -> (N,)."""
    return (cross_entropy(a, b) + cross_entropy(b, a)) / 2


def fair_share(logits: Tensor, ranks: Alone = ALONE) -> Tensor:
    """Return a weight for each image, at most 1, by which no predicted class has more than its share: (N, C) -> (N,).

    A class's share is the weight of N / C images, and of at least one.
    """
    own = logits.detach().argmax(1, keepdim=True).float()  # as floats, which ranks can exchange
    every = ranks.rows(own)
    share = max(len(every) / logits.shape[1], 1.0)
    count = (own == every.T).sum(1).to(logits.dtype)
    return (share / count).clamp(max=1)


def discrepancy(features: Sequence[Tensor], mean: Sequence[Tensor], std: Sequence[Tensor]) -> Tensor:
    """Return the second line of Eq. 7: the squared distance of batch statistics from the source's, over all layers.

    `std` is the unbiased standard deviation, which one image does not have. So for a batch of one only the means count.
    """
    _check_layers(features, mean)
    found = moments(torch.cat(list(features), 1))
    return _distance(found, torch.cat(list(mean)), torch.cat(list(std)))


def objective(
    logits: Tensor,
    features: Sequence[Tensor],
    mean: Sequence[Tensor],
    std: Sequence[Tensor],
    trade_off: float = 0.4,
    ranks: Alone = ALONE,
    weight: Tensor | None = None,
) -> Tensor:
    """Return Eq. 7 divided by 64: mean entropy plus trade_off / 64 times the discrepancy.

    At the paper's batch of 64 this is Eq. 7 up to a factor, which does not change the generator's inputs.

    Args:
        ranks: the processes that share the batch; means and deviations are over the whole batch.
        weight: of the entropy of each image (N,); 1 in the paper.
    """
    _check_layers(features, mean)
    around = torch.cat(list(mean))
    unsure = entropy(logits)
    if weight is not None:
        unsure = weight * unsure
    mean_entropy, found = ranks.moments(unsure, torch.cat(list(features), 1), around)
    return mean_entropy + trade_off / 64 * _distance(found, around, torch.cat(list(std)))


def _distance(found: Moments, mean: Tensor, std: Tensor) -> Tensor:
    """Return the squared distance between two pairs of moments (D,), D counting the features of all layers."""
    found_mean, found_std = found
    total = (found_mean - mean).square().sum()
    if found_std is None:
        return total
    return total + (found_std - std).square().sum()


def _check_layers(features: Sequence[Tensor], mean: Sequence[Tensor]) -> None:
    if len(features) != len(mean):
        raise ValueError(
            f"features of {len(features)} layers, but source statistics of {len(mean)}: they are of another model"
        )
