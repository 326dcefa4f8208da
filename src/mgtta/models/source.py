"""Source statistics: mean and standard deviation of each layer's features on clean images (Eq. 7).

Beside them: the mean of what the head reads, how features follow the predicted classes, and how many clean images the
model predicts alike when they are mirrored.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.files import check_kind, check_weights, read_tensors, write_tensors
from mgtta._lib.shipped import shipped
from mgtta.models.alike import Looks, LooksOfClean
from mgtta.models.batches import image_batches
from mgtta.models.blended import can_blend
from mgtta.models.checks import IMAGE_AXES
from mgtta.models.class_map import ClassMap, fit_class_map
from mgtta.models.classifier import Classifier
from mgtta.models.head import LOGITS, HeadTap
from mgtta.models.loading import as_classifier
from mgtta.models.norms import with_running_statistics

KIND = "mgtta source statistics"
VERSION = 4  # 1: without `head`, `head_layer` and `mirrored`; 2: without `by_class`; 3: without `looks`
LARGEST_VALUE = 20  # of a clean image, also of a normalised one
MIRRORED_IMAGES = 512  # of which mirror images are predicted: their share has a standard error of at most 2 %
FITTED_IMAGES = 1024  # whose features are held in memory, to see how they follow the classes


@dataclass(frozen=True)
class SourceStatistics:
    """Mean and standard deviation of the features of each layer i, both (d_i,), and of which model they are.

    Attributes:
        head: mean (d,) of what the head reads; None in older files.
        head_layer: name of the layer that gives the logits; "" if there is none: then `head` is of the logits.
        head_reads_last_layer: whether what the head reads are the last layer's features; None in older files.
        mirrored: share of clean images that are predicted alike when mirrored; 0 if the inputs are not images, None in
            older files.
        by_class: how the features of all layers, and after them what the head reads, follow the predicted classes; None
            in older files, or if they do not.
        classes: the scored classes, to which `by_class` belongs; None: all.
        looks: how clean images look to the first BatchNorm layer; None in older files, or without such a layer.
    """

    mean: list[Tensor]
    std: list[Tensor]
    images: int
    model: str
    fingerprint: str
    head: Tensor | None = None
    head_layer: str = LOGITS
    head_reads_last_layer: bool | None = None
    mirrored: float | None = None
    by_class: ClassMap | None = None
    classes: list[int] | None = None
    looks: Looks | None = None

    @property
    def before_head(self) -> Tensor:
        """The mean of what the head reads; in old files, the last layer's, which is the same for many ViTs."""
        return self.mean[-1] if self.head is None else self.head

    def to(self, like: Tensor) -> "SourceStatistics":
        """Return the same statistics on another tensor's device and in its dtype; itself if nothing changes."""
        mean = [t.to(like.device, like.dtype) for t in self.mean]
        std = [t.to(like.device, like.dtype) for t in self.std]
        head = None if self.head is None else self.head.to(like.device, like.dtype)
        by_class = None if self.by_class is None else self.by_class.to(like)
        looks = None if self.looks is None else self.looks.to(like)
        same = head is self.head and by_class is self.by_class and looks is self.looks
        if same and all(new is old for new, old in zip(mean + std, self.mean + self.std, strict=True)):
            return self
        return replace(self, mean=mean, std=std, head=head, by_class=by_class, looks=looks)

    def looks_for(self, alike: bool) -> Looks | None:
        """Return how clean images look, if images that look alike shall count more; an error if that is not known."""
        if alike and self.looks is None:
            raise ValueError(
                "alike=True needs source statistics that know how clean images look to a BatchNorm layer: those of "
                "older versions do not (make them again with mgtta.source_statistics), nor do those of networks "
                "without such layers"
            )
        return self.looks if alike else None

    def check(self, model: str, fingerprint: str) -> None:
        """Raise an error unless they were taken from the model of this name and fingerprint."""
        remedy = "mgtta.source_statistics(model, clean_images)"
        check_weights("these are source statistics", (self.model, self.fingerprint), (model, fingerprint), remedy)


@torch.no_grad()
def source_statistics(
    model: Classifier | nn.Module, clean_images: Tensor | Iterable[Any], batch_size: int = 64
) -> SourceStatistics:
    """Return the statistics of clean, in-distribution images without labels; 64 of them are enough.

    Args:
        clean_images: one tensor of images, or an iterable of batches: tensors, or tuples that start with one.
    """
    model = as_classifier(model)
    count = 0
    sums: list[_Sums] = []
    alike = _Alike()
    seen = _Seen()
    looks = LooksOfClean(model.net, [layer for layer in with_running_statistics(model.net) if can_blend(layer)])
    layer = LOGITS
    same = False
    for x in image_batches(clean_images, batch_size):
        _check(x)
        if not sums:
            model.check(x)
            layer = model.head_layer(x[:2])
        with looks.watching():
            logits, features = model.features(x, HeadTap(layer))
        if not sums:
            sums = [_Sums(f.double()) for f in features]
            same = model.is_last_layer(features[-2], features[-1])
        for total, f in zip(sums, features, strict=True):
            total.add(f.double())
        alike.add(model, x, logits)
        seen.add(logits, features)
        count += len(x)
    if count < 2:
        raise ValueError(f"{count} clean images: a standard deviation needs at least 2, and 64 are enough")
    dtype = next(model.parameters()).dtype
    *mean, head = [total.mean(count).to(dtype) for total in sums]
    std = [total.std(count).to(dtype) for total in sums[:-1]]
    own = (count, model.name, model.fingerprint(), head, layer, same, alike.share())
    classes = None if model.classes is None else model.classes.tolist()
    by_class = seen.by_class(dtype)
    return SourceStatistics(mean, std, *own, by_class=by_class, classes=classes, looks=looks.fitted(dtype))


