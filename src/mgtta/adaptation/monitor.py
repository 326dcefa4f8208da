"""A monitor: what can be told, without labels, about a model that adapts. Call it after each batch, in any loop.

The monitor asks the source model about a share of the images. It compares the two predictions, and it follows the
source model's features, which only the images can change.

Shapes: N images of a batch, n of them in the sample, C classes, d features of all layers.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgtta.adaptation.estimate import Calibration
from mgtta.adaptation.shift import ShiftDetector
from mgtta.adaptation.wrapper import Adapting, innermost, source_model
from mgtta.losses import entropy
from mgtta.models.classifier import Classifier
from mgtta.models.source import Source, as_source

WINDOW_IMAGES = 512
SHARE = 0.25  # of the images that the source model is asked about
ENOUGH_IMAGES = 16  # of the sample that a shift is looked for in


@dataclass(frozen=True)
class Signals:
    """What is known after a batch. Means are over about the last `window` images.

    Attributes:
        images: images so far.
        updates, skipped: of the method, since its last reset.
        entropy: mean entropy of the predictions in nats.
        confidence: mean probability of the predicted classes.
        changed: share of the sampled images for which method and source model predict different classes.
        drift: squared distance of the features' means from the source's, in squared standard deviations, averaged over
            all features: 0 if there is no drift. None without source statistics.
        shifts: shifts of the domain so far.
        shifted: True if the last shift was found in this batch.
        alarms: events so far: of a guard, of recall, or of a change of normalisation.
        events: the events of this batch.
        accuracy: estimate of the method's accuracy in percent; None without a calibration.
        source_accuracy: the same estimate for the source model on the same images.
    """

    images: int
    updates: int
    skipped: int
    entropy: float | None
    confidence: float | None
    changed: float | None
    drift: float | None
    shifts: int
    shifted: bool
    alarms: int
    events: tuple[dict[str, Any], ...] = ()
    accuracy: float | None = None
    source_accuracy: float | None = None

    @property
    def gain(self) -> float | None:
        """Estimated gain of adaptation in points."""
        if self.accuracy is None or self.source_accuracy is None:
            return None
        return self.accuracy - self.source_accuracy

    def numbers(self) -> dict[str, float]:
        """Return the signals that are numbers, by name: for plots and gauges."""
        found = {**asdict(self), "gain": self.gain}
        del found["events"]
        return {name: float(value) for name, value in found.items() if value is not None}

    def plain(self) -> dict[str, Any]:
        """Return all signals as plain values, for JSON."""
        return {**asdict(self), "gain": self.gain, "events": [dict(event) for event in self.events]}


class Sample(NamedTuple):
    """The images of a batch that the source model was asked about."""

    rows: Tensor  # (n,), their places in the batch
    given: Tensor  # (n, C), the method's logits
    asked: Tensor  # (n, C), the source model's logits


class Window:
    """Means over about the last so many images."""

    def __init__(self, images: int):
        self.images = images
        self.weight = 0.0
        self.mean: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Take in one row of values for each image: (n, k). Rows that are not finite are left out."""
        values = values[values.isfinite().all(1)]
        if not len(values):
            return
        self.weight = min(self.weight + len(values), max(self.images, len(values)))
        new = values.mean(0)
        if self.mean is None:
            self.mean = torch.zeros_like(new)
        self.mean = torch.lerp(self.mean, new, len(values) / self.weight)

    def values(self) -> list[float]:
        """Return the means; an empty list if nothing was seen."""
        return [] if self.mean is None else self.mean.tolist()


@dataclass
class _Seen:
    """What a monitor has seen; all of it is saved."""

    images: int = 0
    owed: float = 0.0  # images that the source model is still to be asked about
    shifts: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)  # that were told already
    detector: ShiftDetector = field(default_factory=ShiftDetector)


