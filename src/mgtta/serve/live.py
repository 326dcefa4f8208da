"""What the live view shows of one stream: running figures, marks and the last pictures. In memory only, and bounded.

The source model is asked about one image in SAMPLE_IMAGES (see Streams), so that the view can say how often the stream
agrees with it, and how sure each of the two is. That costs a forward pass for one image in SAMPLE_IMAGES. With a
calibration (mgtta.calibrate), the accuracy of both is estimated from the same sample.

When there are more than POINTS points, the older half is merged in pairs. So the time line reaches back to the time
when the stream was loaded, in less and less detail.

Shapes: n images, C classes.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import quantiles
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from mgtta.serve.pictures import thumbnail

SAMPLE_IMAGES = 8  # of which the source model is asked about one
SAMPLED = 16  # images that wait for the source model, at most
POINT_IMAGES = 16  # in a point of the time line, at least
POINT_SECONDS = 0.5  # between two points, at least
POINTS = 256
MARKS = 128
MEMORY_ESTIMATES = 32  # images of the sample that the estimate of accuracy looks back on
MEMORY_SAMPLED = 16  # images of the sample that running means look back on
MEMORY_IMAGES = MEMORY_SAMPLED * SAMPLE_IMAGES  # that the others look back on: as far
LATENCIES = 256  # requests of which percentiles are told
RATE_SECONDS = 10  # over which images a second are counted
SPARK_POINTS = 32  # of the small curve on a card


class Prediction(NamedTuple):
    """A class and its probability."""

    number: int
    probability: float


class Sampled(NamedTuple):
    """An image that the source model will be asked about."""

    pixels: Tensor  # (3, side, side) uint8
    image: int  # its number in the stream
    probabilities: Tensor  # (C,), by the adapted model

    @property
    def after(self) -> Prediction:
        """The adapted model's prediction."""
        best, number = self.probabilities.max(0)
        return Prediction(int(number), float(best))


class Picture(NamedTuple):
    """An image as the live view shows it."""

    image: int
    thumbnail: str  # a data address
    before: Prediction  # by the source model
    after: Prediction


class Point(NamedTuple):
    """Running figures, told after this image."""

    image: int
    seconds: float  # since 1970
    confidence: float | None
    entropy: float | None  # in nats
    source_confidence: float | None
    agreement: float | None  # share of the sample for which source and adapted model name the same class
    accuracy: float | None  # by an estimate without labels; None without a calibration
    source_accuracy: float | None
    images_per_second: float
    latency_seconds: float | None  # median


class Mark(NamedTuple):
    """Something that happened at an image."""

    image: int
    kind: str  # shift, recall, reset, freeze, learn; slow, rest, trust: by a guard; one by one, by batch: see turns.py


class News(NamedTuple):
    """What is new for a viewer of a stream."""

    number: str  # of the Live object
    fresh: bool  # the viewer must forget what it was told before
    points: list[Point]
    marks: list[Mark]
    pictures: list[Picture]
    told: dict[str, int]  # what to give the next time


class RunningMean:
    """A mean in which the latest `memory` values count most."""

    def __init__(self, memory: int):
        self.memory = memory
        self.values = 0
        self.mean: float | None = None

    def add(self, mean: float, n: int = 1) -> None:
        """Take in the mean of n values."""
        self.values = min(self.values + n, self.memory)
        before = mean if self.mean is None else self.mean
        self.mean = before + min(n / self.values, 1.0) * (mean - before)


