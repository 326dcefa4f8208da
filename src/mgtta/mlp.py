"""The frozen MLP of a transformer's block: y = GELU(h W1^T + b1) W2^T + b2.

The way back needs GELU's slope alone, which is kept in 8 bits. GELU overwrites its input: a kernel (Triton, for a GPU)
with a plain twin. On request the products of the way back, too, are those of 8-bit floats.

Notation    GELU(x) = x Phi(x), Phi the normal distribution; its slope D = Phi(x) + x phi(x) lies in [-0.129, 1.129]
            Phi by Abramowitz and Stegun, 7.1.26, to 1.5e-7
            g = dL/dy (M, d);  dL/dh = G W1, with G = (g W2) * D (M, hidden)
            8-bit floats have a scale for each row of a gradient and each column of a weight. A row of g is scaled by
            its largest value. |(g W2)_ij| <= |g_i| |column j of W2|, by Cauchy and Schwarz, which scales a row of G
            before it is there, so that it needs no pass of its own.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta._triton import tl, triton

LOWEST, STEPS = -0.13, 202.0  # of the slope, as it is kept
BLOCK = 1024  # values that a program of GELU's kernel takes
FLOAT8, LARGEST = torch.float8_e4m3fn, 448.0
ROUNDED = 1.0625  # by which a value may grow when it is rounded to 8 bits
TINY = 1e-30


class Float8Weights(NamedTuple):
    """An MLP's weights for the way back, in 8 bits."""

    second: Tensor  # W2 (d, hidden), column by column in memory
    second_scale: Tensor  # (1, hidden)
    first: Tensor  # W1 (hidden, d), column by column
    first_scale: Tensor  # (1, d)
    reach: Tensor  # by which |g_i| comes to the scale of row i of G


def float8_weights(first: Tensor, second: Tensor) -> Float8Weights:
    """From W1 (hidden, d) and W2 (d, hidden)."""
    longest = second.float().norm(dim=0).max()
    reach = (longest * (ROUNDED**2 * (1 - LOWEST) / LARGEST)).clamp_min(1e-4)  # for whom W2 is 0
    return Float8Weights(*_rounded(second), *_rounded(first), reach)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.float().abs().amax(0, keepdim=True).clamp_min(TINY) / LARGEST
    return (weight.float() / scale).to(FLOAT8).t().contiguous().t(), scale


@cache
def multiplies_float8(device: torch.device) -> bool:
    """Whether it can, with a scale for each row and column: not every GPU that has 8-bit floats does."""
    square, row = torch.ones(32, 32, device=device), torch.ones(1, 32, device=device)
    try:
        _product(square.to(FLOAT8), row.view(32, 1), square.to(FLOAT8).t(), row, torch.bfloat16)
    except (RuntimeError, TypeError):
        return False
    return True


