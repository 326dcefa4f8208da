"""Learn, from corrupted copies of clean images, how far predictions can be trusted: `mgtta.calibrate`."""

import copy
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgtta._lib.errors import unknown
from mgtta.adaptation.estimate import Calibration, evidence, fitted, probability, spread
from mgtta.adaptation.wrapper import Adapting, innermost, source_model
from mgtta.data.corruptions import SEVERITIES, VALIDATION_CORRUPTIONS, corrupt
from mgtta.models.batches import image_batches
from mgtta.models.classifier import Classifier

IMAGES = 128  # clean images, and as many copies under each corruption and severity
FEWEST_IMAGES = 16


class Rows(NamedTuple):
    """The evidence of the images of one domain, and whether the two predictions are right; first the method's."""

    evidence: Tensor  # (2, n, 3)
    right: Tensor  # (2, n); without labels probabilities

    @classmethod
    def of(cls, given: Tensor, asked: Tensor, truth: Tensor, scale: float) -> "Rows":
        """Return the rows of images: logits of method and source model (n, C), and each class's probability (n, C)."""
        both = torch.stack([evidence(given, asked, scale), evidence(asked, given, scale)]).cpu()
        predictions = torch.stack([given.argmax(1), asked.argmax(1)], 1).cpu()
        return cls(both, truth.gather(1, predictions).T)


def calibrate(
    method: Adapting,
    clean_images: Tensor | Iterable[Any],
    labels: Tensor | None = None,
    *,
    images: int = IMAGES,
    batch_size: int = 64,
    severities: Sequence[int] = (1, 3, 5),
    corruptions: Sequence[str] = VALIDATION_CORRUPTIONS,
    seed: int = 0,
) -> Calibration:
    """Return a calibration for a method, from clean images of the kind that its model was trained on.

    The method runs over copies of the clean images under four corruptions that are in no benchmark, as it would over a
    stream. Then it is put back exactly as it was. This takes as long as a stream of 12 x `images`. Clean images
    themselves are not learned from: they make confidence look better than it is under a shift.

    Args:
        clean_images: one tensor of images, or an iterable of batches: tensors, or tuples that start with one.
        labels: their classes (n,). Without them a prediction counts as right with the probability that the source
            model gives to it on the clean image, so a model that is unsure on clean images is underrated.
        images: images to use, the first ones.
        batch_size: images of a batch; best that of your stream.
        severities, corruptions: of the copies; at least two corruptions, so that the error can be told.
    """
    x = torch.cat(list(image_batches(clean_images, batch_size, images)))
    _check(x, labels, severities, corruptions)
    source = source_model(method)
    clean = clean_logits(source, x, batch_size)
    truth = clean_truth(clean, labels)
    scale = float(spread(clean).mean())
    kept = copy.deepcopy(method.state_dict())
    domains: dict[str, list[Rows]] = {}
    try:
        for name, severity in product(corruptions, severities):
            method.reset()
            shifted = corrupt(x.cpu(), name, severity, seed=seed)
            domains.setdefault(name, []).append(domain_rows(method, source, shifted, truth, scale, batch_size))
    finally:
        method.load_state_dict(kept)
    together = {name: joined(rows) for name, rows in domains.items()}
    return Calibration(
        coefficients=coefficients(together.values()),
        scale=scale,
        error=left_out_error(together),
        method=method.name,
        images=len(x),
        labelled=labels is not None,
        model=source.name,
        fingerprint=innermost(method).fingerprint,
    )


def _check(x: Tensor, labels: Tensor | None, severities: Sequence[int], corruptions: Sequence[str]) -> None:
    if len(x) < FEWEST_IMAGES:
        raise ValueError(f"{len(x)} clean images: a calibration needs at least {FEWEST_IMAGES}, and 128 are enough")
    if labels is not None and len(labels) < len(x):
        raise ValueError(f"{len(labels)} labels for {len(x)} clean images: give one for each, or none")
    for severity in severities:
        if severity not in SEVERITIES:
            raise unknown("severity", severity, map(str, SEVERITIES))
    if len(corruptions) < 2:
        raise ValueError("a calibration needs at least two corruptions")


@torch.no_grad()
def clean_logits(source: Classifier, x: Tensor, batch_size: int) -> Tensor:
    """Return the source model's logits of the clean images: (n, C)."""
    return torch.cat([source(part).double().cpu() for part in x.split(batch_size)])


def clean_truth(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return the probability of each class for each clean image (n, C): from the labels, or from the source model."""
    if labels is None:
        return logits.softmax(1)
    return torch.nn.functional.one_hot(labels[: len(logits)].cpu().long(), logits.shape[1]).double()


@torch.no_grad()
def domain_rows(method: Adapting, source: Classifier, x: Tensor, truth: Tensor, scale: float, batch_size: int) -> Rows:
    """Return the rows of one domain: the method runs over the images x, whose classes are `truth` (n, C)."""
    parts = zip(x.split(batch_size), truth.split(batch_size), strict=True)
    return joined([Rows.of(method(part), source(part), known, scale) for part, known in parts])


def joined(rows: Iterable[Rows]) -> Rows:
    """Return the rows of several batches or domains as those of one."""
    rows = list(rows)
    return Rows(torch.cat([r.evidence for r in rows], 1), torch.cat([r.right for r in rows], 1))


def coefficients(domains: Iterable[Rows]) -> Tensor:
    """Return the coefficients of the method's and of the source model's regression: (2, 4)."""
    return torch.stack([fitted(rows, right) for rows, right in zip(*joined(domains), strict=True)])


def left_out_error(domains: dict[str, Rows]) -> float:
    """Return the mean absolute error in points on each corruption, estimated from all others."""
    errors = []
    for name, rows in domains.items():
        learned = coefficients(other for key, other in domains.items() if key != name)
        for own, found, right in zip(learned, *rows, strict=True):
            errors.append(100 * abs(float(probability(own, found).mean() - right.mean())))
    return sum(errors) / len(errors)
