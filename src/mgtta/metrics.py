"""Measures of predictions: functions of logits (N, C) and labels (N,)."""

import torch
from torch import Tensor


def correct(logits: Tensor, labels: Tensor, k: int = 1) -> int:
    """How many labels are among the k largest logits; a row that is not finite is wrong."""
    k = min(k, logits.shape[1])
    top = logits.nan_to_num(nan=-torch.inf).topk(k, dim=1).indices  # (N, k)
    hits = (top == labels.to(logits.device).unsqueeze(1)).any(1) & logits.isfinite().all(1)
    return int(hits.sum())