def _check(x: Tensor) -> None:
    """Raise an error unless the values are finite, and those of images small."""
    if not x.is_floating_point():
        return
    if not x.isfinite().all() or (x.ndim == IMAGE_AXES and x.abs().max() >= LARGEST_VALUE):
        raise ValueError("clean images must be finite; give uint8 pixels, or floats in [0, 1]")


class _Alike:
    """Counts the images whose mirror image is predicted alike, among the first MIRRORED_IMAGES."""

    def __init__(self) -> None:
        self.images = 0
        self.count = 0

    def add(self, model: Classifier, x: Tensor, logits: Tensor) -> None:
        """Count images x, of which these are the logits; other inputs than images count as not alike."""
        n = min(len(x), MIRRORED_IMAGES - self.images)
        if n == 0:
            return
        self.images += n
        if x.ndim == IMAGE_AXES:
            mirrored = model(x[:n].flip(-1))
            self.count += int((mirrored.argmax(1) == logits[:n].argmax(1)).sum())

    def share(self) -> float:
        return self.count / self.images


class _Seen:
    """Holds probabilities and features of the first FITTED_IMAGES."""

    def __init__(self) -> None:
        self.images = 0
        self.probabilities: list[Tensor] = []
        self.features: list[Tensor] = []

    def add(self, logits: Tensor, features: Sequence[Tensor]) -> None:
        n = min(len(logits), FITTED_IMAGES - self.images)
        if n == 0:
            return
        self.images += n
        self.probabilities.append(logits[:n].float().softmax(1))
        self.features.append(torch.cat([f[:n].float() for f in features], 1))

    def by_class(self, dtype: torch.dtype) -> ClassMap | None:
        found = fit_class_map(torch.cat(self.probabilities), torch.cat(self.features))
        return None if found is None else ClassMap(*(t.to(dtype) for t in found))


class _Sums:
    """Sums of one layer's features (N, d) around the mean of the first batch, so that no digits are lost."""

    def __init__(self, first: Tensor):
        self.centre = first.mean(0)
        self.total = torch.zeros_like(self.centre)
        self.squares = torch.zeros_like(self.centre)

    def add(self, f: Tensor) -> None:
        self.total += (f - self.centre).sum(0)
        self.squares += (f - self.centre).square().sum(0)

    def mean(self, count: int) -> Tensor:
        return self.centre + self.total / count

    def std(self, count: int) -> Tensor:
        variance = (self.squares - self.total * self.total / count) / (count - 1)
        return variance.clamp(min=0).sqrt()


def save_source(source: SourceStatistics, path: str | os.PathLike) -> None:
    """Write the statistics to a safetensors file."""
    tensors = {f"mean.{i}": t for i, t in enumerate(source.mean)}
    tensors |= {f"std.{i}": t for i, t in enumerate(source.std)}
    about: dict[str, Any] = {
        "images": source.images,
        "model": source.model,
        "fingerprint": source.fingerprint,
        "mirrored": source.mirrored,
        "classes": source.classes,
    }
    if source.head is not None:
        tensors["head"] = source.head
        about["head_layer"] = source.head_layer
        about["head_reads_last_layer"] = source.head_reads_last_layer
    if source.by_class is not None:
        tensors |= {f"by_class.{name}": t for name, t in source.by_class._asdict().items()}
    if source.looks is not None:
        tensors["looks"] = source.looks.root
        about["looks_layer"] = source.looks.layer
    write_tensors(path, tensors, {"kind": KIND, "version": str(VERSION), "about": json.dumps(about)})


def load_source(name_or_path: str | os.PathLike) -> SourceStatistics:
    """Return the statistics of a shipped model by its name, or those that save_source wrote to a file."""
    path = shipped("sources").get(str(name_or_path), name_or_path)
    tensors, metadata = read_tensors(path)
    check_kind(metadata, KIND, VERSION, path, "make them with mgtta.source_statistics")
    try:
        about = json.loads(metadata["about"])
        head = tensors.pop("head", None)
        by_class = None
        if "by_class.centre" in tensors:
            by_class = ClassMap(*(tensors.pop(f"by_class.{name}") for name in ClassMap._fields))
        looks = None
        if "looks" in tensors:
            looks = Looks(about.pop("looks_layer"), tensors.pop("looks"))
        n = len(tensors) // 2
        mean = [tensors[f"mean.{i}"] for i in range(n)]
        std = [tensors[f"std.{i}"] for i in range(n)]
        return SourceStatistics(mean, std, head=head, by_class=by_class, looks=looks, **about)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged source statistics ({error}); make them again") from error


Source = SourceStatistics | str | os.PathLike


def as_source(source: Source, model: str, fingerprint: str) -> SourceStatistics:
    """Return the statistics themselves, or those of a file; refuse those of another model."""
    if isinstance(source, str | os.PathLike):
        source = load_source(source)
    if not isinstance(source, SourceStatistics):
        raise TypeError(f"source must be source statistics or a file of them, not {type(source).__name__}")
    source.check(model, fingerprint)
    return source
