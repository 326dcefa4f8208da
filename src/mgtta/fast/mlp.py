"""The frozen MLP of a transformer's block: y = GELU(h W1^T + b1) W2^T + b2.

The way back needs GELU's slope alone, which is kept in 8 bits. GELU overwrites its input: a kernel (Triton, for a GPU)
with a plain twin. On the way back one kernel multiplies by W2 and by the slope, where a GPU is a Hopper; elsewhere they
are two. On request the products of the way back, too, are those of 8-bit floats.

Notation    GELU(x) = x Phi(x), Phi the normal distribution; its slope D = Phi(x) + x phi(x) lies in [-0.129, 1.129]
            Phi by Abramowitz and Stegun, 7.1.26, to 1.5e-7
            g = dL/dy (M, d);  dL/dh = G W1, with G = (g W2) * D (M, hidden)
            8-bit floats have a scale for each row of a gradient and each column of a weight. A row of g is scaled by
            its largest value. |(g W2)_ij| <= |g_i| |column j of W2|, by Cauchy and Schwarz, which scales a row of G
            before it is there, so that it needs no pass of its own.
Shapes      M rows, the tokens of all images; d features, hidden ones between the layers
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta._lib.triton import TensorDescriptor, tl, triton

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
    steepest = 1 - LOWEST  # D(-x) = 1 - D(x)
    reach = (longest * (ROUNDED**2 * steepest / LARGEST)).clamp_min(1e-4)  # where W2 is 0
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
            return _sloped_product(grad, w2, slope) @ w1, *[None] * 5
        return float8_backward(grad, slope, Float8Weights(*weights)), *[None] * (5 + len(weights))


def float8_backward(grad: Tensor, slope: Tensor, weights: Float8Weights) -> Tensor:
    """dL/dh from g and the slope that was kept, by products of 8-bit floats."""
    kernel = grad.is_cuda and triton is not None
    g, ratio, later_scale = (_scaled_rows if kernel else plain_scaled_rows)(grad.contiguous(), weights.reach)
    later = _sloped_product(g, weights.second, slope, ratio, weights.second_scale)
    return _product(later, later_scale, weights.first, weights.first_scale, grad.dtype)


def plain_scaled_rows(grad: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g in 8 bits; the scales of its rows over those of the rows of G; and the latter."""
    g = grad.float()
    scale = g.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    g = g / scale
    growth = g.square().sum(-1, keepdim=True).sqrt().clamp_min(1.0) * reach
    return g.to(FLOAT8), 1 / growth, growth * scale


