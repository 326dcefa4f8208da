"""Measures of predictions: functions of logits (N, C) and labels (N,), and a `Tally` that sums them over a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mgtta.evaluation.record import BINS, empty_bins

HELD_IMAGES = 512  # judged together, where nobody asks for figures earlier


def correct(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return how many labels are among the k largest logits, as a number on the logits' device.

    A row that is not finite is wrong.
    """
    return _hits(logits, labels, k, _finite(logits)).sum()


def reliability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (BINS, 3): for each bin of confidence, the number of predictions, the sum of confidence, the number right.

    On the logits' device. Rows that are not finite count as confidence 0 and wrong.
    """
    confidence, right = _confidence(logits, labels, _finite(logits))
    rows = torch.stack([torch.ones_like(confidence), confidence, right.to(confidence)], dim=1)  # (N, 3)
    return one_hot(_bin(confidence), BINS).double().T @ rows.double()  # the same sums in the same order on every run


def expected_calibration_error(bins: Sequence[Sequence[float]] | Tensor) -> float:
    """Return the calibration error in percent, from the bins of `reliability`.

    It is the mean distance of confidence and accuracy (Guo et al., ICML 2017).
    """
    if isinstance(bins, Tensor):
        bins = bins.tolist()
    gaps = torch.tensor([confidence - right for _, confidence, right in bins], dtype=torch.float64)
    images = sum(count for count, _, _ in bins)
    return 100 * gaps.abs().sum().item() / images


class Tally:
    """Counts over the batches of a stream: `update` after each batch, `figures` whenever they are asked for.

    A batch costs the same however many came before it. Images are judged `held` at a time, on the device of their
    logits, so that a GPU is waited for once in so many images; `settle` judges those that are left.

    Args:
        held: images whose logits are kept until they are judged together; 0 judges every batch at once.
        total: sums a batch's counts over the ranks that share it. It is called once a batch.

    Attributes, up to date after `settle`:
        images, labelled: how many came.
        sizes: images of each batch.
        curve: right predictions of each labelled batch.
        bins: see `reliability`.
    """

    def __init__(self, held: int = HELD_IMAGES, total: Callable[[Sequence[float]], list[float]] = list):
        self.held = held
        self.total = total
        self.images = 0
        self.labelled = 0
        self.sizes: list[int] = []
        self.curve: list[int] = []
        self.bins = empty_bins()
        self._right = 0
        self._right_of_five = 0
        self._late_labelled = 0
        self._late_right = 0
        self._waiting: list[_Batch] = []
        self._images_waiting = 0

    def update(self, logits: Tensor, labels: Tensor | None, late: bool = False) -> None:
        """Add a batch; with `late`, its accuracy counts as `remaining`, too."""
        images = logits.shape[0]
        scored = None
        if labels is not None and labels.shape[0]:
            scored = (logits, labels)
            if self.held > images:  # the method may write its next logits into the same memory
                scored = (logits.detach().clone(), labels.clone())
        self._waiting.append(_Batch(images, late, scored))
        self._images_waiting += images
        if self._images_waiting >= self.held:
            self.settle()

    def settle(self) -> None:
        """Judge the images that are waiting."""
        waiting = self._waiting
        self._waiting = []
        self._images_waiting = 0
        judged = iter(_judged([batch.scored for batch in waiting if batch.scored is not None]))
        for batch in waiting:
            labelled = 0
            if batch.scored is not None:
                labelled = batch.scored[1].shape[0]
            counts = _counts(batch.images, list(islice(judged, labelled)))
            self._add(self.total(counts), batch.late)

    def figures(self) -> dict[str, float | None]:
        """Return top1, top5, ece and remaining, in percent of labelled images; None where there are none."""
        self.settle()
        found: dict[str, float | None] = dict.fromkeys(("top1", "top5", "ece", "remaining"))
        if self.labelled:
            found["top1"] = 100 * self._right / self.labelled
            found["top5"] = 100 * self._right_of_five / self.labelled
            found["ece"] = expected_calibration_error(self.bins)
        if self._late_labelled:
            found["remaining"] = 100 * self._late_right / self._late_labelled
        return found

    def _add(self, counts: Sequence[float], late: bool) -> None:
        images, labelled, right, right_of_five, *bins = counts
        self.images += int(images)
        self.sizes.append(int(images))
        if not labelled:
            return
        self.labelled += int(labelled)
        self.curve.append(int(right))
        self._right += int(right)
        self._right_of_five += int(right_of_five)
        for i, row in enumerate(self.bins):
            if bins[3 * i]:  # with batches of one, nearly all are empty
                row[0] += bins[3 * i]
                row[1] += bins[3 * i + 1]
                row[2] += bins[3 * i + 2]
        if late:
            self._late_labelled += int(labelled)
            self._late_right += int(right)


@dataclass
class _Batch:
    images: int
    late: bool
    scored: tuple[Tensor, Tensor] | None  # logits and labels


def _counts(images: int, judged: Sequence[Sequence[float]]) -> list[float]:
    """Return images, labelled images, right ones, those right among the best five, and the bins row by row."""
    right = 0.0
    right_of_five = 0.0
    bins = [0.0] * (3 * BINS)
    for confidence, which, likely, best, among_five in judged:
        first = 3 * int(which)
        bins[first] += 1.0
        bins[first + 1] += confidence
        bins[first + 2] += likely
        right += best
        right_of_five += among_five
    return [float(images), float(len(judged)), right, right_of_five, *bins]


def _judged(batches: Sequence[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Return for each image of batches of logits and labels: confidence, its bin, and three times 0 or 1.

    These say whether the likeliest class is right, the class of the largest logit, and one of the largest five. A GPU
    is waited for once.
    """
    if not batches:
        return []
    logits, labels = batches[0]
    if len(batches) > 1:
        logits = torch.cat([logits for logits, _ in batches])
        labels = torch.cat([labels for _, labels in batches])
    with torch.no_grad():
        labels = labels.to(logits.device)
        finite = _finite(logits)
        confidence, likely = _confidence(logits, labels, finite)
        columns = [
            confidence,
            _bin(confidence),
            likely,
            _hits(logits, labels, 1, finite),
            _hits(logits, labels, 5, finite),
        ]
        return torch.stack([column.double() for column in columns], dim=1).tolist()


def _finite(logits: Tensor) -> Tensor:
    return logits.isfinite().all(1)  # (N,)


def _hits(logits: Tensor, labels: Tensor, k: int, finite: Tensor) -> Tensor:
    k = min(k, logits.shape[1])
    top = logits.nan_to_num(nan=-torch.inf).topk(k, dim=1).indices  # (N, k)
    return (top == labels.to(logits.device).unsqueeze(1)).any(1) & finite


def _confidence(logits: Tensor, labels: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest probability of each row, and whether it is the label's."""
    confidence, prediction = logits.softmax(1).nan_to_num(nan=0.0).max(1)
    return confidence, (prediction == labels.to(logits.device)) & finite


def _bin(confidence: Tensor) -> Tensor:
    return (confidence * BINS).long().clamp(0, BINS - 1)