class Live:
    """The figures of one stream since it was loaded. All functions may be called from any thread.

    Attributes:
        number: another one for each object, so that a viewer notices if a stream was loaded again.
        thumbnails: how many pictures are kept; 0: none.
        sampled: the images that wait for the source model.
    """

    def __init__(self, thumbnails: int):
        self.number = uuid4().hex
        self.thumbnails = thumbnails
        self.sampled: list[Sampled] = []
        self._lock = Lock()
        self._confidence = RunningMean(MEMORY_IMAGES)
        self._entropy = RunningMean(MEMORY_IMAGES)
        self._source_confidence = RunningMean(MEMORY_SAMPLED)
        self._agreement = RunningMean(MEMORY_SAMPLED)
        self._accuracy = RunningMean(MEMORY_ESTIMATES)
        self._source_accuracy = RunningMean(MEMORY_ESTIMATES)
        self._points: list[Point] = []
        self._marks: deque[Mark] = deque(maxlen=MARKS)
        self._pictures: deque[Picture] = deque(maxlen=thumbnails)
        self._told = {"points": 0, "marks": 0, "pictures": 0}  # so far
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._arrived: deque[list[float]] = deque(maxlen=RATE_SECONDS + 1)  # second, images in it
        self._images = 0  # since the last point

    # --- what happens to the stream

    def answered(self, x: Tensor, probabilities: Tensor, first: int) -> None:
        """Follow images (n, 3, side, side) that were answered; the first of them is number `first` of the stream."""
        n = len(x)
        best, _ = probabilities.max(1)
        entropy = float(torch.special.entr(probabilities).sum(1).mean())
        chosen = range(-first % SAMPLE_IMAGES, n, SAMPLE_IMAGES)
        with self._lock:
            self._confidence.add(float(best.mean()), n)
            self._entropy.add(entropy, n)
            self._count(n)
            self._images += n
            for i in chosen:
                if len(self.sampled) < SAMPLED:
                    self.sampled.append(Sampled(x[i].clone(), first + i, probabilities[i].clone()))
            self._draw(first + n)

    def asked(self, sampled: Sequence[Sampled], probabilities: Tensor, right: Tensor | None = None) -> None:
        """Take in what the source model says (n, C) about images of the sample.

        Args:
            right: estimated probabilities that the adapted and the source model are right, (n, 2).
        """
        best, number = probabilities.max(1)
        shown = sampled[max(len(sampled) - self.thumbnails, 0) :]
        pictures = {s.image: thumbnail(s.pixels) for s in shown}
        with self._lock:
            if right is not None:
                for adapted, source in right.tolist():
                    self._accuracy.add(adapted)
                    self._source_accuracy.add(source)
            for s, p, c in zip(sampled, best.tolist(), number.tolist(), strict=True):
                self._source_confidence.add(p)
                self._agreement.add(float(c == s.after.number))
                if s.image in pictures:
                    self._pictures.append(Picture(s.image, pictures[s.image], Prediction(c, p), s.after))
                    self._told["pictures"] += 1

    def mark(self, image: int, kind: str) -> None:
        """Note that something happened."""
        with self._lock:
            self._marks.append(Mark(image, kind))
            self._told["marks"] += 1

    def took(self, seconds: Iterable[float]) -> None:
        """Note how long answers took, from their arrival."""
        with self._lock:
            self._latencies.extend(seconds)

    def _count(self, n: int) -> None:
        second = float(int(time.monotonic()))
        if not self._arrived or self._arrived[-1][0] != second:
            self._arrived.append([second, 0.0])
        self._arrived[-1][1] += n

    def _draw(self, image: int) -> None:
        """Add a point if enough has come since the last one."""
        now = time.time()
        if self._points and (self._images < POINT_IMAGES or now - self._points[-1].seconds < POINT_SECONDS):
            return
        self._images = 0
        median = quantiles(self._latencies, n=2)[0] if len(self._latencies) > 1 else None
        point = Point(
            image=image,
            seconds=now,
            confidence=self._confidence.mean,
            entropy=self._entropy.mean,
            source_confidence=self._source_confidence.mean,
            agreement=self._agreement.mean,
            accuracy=self._accuracy.mean,
            source_accuracy=self._source_accuracy.mean,
            images_per_second=self._rate(),
            latency_seconds=median,
        )
        self._points.append(point)
        self._told["points"] += 1
        if len(self._points) > POINTS:
            older = self._points[: POINTS // 2]
            self._points[: POINTS // 2] = [merged(*pair) for pair in zip(older[::2], older[1::2], strict=True)]

    # --- what is told

    def _rate(self) -> float:
        """Return the images a second of the last RATE_SECONDS whole seconds."""
        now = time.monotonic()
        counted = [n for second, n in self._arrived if now - RATE_SECONDS <= second]
        if not counted:
            return 0.0
        began = max(self._arrived[0][0], now - RATE_SECONDS)
        return sum(counted) / max(now - began, 1.0)

    def figures(self) -> dict[str, Any]:
        """Return the running figures as they stand."""
        with self._lock:
            median, late = None, None
            if len(self._latencies) > 1:
                cuts = quantiles(self._latencies, n=100, method="inclusive")
                median, late = cuts[49], cuts[98]
            return {
                "confidence": self._confidence.mean,
                "source_confidence": self._source_confidence.mean,
                "agreement": self._agreement.mean,
                "accuracy": self._accuracy.mean,
                "source_accuracy": self._source_accuracy.mean,
                "images_per_second": self._rate(),
                "latency_seconds": median,
                "late_seconds": late,
                "spark": [point.confidence for point in self._points[-SPARK_POINTS:]],
            }

    def news(self, number: str | None = None, told: dict[str, int] | None = None) -> News:
        """Return the points, marks and pictures that a viewer was not told yet.

        Args:
            number, told: of the last news that the viewer was given; None if there were none.
        """
        fresh = number != self.number or told is None
        with self._lock:
            kept: dict[str, list[Any]] = {
                "points": self._points,
                "marks": list(self._marks),
                "pictures": list(self._pictures),
            }
            found = {}
            for name, values in kept.items():
                known = 0 if fresh or told is None else told[name]
                unknown = min(self._told[name] - known, len(values))
                found[name] = values[len(values) - unknown :]
            return News(self.number, fresh, told=dict(self._told), **found)


def merged(a: Point, b: Point) -> Point:
    """Return one point for two that follow each other: the place of the second, and the mean of both figures."""
    means = []
    for left, right in zip(a[2:], b[2:], strict=True):
        known = [value for value in (left, right) if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return Point(b.image, b.seconds, *means)  # type: ignore[arg-type]
