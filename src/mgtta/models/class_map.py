"""How features follow the predicted classes on clean images: a ridge regression, judged on images that are left out.

Notation    n images, C classes, D features; P (n, C) predicted probabilities and F (n, D) features, less their means
            K = P P^T = U diag(e) U^T; lambda the strength of the ridge
            B = P^T (K + lambda)^-1 F, (C, D): a change c of the probabilities goes with a change c B of the features
            H = K (K + lambda)^-1; an image that is left out is missed by (F - H F)_i / (1 - H_ii)

B is kept as two factors, for the LARGEST_RANK largest directions of P.
"""

from typing import NamedTuple

import torch
from torch import Tensor

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # of the ridge, in units of the mean of K's diagonal
LARGEST_RANK = 32  # so that the factors of a large network with many classes stay small
JUDGED_FEATURES = 4096  # by which the strength is chosen, evenly spread over all
LEAST_SHARE = 1e-6  # of the largest eigenvalue, below which a direction is left out


class ClassMap(NamedTuple):
    """A linear map from a change of class probabilities (..., C) to the change of features that goes with it (..., D).

    Attributes:
        centre: mean probabilities of the clean images (C,).
        down, up: its factors, (C, r) and (r, D).
    """

    centre: Tensor
    down: Tensor
    up: Tensor

    def features(self, change: Tensor) -> Tensor:
        """Return the change of the features (..., D), given that of the probabilities (..., C)."""
        return change @ self.down @ self.up

    def to(self, like: Tensor) -> "ClassMap":
        """Return the same map on another tensor's device and in its dtype; itself if nothing changes."""
        moved = ClassMap(*(t.to(like.device, like.dtype) for t in self))
        if all(new is old for new, old in zip(moved, self, strict=True)):
            return self
        return moved


def fit_class_map(probabilities: Tensor, features: Tensor) -> ClassMap | None:
    """Return the map of clean images, from (n, C) and (n, D); None if classes tell nothing about left-out images."""
    centre = probabilities.double().mean(0)
    p = probabilities.double() - centre
    f = features - features.mean(0)
    eigenvalues, directions = torch.linalg.eigh(p @ p.T)
    unit = float(eigenvalues.clamp(min=0).mean())
    if unit == 0:
        return None
    judged = f[:, :: -(-f.shape[1] // JUDGED_FEATURES)].double()
    missed = {s * unit: _missed(judged, eigenvalues, directions, s * unit) for s in STRENGTHS}
    strength = min(missed, key=lambda s: missed[s])
    if not missed[strength] < 1:  # NaN, if no feature varies
        return None
    kept = eigenvalues > LEAST_SHARE * eigenvalues.max()
    kept[:-LARGEST_RANK] = False  # they come in ascending order
    e = eigenvalues[kept]
    u = directions[:, kept]  # (n, r)
    down = p.T @ u / e.sqrt()
    up = (u * (e.sqrt() / (e + strength))).T @ f.double()
    return ClassMap(centre.to(features), down.to(features), up.to(features))


def _missed(f: Tensor, eigenvalues: Tensor, directions: Tensor, strength: float) -> float:
    """Return the mean square by which left-out images are missed, in units of the features' variance."""
    fitted = (directions * (eigenvalues / (eigenvalues + strength))) @ directions.T  # H
    left_out = (f - fitted @ f) / (1 - fitted.diagonal())[:, None]
    variance = f.square().mean(0)
    varies = variance > 0
    return float((left_out[:, varies].square().mean(0) / variance[varies]).mean())
