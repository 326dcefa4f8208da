"""LayerNorm in one pass over its rows, forward and backward, and the backward pass of queries, keys and values.

LayerNorm's passes are Triton kernels on a GPU, with plain versions elsewhere. torch.compile fuses the forward pass by
itself, but does not generate the backward passes.

Notation    y = z w + b, z the normalised input, s = 1 / std of each row, g = dL/dy
            dL/dx = s (g w - mean(g w) - z mean(g w z)), dL/dw = sum of g z over rows, dL/db = sum of g
Shapes      N images, L tokens, d features
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mgtta._lib.triton import tl, triton

TILE = 1024  # values that a program has in hand


@torch.library.custom_op("mgtta::qkv_backward", mutates_args=())
def qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of h (N, L, d), from those of queries, keys and values (N, heads, L, size) of h W^T + b.

    Three products are added in place, so that the gradients need not be concatenated first. One of them is copied at a
    time, and freed.
    """
    n, heads, length, size = dq.shape
    first, *others = weight.split(heads * size)
    found = _rows(dq) @ first
    for grad, part in zip((dk, dv), others, strict=True):
        found.addmm_(_rows(grad), part)
    return found.view(n, length, -1)


def _rows(grad: Tensor) -> Tensor:
    """Return (N L, heads size) from (N, heads, L, size)."""
    return grad.transpose(1, 2).flatten(2).flatten(0, 1)


@qkv_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, weight: Tensor) -> Tensor:
    return dq.new_empty(dq.shape[0], dq.shape[2], weight.shape[1])


class Normed(NamedTuple):
    """What the forward pass of LayerNorm gives."""

    z: Tensor  # (N, L, d), in the dtype in which it is kept
    scale: Tensor  # s, (N, L, 1)
    y: Tensor  # (N, L, d), in the dtype of x
    first: Tensor  # y of the first token, (N, d), float32
    x: Tensor  # the input, with what was added to it


def has_norm_kernel(x: Tensor) -> bool:
    """Return whether `norm_forward` takes x here: on a GPU, and not while a compiler traces, which fuses by itself."""
    return x.is_cuda and triton is not None and not torch.compiler.is_compiling()


def _rows_at_a_time(d: int) -> int:
    """Return how many rows of d features a program takes at a time: one short row would not keep it busy."""
    return max(1, TILE // triton.next_power_of_2(d))


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    keep: torch.dtype | None,
    added: Tensor | None = None,
    shift: Tensor | None = None,
) -> Normed:
    """Return LayerNorm of x (N, L, d), and what its backward pass needs, by one kernel.

    Args:
        keep: dtype of z; None: z and scale are not needed, and stay empty.
        added: what is added to x before, (N, L, d); None: nothing.
        shift: what is added to each row before, but not to the x that is returned, (d,); None: nothing.
    """
    x = x.contiguous()
    n, length, d = x.shape
    z = x.new_empty(x.shape if keep is not None else 0, dtype=keep)
    scale = x.new_empty((n, length, 1) if keep is not None else 0, dtype=torch.float32)
    y = torch.empty_like(x)
    first = x.new_empty((n, d), dtype=torch.float32)
    adds = added is not None
    whole = torch.empty_like(x) if adds else x
    more = added.contiguous() if added is not None else x  # any tensor, if it is not read
    offset = weight if shift is None else shift  # likewise
    tensors = (x, more, whole, offset, weight, bias, z, scale, y, first)
    rows = _rows_at_a_time(d)
    _forward_kernel[(triton.cdiv(n * length, rows),)](
        *tensors,
        n * length,
        length,
        eps,
        d=d,
        kept=keep is not None,
        adds=adds,
        shifts=shift is not None,
        ROWS=rows,
        BLOCK=triton.next_power_of_2(d),
        num_warps=4,
    )
    return Normed(z, scale, y, first, whole)


