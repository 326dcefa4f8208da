"""Choose a method and its learning rate without labels, from a sample of the shifted stream: `mgtta tune`.

Each candidate is calibrated on corrupted copies of the clean images, and then runs over the sample. The one with the
highest estimated accuracy is chosen. Entropy would choose a model that has collapsed; a candidate that collapses on the
corrupted copies is calibrated to it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.wrapper import Adapting, source_model
from mgtta.methods.create import create
from mgtta.methods.registry import SOURCE, recipe
from mgtta.models.batches import image_batches
from mgtta.models.classifier import Classifier
from mgtta.models.source import SourceStatistics
from mgtta.running.calibrate import calibrate

NOADAPT = "noadapt"
METHODS = ("mgtta", "mgtta_plus", "tent")
PACES = (0.2, 1.0, 5.0)  # factors on a method's own learning rate
SAMPLE_IMAGES = 256
ENOUGH_IMAGES = 128  # of a sample, for a choice that is more than a guess
CLEAN_IMAGES = 64


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and what was found of it.

    Attributes:
        accuracy: estimated accuracy on the sample in percent.
        error: mean absolute error of such estimates on corruptions that were not learned from, in points.
        noise: standard error of the estimated difference from the source model, in points.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    accuracy: float = 0.0
    error: float = 0.0
    noise: float = 0.0

    def __str__(self) -> str:
        words = ", ".join(f"{name}={value:g}" for name, value in self.settings.items() if isinstance(value, float))
        return f"{self.method} ({words})" if words else self.method


@dataclass(frozen=True)
class Tuning:
    """The candidates, the best first, and the source model's estimate."""

    candidates: list[Candidate]
    images: int = SAMPLE_IMAGES  # of the sample

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def source(self) -> Candidate:
        """NoAdapt, which is always a candidate."""
        return next(c for c in self.candidates if c.method == NOADAPT)

    @property
    def sure(self) -> bool:
        """True if the sample is large enough, and the estimated gain larger than the error and twice the noise."""
        if self.images < ENOUGH_IMAGES:
            return False
        gain = self.best.accuracy - self.source.accuracy
        return gain > max(self.best.error, 2 * self.best.noise)

    def __str__(self) -> str:
        lines = [f"{c.accuracy:5.1f} %, off by {c.error:.1f} points or so: {c}" for c in self.candidates]
        gain = self.best.accuracy - self.source.accuracy
        if self.best.method == NOADAPT:
            last = "Do not adapt: no candidate is estimated to be better than the source model."
        elif self.sure:
            last = f"Take {self.best}: {gain:+.1f} points over the source model, more than such estimates are off."
        elif self.images < ENOUGH_IMAGES:
            last = f"Take {self.best}, but it is a guess: {self.images} images are too few, {ENOUGH_IMAGES} are enough."
        else:
            last = f"Take {self.best}, but it is a guess: {gain:+.1f} points are within the error of the estimate."
        return "\n".join(["Estimated accuracy without labels:", *lines, last])


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
    on_candidate: Callable[[Candidate], None] | None = None,
    **calibration: Any,
) -> Tuning:
    """Return the candidates in the order of their estimated accuracy on a sample of the shifted stream.

    Args:
        images: the sample, (n, 3, H, W), in the order of the stream; 256 are enough.
        clean_images, labels: as in mgtta.calibrate.
        source: source statistics, for methods that need them.
        candidates: by default NoAdapt, and mgtta, mgtta+ and tent at three learning rates each.
        on_candidate: called with each candidate as soon as it is known.
        calibration: further arguments of mgtta.calibrate.
    """
    found = []
    clean = torch.cat(list(image_batches(clean_images, batch_size)))
    for candidate in candidates or default_candidates():
        settings = dict(candidate.settings)
        if SOURCE in recipe(candidate.method).needs:
            if source is None:
                raise ValueError(f"{candidate.method} needs source=..., the source statistics of the model")
            settings["source"] = source
        method = create(candidate.method, model, **settings)
        known = estimated(method, candidate, images, clean, labels, batch_size, calibration)
        found.append(known)
        if on_candidate is not None:
            on_candidate(known)
    if not any(candidate.method == NOADAPT for candidate in found):
        raise ValueError("the candidates must include noadapt, which all others are compared with")
    return Tuning(sorted(found, key=lambda c: -c.accuracy), len(images))


@torch.no_grad()
def estimated(
    method: Adapting,
    candidate: Candidate,
    images: Tensor,
    clean: Tensor,
    labels: Tensor | None,
    batch_size: int,
    options: dict[str, Any],
) -> Candidate:
    """Return a candidate with its estimate on the images; arguments as in `tune`."""
    chosen = {"images": CLEAN_IMAGES, "severities": (5,), **options}
    calibration = calibrate(method, clean, labels, batch_size=batch_size, **chosen)
    model = source_model(method)
    parts = [calibration.estimates(method(x), model(x)) for x in images.split(batch_size)]
    both = torch.cat(parts)  # (n, 2): method, source model
    noise = float((both[:, 0] - both[:, 1]).std()) / len(both) ** 0.5
    accuracy = 100 * float(both[:, 0].mean())
    return Candidate(candidate.method, candidate.settings, accuracy, calibration.error, 100 * noise)
