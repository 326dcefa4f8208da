"""What is kept of the source data: mean and standard deviation of each layer's features (Eq. 7)."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.files import check_kind, check_weights, read_tensors, write_tensors
from mgtta._lib.shipped import shipped
from mgtta.models.classifier import Classifier
from mgtta.models.loading import as_classifier

KIND = "mgtta source statistics"
VERSION = 1


@dataclass(frozen=True)
class SourceStatistics:
    """Per layer i: mean[i] and std[i], both (d_i,); and whose they are."""

    mean: list[Tensor]
    std: list[Tensor]
    images: int
    model: str
    fingerprint: str

    def to(self, like: Tensor) -> "SourceStatistics":
        """The same statistics on another tensor's device and in its dtype."""
        if self.mean[0].device == like.device and self.mean[0].dtype == like.dtype:
            return self
        mean, std = ([t.to(like.device, like.dtype) for t in ts] for ts in (self.mean, self.std))
        return SourceStatistics(mean, std, self.images, self.model, self.fingerprint)

    def check(self, model: str, fingerprint: str) -> None:
        """Refuse statistics that were not taken from the model of this name and fingerprint."""
        remedy = "mgtta.source_statistics(model, clean_images)"
        check_weights("these are source statistics", (self.model, self.fingerprint), (model, fingerprint), remedy)


@torch.no_grad()
def source_statistics(
    model: Classifier | nn.Module, clean_images: Tensor | Iterable[Any], batch_size: int = 64
) -> SourceStatistics:
    """The statistics of clean, in-distribution images without labels; 64 of them are enough.

    Args:
        clean_images: one tensor of images, or an iterable of batches: tensors, or tuples that start with one.
    """
    model = as_classifier(model)
    if isinstance(clean_images, Tensor):
        clean_images = clean_images.split(batch_size) if len(clean_images) else []
    count = 0
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    shift: list[Tensor] = []
    for batch in clean_images:
        x = batch if isinstance(batch, Tensor) else batch[0]
        if x.is_floating_point() and not (x.isfinite().all() and x.abs().max() < 20):
            raise ValueError("clean images must be finite; give uint8 pixels, or floats in [0, 1]")
        _, features = model.features(x)
        features = [f.double() for f in features]
        if not shift:  # sums around the first batch's mean lose no digits
            shift = [f.mean(0) for f in features]
            sums = [torch.zeros_like(s) for s in shift]
            squares = [torch.zeros_like(s) for s in shift]
        for f, s, total, square in zip(features, shift, sums, squares, strict=True):
            total += (f - s).sum(0)
            square += (f - s).square().sum(0)
        count += len(x)
    if count < 2:
        raise ValueError(f"{count} clean images: a standard deviation needs at least 2, and 64 serve well")
    dtype = next(model.parameters()).dtype
    mean = [(s + total / count).to(dtype) for s, total in zip(shift, sums, strict=True)]
    std = [
        ((q - t * t / count) / (count - 1)).clamp(min=0).sqrt().to(dtype) for t, q in zip(sums, squares, strict=True)
    ]
    return SourceStatistics(mean, std, count, model.name, model.fingerprint())


def save_source(source: SourceStatistics, path: str | os.PathLike) -> None:
    tensors = {f"mean.{i}": t for i, t in enumerate(source.mean)} | {f"std.{i}": t for i, t in enumerate(source.std)}
    about = {
        "images": source.images,
        "model": source.model,
        "fingerprint": source.fingerprint,
    }
    write_tensors(path, tensors, {"kind": KIND, "version": str(VERSION), "about": json.dumps(about)})


def load_source(name_or_path: str | os.PathLike) -> SourceStatistics:
    """The statistics of a shipped model by its name, or those that save_source wrote to a file."""
    path = shipped("sources").get(str(name_or_path), name_or_path)
    tensors, metadata = read_tensors(path)
    check_kind(metadata, KIND, VERSION, path, "make them with mgtta.source_statistics")
    try:
        about = json.loads(metadata["about"])
        n = len(tensors) // 2
        mean, std = ([tensors[f"{kind}.{i}"] for i in range(n)] for kind in ("mean", "std"))
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
