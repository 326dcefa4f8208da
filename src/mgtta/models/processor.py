"""What a Hugging Face image processor does to images: normalisation and size, as a Classifier needs them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = "preprocessor_config.json"
LARGEST_PIXEL = 255


class Preprocessing(NamedTuple):
    """Normalisation of images in [0, 1], and their size; None for what the processor does not do."""

    mean: list[float] | None
    std: list[float] | None
    size: tuple[int, float] | None  # side in pixels, share of an image that the centre crop keeps


def preprocessing(processor: Any) -> Preprocessing:
    """Return what a processor does to images.

    Args:
        processor: an image processor of transformers, or a processor that has one; its configuration as a dict; or the
            path of `preprocessor_config.json` or of its folder.
    """
    config = _config(processor)
    mean, std = _normalisation(config)
    return Preprocessing(mean, std, _size(config))


def _config(processor: Any) -> Mapping[str, Any]:
    if isinstance(processor, str | os.PathLike):
        path = Path(processor)
        if path.is_dir():
            path /= FILE
        processor = json.loads(path.read_text())
    processor = getattr(processor, "image_processor", processor)
    if hasattr(processor, "to_dict"):
        processor = processor.to_dict()
    if not isinstance(processor, Mapping):
        raise TypeError(
            f"processor must be an image processor of transformers, its configuration or the path of {FILE}, not "
            f"{type(processor).__name__}"
        )
    return processor


def _normalisation(config: Mapping[str, Any]) -> tuple[list[float] | None, list[float] | None]:
    """Return mean and std for images in [0, 1].

    A processor takes pixels from 0 to 255, multiplies them by `rescale_factor`, may subtract 1, and then normalises.
    """
    mean = config.get("image_mean")
    std = config.get("image_std")
    if not config.get("do_normalize", mean is not None):
        mean, std = None, None
    scale = 1.0
    if config.get("do_rescale", True):
        scale = LARGEST_PIXEL * (config.get("rescale_factor") or 1 / LARGEST_PIXEL)
    offset = 1.0 if config.get("rescale_offset") else 0.0
    if abs(scale - 1) < 1e-6 and not offset:
        return mean, std
    channels = len(mean or [0, 0, 0])
    first = mean or [0.0] * channels
    second = std or [1.0] * channels
    return [(m + offset) / scale for m in first], [s / scale for s in second]


def _size(config: Mapping[str, Any]) -> tuple[int, float] | None:
    size = _side(config.get("size"))
    crop = _side(config.get("crop_size"))
    if config.get("do_center_crop") and crop:
        return crop, crop / max(size or crop, crop)
    if not size:
        return None
    return size, config.get("crop_pct") or 1.0


def _side(size: Any) -> int | None:
    """Return the side in pixels, from a number or from a dict with height, shortest_edge or longest_edge."""
    if isinstance(size, Mapping):
        sides = [size.get(key) for key in ("height", "shortest_edge", "longest_edge")]
        return next((side for side in sides if side), None)
    if isinstance(size, list | tuple):
        return size[0]
    return size
