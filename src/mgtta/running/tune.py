"""Choose a method and its learning rate without labels: `mgtta tune`.

Each candidate adapts to corrupted copies of clean images. It is right where it predicts what the source model predicts
on the clean original, or the label if there is one. The candidate with the highest accuracy over the corruptions is
chosen. If mgtta+, or another method, at its own learning rate is less than a standard error behind, it is taken
instead: copies are few, and on short streams high rates look better than they are. Then the choice runs over the sample
of your own stream, where its accuracy can only be estimated (mgtta.calibrate): this does not choose, it says how sure
to be.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.names import spelled
from mgtta.adaptation.wrapper import Adapting, source_model
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, corrupt
from mgtta.methods.create import create
from mgtta.methods.registry import SOURCE, recipe
from mgtta.models.batches import image_batches
from mgtta.models.classifier import Classifier
from mgtta.models.source import SourceStatistics
from mgtta.running.calibrate import FEWEST_IMAGES, calibrate, clean_logits, clean_truth

NOADAPT = "noadapt"
DEFAULT = "mgtta+"  # of `mgtta adapt`
METHODS = ("mgtta", "mgtta+", "tent")
PACES = (0.2, 1.0, 5.0)  # factors on a method's own learning rate
SAMPLE_IMAGES = 256
CLEAN_IMAGES = 256
ENOUGH_IMAGES = 128  # of the sample and of the clean images, for a choice that is more than a guess
FEWEST_BATCHES = 4  # of the copies under one corruption, so that adaptation shows
SEVERITY = 5


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and how it did on corrupted copies of the clean images.

    Attributes:
        accuracy: in percent, the mean over corruptions.
        gains: points over the source model, under each corruption.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    accuracy: float = 0.0
    gains: dict[str, float] = field(default_factory=dict)

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
class Estimate:
    """Estimated accuracy of a method and of its source model on the sample, in percent.

    Attributes:
        noise: standard error of the difference, in points.
        error: mean absolute error of such estimates on corruptions that were not learned from, in points.
    """

    accuracy: float
    source: float
    noise: float
    error: float

    @property
    def gain(self) -> float:
        return self.accuracy - self.source

    def __str__(self) -> str:
        return f"{self.source:.0f} % -> {self.accuracy:.0f} %, off by {self.error:.0f} points or so"


@dataclass(frozen=True)
class Tuning:
    """The candidates, the one to take first, and what is estimated of it on the sample.

    Attributes:
        images, clean_images: numbers of images.
    """

    candidates: list[Candidate]
    estimate: Estimate
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
        worst = min(self.best.gains, key=self.best.gains.__getitem__)
        if self.best.gains[worst] <= 0:
            return f"it does not gain under every corruption ({worst} {self.best.gains[worst]:+.1f} points)"
        if self.estimate.gain <= 2 * self.estimate.noise:
            return "the estimate on your images does not confirm it"
        return ""

    @property
    def sure(self) -> bool:
        """True if it gains under every corruption, and on the sample by more than twice the noise of the estimate."""
        return not self.doubt

    def __str__(self) -> str:
        lines = [f"{c.accuracy:5.1f} %  {c}" for c in self.candidates]
        lines.append(f"Estimated on your images: {self.estimate}.")
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
        return "\n".join(["Accuracy on corrupted copies of the clean images:", *lines, last])


def default_candidates(
    net: nn.Module, methods: Sequence[str] = METHODS, paces: Sequence[float] = PACES
) -> list[Candidate]:
    """Return NoAdapt, and each method at each factor on its own learning rate for such a network."""
    found = [Candidate(NOADAPT)]
    for name in methods:
        lr = recipe(name).settings_for(net).get("lr")
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
    """Return the candidates, the one to take first.

    For each candidate this takes as long as a stream of four times the clean images.

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
    tried = list(candidates or default_candidates(model))
    if not any(candidate.method == NOADAPT for candidate in tried):
        raise ValueError("the candidates must include noadapt, which all others are compared with")
    settings = {id(candidate): _with_source(candidate, source) for candidate in tried}
    clean = torch.cat(list(image_batches(clean_images, batch_size, CLEAN_IMAGES)))
    if len(clean) < FEWEST_IMAGES:
        raise ValueError(f"{len(clean)} clean images: tuning needs at least {FEWEST_IMAGES}, and 256 are enough")
    copies = {name: corrupt(clean.cpu(), name, SEVERITY, seed=seed) for name in corruptions}
    truth = clean_truth(clean_logits(model, clean, batch_size), labels)
    few = batch_of_copies(len(clean), batch_size)
    still = copies_right(create(NOADAPT, model), copies, truth, few)
    found = []
    for candidate in tried:
        right = copies_right(create(candidate.method, model, **settings[id(candidate)]), copies, truth, few)
        known = measured(candidate, right, still)
        found.append((known, right))
        if on_candidate is not None:
            on_candidate(known)
    order = ranked(found)
    method = create(order[0].method, model, **_with_source(order[0], source))
    known_by = {"labels": labels, "corruptions": corruptions, "seed": seed, "batch_size": few}
    return Tuning(order, estimated(method, images, clean, batch_size, **known_by), len(images), len(clean))


