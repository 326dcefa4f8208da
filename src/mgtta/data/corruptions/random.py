"""Random numbers that belong to an image: a counter-based generator in integer tensor operations.

Every number is a hash (the splitmix64 finaliser: Steele, Lea, Flood, OOPSLA 2014) of (seed, name, image
index, draw, element). There is no state to carry, so a number depends neither on the batch around the image
nor on the worker or device that computes it.
"""

import zlib
from functools import cached_property, lru_cache
from math import ceil, prod

import torch
from torch import Tensor

LEVELS = 1 << 16  # a random number has 16 bits: four to a hash


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser, in place; the masks turn torch's arithmetic shifts into logical ones."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= (z >> shift) & ((1 << 64 - shift) - 1)
        z *= _signed(factor)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


class Random:
    """Draws for a batch of images; successive draws are independent."""

    def __init__(self, seed: int, name: str, index: Tensor):
        self.stream = seed * (1 << 32) + zlib.crc32(name.encode())
        self.index = index
        self.draws = 0

    @cached_property
    def key(self) -> Tensor:
        """(N,) int64."""
        stream = _mix(torch.tensor(_signed(self.stream), device="cpu"))
        return _mix(self.index * GOLDEN + stream.item())

    def bits(self, *shape: int) -> Tensor:
        """(N, *shape) int16, uniform over all 65,536 values."""
        n = prod(shape)
        self.draws += 1
        start = _signed(self.draws * (1 << 32) * GOLDEN)
        counter = torch.arange(ceil(n / 4), device=self.key.device) * GOLDEN + start
        z = _mix(self.key[:, None] + counter)
        return z.view(torch.int16)[:, :n].reshape(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """(N, *shape) float32 in (0, 1)."""
        return (self.bits(*shape).float() + (LEVELS / 2 + 0.5)) / LEVELS

    def integers(self, n: int, *shape: int) -> Tensor:
        """(N, *shape) int64 in 0 .. n - 1, for small n."""
        return (self.bits(*shape).long() + LEVELS // 2) * n >> 16

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """(N, *shape) normal, rounded down to integers (int16)."""
        return lookup(normal_table(mean, std, self.key.device), self.bits(*shape))


def lookup(table: Tensor, bits: Tensor) -> Tensor:
    """A table of 65,536 equally likely values, read with random bits."""
    return table.index_select(0, bits.reshape(-1).int() + LEVELS // 2).view(bits.shape)


def quantiles() -> Tensor:
    """65,536 standard normal quantiles, float64: read from a table, normals have the same bits everywhere."""
    return torch.special.ndtri((torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS)


@lru_cache(maxsize=32)
def normal_table(mean: float, std: float, device: torch.device) -> Tensor:
    return (mean + std * quantiles()).floor().to(torch.int16).to(device)