def mlp(
    h: Tensor, first: nn.Linear, second: nn.Linear, float8: Float8Weights | None = None, unseen: bool = False
) -> Tensor:
    """y of h (N, L, d). The layers get no gradients; that of h is up to the rounding of what it is made of.

    Args:
        float8: weights for the way back; None: the layers' own.
        unseen: whether only the gradient matters: y is zeros, in one place for all.
    """
    if torch.is_grad_enabled():
        return _MLP.apply(h, first.weight, first.bias, second.weight, second.bias, unseen, *(float8 or ()))
    return F.linear(gelu_and_slope(h, first.weight, first.bias, False)[0], second.weight, second.bias)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, unseen: bool, *float8: Tensor
    ) -> Tensor:
        y, slope = gelu_and_slope(h, w1, b1, True)
        ctx.save_for_backward(slope, *(float8 or (w1, w2)))
        return y.new_zeros(()).expand(*y.shape[:-1], len(w2)) if unseen else F.linear(y, w2, b2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        slope, *weights = ctx.saved_tensors
        if len(weights) == 2:
            w1, w2 = weights
            return _times_slope(grad @ w2, slope).to(grad.dtype) @ w1, *[None] * 5
        return float8_backward(grad, slope, Float8Weights(*weights)), *[None] * (5 + len(weights))


def float8_backward(grad: Tensor, slope: Tensor, weights: Float8Weights) -> Tensor:
    """dL/dh from g and the slope that was kept, by products of 8-bit floats."""
    kernel = grad.is_cuda and triton is not None
    g, scale, later_scale, inverse = (_scaled_rows if kernel else plain_scaled_rows)(grad.contiguous(), weights.reach)
    later = _product(g, scale, weights.second, weights.second_scale, grad.dtype)
    later = (_times_slope(later, slope) * inverse).to(FLOAT8)
    return _product(later, later_scale, weights.first, weights.first_scale, grad.dtype)


def plain_scaled_rows(grad: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g in 8 bits; the scales of its rows; those of the rows of G; and 1 / the latter."""
    g = grad.float()
    scale = g.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    g = g / scale
    later_scale = g.square().sum(-1, keepdim=True).sqrt().clamp_min(1.0) * scale * reach
    return g.to(FLOAT8), scale, later_scale, 1 / later_scale


def _product(a: Tensor, rows: Tensor, b: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """(a * rows) @ (b * columns)."""
    if not a.is_cuda:
        return ((a.float() * rows) @ (b.float() * columns)).to(dtype)
    found = torch._scaled_mm(a.flatten(0, -2), b, rows.flatten(0, -2), columns, out_dtype=dtype, use_fast_accum=True)
    return found.view(*a.shape[:-1], -1)


def _times_slope(grad: Tensor, slope: Tensor) -> Tensor:
    return grad.float() * (slope.float() * (1 / STEPS) + LOWEST)


@torch.library.custom_op("mgtta::gelu_and_slope", mutates_args=())
def gelu_and_slope(h: Tensor, weight: Tensor, bias: Tensor | None, sloped: bool) -> tuple[Tensor, Tensor]:
    """GELU of h W^T + b; and where it is asked for its slope, in steps of 1 / STEPS from LOWEST on."""
    x = F.linear(h, weight, bias)
    if not x.is_cuda or triton is None:
        y, slope = plain_gelu_and_slope(x)
        return y, slope if sloped else slope.new_empty(0)
    slope = x.new_empty(x.shape if sloped else 0, dtype=torch.uint8)
    _gelu_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, slope, x.numel(), LOWEST, STEPS, sloped, BLOCK, num_warps=4)
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
    def _gelu_kernel(
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

    @triton.jit
    def _rows_kernel(
        grad, reach, g, scale, later_scale, inverse, d: tl.constexpr, largest: tl.constexpr, tiny: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < d
        x = tl.load(grad + row * d + columns, mask=inside, other=0.0).to(tl.float32)
        s = tl.maximum(tl.max(tl.abs(x), 0), tiny) / largest
        x = x / s
        later = tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1.0) * s * tl.load(reach)
        tl.store(g + row * d + columns, x.to(g.dtype.element_ty), mask=inside)
        tl.store(scale + row, s)
        tl.store(later_scale + row, later)
        tl.store(inverse + row, 1 / later)

    @torch.library.triton_op("mgtta::scaled_rows", mutates_args={})
    def _scaled_rows(grad: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *some, d = grad.shape
        g = torch.empty_like(grad, dtype=FLOAT8)
        scale, later_scale, inverse = (grad.new_empty((*some, 1), dtype=torch.float32) for _ in range(3))
        torch.library.wrap_triton(_rows_kernel)[(grad.numel() // d,)](
            grad, reach, g, scale, later_scale, inverse,
            d=d, largest=LARGEST, tiny=TINY, BLOCK=triton.next_power_of_2(d), num_warps=2,
        )  # fmt: skip
        return g, scale, later_scale, inverse
