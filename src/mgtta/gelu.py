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
BLOCK = 1024  # values that a program of the kernel takes


def gelu_linear(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of h W^T + b, where W and b get no gradients and that of h is up to the rounding of the slope."""
    if torch.is_grad_enabled():
        return _GeluLinear.apply(h, weight, bias)
    return gelu_and_slope(h, weight, bias, False)[0]


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, slope = gelu_and_slope(h, weight, bias, True)
        ctx.save_for_backward(slope, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        slope, weight = ctx.saved_tensors
        return (grad.float() * (slope.float() * (1 / STEPS) + LOWEST)).to(grad.dtype) @ weight, None, None


@torch.library.custom_op("mgtta::gelu_and_slope", mutates_args=())
def gelu_and_slope(h: Tensor, weight: Tensor, bias: Tensor | None, sloped: bool) -> tuple[Tensor, Tensor]:
    """GELU of h W^T + b; and where it is asked for its slope, in steps of 1 / STEPS from LOWEST on."""
    x = F.linear(h, weight, bias)
    if not x.is_cuda or triton is None:
        y, slope = plain_gelu_and_slope(x)
        return y, slope if sloped else slope.new_empty(0)
    slope = x.new_empty(x.shape if sloped else 0, dtype=torch.uint8)
    _kernel[(triton.cdiv(x.numel(), BLOCK),)](x, slope, x.numel(), LOWEST, STEPS, sloped, BLOCK, num_warps=4)
    return x, slope


@gelu_and_slope.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor | None, sloped: bool) -> tuple[Tensor, Tensor]:
    y = h.new_empty(*h.shape[:-1], len(weight))
    return y, y.new_empty(y.shape if sloped else 0, dtype=torch.uint8)


def plain_gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a layer's output, as the formulas have it."""
    z = x.float()
    density = torch.exp(-0.5 * z * z)
    below = _below(z, density)
    slope = below + z * density / math.sqrt(2 * math.pi)
    return (z * below).to(x.dtype), (slope * STEPS + (0.5 - LOWEST * STEPS)).to(torch.uint8)


def _below(z: Tensor, density: Tensor) -> Tensor:
    """Phi(z), from density = exp(-z^2 / 2)."""
    t = 1 / (1 + (0.3275911 / math.sqrt(2)) * z.abs())
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    beyond = 0.5 * series * density  # of |z|
    return torch.where(z < 0, beyond, 1 - beyond)


if triton is not None:

    @triton.jit
    def _kernel(
        x, slope, size,
        lowest: tl.constexpr, steps: tl.constexpr, sloped: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        density = tl.exp2(-0.7213475204444817 * z * z)  # exp(-z^2 / 2)
        t = 1 / (1 + 0.2316418882663604 * tl.abs(z))
        series = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t
        beyond = series * density
        below = tl.where(z < 0, beyond, 1 - beyond)
        tl.store(x + at, (z * below).to(x.dtype.element_ty), mask=inside)
        if sloped:
            kept = (below + z * density * 0.3989422804014327) * steps + (0.5 - lowest * steps)
            tl.store(slope + at, kept.to(tl.uint8), mask=inside)
