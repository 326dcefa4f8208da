"""Products of 8-bit floats for the backward pass of a frozen MLP, which mgtta.fast.mlp computes.

Notation    g = dL/dy (M, d), G = (g W2) * D (M, hidden), D the slope of GELU
            8-bit floats have a scale for each row of a gradient and each column of a weight. A row of g is scaled by
            its largest value. |(g W2)_ij| <= |g_i| |column j of W2| (Cauchy-Schwarz) gives the scale of a row of G
            before the row is computed, so the scale needs no pass of its own.
Shapes      M rows, the tokens of all images; d features, hidden features between the layers
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mgtta._lib.triton import tl, triton

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # value of FLOAT8
ROUNDED = 1.0625  # factor by which a value may grow when it is rounded to 8 bits
TINY = 1e-30  # smallest scale
STEEPEST = 1.13  # GELU's slope D at most: D(-x) = 1 - D(x)


class Float8Weights(NamedTuple):
    """An MLP's weights for the backward pass, in 8 bits."""

    second: Tensor  # W2 (d, hidden), column by column in memory
    second_scale: Tensor  # (1, hidden)
    first: Tensor  # W1 (hidden, d), column by column
    first_scale: Tensor  # (1, d)
    reach: Tensor  # |g_i| times reach is the scale of row i of G


def float8_weights(first: Tensor, second: Tensor) -> Float8Weights:
    """Return the 8-bit weights of W1 (hidden, d) and W2 (d, hidden)."""
    longest = second.float().norm(dim=0).max()
    reach = (longest * (ROUNDED**2 * STEEPEST / LARGEST)).clamp_min(1e-4)  # not 0, also if W2 is 0
    return Float8Weights(*_rounded(second), *_rounded(first), reach)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight in 8 bits, column by column in memory, and the scale of each column."""
    scale = weight.float().abs().amax(0, keepdim=True).clamp_min(TINY) / LARGEST
    return (weight.float() / scale).to(FLOAT8).t().contiguous().t(), scale


@cache
def multiplies_float8(device: torch.device) -> bool:
    """Return whether the device multiplies 8-bit floats with a scale for each row and column.

    Not every GPU with 8-bit floats does.
    """
    square = torch.ones(32, 32, device=device)
    row = torch.ones(1, 32, device=device)
    try:
        product(square.to(FLOAT8), row.view(32, 1), square.to(FLOAT8).t(), row, torch.bfloat16)
    except (RuntimeError, TypeError):
        return False
    return True


def product(a: Tensor, rows: Tensor, b: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (a * rows) @ (b * columns)."""
    if not a.is_cuda:
        return ((a.float() * rows) @ (b.float() * columns)).to(dtype)
    found = torch._scaled_mm(a.flatten(0, -2), b, rows.flatten(0, -2), columns, out_dtype=dtype, use_fast_accum=True)
    return found.view(*a.shape[:-1], -1)


def scaled_rows(grad: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return g in 8 bits; the scales of its rows divided by those of the rows of G; and the scales of the rows of G."""
    if grad.is_cuda and triton is not None:
        return _scaled_rows(grad, reach)
    return plain_scaled_rows(grad, reach)


def plain_scaled_rows(grad: Tensor, reach: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `scaled_rows`, as the formulas say."""
    g = grad.float()
    scale = g.abs().amax(-1, keepdim=True).clamp_min(TINY) / LARGEST
    g = g / scale
    growth = g.square().sum(-1, keepdim=True).sqrt().clamp_min(1.0) * reach
    return g.to(FLOAT8), 1 / growth, growth * scale


if triton is not None:

    @triton.jit
    def _rows_kernel(
        grad,
        reach,
        g,
        ratio,
        later_scale,
        d: tl.constexpr,
        largest: tl.constexpr,
        tiny: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
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
        ratio = grad.new_empty((*some, 1), dtype=torch.float32)
        later_scale = torch.empty_like(ratio)
        block = triton.next_power_of_2(d)
        constants = {"d": d, "largest": LARGEST, "tiny": TINY, "BLOCK": block, "num_warps": 2}
        kernel = torch.library.wrap_triton(_rows_kernel)
        kernel[(grad.numel() // d,)](grad, reach, g, ratio, later_scale, **constants)
        return g, ratio, later_scale