def _with_source(candidate: Candidate, source: SourceStatistics | None) -> dict[str, Any]:
    """Return the settings of a candidate with the source statistics, if its method needs them."""
    if SOURCE not in recipe(candidate.method).needs:
        return candidate.settings
    if source is None:
        raise ValueError(f"{spelled(candidate.method)} needs source=..., the source statistics of the model")
    return {**candidate.settings, "source": source}


def batch_of_copies(images: int, batch_size: int) -> int:
    """Return the images of a batch of copies: those of the stream's batches, or fewer, so that adaptation shows."""
    return max(1, min(batch_size, images // FEWEST_BATCHES))


@torch.no_grad()
def copies_right(method: Adapting, copies: Mapping[str, Tensor], truth: Tensor, batch_size: int) -> dict[str, Tensor]:
    """Return corruption -> whether each prediction is right (n,), or the probability of it.

    Each corruption is a stream of its own, from the source model.

    Args:
        truth: the probability of each class for each clean image (n, C).
    """
    found = {}
    for name, x in copies.items():
        method.reset()
        predictions = torch.cat([method(part).argmax(1, keepdim=True).cpu() for part in x.split(batch_size)])
        found[name] = truth.gather(1, predictions)[:, 0]
    return found


def measured(candidate: Candidate, right: Mapping[str, Tensor], still: Mapping[str, Tensor]) -> Candidate:
    """Return a candidate with its accuracy on the copies, and its gains over NoAdapt, both as in `copies_right`."""
    gains = {name: 100 * float(right[name].mean() - still[name].mean()) for name in right}
    accuracy = 100 * float(torch.stack([values.mean() for values in right.values()]).mean())
    return dataclasses.replace(candidate, accuracy=accuracy, gains=gains)


def ranked(found: Sequence[tuple[Candidate, Mapping[str, Tensor]]]) -> list[Candidate]:
    """Return the candidates, the one to take first, the others by accuracy.

    Args:
        found: candidates, each with what `copies_right` returns.
    """
    order = sorted(found, key=lambda pair: -pair[0].accuracy)
    top, right = order[0]
    near = [c for c, other in order if c.usual and _within_noise(_joined(right) - _joined(other))]
    default = [c for c in near if spelled(c.method) == DEFAULT]
    first = [*default, *near, top][0]
    return [first, *(c for c, _ in order if c is not first)]


def _joined(right: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(list(right.values()))


def _within_noise(difference: Tensor) -> bool:
    """Return whether the mean of differences is at most its standard error."""
    return float(difference.mean()) <= float(difference.std()) / len(difference) ** 0.5


@torch.no_grad()
def estimated(method: Adapting, images: Tensor, clean: Tensor, stream_batch: int, **how: Any) -> Estimate:
    """Return the estimate on the sample.

    Args:
        stream_batch: images of a batch of the sample.
        how: further arguments of mgtta.calibrate.
    """
    calibration = calibrate(method, clean, images=len(clean), severities=(SEVERITY,), **how)
    model = source_model(method)
    both = torch.cat([calibration.estimates(method(x), model(x)) for x in images.split(stream_batch)])
    noise = 100 * float((both[:, 0] - both[:, 1]).std()) / len(both) ** 0.5
    accuracy, still = (100 * both.mean(0)).tolist()
    return Estimate(accuracy, still, noise, calibration.error)
