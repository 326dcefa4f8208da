"""Choose a method and its learning rate without labels: `mgtta tune`.

Each candidate adapts to corrupted copies of clean images. It is right where it predicts what the source model predicts
on the clean original, or the label if there is one. The candidate with the highest accuracy over the corruptions is
chosen. If a method at its own learning rate is less than a standard error behind, it is taken instead: copies are few,
and on short streams high rates look better than they are. On the sample of your own stream the accuracy can only be
estimated (mgtta.calibrate). The estimate does not choose, since it is off by several points; it says how sure to be.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mgtta._lib.names import spelled
from mgtta.adaptation.wrapper import Adapting, source_model
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, corrupt
from mgtta.methods.create import create
from mgtta.methods.registry import SOURCE, recipe
from mgtta.models.batches import image_batches
from mgtta.models.classifier import Classifier
from mgtta.models.source import SourceStatistics
from mgtta.running.calibrate import Rows, calibration_of, check_clean, clean_truth, copied_rows

NOADAPT = "noadapt"
METHODS = ("mgtta", "mgtta+", "tent")
PACES = (0.2, 1.0, 5.0)  # factors on a method's own learning rate
SAMPLE_IMAGES = 256
CLEAN_IMAGES = 256
ENOUGH_IMAGES = 128  # of the sample and of the clean images, for a choice that is more than a guess
FEWEST_BATCHES = 4  # of the copies under one corruption, so that adaptation shows
SEVERITY = 5


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and what was found of it, in percent and points.

    Attributes:
        accuracy: on the corrupted copies of the clean images, the mean over corruptions.
        gains: accuracy less the source model's, under each corruption.
        estimate: estimated accuracy on the sample.
        estimated_gain: estimate less the source model's.
        noise: standard error of the estimated gain.
        error: mean absolute error of such estimates on corruptions that were not learned from.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    accuracy: float = 0.0
    gains: dict[str, float] = field(default_factory=dict)
    estimate: float = 0.0
    estimated_gain: float = 0.0
    noise: float = 0.0
    error: float = 0.0

    @property
    def usual(self) -> bool:
        """True if the learning rate is the recipe's own."""
        own = recipe(self.method).settings.get("lr")
        return self.settings.get("lr", own) == own

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value:g}" for name, value in self.settings.items() if isinstance(value, float))
        name = spelled(self.method)
        return f"{name} ({words})" if words else name


@dataclass(frozen=True)
class Tuning:
    """The candidates, the best first, and the number of images of the sample and of the clean ones."""

    candidates: list[Candidate]
    images: int = SAMPLE_IMAGES
    clean_images: int = CLEAN_IMAGES

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def source(self) -> Candidate:
        """NoAdapt, which is always a candidate."""
        return next(c for c in self.candidates if c.method == NOADAPT)

    @property
    def doubt(self) -> str:
        """Why the choice is a guess; empty if it is more than that."""
        few = min(self.images, self.clean_images)
        if few < ENOUGH_IMAGES:
            return f"{few} images are too few, {ENOUGH_IMAGES} are enough"
        worst = min(self.best.gains, key=self.best.gains.__getitem__, default=None)
        if worst is not None and self.best.gains[worst] <= 0:
            return f"it does not gain under every corruption ({worst} {self.best.gains[worst]:+.1f} points)"
        if self.best.estimated_gain <= 2 * self.best.noise:
            return f"the estimate on your images does not confirm it ({self.best.estimated_gain:+.1f} points)"
        return ""

    @property
    def sure(self) -> bool:
        """True if it gains under every corruption, and on the sample by more than twice the noise of the estimate."""
        return not self.doubt

    def __str__(self) -> str:
        head = (
            "Accuracy on corrupted copies of the clean images, and estimated on your images "
            f"(off by {self.best.error:.0f} points or so):"
        )
        lines = [f"{c.accuracy:5.1f} %  {c.estimate:5.1f} %  {c}" for c in self.candidates]
        gain = self.best.accuracy - self.source.accuracy
        highest = max(self.candidates, key=lambda c: c.accuracy)
        if self.best.method == NOADAPT:
            last = "Do not adapt: no candidate is better than the source model."
        elif self.sure:
            last = f"Take {self.best}: {gain:+.1f} points over the source model on the copies."
            if highest.accuracy > self.best.accuracy:
                last += f" {highest} is not clearly better."
        else:
            last = f"Take {self.best}, but it is a guess: {self.doubt}."
        return "\n".join([head, *lines, last])


def default_candidates(methods: Sequence[str] = METHODS, paces: Sequence[float] = PACES) -> list[Candidate]:
    """Return NoAdapt, and each method at each factor on its own learning rate."""
    found = [Candidate(NOADAPT)]
    for name in methods:
        lr = recipe(name).settings.get("lr")
        if name == NOADAPT:
            continue
        if lr is None:
            found.append(Candidate(name))
        else:
            found += [Candidate(name, {"lr": lr * pace}) for pace in paces]
    return found


