"""Linear filters whose sums are exact, shared by the families of corruptions.

Weights are integers over a power of two that sum to one. Pixels are integers or multiples of 1/4. So every partial sum
fits float32's 24 bits, and no order of summation (batch size, library, device) changes a result.

Shapes: x (N, C, H, W), float32, within ±255 (single pixels of noise may exceed it).
"""

from functools import lru_cache, reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor


def exact_weights(weights: Tensor, one: int) -> Tensor:
    """Return integers in proportion to the weights that sum to `one`; the largest one absorbs the rounding error."""
    units = (weights / weights.sum() * one).round().long()
    units[units.argmax()] += one - units.sum()
    return units


@lru_cache(maxsize=64)
def gaussian_matrix(n: int, sigma: float, truncate: float, mirror: bool, device: torch.device) -> Tensor:
    """Return (n, n), which blurs a line of n pixels; beyond its ends it is mirrored, or its last pixel repeated."""
    radius = _radius(sigma, truncate)
    taps = torch.arange(-radius, radius + 1)
    weights = exact_weights(torch.exp(-(taps.double() ** 2) / (2 * sigma**2)), 1 << 14).double() / (1 << 14)
    source = torch.arange(n)[:, None] + taps  # (n, taps)
    if mirror:
        source = source % (2 * n)
        source = torch.minimum(source, 2 * n - 1 - source)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    matrix.scatter_add_(1, source.clamp(0, n - 1), weights.expand(n, -1).contiguous())
    # float64 on a GPU, since TF32 settings do not change it
    return matrix.to(device, torch.float32 if device.type == "cpu" else torch.float64)


def _radius(sigma: float, truncate: float) -> int:
    return int(truncate * sigma + 0.5)


def gaussian(x: Tensor, sigma: float, truncate: float = 4.0, mirror: bool = False) -> Tensor:
    """Return x blurred along its last two axes; it is rounded to 1/4 in between."""
    reach = _radius(sigma, truncate)
    for axis in (-1, -2):
        n = x.shape[axis]
        matrix = gaussian_matrix(n, sigma, truncate, mirror, x.device)
        x = (x * 4).round().to(matrix.dtype) / 4
        parts = []
        for start in range(0, n, 64):  # a block of pixels depends on few others
            low = max(0, start - reach)
            high = min(n, start + 64 + reach)
            band = matrix[start : start + 64, low:high]
            part = x.narrow(axis, low, high - low)
            parts.append(part @ band.T if axis == -1 else band @ part)
        x = torch.cat(parts, axis)
    return x.float()


def motion(x: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Return x (N, C, H, W), C up to 3, levels 0 .. 255, smeared along each image's own angle (N,), in degrees.

    This is ImageMagick's motion blur, which ImageNet-C calls through the wand library: a one-sided Gaussian of
    2 radius + 1 taps along the angle, each tap at the nearest pixel. The channels are packed into one int64 with 21
    bits each: 8 for the pixel and 13 for the weights.
    """
    H, W = x.shape[-2:]
    taps = torch.arange(2 * radius + 1, dtype=torch.float64)
    weights = exact_weights(torch.exp(-(taps**2) / (2 * sigma**2)), 1 << 13).tolist()
    distance = torch.arange(2 * radius + 1, device=x.device)
    direction = torch.deg2rad(angle.double())[:, None]
    dy = torch.ceil(distance * direction.sin() - 0.5).long()  # (N, taps)
    dx = torch.ceil(distance * direction.cos() - 0.5).long()

    reach = 2 * radius
    padded = F.pad(x.float(), (reach,) * 4, mode="replicate").long().unbind(1)
    packed = reduce(add, (channel << 21 * i for i, channel in enumerate(padded))).flatten(1)  # (N, pixels)
    stride = W + 2 * reach
    rows, columns = (torch.arange(n, device=x.device) + reach for n in (H, W))
    here = (rows[:, None] * stride + columns).flatten()  # (HW,)
    total = torch.zeros(len(x), H * W, dtype=torch.int64, device=x.device)
    for weight, step in zip(weights, (dy * stride + dx).unbind(1), strict=True):
        total.add_(packed.gather(1, here + step[:, None]), alpha=weight)
    channels = [(total >> 21 * i) & ((1 << 21) - 1) for i in range(x.shape[1])]
    return torch.stack(channels, dim=1).view(x.shape) / (1 << 13)


def enlarge(x: Tensor, factor: float) -> Tensor:
    """Return x (N, C, H, W) enlarged, bilinear, with corner pixels on corner pixels."""
    size = [round(n * factor) for n in x.shape[-2:]]
    return F.interpolate(x, size=size, mode="bilinear", align_corners=True)
