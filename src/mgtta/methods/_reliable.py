"""What ETA, EATA and SPA joined with them share: which images are learned from, and what must not be forgotten.

The equation numbers are EATA's (Niu et al., ICML 2022).
"""

import math
import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mgtta.adaptation.method import Method
from mgtta.models.fisher import Fisher, as_fisher

MOMENTUM = 0.9  # of the average of the kept predictions


def is_kept(uncertainty: Tensor, p: Tensor, m: Tensor, margin: float, redundancy: float | None) -> Tensor:
    """Return which images are reliable (Eq. 3) and not redundant (Eq. 5): (N,) of bool.

    Args:
        uncertainty: entropy of each prediction (N,).
        p: predictions (N, C).
        m: average of the kept predictions (C,); zeros before there is one.
        margin: E_0, in units of ln C.
        redundancy: eps; None: that of the number of classes.
    """
    classes = p.shape[1]
    eps = redundancy
    if eps is None:
        eps = redundancy_for(classes)
    new = (cosine_similarity(p, m[None], dim=1) < eps) | ~m.any()
    return (uncertainty < margin * math.log(classes)) & new


def redundancy_for(classes: int) -> float:
    """Return eps for a number of classes: 0.05 for 1,000, 0.4 for 10, and a power of the number through both."""
    power = math.log(0.4 / 0.05) / math.log(1000 / 10)
    return 0.05 * (1000 / classes) ** power


def weight_of(E: Tensor, classes: int, margin: float) -> Tensor:
    """Return the weight of each image, larger for a surer prediction (Eq. 3): (N,)."""
    return (margin * math.log(classes) - E.detach()).exp()


def importance_of(method: Method, fisher: Fisher | str | os.PathLike) -> nn.ParameterList:
    """Return the Fisher importance of each parameter that the method adapts."""
    values = as_fisher(fisher, method.model.name, method.fingerprint).values
    unknown = [name for name in method.adapted if name not in values]
    if unknown:
        raise ValueError(f"Fisher information is of norm parameters, and {unknown[0]} is none of them: take eta")
    found = [values[name].to(p) for name, p in method.adapted.items()]
    return nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in found)


def forgetting(method: Method, importance: Iterable[Tensor]) -> Tensor:
    """Return the squared distance from the source, weighed by importance (Eq. 7)."""
    moved = _flat(method.adapted.values()) - _flat(method.origin)
    return (_flat(importance) * moved.square()).sum()


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all values as one vector, with which a GPU does in a few steps what would take hundreds."""
    return torch.cat([t.flatten() for t in tensors])