def tune(
    model: Classifier,
    images: Tensor,
    clean_images: Tensor | Iterable[Any],
    labels: Tensor | None = None,
    *,
    source: SourceStatistics | None = None,
    candidates: Sequence[Candidate] | None = None,
    batch_size: int = 64,
    corruptions: Sequence[str] = VALIDATION_CORRUPTIONS,
    seed: int = 0,
    on_candidate: Callable[[Candidate], None] | None = None,
) -> Tuning:
    """Return the candidates, the best first.

    This takes as long as a stream of the sample and four times the clean images, for each candidate.

    Args:
        images: a sample of the shifted stream, (n, 3, H, W), in its order; 256 are enough.
        clean_images: images of the kind that the model was trained on; the first 256 are used. On a short stream, high
            learning rates look better than they are, so give at least 128.
        labels: their classes (n,). Without them the source model's predictions on the clean images take their place.
        source: source statistics, for methods that need them.
        candidates: by default NoAdapt, and mgtta, mgtta+ and tent at three learning rates each.
        batch_size: images of a batch, best that of the stream. The copies come in at least four batches.
        corruptions: of the copies, at least two; seed: of their noise.
        on_candidate: called with each candidate as soon as it is known.
    """
    tried = list(candidates or default_candidates())
    if not any(candidate.method == NOADAPT for candidate in tried):
        raise ValueError("the candidates must include noadapt, which all others are compared with")
    settings = [_with_source(candidate, source) for candidate in tried]
    clean = torch.cat(list(image_batches(clean_images, batch_size, CLEAN_IMAGES)))
    check_clean(clean, labels, corruptions)
    copies = {name: [corrupt(clean.cpu(), name, SEVERITY, seed=seed)] for name in corruptions}
    truth = clean_truth(model, clean, labels, batch_size)
    few = max(1, min(batch_size, len(clean) // FEWEST_BATCHES))
    found = []
    for candidate, given in zip(tried, settings, strict=True):
        method = create(candidate.method, model, **given)
        domains = copied_rows(method, copies, truth, few)
        calibration = calibration_of(method, domains, len(clean), labels is not None)
        known = measured(candidate, domains, sample_estimates(method, images, calibration, batch_size))
        known = dataclasses.replace(known, error=calibration.error)
        found.append((known, right_of(domains)))
        if on_candidate is not None:
            on_candidate(known)
    return Tuning(ranked(found), len(images), len(clean))


def right_of(domains: dict[str, Rows]) -> Tensor:
    """Return whether the method's predictions of all copies are right, or the probability of it: (n,)."""
    return torch.cat([rows.right[0] for rows in domains.values()])


def ranked(found: Sequence[tuple[Candidate, Tensor]]) -> list[Candidate]:
    """Return the candidates, the one to take first, the others by accuracy.

    Args:
        found: candidates, each with what `right_of` returns.
    """
    order = sorted(found, key=lambda pair: -pair[0].accuracy)
    top, right = order[0]
    near = [c for c, other in order if _within_noise(right - other)]
    first = next((c for c in near if c.usual), top)
    return [first, *(c for c, _ in order if c is not first)]


def _within_noise(difference: Tensor) -> bool:
    """Return whether the mean of differences is at most its standard error."""
    return float(difference.mean()) <= float(difference.std()) / len(difference) ** 0.5


def _with_source(candidate: Candidate, source: SourceStatistics | None) -> dict[str, Any]:
    """Return the settings of a candidate with the source statistics, if its method needs them."""
    if SOURCE not in recipe(candidate.method).needs:
        return candidate.settings
    if source is None:
        raise ValueError(f"{spelled(candidate.method)} needs source=..., the source statistics of the model")
    return {**candidate.settings, "source": source}


@torch.no_grad()
def sample_estimates(method: Adapting, images: Tensor, calibration: Any, batch_size: int) -> Tensor:
    """Return the probabilities that the method and the source model are right on the sample: (n, 2)."""
    model = source_model(method)
    return torch.cat([calibration.estimates(method(x), model(x)) for x in images.split(batch_size)])


def measured(candidate: Candidate, domains: dict[str, Rows], estimates: Tensor) -> Candidate:
    """Return a candidate with its accuracy on the copies, and its estimates (n, 2) on the sample."""
    shares = {name: rows.right.mean(1) for name, rows in domains.items()}  # (2,): method, source model
    gains = {name: 100 * float(share[0] - share[1]) for name, share in shares.items()}
    accuracy = 100 * float(torch.stack(list(shares.values()))[:, 0].mean())
    difference = estimates[:, 0] - estimates[:, 1]
    noise = float(difference.std()) / len(difference) ** 0.5
    return dataclasses.replace(
        candidate,
        accuracy=accuracy,
        gains=gains,
        estimate=100 * float(estimates[:, 0].mean()),
        estimated_gain=100 * float(difference.mean()),
        noise=100 * noise,
    )