def plain_norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    keep: torch.dtype | None,
    added: Tensor | None = None,
    shift: Tensor | None = None,
) -> Normed:
    """Return the same as `norm_forward`, as the formulas say.

    The first token is computed separately. If it were a slice of the whole, a compiler would write it all in float32.
    """
    if added is not None:
        x = x + added
    t = x.float() if shift is None else x.float() + shift
    mean = t.mean(-1, keepdim=True)
    scale = ((t - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    z = (t - mean) * scale
    first = (t[:, 0] - mean[:, 0]) * scale[:, 0] * weight + bias
    return Normed(z if keep is None else z.to(keep), scale, (z * weight + bias).to(x.dtype), first, x)


PROGRAMS = 912  # that share the rows; an H200 runs all of them at once


def norm_backward(
    grad: Tensor, z: Tensor, scale: Tensor, weight: Tensor, through: Tensor | None, tap: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias.

    Args:
        grad: of y, (N, L, d), in any dtype.
        z: (N, L, d), in any dtype.
        scale: s, (N, L, 1).
        through: gradient of x that does not come through the layer, (N, L, d), in the dtype of the gradient of x; None:
            there is none, and that dtype is the one of `grad`.
        tap: further gradient of y of the first token, (N, d), float32; None: there is none.
    """
    if grad.is_cuda and triton is not None:
        if tap is not None and tap.stride(1) != 1:
            tap = tap.contiguous()
        if through is not None:
            through = through.contiguous()
        dx, sums = _in_one_pass(grad.contiguous(), z, scale, weight, through, tap)
        return dx, *sums.unbind()
    return plain_norm_backward(grad, z, scale, weight, through, tap)


def plain_norm_backward(
    grad: Tensor, z: Tensor, scale: Tensor, weight: Tensor, through: Tensor | None, tap: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `norm_backward`, as the formulas say."""
    g = grad.float()
    z = z.float()
    if tap is not None:
        g = torch.cat([g[:, :1] + tap.unsqueeze(1), g[:, 1:]], 1)
    gw = g * weight
    dx = scale * (gw - gw.mean(-1, keepdim=True) - z * (gw * z).mean(-1, keepdim=True))
    dtype = grad.dtype
    if through is not None:
        dx = dx + through.float()
        dtype = through.dtype
    return dx.to(dtype), (g * z).sum((0, 1)), g.sum((0, 1))


if triton is not None:

    @triton.jit
    def _forward_kernel(
        x,
        more,
        whole,
        shift,
        weight,
        bias,
        z,
        scale,
        y,
        first,
        count,
        length,
        eps,
        d: tl.constexpr,
        kept: tl.constexpr,
        adds: tl.constexpr,
        shifts: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        start = tl.program_id(0) * ROWS
        row = start + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK)
        inside = (row[:, None] < count) & (columns[None, :] < d)
        wide = tl.full((), d, tl.int64)  # 32 bits may not count all values
        at = row[:, None] * wide + columns[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if adds:
            value += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
            value = value.to(whole.dtype.element_ty).to(tl.float32)  # as it is kept
            tl.store(whole + at, value.to(whole.dtype.element_ty), mask=inside)
        if shifts:
            value += tl.load(shift + columns, mask=columns < d, other=0.0)[None, :]
        w = tl.load(weight + columns, mask=columns < d, other=0.0)
        b = tl.load(bias + columns, mask=columns < d, other=0.0)
        away = tl.where(columns[None, :] < d, value - (tl.sum(value, 1) / d)[:, None], 0.0)
        s = 1.0 / tl.sqrt(tl.sum(away * away, 1) / d + eps)
        normed = away * s[:, None]
        out = normed * w[None, :] + b[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
        if kept:
            tl.store(z + at, normed.to(z.dtype.element_ty), mask=inside)
            tl.store(scale + row, s, mask=row < count)
        if (start + ROWS - 1) // length * length >= start:  # an image begins among these rows
            begins = inside & (row % length == 0)[:, None]
            tl.store(first + (row // length)[:, None] * wide + columns[None, :], out, mask=begins)

    @triton.jit
    def _kernel(
        grad,
        z,
        scale,
        weight,
        through,
        tap,
        dx,
        sums,
        rows,
        length,
        stride,
        d: tl.constexpr,
        passed: tl.constexpr,
        tapped: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        program = tl.program_id(0)
        columns = tl.arange(0, BLOCK)
        w = tl.load(weight + columns, mask=columns < d, other=0.0)
        dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        wide = tl.full((), d, tl.int64)  # 32 bits may not count all values
        for start in tl.range(program * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=3):
            row = start + tl.arange(0, ROWS)
            inside = (row[:, None] < rows) & (columns[None, :] < d)
            at = row[:, None] * wide + columns[None, :]
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
            r = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
            if passed:
                r = tl.load(through + at, mask=inside, other=0.0).to(tl.float32)  # all loads come before any sum
            s = tl.load(scale + row, mask=row < rows, other=0.0)
            if tapped:  # noqa: SIM102 - a constant when the kernel is compiled
                if (start + ROWS - 1) // length * length >= start:  # an image begins among these rows
                    begins = inside & (row % length == 0)[:, None]
                    g += tl.load(tap + (row // length)[:, None] * stride + columns[None, :], mask=begins, other=0.0)
            dw += g * x
            db += g
            gw = g * w[None, :]
            centred = gw - (tl.sum(gw, 1) / d)[:, None] - x * (tl.sum(gw * x, 1) / d)[:, None]
            tl.store(dx + at, (r + s[:, None] * centred).to(dx.dtype.element_ty), mask=inside)
        tl.store(sums + program * 2 * d + columns, tl.sum(dw, 0), mask=columns < d)
        tl.store(sums + program * 2 * d + d + columns, tl.sum(db, 0), mask=columns < d)

    @triton.jit
    def _sum(parts, total, count, size: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        found = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(0, count, ROWS):
            rows = first + tl.arange(0, ROWS)[:, None]
            found += tl.load(parts + rows * size + columns, mask=(rows < count) & (columns < size), other=0.0)
        tl.store(total + columns, tl.sum(found, 0)[None, :], mask=columns < size)

    @torch.library.triton_op("mgtta::norm_backward", mutates_args={})
    def _in_one_pass(
        grad: Tensor, z: Tensor, scale: Tensor, weight: Tensor, through: Tensor | None, tap: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n, length, d = grad.shape
        rows = _rows_at_a_time(d)
        programs = min(PROGRAMS, triton.cdiv(n * length, rows))
        past = grad if through is None else through  # any tensor, if it is not read
        dx = torch.empty_like(past)
        parts = grad.new_empty((programs, 2, d), dtype=torch.float32)
        tapped = tap is not None
        taps = scale if tap is None else tap  # any tensor, if it is not read
        stride = 0 if tap is None else tap.stride(0)
        tensors = (grad, z, scale, weight, past, taps, dx, parts)
        constants = {
            "d": d,
            "passed": through is not None,
            "tapped": tapped,
            "ROWS": rows,
            "BLOCK": triton.next_power_of_2(d),
            "num_warps": 4,
        }
        torch.library.wrap_triton(_kernel)[(programs,)](*tensors, n * length, length, stride, **constants)
        sums = grad.new_empty((2, d), dtype=torch.float32)
        torch.library.wrap_triton(_sum)[(triton.cdiv(2 * d, 16),)](
            parts, sums, programs, size=2 * d, ROWS=128, COLUMNS=16, num_warps=8
        )
        return dx, sums