def _sloped_product(
    grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """(g W2) * D in the dtype of g, where rows and columns scale the product if g and W2 are 8-bit floats."""
    if slope.is_cuda and TensorDescriptor is not None and _is_for_hopper(weight):
        return fused_sloped_product(grad, weight, slope, rows, columns)
    return plain_sloped_product(grad, weight, slope, rows, columns)


def _is_for_hopper(weight: Tensor) -> bool:
    """Whether the fused kernel can take it: in at most 16 bits, and in rows of a multiple of 16 bytes."""
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and weight.dtype.itemsize <= 2 and all(size % 16 == 0 for size in weight.shape)


def plain_sloped_product(
    grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None, columns: Tensor | None
) -> Tensor:
    """_sloped_product, one after the other."""
    if rows is None or columns is None:
        product = grad @ weight
    else:
        product = _product(grad, rows, weight, columns, torch.bfloat16 if grad.is_cuda else torch.float32)
    return (product.float() * (slope.float() * (1 / STEPS) + LOWEST)).to(grad.dtype)


def _product(a: Tensor, rows: Tensor, b: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """(a * rows) @ (b * columns)."""
    if not a.is_cuda:
        return ((a.float() * rows) @ (b.float() * columns)).to(dtype)
    found = torch._scaled_mm(a.flatten(0, -2), b, rows.flatten(0, -2), columns, out_dtype=dtype, use_fast_accum=True)
    return found.view(*a.shape[:-1], -1)


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


@torch.library.custom_op("mgtta::fused_sloped_product", mutates_args=())
def fused_sloped_product(
    grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None, columns: Tensor | None
) -> Tensor:
    """plain_sloped_product in one kernel. An 8-bit weight lies column by column in memory, any other row by row."""
    d, hidden = weight.shape
    found, eight = torch.empty_like(slope, dtype=grad.dtype), rows is not None
    tall, wide, deep, stages = (128, 128, 128, 3) if eight else (128, 128, 64, 2)
    blocks = triton.cdiv(slope.numel() // hidden, tall) * triton.cdiv(hidden, wide)
    _sloped_kernel[(blocks,)](
        TensorDescriptor.from_tensor(grad.contiguous().view(-1, d), [tall, deep]),
        TensorDescriptor.from_tensor(weight.t(), [wide, deep])
        if eight
        else TensorDescriptor.from_tensor(weight, [deep, wide]),
        TensorDescriptor.from_tensor(slope.view(-1, hidden), [tall, wide]),
        TensorDescriptor.from_tensor(found.view(-1, hidden), [tall, wide]),
        rows, columns, slope.numel() // hidden, hidden, d,
        eight, LOWEST, STEPS, tall, wide, deep, stages, num_warps=4,
    )  # fmt: skip
    return found


@fused_sloped_product.register_fake
def _(grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    return torch.empty_like(slope, dtype=grad.dtype)


def plain_gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """gelu_and_slope of a layer's output, as the formulas have it."""
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
    def _sloped_kernel(
        grad, weight, slope, out, row_scales, column_scales, m, n, k,
        eight: tl.constexpr, lowest: tl.constexpr, steps: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        across = tl.cdiv(n, N)
        i, j = (tl.program_id(0) // across) * M, (tl.program_id(0) % across) * N
        product = tl.zeros((M, N), dtype=tl.float32)
        for at in tl.range(0, k, K, num_stages=STAGES):
            if eight:
                product = tl.dot(grad.load([i, at]), weight.load([j, at]).T, product)
            else:
                product = tl.dot(grad.load([i, at]), weight.load([at, j]), product)
        if eight:
            rows, columns = i + tl.arange(0, M), j + tl.arange(0, N)
            product *= tl.load(row_scales + rows, mask=rows < m, other=0.0)[:, None]
            product *= tl.load(column_scales + columns, mask=columns < n, other=0.0)[None, :]
        product *= slope.load([i, j]).to(tl.float32) * (1 / steps) + lowest
        out.store([i, j], product.to(out.dtype))

    @triton.jit
    def _rows_kernel(
        grad, reach, g, ratio, later_scale, d: tl.constexpr, largest: tl.constexpr, tiny: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        columns = tl.arange(0, BLOCK)
        inside = columns < d
        x = tl.load(grad + row * d + columns, mask=inside, other=0.0).to(tl.float32)
        s = tl.maximum(tl.max(tl.abs(x), 0), tiny) / largest
        x = x / s
        growth = tl.maximum(tl.sqrt(tl.sum(x * x, 0)), 1.0) * tl.load(reach)
        tl.store(g + row * d + columns, x.to(g.dtype.element_ty), mask=inside)
        tl.store(ratio + row, 1 / growth)
        tl.store(later_scale + row, growth * s)

    @torch.library.triton_op("mgtta::scaled_rows", mutates_args={})
    def _scaled_rows(grad: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *some, d = grad.shape
        g = torch.empty_like(grad, dtype=FLOAT8)
        ratio, later_scale = (grad.new_empty((*some, 1), dtype=torch.float32) for _ in range(2))
        torch.library.wrap_triton(_rows_kernel)[(grad.numel() // d,)](
            grad, reach, g, ratio, later_scale,
            d=d, largest=LARGEST, tiny=TINY, BLOCK=triton.next_power_of_2(d), num_warps=2,
        )  # fmt: skip
        return g, ratio, later_scale
