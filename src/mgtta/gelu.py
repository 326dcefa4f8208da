"""A frozen layer with GELU behind it. The way back needs GELU's slope alone, which is kept in 8 bits.

GELU overwrites the layer's output: a kernel (Triton, for a GPU) with a plain twin.

Notation    GELU(x) = x Phi(x), Phi the normal distribution; its slope is Phi(x) + x phi(x)
            Phi by Abramowitz and Stegun, 7.1.26, to 1.5e-7
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = None

LOWEST, STEPS = -0.13, 202.0  # the slope lies in [-0.129, 1.129]


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), in x's dtype."""
    z = x.float()
    return (z * _below(z, torch.exp(-0.5 * z * z))).to(x.dtype)


def gelu_linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of h W^T + b, where W and b get no gradients and that of h is up to the rounding of the slope."""
    return _GeluLinear.apply(h, weight, bias)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, slope = gelu_and_slope(h, weight, bias)
        ctx.save_for_backward(slope, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        slope, weight = ctx.saved_tensors
        return (grad.float() * (slope.float() / STEPS + LOWEST)).to(grad.dtype) @ weight, None, None


@torch.library.custom_op("mgtta::gelu_and_slope", mutates_args=())
def gelu_and_slope(h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU of h W^T + b, and its slope in steps of 1 / STEPS from LOWEST on."""
    x = F.linear(h, weight, bias)
    if not x.is_cuda or triton is None:
        return plain_gelu_and_slope(x)
    slope = torch.empty_like(x, dtype=torch.uint8)
    block = 1024
    _kernel[(triton.cdiv(x.numel(), block),)](x, slope, x.numel(), LOWEST=LOWEST, STEPS=STEPS, BLOCK=block, num_warps=4)
    return x, slope


@gelu_and_slope.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    y = h.new_empty(*h.shape[:-1], len(weight))
    return y, torch.empty_like(y, dtype=torch.uint8)


def plain_gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a layer's output, as the formulas have it."""
    z = x.float()
    density = torch.exp(-0.5 * z * z)
    below = _below(z, density)
    slope = below + z * density / math.sqrt(2 * math.pi)
    return (z * below).to(x.dtype), (slope * STEPS + (0.5 - LOWEST * STEPS)).to(torch.uint8)


def _below(z: Tensor, density: Tensor) -> Tensor:
    """Phi(z), from exp(-z^2 / 2)."""
    t = 1 / (1 + (0.3275911 / math.sqrt(2)) * z.abs())
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    beyond = 0.5 * series * density  # of |z|
    return torch.where(z < 0, beyond, 1 - beyond)


if triton is not None:

    @triton.jit
    def _kernel(x, slope, size, LOWEST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        density = tl.exp2(-0.7213475204444817 * z * z)  # exp(-z^2 / 2)
        t = 1 / (1 + 0.2316418882663604 * tl.abs(z))
        series = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t
        beyond = series * density
        below = tl.where(z < 0, beyond, 1 - beyond)
        tl.store(x + at, (z * below).to(x.dtype.element_ty), mask=inside)
        steps = (below + z * density * 0.3989422804014327) * STEPS + (0.5 - LOWEST * STEPS)
        tl.store(slope + at, steps.to(tl.uint8), mask=inside)
