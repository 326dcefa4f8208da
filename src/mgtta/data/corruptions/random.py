"""Random numbers of an image: a counter-based generator in integer tensor operations.

Every number is a hash (the splitmix64 finaliser: Steele, Lea, Flood, OOPSLA 2014) of (seed, name, image index, draw,
element). There is no state, so a number does not depend on the other images of the batch, the worker or the device.
"""

import zlib
from functools import cached_property, lru_cache
from math import ceil, prod

import torch
from torch import Tensor

LEVELS = 1 << 16  # a random number has 16 bits; a hash gives four of them


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mix(z: Tensor) -> Tensor:
    """Apply splitmix64's finaliser in place; the masks turn torch's arithmetic shifts into logical ones."""
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
        """The hash of seed, name and index of each image, (N,) int64."""
        stream = _mix(torch.tensor(_signed(self.stream), device="cpu"))
        return _mix(self.index * GOLDEN + stream.item())

    def bits(self, *shape: int) -> Tensor:
        """Return (N, *shape) int16, uniform over all 65,536 values."""
        n = prod(shape)
        self.draws += 1
        start = _signed(self.draws * (1 << 32) * GOLDEN)
        counter = torch.arange(ceil(n / 4), device=self.key.device) * GOLDEN + start
        z = _mix(self.key[:, None] + counter)
        return z.view(torch.int16)[:, :n].reshape(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Return (N, *shape) float32 in (0, 1)."""
        return (self.bits(*shape).float() + (LEVELS / 2 + 0.5)) / LEVELS

    def integers(self, n: int, *shape: int) -> Tensor:
        """Return (N, *shape) int64 in 0 .. n - 1, for small n."""
        return (self.bits(*shape).long() + LEVELS // 2) * n >> 16

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """Return (N, *shape) normal numbers, rounded down to integers (int16)."""
        return lookup(normal_table(mean, std, self.key.device), self.bits(*shape))


def lookup(table: Tensor, bits: Tensor) -> Tensor:
    """Return values of a table of 65,536 equally likely ones, chosen by random bits."""
    return table.index_select(0, bits.reshape(-1).int() + LEVELS // 2).view(bits.shape)


def quantiles() -> Tensor:
    """Return 65,536 standard normal quantiles, float64; a table gives the same bits on every device."""
    return torch.special.ndtri((torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS)


@lru_cache(maxsize=32)
def normal_table(mean: float, std: float, device: torch.device) -> Tensor:
    return (mean + std * quantiles()).floor().to(torch.int16).to(device)
