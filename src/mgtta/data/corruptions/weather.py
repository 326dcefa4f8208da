"""Weather: snow, frost, fog, spatter, brightness. x is uint8 (N, 3, H, W); results are on the same scale.

c: the corruption's constants at a severity; scale: the factor for lengths in pixels.
"""

from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .filters import enlarge, gaussian, motion
from .frost import textures
from .random import Random


def snow(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Add thresholded noise, enlarged and motion-blurred, and the same turned by 180 degrees, to a whitened image."""
    mean, std, size, threshold, radius, sigma, keep = c
    H, W = x.shape[-2:]
    size = max(1.0, size * scale)
    noise = rng.normal(1, ceil(H / size), ceil(W / size), mean=255 * mean + 0.5, std=255 * std)
    flakes = enlarge(noise.float(), size)  # (N, 1, H or more, W or more)
    flakes = flakes.clamp(max=255).round().masked_fill(flakes < 255 * threshold, 0)
    angle = rng.uniform() * 90 - 135
    flakes = motion(flakes, max(1, round(radius * scale)), sigma * scale, angle)
    flakes = flakes[..., :H, :W].round()

    x = x.float()
    r, g, b = x.split(1, dim=1)
    grey = 0.299 * r + 0.587 * g + 0.114 * b
    x = keep * x + (1 - keep) * torch.maximum(x, grey * 1.5 + 127.5)
    return x + flakes + flakes.flip(-2, -1)


def frost(
    x: Tensor, rng: Random, c: Any, scale: float, *, size: float, smooth: bool, folder: Path | None = None
) -> Tensor:
    """Add a window at a random place of a random texture, which is shown at `size * scale` of its own size."""
    keep, ice = c
    H, W = x.shape[-2:]
    pixels, start, heights, widths = textures(folder, H, W, size * scale, smooth, x.device)
    which = rng.integers(len(start))  # (N,)
    top = (rng.uniform() * (heights[which] - H)).long()
    left = (rng.uniform() * (widths[which] - W)).long()
    rows = top[:, None] + torch.arange(H, device=x.device)  # (N, H)
    columns = left[:, None] + torch.arange(W, device=x.device)  # (N, W)
    at = start[which, None, None] + rows[:, :, None] * widths[which, None, None] + columns[:, None]
    window = pixels.index_select(1, at.flatten()).view(3, *at.shape).transpose(0, 1)  # (N, 3, H, W)
    return keep * x.float() + ice * window.float()


def fog(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    density, decay = c
    H, W = x.shape[-2:]
    haze = plasma(rng, max(H, W), decay)[:, None, :H, :W]
    x = x.float() / 255
    peak = x.amax((1, 2, 3), keepdim=True)
    return (x + density * haze) * (255 * peak / (peak + density))


def plasma(rng: Random, size: int, decay: float) -> Tensor:
    """Return (N, S, S) in [0, 1], S the next power of two from size up: a cloud by diamond-square on a torus."""
    S = 1 << (size - 1).bit_length()
    wibble = rng.uniform(S, S) * 2 - 1
    cloud = torch.zeros_like(wibble)
    step = S
    amplitude = 100.0 * 100.0
    while step > 1:
        half = step // 2
        corners = cloud[:, ::step, ::step]  # a view
        centres = cloud[:, half::step, half::step]  # a view, which is written to
        pairs = corners + corners.roll(-1, 1)
        centres.copy_((pairs + pairs.roll(-1, 2)) / 4 + amplitude * wibble[:, half::step, half::step])
        beside = (centres + centres.roll(1, 1)) + (corners + corners.roll(-1, 2))
        below = (centres + centres.roll(1, 2)) + (corners + corners.roll(-1, 1))
        cloud[:, ::step, half::step] = beside / 4 + amplitude * wibble[:, ::step, half::step]
        cloud[:, half::step, ::step] = below / 4 + amplitude * wibble[:, half::step, ::step]
        step = half
        amplitude = amplitude / decay**2
    cloud -= cloud.amin((1, 2), keepdim=True)
    return cloud / cloud.amax((1, 2), keepdim=True)


def spatter(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Add drops of water or of mud where smoothed noise is high."""
    mean, std, sigma, threshold, amount, mud = c
    # the noise shrinks with the lengths, since less smoothing leaves more of it
    noise = rng.normal(1, *x.shape[-2:], mean=0.5, std=255 * std * scale)
    liquid = 255 * mean + gaussian(noise.float(), sigma * scale)  # (N, 1, H, W)
    wet = liquid >= 255 * threshold
    if mud:
        cover = gaussian(255.0 * wet, amount * scale) / 255
        cover = cover.masked_fill(cover < 0.8, 0)
        return torch.cat([x[:, i, None] * (1 - cover) + cover * level for i, level in enumerate((63, 42, 20))], 1)
    liquid = liquid.floor() * wet
    shine = liquid * _relief(liquid)
    shine = shine / shine.amax((2, 3), keepdim=True).clamp(min=1)
    return torch.cat([x[:, i, None] + amount * shine * level for i, level in enumerate((175, 238, 238))], 1)


def _relief(liquid: Tensor) -> Tensor:
    """Return (N, 1, H, W) integers 0 .. 255: the drops lit from a corner, with the distance to an edge as depth."""
    box = ((1, 1, 1),) * 3
    depth = _distance(_edges(liquid), 20)
    depth = (_stencil(depth, box) / 9 + 1e-3).to(torch.uint8)  # 0 .. 20
    counts = torch.stack([(depth == level).sum((1, 2, 3)) for level in range(21)], dim=1)  # (N, 21)
    below = counts.cumsum(1)
    first = counts.gather(1, (counts > 0).int().argmax(1, keepdim=True))
    total = below[:, -1:]
    equalised = (255 * (below - first) / (total - first).clamp(min=1)).round().clamp(min=0)
    depth = equalised.gather(1, depth.flatten(1).long()).view(liquid.shape)
    lit = _stencil(depth, ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))).clamp(0, 255)
    return (_stencil(lit, box) / 9).round()


