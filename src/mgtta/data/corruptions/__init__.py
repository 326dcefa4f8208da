"""The 19 corruptions of ImageNet-C, batched, seeded, on CPU or GPU.

D. Hendrycks, T. Dietterich: Benchmarking Neural Network Robustness to Common Corruptions and Perturbations,
ICLR 2019, with its severity constants, and those of CIFAR-10-C. Each family has a file; they share constants, random
(numbers by image), filters and frost (textures).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgtta._lib.errors import unknown

from . import blur, digital, noise, weather
from .constants import CONSTANTS
from .frost import frost_source
from .random import Random

__all__ = ["CONSTANTS", "CORRUPTIONS", "SEVERITIES", "VALIDATION_CORRUPTIONS", "corrupt", "frost_source"]

_TEST: tuple[Callable[..., Tensor], ...] = (
    noise.gaussian_noise,
    noise.shot_noise,
    noise.impulse_noise,
    blur.defocus_blur,
    blur.glass_blur,
    blur.motion_blur,
    blur.zoom_blur,
    weather.snow,
    weather.frost,
    weather.fog,
    weather.brightness,
    digital.contrast,
    digital.elastic_transform,
    digital.pixelate,
    digital.jpeg_compression,
)
_VALIDATION: tuple[Callable[..., Tensor], ...] = (
    noise.speckle_noise,
    weather.spatter,
    blur.gaussian_blur,
    digital.saturate,
)
_FUNCTIONS = {f.__name__: f for f in (*_TEST, *_VALIDATION)}

CORRUPTIONS = tuple(f.__name__ for f in _TEST)
VALIDATION_CORRUPTIONS = tuple(f.__name__ for f in _VALIDATION)
SEVERITIES = (1, 2, 3, 4, 5)

_PIXELS_ON_CPU = 2 * 224 * 224  # processed at once: as many as its cache holds
_PIXELS_ELSEWHERE = 128 * 224 * 224


@torch.no_grad()
def corrupt(
    images: Tensor,
    name: str,
    severity: int = 5,
    *,
    index: Tensor | None = None,
    seed: int = 0,
    frost_textures: str | Path | None = None,
    constants: str = "imagenet",
) -> Tensor:
    """Return corrupted copies of images (N, 3, H, W), in their dtype and on their device.

    Like the published files, a corrupted image has 8 bits a channel, rounded down. Float images are first
    rounded to 8 bits, so that both dtypes give the same pixels. Random numbers depend only on (seed, index,
    name), so an image gets the same corruption in any batch.

    Args:
        images: uint8, or float in [0, 1]; H and W from 32 up.
        name: one of CORRUPTIONS or VALIDATION_CORRUPTIONS.
        index: (N,) integers, each image's number in its data set; by default 0 .. N - 1.
        frost_textures: a folder of images for frost; by default textures are generated (see frost_source).
        constants: "imagenet": those of ImageNet-C at 224 pixels; below, lengths in pixels (radii, flakes,
            displacements) shrink with the shorter side. "cifar": those of CIFAR-10-C at 32 pixels, as they are.
    """
    function = _check(images, name, severity)
    if constants not in CONSTANTS:
        raise unknown("set of constants", constants, CONSTANTS)
    chosen = CONSTANTS[constants]
    if index is None:
        index = torch.arange(len(images), device=images.device)
    elif index.shape != (len(images),) or index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ValueError(
            f"index must hold one integer for each of the {len(images)} images; "
            f"it is {index.dtype} of shape {tuple(index.shape)}"
        )
    if len(images) == 0:
        return images.clone()
    index = index.to(images.device, torch.int64, non_blocking=True)
    options: dict[str, Any] = {"c": chosen.values[name][severity - 1], "scale": chosen.scale(*images.shape[2:])}
    if name == "frost":
        options |= {"size": chosen.frost_size, "smooth": chosen.frost_smooth}
    if name == "frost" and frost_textures:
        options["folder"] = Path(frost_textures)

    x = _to_bytes(images)
    pixels = _PIXELS_ON_CPU if x.device.type == "cpu" else _PIXELS_ELSEWHERE
    at_once = max(1, pixels // (x.shape[2] * x.shape[3]))
    parts = [
        _to_bytes_down(function(part, Random(seed, name, where), **options))
        for part, where in zip(x.split(at_once), index.split(at_once), strict=True)
    ]
    out = torch.cat(parts).contiguous()
    if images.dtype == torch.uint8:
        return out
    return (out / 255).to(images.dtype)


def _check(images: Tensor, name: str, severity: int) -> Callable[..., Tensor]:
    if name not in _FUNCTIONS:
        raise ValueError(f"unknown corruption {name!r}; choose one of: {', '.join(_FUNCTIONS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"unknown severity {severity!r}; choose one of: {', '.join(map(str, SEVERITIES))}")
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < 32:
        raise ValueError(
            f"images must be (N, 3, H, W) with H and W from 32 up, not {tuple(images.shape)}; "
            "add a batch dimension with images[None], make grey images RGB with images.expand(-1, 3, -1, -1)"
        )
    if images.dtype != torch.uint8 and not images.dtype.is_floating_point:
        raise TypeError(f"images must be uint8 or float in [0, 1], not {images.dtype}")
    return _FUNCTIONS[name]


def _to_bytes(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images.contiguous()
    x = images.float()
    low, high = (bound.item() for bound in x.aminmax())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"float images must be in [0, 1]; these span {low:.4g} .. {high:.4g}. Divide by 255, or pass "
            "uint8; corrupt before normalising, not after"
        )
    return (x * 255).round().to(torch.uint8).contiguous()


def _to_bytes_down(x: Tensor) -> Tensor:
    """Return uint8, rounded down, except that a rounding error is rounded up: 254.9999 is white."""
    if x.dtype == torch.uint8:
        return x
    if x.is_floating_point():
        x = x + 1e-3
    return x.clamp(0, 255).to(torch.uint8)
