"""Noise: gaussian, shot, impulse, speckle. x is uint8 (N, 3, H, W); results are on the same scale.

c: the corruption's constants at a severity; scale: the factor for lengths in pixels.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .random import LEVELS, Random, lookup, quantiles


def gaussian_noise(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    return x + rng.normal(*x.shape[1:], std=255 * c)


def shot_noise(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    photons = c
    bits = rng.bits(*x.shape[1:])
    u = (bits.int() + LEVELS // 2) >> 2
    table = _poisson_table(photons, x.device)
    return table.index_select(0, ((x.int() << 14) + u).view(-1)).view(x.shape)


@lru_cache(maxsize=8)
def _poisson_table(photons: int, device: torch.device) -> Tensor:
    """Return (256 * 2^14,) uint8: for each grey level, equally likely 8-bit outcomes of Poisson counts."""
    rate = torch.arange(256, dtype=torch.float64)[:, None] / 255 * photons
    count = torch.arange(photons + 1, dtype=torch.float64)  # larger counts are clipped to white
    mass = torch.exp(torch.xlogy(count, rate) - rate - torch.lgamma(count + 1))  # (256, counts)
    edges = (mass.cumsum(1)[:, :-1] * (1 << 14)).round().long()  # where the next count begins
    steps = torch.zeros(256, (1 << 14) + 1, dtype=torch.int64)
    steps.scatter_add_(1, edges.clamp(max=1 << 14), torch.ones_like(edges))
    counts = steps.cumsum(1)[:, :-1]
    return (counts * 255 // photons).to(torch.uint8).flatten().to(device)


def impulse_noise(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    amount = c
    bits = rng.bits(*x.shape[1:])
    salt, either = (round(LEVELS * (share - 0.5)) for share in (amount / 2, amount))
    return x.masked_fill(bits < either, 0).masked_fill(bits < salt, 255)


def speckle_noise(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    return x * lookup(_gain_table(c, x.device), rng.bits(*x.shape[1:]))


@lru_cache(maxsize=8)
def _gain_table(std: float, device: torch.device) -> Tensor:
    return (1 + std * quantiles()).float().to(device)
