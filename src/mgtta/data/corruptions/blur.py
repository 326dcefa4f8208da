"""Blur: defocus, glass, motion, zoom, gaussian. x is uint8 (N, 3, H, W); results are on the same scale.

c: the corruption's constants at a severity; scale: the factor for lengths in pixels.
"""

from math import ceil, floor, isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .filters import enlarge, exact_weights, gaussian, motion
from .random import Random

SMALLEST_DISC = 2  # pixels; smaller ones are written out as weights


def gaussian_blur(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    sigma = c
    return gaussian(x.float(), sigma * scale)


def defocus_blur(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Average over a disc with a soft edge, by differences of running sums along the rows (int32, exact)."""
    full_radius, softness = c
    if full_radius < SMALLEST_DISC:
        return _small_disc(x, full_radius, softness)
    radius = max(1.0, full_radius * scale)
    reach = floor(radius)
    half_widths = [isqrt(floor(radius**2 - dy**2)) for dy in range(-reach, reach + 1)]

    H, W = x.shape[-2:]
    y = F.pad(x.float(), (reach + 1,) * 4, mode="reflect").int()
    if softness == 0.5:  # [7 50 7] / 64: a Gaussian of sigma 0.5
        y = 50 * y[..., 1:-1, :] + 7 * (y[..., :-2, :] + y[..., 2:, :])
        y = 50 * y[..., 1:-1] + 7 * (y[..., :-2] + y[..., 2:])
    else:
        y = 4096 * y[..., 1:-1, 1:-1]
    sums = F.pad(y.cumsum(-1, dtype=torch.int32), (1, 0))  # sums[w] is over the columns before w
    out = torch.zeros_like(x, dtype=torch.int32)
    for top, half in enumerate(half_widths):
        rows = sums[..., top : top + H, :]
        out += rows[..., reach + half + 1 :][..., :W]
        out -= rows[..., reach - half :][..., :W]
    area = sum(2 * half + 1 for half in half_widths)
    gain = 1.0
    if full_radius >= 8:  # these discs fill the grid that they are softened on, whose mirrored border adds 1 % of light
        gain = 1 + 8 * 7 / 64 * (half_widths[1] - half_widths[0]) / area
    return out.float() * (gain / (4096 * area))


def _small_disc(x: Tensor, radius: float, softness: float) -> Tensor:
    """Average over a disc of a few pixels, softened by a Gaussian of three taps; integer weights make it exact."""
    reach = floor(radius) + 1
    at = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disc = (at[:, None] ** 2 + at**2 <= radius**2).double()
    taps = torch.exp(-(torch.arange(-1, 2, dtype=torch.float64) ** 2) / (2 * softness**2))
    soft = F.conv2d(disc[None, None], torch.outer(taps, taps)[None, None], padding=1)[0, 0]
    weights = exact_weights(soft.flatten(), 1 << 14).view_as(soft)

    H, W = x.shape[-2:]
    y = F.pad(x.float(), (reach,) * 4, mode="reflect").int()
    out = torch.zeros_like(x, dtype=torch.int32)
    for top, row in enumerate(weights.tolist()):
        for left, weight in enumerate(row):
            out.add_(y[..., top : top + H, left : left + W], alpha=weight)
    return out.float() / (1 << 14)


def glass_blur(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Blur, copy each pixel from a random neighbour, blur again.

    The published code walks backwards over the pixels and intends to swap two of them. But the two views share memory,
    so each pixel takes its neighbour's value, which is the new one if the walk has passed the neighbour. Here all
    pixels are followed at once by pointer doubling, which gives the same distribution.
    """
    sigma, delta, rounds = c
    sigma = sigma * scale
    delta = max(1, round(delta * scale))
    y = gaussian(x.float(), sigma).floor().flatten(2)
    walk = _shuffle(rng, delta, *x.shape[-2:])
    for _ in range(rounds - 1):
        walk = walk.gather(1, _shuffle(rng, delta, *x.shape[-2:]))
    y = y.gather(2, walk[:, None].expand_as(y)).view(x.shape)
    return gaussian(y, sigma)


def _shuffle(rng: Random, delta: int, H: int, W: int) -> Tensor:
    """Return (N, HW): the pixel that each pixel's value comes from, after one walk."""
    h = H - 2 * delta  # the walk leaves out a border
    w = W - 2 * delta
    here = torch.arange(H * W, device=rng.key.device).view(H, W)
    inner = here[delta + 1 : H - delta + 1, delta + 1 : W - delta + 1]
    dy, dx = (rng.integers(2 * delta, h, w) - delta for _ in range(2))
    there = inner + dy * W + dx  # (N, h, w)

    # a pixel that the walk has passed is after this one in raster order, and not in the border
    row = torch.div(there, W, rounding_mode="floor")
    column = there % W
    passed = (there > inner) & (row > delta) & (row <= H - delta) & (column > delta) & (column <= W - delta)
    link = (~here).expand(len(there), H, W).clone()  # ~pixel: the walk ends there
    link[:, delta + 1 : H - delta + 1, delta + 1 : W - delta + 1] = torch.where(passed, there, ~there)
    link = link.flatten(1)
    for _ in range(6):  # 64 links; half of the walks end at each one
        link = torch.where(link < 0, link, link.gather(1, link.clamp(min=0)))
    return torch.where(link < 0, ~link, link)


def motion_blur(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    radius, sigma = c
    angle = rng.uniform() * 90 - 45
    return motion(x.float(), max(1, round(radius * scale)), sigma * scale, angle)


def zoom_blur(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Average the image and its centre at growing enlargements."""
    step, count = c
    H, W = x.shape[-2:]
    x = x.float().contiguous(memory_format=torch.channels_last)  # interpolates faster
    out = 2 * x  # the image itself, and enlarged by 1
    for factor in (1 + i * step for i in range(1, count)):
        h = ceil(H / factor)
        w = ceil(W / factor)
        top = (H - h) // 2
        left = (W - w) // 2
        out += enlarge(x[..., top : top + h, left : left + w], factor)[..., :H, :W]
    return out / (count + 1)
