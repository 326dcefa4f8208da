"""Measures of predictions: functions of logits (N, C) and labels (N,)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mgtta.evaluation.record import BINS


def correct(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """How many labels are among the k largest logits, as a number on the logits' device.

    A row that is not finite is wrong.
    """
    k = min(k, logits.shape[1])
    top = logits.nan_to_num(nan=-torch.inf).topk(k, dim=1).indices  # (N, k)
    hits = (top == labels.to(logits.device).unsqueeze(1)).any(1) & logits.isfinite().all(1)
    return hits.sum()


def reliability(logits: Tensor, labels: Tensor) -> Tensor:
    """(BINS, 3): in each bin of confidence, how many predictions, the sum of their confidence, how many right.

    On the logits' device. Rows that are not finite count as confidence 0 and wrong.
    """
    confidence, prediction = logits.softmax(1).nan_to_num(nan=0.0).max(1)
    right = (prediction == labels.to(logits.device)) & logits.isfinite().all(1)
    which = (confidence * BINS).long().clamp(0, BINS - 1)
    rows = torch.stack([torch.ones_like(confidence), confidence, right.to(confidence)], dim=1)  # (N, 3)
    return one_hot(which, BINS).double().T @ rows.double()  # the same sums in the same order on every run


def counts(logits: Tensor, labels: Tensor) -> list[float]:
    """Right ones, those right among the best five, and `reliability` row by row; a GPU is waited for once."""
    parts = [correct(logits, labels), correct(logits, labels, k=5)]
    return torch.cat([torch.stack(parts).double(), reliability(logits, labels).flatten()]).tolist()


def expected_calibration_error(bins: Sequence[Sequence[float]] | Tensor) -> float:
    """In percent, from the bins of `reliability`: mean distance of confidence and accuracy (Guo et al., ICML 2017)."""
    bins = torch.as_tensor(bins, dtype=torch.float64)
    return float(100 * (bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum())