def _stencil(x: Tensor, weights: tuple[tuple[int, ...], ...], border: str = "reflect") -> Tensor:
    """Return x (N, C, H, W) correlated with 3 x 3 integers."""
    H, W = x.shape[-2:]
    padded = F.pad(x, (1,) * 4, mode=border)
    out = torch.zeros_like(x)
    for dy, row in enumerate(weights):
        for dx, weight in enumerate(row):
            if weight:
                out.add_(padded[..., dy : dy + H, dx : dx + W], alpha=weight)
    return out


def _edges(x: Tensor) -> Tensor:
    """Return Canny's edges, without hysteresis: strong local maxima of the gradient."""
    gx = _stencil(x, ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1)), "replicate")
    gy = _stencil(x, ((-1, -2, -1), (0, 0, 0), (1, 2, 1)), "replicate")
    across = gx.abs()
    along = gy.abs()
    size = across + along
    H, W = x.shape[-2:]
    around = F.pad(size, (1,) * 4)

    def largest(dy: int, dx: int) -> Tensor:
        """Return where the gradient exceeds that of both neighbours on a line."""
        before = around[..., 1 - dy : 1 - dy + H, 1 - dx : 1 - dx + W]
        after = around[..., 1 + dy : 1 + dy + H, 1 + dx : 1 + dx + W]
        return (size > before) & (size >= after)

    diagonal = torch.where(gx * gy < 0, largest(1, -1), largest(1, 1))
    peak = torch.where(along < 0.41421 * across, largest(0, 1), diagonal)
    peak = torch.where(along > 2.41421 * across, largest(1, 0), peak)
    return peak & (size > 150)


def _distance(edges: Tensor, limit: int) -> Tensor:
    """Return the Euclidean distance to the nearest edge pixel, at most limit."""
    H, W = edges.shape[-2:]
    rows = torch.arange(H, device=edges.device, dtype=torch.int32)[:, None]
    above = rows - rows.where(edges, -limit).cummax(-2).values
    below = rows.where(edges, H + limit).flip(-2).cummin(-2).values.flip(-2) - rows
    vertical = torch.minimum(above, below).clamp(max=limit)
    squares = F.pad((vertical * vertical).float(), (limit, limit), value=float(limit**2))
    nearest = squares[..., limit : limit + W]
    for dx in range(1, limit):
        side = torch.minimum(squares[..., limit - dx :][..., :W], squares[..., limit + dx :][..., :W])
        nearest = torch.minimum(nearest, side + dx * dx)
    return nearest.clamp(max=limit * limit).sqrt()


def brightness(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Raise HSV's value: all channels grow by one ratio; black becomes grey."""
    rise = c
    value = x.amax(1, keepdim=True).float()
    raised = (value + 255 * rise).clamp(max=255)
    return torch.where(value > 0, x * (raised / value.clamp(min=1)), raised)
