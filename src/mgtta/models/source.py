"""Source statistics: mean and standard deviation of each layer's features on clean images (Eq. 7)."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.files import check_kind, check_weights, read_tensors, write_tensors
from mgtta._lib.shipped import shipped
from mgtta.models.batches import image_batches
from mgtta.models.classifier import Classifier
from mgtta.models.loading import as_classifier

KIND = "mgtta source statistics"
VERSION = 1
LARGEST_VALUE = 20  # of a clean image, also of a normalised one


@dataclass(frozen=True)
class SourceStatistics:
    """Mean and standard deviation of the features of each layer i, both (d_i,), and of which model they are."""

    mean: list[Tensor]
    std: list[Tensor]
    images: int
    model: str
    fingerprint: str

    def to(self, like: Tensor) -> "SourceStatistics":
        """Return the same statistics on another tensor's device and in its dtype; itself if nothing changes."""
        mean = [t.to(like.device, like.dtype) for t in self.mean]
        std = [t.to(like.device, like.dtype) for t in self.std]
        if all(new is old for new, old in zip(mean + std, self.mean + self.std, strict=True)):
            return self
        return replace(self, mean=mean, std=std)

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
    for x in image_batches(clean_images, batch_size):
        if x.is_floating_point() and not (x.isfinite().all() and x.abs().max() < LARGEST_VALUE):
            raise ValueError("clean images must be finite; give uint8 pixels, or floats in [0, 1]")
        _, features = model.features(x)
        if not sums:
            sums = [_Sums(f.double()) for f in features]
        for total, f in zip(sums, features, strict=True):
            total.add(f.double())
        count += len(x)
    if count < 2:
        raise ValueError(f"{count} clean images: a standard deviation needs at least 2, and 64 are enough")
    dtype = next(model.parameters()).dtype
    mean = [total.mean(count).to(dtype) for total in sums]
    std = [total.std(count).to(dtype) for total in sums]
    return SourceStatistics(mean, std, count, model.name, model.fingerprint())


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
    about = {
        "images": source.images,
        "model": source.model,
        "fingerprint": source.fingerprint,
    }
    write_tensors(path, tensors, {"kind": KIND, "version": str(VERSION), "about": json.dumps(about)})


def load_source(name_or_path: str | os.PathLike) -> SourceStatistics:
    """Return the statistics of a shipped model by its name, or those that save_source wrote to a file."""
    path = shipped("sources").get(str(name_or_path), name_or_path)
    tensors, metadata = read_tensors(path)
    check_kind(metadata, KIND, VERSION, path, "make them with mgtta.source_statistics")
    try:
        about = json.loads(metadata["about"])
        n = len(tensors) // 2
        mean = [tensors[f"mean.{i}"] for i in range(n)]
        std = [tensors[f"std.{i}"] for i in range(n)]
        return SourceStatistics(mean, std, **about)
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
