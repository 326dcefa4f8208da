"""BatchNorm with what follows it, a shortcut and ReLU, in few passes over memory: Triton kernels for channels last.

Statistics are blended with the source's as in mgtta.models.blended, by a share that may be 0. One pass reads the sums
of channels, another one normalises, adds the shortcut and applies ReLU. In the backward pass the slope of ReLU is found
again from the input, or from the output if there is a shortcut.

Notation    as in mgtta.models.blended: y = w r (x - M) + b, without ReLU and shortcut; g = dL/dy, 0 where ReLU gave 0
            s = w r, t = b - s M;  A = s (1 - a) / P sum(g), B = s (1 - a) / P r^2 sum(g (x - M))
            dx = s g - A - B (x - m);  dL/dw = r sum(g (x - M)), dL/db = sum(g), g is also the shortcut's gradient
Shapes      P places of all images, C channels
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta._lib.triton import tl, triton

PROGRAMS = 792  # that share the places of all channels: six for each multiprocessor of an H200
VALUES = 2048  # that a program has in hand
CHANNELS = 64  # of a block


class Told(NamedTuple):
    """Where the mean and the unbiased variance (C,) of a batch are left."""

    mean: Tensor
    var: Tensor


def has_batch_norm_kernels(x: Tensor) -> bool:
    """Return whether `batch_norm` takes x here: channels last on a GPU, and not while a compiler traces."""
    if not x.is_cuda or triton is None or torch.compiler.is_compiling() or x.ndim != 4:
        return False
    return x.dtype in (torch.bfloat16, torch.float32) and x.is_contiguous(memory_format=torch.channels_last)


def batch_norm(
    x: Tensor, layer: _BatchNorm, share: float, residual: Tensor | None, relu: bool, told: Told | None
) -> Tensor:
    """Return a layer's output for a batch x (N, C, H, W), by the batch's statistics and the running ones.

    Args:
        share: of the running statistics.
        residual: what is added to the output; None: nothing.
        relu: apply ReLU at last.
        told: where the batch's statistics are left; None: nowhere.
    """
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    affine = (layer.weight, layer.bias)
    given: Any = (layer.running_mean, layer.running_var, share, layer.eps, relu, told)
    if torch.is_grad_enabled():
        return _Normalised.apply(x, residual, *affine, *given)
    y, _ = forward_pass(x, residual, *affine, *given)
    return y


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, *given: Any) -> Tensor:
        y, found = forward_pass(x, residual, weight, bias, *given)
        _, _, ctx.share, _, ctx.relu, _ = given
        ctx.has_residual = residual is not None
        ctx.save_for_backward(x, found, *([y] if ctx.has_residual and ctx.relu else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, found, *output = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        dx, passed, dw, db = backward_pass(grad, x, found, output[0] if output else None, ctx.share, ctx.relu)
        return dx, passed if ctx.has_residual else None, dw, db, *[None] * 6


def forward_pass(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean_s: Tensor,
    var_s: Tensor,
    share: float,
    eps: float,
    relu: bool,
    told: Told | None,
) -> tuple[Tensor, Tensor]:
    """Return y, and what the backward pass needs of channels: s, t, M, m and r, (5, C)."""
    places, channels, block, tall = _sizes(x)
    programs, rows = _split(places, channels, block, tall)
    parts = x.new_empty((programs, 2, channels), dtype=torch.float32)
    blocks = triton.cdiv(channels, block)
    constants = {"C": channels, "ROWS": tall, "B": block}
    _sums_kernel[(programs, blocks)](x, mean_s, parts, places, rows, **constants, num_warps=4)
    found = x.new_empty((5, channels), dtype=torch.float32)
    left = (found, found) if told is None else told  # any tensors, if they are not written
    narrow = {"C": channels, "ROWS": 128, "B": 16, "told": told is not None}
    _moments_kernel[(triton.cdiv(channels, 16),)](
        parts, mean_s, var_s, weight, bias, found, *left, programs, places, share, eps, **narrow
    )
    y = torch.empty_like(x)
    adds = residual is not None
    _apply_kernel[(triton.cdiv(places, tall), blocks)](
        x, residual if adds else x, found, y, places, adds=adds, relu=relu, **constants, num_warps=4
    )
    return y, found


def backward_pass(
    grad: Tensor, x: Tensor, found: Tensor, output: Tensor | None, share: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the shortcut, of the weight and of the bias.

    Args:
        output: y, if a shortcut was added before ReLU; else None.
    """
    places, channels, block, tall = _sizes(x)
    programs, rows = _split(places, channels, block, tall)
    parts = x.new_empty((programs, 2, channels), dtype=torch.float32)
    blocks = triton.cdiv(channels, block)
    constants = {"C": channels, "ROWS": tall, "B": block, "num_warps": 4}
    added = output is not None
    passed = torch.empty_like(grad) if added else grad
    _grad_sums_kernel[(programs, blocks)](
        grad, x, output if added else x, found, passed, parts, places, rows, added=added, relu=relu, **constants
    )
    slopes = x.new_empty((4, channels), dtype=torch.float32)  # dL/dw, dL/db, A - B m, B
    narrow = {"C": channels, "ROWS": 128, "B": 16}
    _slopes_kernel[(triton.cdiv(channels, 16),)](parts, found, slopes, programs, places, 1.0 - share, **narrow)
    dx = torch.empty_like(x)
    _grad_kernel[(triton.cdiv(places, tall), blocks)](
        passed, x, found, slopes, dx, places, masks=relu and not added, **constants
    )
    return dx, passed, slopes[0], slopes[1]


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """Return places and channels, and how many channels and places a program takes at a time."""
    channels = x.shape[1]
    block = min(CHANNELS, triton.next_power_of_2(channels))
    return x.numel() // channels, channels, block, VALUES // block