class Monitor:
    """Signals of a method, after each batch: `signals = monitor(x, logits)`.

    Args:
        method: what `mgtta.create` gave.
        source: source statistics, or a file of them, for `drift`.
        calibration: what `mgtta.calibrate` gave, for the estimates of accuracy.
        to: called with the signals of each batch; see mgtta.running.sinks.
        share: share of the images that the source model is asked about; each costs one forward pass.
        window: images that means look back on.
        model: the source model, to share one among several monitors; by default it is taken from the method.

    Attributes:
        last: the sample of the last batch; None if the source model was not asked.
    """

    def __init__(
        self,
        method: Adapting,
        source: Source | None = None,
        calibration: Calibration | None = None,
        to: Sequence[Callable[[Signals], None]] = (),
        share: float = SHARE,
        window: int = WINDOW_IMAGES,
        model: Classifier | None = None,
    ):
        if not 0 < share <= 1:
            raise ValueError(f"share is a part of the images: above 0 and at most 1, not {share}")
        if window < 1:
            raise ValueError(f"window is a number of images: at least 1, not {window}")
        self.method = method
        self.model = source_model(method) if model is None else model
        fingerprint = innermost(method).fingerprint
        self.source = None if source is None else as_source(source, self.model.name, fingerprint)
        if calibration is not None:
            calibration.check(method.name, self.model.name, fingerprint)
        self.calibration = calibration
        self.to = tuple(to)
        self.share = share
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget everything that was seen; the method stays as it is."""
        self.seen = _Seen(events=list(self.method.events))
        self.predictions = Window(self.window)  # entropy, confidence
        self.sample = Window(self.window)  # changed; and accuracy of the method and of the source, if calibrated
        self.features = Window(self.window)  # (d,)
        self.last: Sample | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, logits: Tensor) -> Signals:
        """Return the signals after a batch: its images (N, 3, H, W), and the logits (N, C) that the method gave."""
        self.seen.images += len(logits)
        confidence = logits.softmax(1).amax(1)
        self.predictions.add(torch.stack([entropy(logits), confidence], 1).cpu())
        shifted = self._ask(x, logits)
        signals = self._signals(shifted)
        for sink in self.to:
            sink(signals)
        return signals

    def _ask(self, x: Tensor, logits: Tensor) -> bool:
        """Ask the source model about a sample of the batch; return whether the domain has shifted."""
        self.seen.owed += self.share * len(logits)
        n = min(int(self.seen.owed), len(logits))
        self.seen.owed -= n
        self.last = None
        if n == 0:
            return False
        rows = torch.linspace(0, len(logits) - 1, n).round().long()  # spread over the batch
        asked, features = self.model.features(x[rows.to(x.device)])
        given = logits[rows.to(logits.device)].to(asked)
        self.last = Sample(rows, given, asked)
        columns = [(asked.argmax(1) != given.argmax(1)).float()]
        if self.calibration is not None:
            columns += list(self.calibration.estimates(given, asked).T)
        self.sample.add(torch.stack([column.double().cpu() for column in columns], 1))
        if self.model.reads_head:  # the last are what the head reads, of which the source has other statistics
            features = features[:-1]
        together = torch.cat(list(features), 1).float().cpu()  # (n, d)
        self.features.add(together)
        return self._look_for_shift(together)

    def _look_for_shift(self, features: Tensor) -> bool:
        """Follow the means of the sample's features; return whether they are of another domain than those before."""
        n = len(features)
        means = features.mean(0).numpy()
        detector = self.seen.detector
        distance = detector.distance(means, n)
        if not math.isfinite(distance):
            return False
        shifted = n >= ENOUGH_IMAGES and detector.shifted(distance)
        if shifted:
            self.seen.shifts += 1
            self.seen.detector = ShiftDetector()
        self.seen.detector.follow(means, n)
        return shifted

    def _signals(self, shifted: bool) -> Signals:
        events = list(self.method.events)
        told = self.seen.events
        if events[: len(told)] != told:  # the method was reset
            told = []
        self.seen.events = events
        unsure, confidence = _filled(self.predictions.values(), 2)
        changed, accuracy, source_accuracy = _filled(self.sample.values(), 3)
        return Signals(
            images=self.seen.images,
            updates=self.method.updates,
            skipped=self.method.skipped,
            entropy=unsure,
            confidence=confidence,
            changed=changed,
            drift=self._drift(),
            shifts=self.seen.shifts,
            shifted=shifted,
            alarms=len(events),
            events=tuple(events[len(told) :]),
            accuracy=None if accuracy is None else 100 * accuracy,
            source_accuracy=None if source_accuracy is None else 100 * source_accuracy,
        )

    def _drift(self) -> float | None:
        """Return the mean squared distance in standard deviations, without what chance adds to it."""
        if self.source is None or self.features.mean is None:
            return None
        mean = torch.cat([t.float().cpu() for t in self.source.mean])
        std = torch.cat([t.float().cpu() for t in self.source.std])
        away = (self.features.mean - mean) / std.clamp(min=std.median() / 100)
        return max(float(away.square().mean()) - 1 / self.features.weight, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the monitor has seen, as plain values and tensors."""
        windows = {name: [w.weight, w.mean] for name, w in self._windows().items()}
        seen = {**vars(self.seen), "detector": self.seen.detector.state()}
        return copy.deepcopy({"seen": seen, "windows": windows})

    def load_state_dict(self, state: Any) -> None:
        """Continue where `state_dict` was taken. A state that does not fit is rejected and changes nothing."""
        try:
            seen = dict(state["seen"])
            detector = ShiftDetector.loaded(seen.pop("detector"))
            windows = {name: state["windows"][name] for name in self._windows()}
            loaded = _Seen(**seen, detector=detector)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"invalid state of a monitor: {error}") from error
        self.seen = loaded
        for name, window in self._windows().items():
            window.weight, window.mean = copy.deepcopy(windows[name])

    def _windows(self) -> dict[str, Window]:
        return {"predictions": self.predictions, "sample": self.sample, "features": self.features}


def _filled(values: list[float], length: int) -> list[float | None]:
    """Return the values, and None for those that are not known."""
    return [*values, *[None] * (length - len(values))]
