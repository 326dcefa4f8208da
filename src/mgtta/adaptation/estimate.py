"""An estimate of accuracy without labels, for a model that adapts and for its source model, on the same images.

A prediction is right with a probability that grows with its confidence, and falls if the other model doubts it. How far
confidence can be trusted differs from model to model, and clean images show it as too good. So a logistic
regression learns it once, from corrupted copies of clean images (see mgtta.calibrate). The estimate is the mean of
these probabilities over a window of the stream.

Some shifts, such as fog, make all logits of an image smaller and hardly change their order. Then confidence falls, and
accuracy does not. So the logits of each image are standardised first.

Notation    p, q  probabilities of an image by a model and by the other one, from standardised logits; y = argmax p
Shapes: n images, C classes.
"""

import json
import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from mgtta._lib.files import check_kind, check_weights, read_tensors, write_tensors
from mgtta._lib.names import spelled
from mgtta.losses import entropy

KIND = "mgtta calibration"
VERSION = 2
COLUMNS = 3  # of the evidence
NEAREST = 1e-4  # distance of a probability from 0 and 1, at least, so that its log-odds are finite
LEAST_SPREAD = 1e-6
FEW_CLASSES = 10  # below which standardised logits tell little; those of two classes tell nothing
RIDGE = 0.001  # weight of the squared coefficients, for each image
NEWTON_STEPS = 30


def spread(logits: Tensor) -> Tensor:
    """Return the standard deviation of each image's logits: (n, 1)."""
    return logits.double().std(1, keepdim=True).clamp(min=LEAST_SPREAD)


def standardised(logits: Tensor, scale: float) -> Tensor:
    """Return the logits (n, C) with the standard deviation `scale` for each image; those of few classes as they are."""
    if logits.shape[1] < FEW_CLASSES:
        return logits.double()
    return scale * logits.double() / spread(logits)


def evidence(own: Tensor, other: Tensor, scale: float) -> Tensor:
    """Return what tells right predictions of a model from wrong ones: (n, 3).

    These are the log-odds of y by the model that is less sure of it; the entropy of p in units of ln C; and whether
    y is also the other model's prediction, 1 or 0.

    Args:
        own: the model's logits (n, C).
        other: the other model's logits (n, C).
        scale: the standard deviation that the logits of each image get.
    """
    mine = standardised(own, scale)
    p = mine.softmax(1)
    q = standardised(other, scale).softmax(1)
    sure, y = p.max(1)
    also_sure = q.gather(1, y[:, None])[:, 0]
    least = torch.minimum(sure, also_sure).clamp(NEAREST, 1 - NEAREST)
    log_odds = (least / (1 - least)).log()
    unsure = entropy(mine) / math.log(own.shape[1])
    agree = (q.argmax(1) == y).double()
    return torch.stack([log_odds, unsure, agree], 1)


def fitted(rows: Tensor, right: Tensor) -> Tensor:
    """Return the coefficients (4,) of a logistic regression, the constant first, by Newton's method.

    Args:
        rows: evidence (n, 3).
        right: whether each prediction was right, or the probability of it: (n,).
    """
    scale = rows.std(0).clamp(min=1e-6)
    centre = rows.mean(0)
    z = torch.cat([torch.ones_like(rows[:, :1]), (rows - centre) / scale], 1)
    ridge = RIDGE * len(rows) * torch.eye(z.shape[1], dtype=z.dtype)
    ridge[0, 0] = 1e-6  # the constant is free
    coefficients = torch.zeros_like(z[0])
    for _ in range(NEWTON_STEPS):
        p = torch.sigmoid(z @ coefficients)
        curvature = z.T @ ((p * (1 - p))[:, None] * z) + ridge
        coefficients = coefficients + torch.linalg.solve(curvature, z.T @ (right - p) - ridge @ coefficients)
    slopes = coefficients[1:] / scale
    constant = coefficients[:1] - (slopes * centre).sum()
    return torch.cat([constant, slopes])


def probability(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return the probability that each prediction is right: (n,)."""
    return torch.sigmoid(coefficients[0] + rows @ coefficients[1:])


@dataclass(frozen=True)
class Calibration:
    """Coefficients of the two regressions, and for what they were fitted.

    Attributes:
        coefficients: (2, 4), for the method's and for the source model's predictions.
        scale: standard deviation of an image's logits by the source model, the mean over the clean images.
        error: mean absolute error of the estimate in points, on each corruption when the others were learned from.
        method: name of the recipe.
        images: number of clean images.
        labelled: True if their labels were used.
        model, fingerprint: the source model.
    """

    coefficients: Tensor
    scale: float
    error: float
    method: str
    images: int
    labelled: bool
    model: str
    fingerprint: str

    def estimates(self, given: Tensor, asked: Tensor) -> Tensor:
        """Return the probabilities that the method and the source model are right: (n, 2).

        Args:
            given: the method's logits (n, C).
            asked: the source model's logits (n, C).
        """
        both = (evidence(given, asked, self.scale).cpu(), evidence(asked, given, self.scale).cpu())
        return torch.stack([probability(own, rows) for own, rows in zip(self.coefficients, both, strict=True)], 1)

    def check(self, method: str, model: str, fingerprint: str) -> None:
        """Raise an error unless it was made for this method and this model."""
        remedy = "mgtta.calibrate(method, clean_images)"
        check_weights("this is a calibration", (self.model, self.fingerprint), (model, fingerprint), remedy)
        if method != self.method:
            raise ValueError(
                f"this calibration is of {spelled(self.method)}, not of {spelled(method)}: make one with {remedy}"
            )


def save_calibration(calibration: Calibration, path: str | os.PathLike) -> None:
    """Write a calibration to a safetensors file."""
    about = {name: value for name, value in vars(calibration).items() if name != "coefficients"}
    metadata = {"kind": KIND, "version": str(VERSION), "about": json.dumps(about)}
    write_tensors(path, {"coefficients": calibration.coefficients}, metadata)


def load_calibration(path: str | os.PathLike) -> Calibration:
    """Return the calibration that save_calibration wrote."""
    tensors, metadata = read_tensors(path)
    check_kind(metadata, KIND, VERSION, path, "make one with mgtta.calibrate")
    try:
        found = Calibration(coefficients=tensors["coefficients"], **json.loads(metadata["about"]))
        if found.coefficients.shape != (2, COLUMNS + 1) or not found.coefficients.isfinite().all():
            raise ValueError("its coefficients are invalid")
        if not found.scale > 0:
            raise ValueError("its scale is invalid")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a damaged calibration ({error}); make it again") from error
    return found