def _split(places: int, channels: int, block: int, tall: int) -> tuple[int, int]:
    """Return how many programs share the places, and how many places each takes."""
    blocks = triton.cdiv(channels, block)
    rows = triton.cdiv(places, max(1, PROGRAMS // blocks))
    rows = triton.cdiv(rows, tall) * tall
    return triton.cdiv(places, rows), rows


# A kernel's C is not a constant: a network has many widths, and each would be compiled for itself.
if triton is not None:

    @triton.jit
    def _sums_kernel(x, pivot, parts, places, rows, C, ROWS: tl.constexpr, B: tl.constexpr):
        program = tl.program_id(0)
        columns = tl.program_id(1) * B + tl.arange(0, B)
        inside = columns < C
        around = tl.load(pivot + columns, mask=inside, other=0.0).to(tl.float32)  # near the mean: few digits are lost
        first = tl.zeros((ROWS, B), dtype=tl.float32)
        second = tl.zeros((ROWS, B), dtype=tl.float32)
        wide = tl.full((), C, tl.int64)  # 32 bits may not count all values
        begin = program * rows
        for start in tl.range(begin, tl.minimum(begin + rows, places), ROWS, num_stages=3):
            place = start + tl.arange(0, ROWS)
            there = (place[:, None] < places) & inside[None, :]
            value = tl.load(x + place[:, None] * wide + columns[None, :], mask=there, other=0.0).to(tl.float32)
            away = tl.where(there, value - around[None, :], 0.0)
            first += away
            second += away * away
        at = parts + program * 2 * C + columns
        tl.store(at, tl.sum(first, 0), mask=inside)
        tl.store(at + C, tl.sum(second, 0), mask=inside)

    @triton.jit
    def _moments_kernel(
        parts,
        mean_s,
        var_s,
        weight,
        bias,
        found,
        told_mean,
        told_var,
        programs,
        places,
        share,
        eps,
        C,
        ROWS: tl.constexpr,
        B: tl.constexpr,
        told: tl.constexpr,
    ):
        columns = tl.program_id(0) * B + tl.arange(0, B)
        inside = columns < C
        first = tl.zeros((ROWS, B), dtype=tl.float32)
        second = tl.zeros((ROWS, B), dtype=tl.float32)
        for start in range(0, programs, ROWS):
            program = start + tl.arange(0, ROWS)
            there = (program[:, None] < programs) & inside[None, :]
            at = parts + program[:, None] * 2 * C + columns[None, :]
            first += tl.load(at, mask=there, other=0.0)
            second += tl.load(at + C, mask=there, other=0.0)
        around = tl.load(mean_s + columns, mask=inside, other=0.0).to(tl.float32)
        away = tl.sum(first, 0) / places
        var = tl.sum(second, 0) / places - away * away
        var = tl.where(var < 0, 0.0, var)  # what is not a number stays so
        mean = around + away
        blend = mean + share * (around - mean)
        spread = var + share * (tl.load(var_s + columns, mask=inside, other=0.0).to(tl.float32) - var)
        r = 1.0 / tl.sqrt(spread + eps)
        s = tl.load(weight + columns, mask=inside, other=0.0) * r
        tl.store(found + columns, s, mask=inside)
        tl.store(found + C + columns, tl.load(bias + columns, mask=inside, other=0.0) - s * blend, mask=inside)
        tl.store(found + 2 * C + columns, blend, mask=inside)
        tl.store(found + 3 * C + columns, mean, mask=inside)
        tl.store(found + 4 * C + columns, r, mask=inside)
        if told:
            tl.store(told_mean + columns, mean, mask=inside)
            tl.store(told_var + columns, var * (places / (places - 1.0)), mask=inside)

    @triton.jit
    def _apply_kernel(
        x,
        residual,
        found,
        y,
        places,
        adds: tl.constexpr,
        relu: tl.constexpr,
        C,
        ROWS: tl.constexpr,
        B: tl.constexpr,
    ):
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1) * B + tl.arange(0, B)
        there = (place[:, None] < places) & (columns[None, :] < C)
        wide = tl.full((), C, tl.int64)
        at = place[:, None] * wide + columns[None, :]
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if adds:
            more = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        s = tl.load(found + columns, mask=columns < C, other=0.0)
        t = tl.load(found + C + columns, mask=columns < C, other=0.0)
        out = value * s[None, :] + t[None, :]
        if adds:
            out += more
        if relu:
            out = tl.where(out < 0, 0.0, out)  # what is not a number stays so
        tl.store(y + at, out.to(y.dtype.element_ty), mask=there)

    @triton.jit
    def _grad_sums_kernel(
        grad,
        x,
        output,
        found,
        passed,
        parts,
        places,
        rows,
        added: tl.constexpr,
        relu: tl.constexpr,
        C,
        ROWS: tl.constexpr,
        B: tl.constexpr,
    ):
        program = tl.program_id(0)
        columns = tl.program_id(1) * B + tl.arange(0, B)
        inside = columns < C
        s = tl.load(found + columns, mask=inside, other=0.0)
        t = tl.load(found + C + columns, mask=inside, other=0.0)
        blend = tl.load(found + 2 * C + columns, mask=inside, other=0.0)
        first = tl.zeros((ROWS, B), dtype=tl.float32)
        second = tl.zeros((ROWS, B), dtype=tl.float32)
        wide = tl.full((), C, tl.int64)  # 32 bits may not count all values
        begin = program * rows
        for start in tl.range(begin, tl.minimum(begin + rows, places), ROWS, num_stages=3):
            place = start + tl.arange(0, ROWS)
            there = (place[:, None] < places) & inside[None, :]
            at = place[:, None] * wide + columns[None, :]
            g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            if added:
                g = tl.where(tl.load(output + at, mask=there, other=0.0).to(tl.float32) > 0, g, 0.0)
                tl.store(passed + at, g.to(passed.dtype.element_ty), mask=there)
            elif relu:
                g = tl.where(value * s[None, :] + t[None, :] > 0, g, 0.0)
            first += g
            second += g * (value - blend[None, :])
        at = parts + program * 2 * C + columns
        tl.store(at, tl.sum(first, 0), mask=inside)
        tl.store(at + C, tl.sum(second, 0), mask=inside)

    @triton.jit
    def _slopes_kernel(parts, found, slopes, programs, places, keep, C, ROWS: tl.constexpr, B: tl.constexpr):
        columns = tl.program_id(0) * B + tl.arange(0, B)
        inside = columns < C
        first = tl.zeros((ROWS, B), dtype=tl.float32)
        second = tl.zeros((ROWS, B), dtype=tl.float32)
        for start in range(0, programs, ROWS):
            program = start + tl.arange(0, ROWS)
            there = (program[:, None] < programs) & inside[None, :]
            at = parts + program[:, None] * 2 * C + columns[None, :]
            first += tl.load(at, mask=there, other=0.0)
            second += tl.load(at + C, mask=there, other=0.0)
        total = tl.sum(first, 0)
        along = tl.sum(second, 0)
        s = tl.load(found + columns, mask=inside, other=0.0)
        mean = tl.load(found + 3 * C + columns, mask=inside, other=0.0)
        r = tl.load(found + 4 * C + columns, mask=inside, other=0.0)
        steep = s * keep / places * r * r * along
        tl.store(slopes + columns, r * along, mask=inside)
        tl.store(slopes + C + columns, total, mask=inside)
        tl.store(slopes + 2 * C + columns, s * keep / places * total - steep * mean, mask=inside)
        tl.store(slopes + 3 * C + columns, steep, mask=inside)

    @triton.jit
    def _grad_kernel(
        grad,
        x,
        found,
        slopes,
        dx,
        places,
        masks: tl.constexpr,
        C,
        ROWS: tl.constexpr,
        B: tl.constexpr,
    ):
        place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1) * B + tl.arange(0, B)
        inside = columns < C
        there = (place[:, None] < places) & inside[None, :]
        wide = tl.full((), C, tl.int64)
        at = place[:, None] * wide + columns[None, :]
        g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        s = tl.load(found + columns, mask=inside, other=0.0)
        constant = tl.load(slopes + 2 * C + columns, mask=inside, other=0.0)
        steep = tl.load(slopes + 3 * C + columns, mask=inside, other=0.0)
        if masks:
            t = tl.load(found + C + columns, mask=inside, other=0.0)
            g = tl.where(value * s[None, :] + t[None, :] > 0, g, 0.0)
        out = s[None, :] * g - constant[None, :] - steep[None, :] * value
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=there)
