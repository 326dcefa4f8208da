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


def norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: torch.dtype | None, added: Tensor | None = None
) -> Normed:
    """Return LayerNorm of x (N, L, d), and what its backward pass needs, by one kernel.

    Args:
        keep: dtype of z; None: z and scale are not needed, and stay empty.
        added: what is added to x before, (N, L, d); None: nothing.
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
    constants = {"d": d, "kept": keep is not None, "adds": adds, "BLOCK": triton.next_power_of_2(d), "num_warps": 4}
    _forward_kernel[(n * length,)](x, more, whole, weight, bias, z, scale, y, first, length, eps, **constants)
    return Normed(z, scale, y, first, whole)


def plain_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: torch.dtype | None, added: Tensor | None = None
) -> Normed:
    """Return the same as `norm_forward`, as the formulas say.

    The first token is computed separately. If it were a slice of the whole, a compiler would write it all in float32.
    """
    if added is not None:
        x = x + added
    mean = x.float().mean(-1, keepdim=True)
    scale = ((x.float() - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    z = (x.float() - mean) * scale
    first = (x[:, 0].float() - mean[:, 0]) * scale[:, 0] * weight + bias
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
        weight,
        bias,
        z,
        scale,
        y,
        first,
        length,
        eps,
        d: tl.constexpr,
        kept: tl.constexpr,
        adds: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0)
        columns = tl.arange(0, BLOCK)
        inside = columns < d
        wide = tl.full((), d, tl.int64)  # 32 bits may not count all values
        at = row * wide + columns
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if adds:
            value += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
            value = value.to(whole.dtype.element_ty).to(tl.float32)  # as it is kept
            tl.store(whole + at, value.to(whole.dtype.element_ty), mask=inside)
        w = tl.load(weight + columns, mask=inside, other=0.0)
        b = tl.load(bias + columns, mask=inside, other=0.0)
        away = tl.where(inside, value - tl.sum(value, 0) / d, 0.0)
        s = 1.0 / tl.sqrt(tl.sum(away * away, 0) / d + eps)
        out = away * s * w + b
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)
        if kept:
            tl.store(z + at, (away * s).to(z.dtype.element_ty), mask=inside)
            tl.store(scale + row, s)
        if row % length == 0:
            tl.store(first + (row // length) * wide + columns, out, mask=inside)

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
        BLOCK: tl.constexpr,
    ):
        program = tl.program_id(0)
        columns = tl.arange(0, BLOCK)
        inside = columns < d
        w = tl.load(weight + columns, mask=inside, other=0.0)
        dw = tl.zeros((BLOCK,), dtype=tl.float32)
        db = tl.zeros((BLOCK,), dtype=tl.float32)
        wide = tl.full((), d, tl.int64)  # 32 bits may not count all values
        for row in tl.range(program, rows, tl.num_programs(0), num_stages=3):
            at = row * wide + columns
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            x = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
            r = tl.zeros((BLOCK,), dtype=tl.float32)
            if passed:
                r = tl.load(through + at, mask=inside, other=0.0).to(tl.float32)  # all loads come before any sum
            s = tl.load(scale + row)
            if tapped:  # noqa: SIM102 - a constant when the kernel is compiled
                if row % length == 0:
                    g += tl.load(tap + (row // length) * stride + columns, mask=inside, other=0.0)
            dw += g * x
            db += g
            gw = g * w
            out = r + s * (gw - tl.sum(gw, 0) / d - x * (tl.sum(gw * x, 0) / d))
            tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
        tl.store(sums + program * 2 * d + columns, dw, mask=inside)
        tl.store(sums + program * 2 * d + d + columns, db, mask=inside)

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
        programs = min(PROGRAMS, n * length)
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
            "BLOCK": triton.next_power_of_2(d),
            "num_warps": 4,
        }
        torch.library.wrap_triton(_kernel)[(programs,)](*tensors, n * length, length, stride, **constants)
        sums = grad.new_empty((2, d), dtype=torch.float32)
        torch.library.wrap_triton(_sum)[(triton.cdiv(2 * d, 16),)](
            parts, sums, programs, size=2 * d, ROWS=128, COLUMNS=16, num_warps=8
        )
        return dx, sums
