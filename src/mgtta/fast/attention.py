"""The attention of one query over many keys: all that a ViT whose head reads the class token needs of its last block.

Attention kernels are made for many queries. On a GPU one Triton kernel in each direction reads keys and values once, as
they lie side by side in memory, and the backward pass writes their gradients so. Only they are kept.

Notation    s_j = q k_j / sqrt(size), p = softmax(s), o = sum_j p_j v_j, e = log sum_j exp(s_j)
            dv_j = p_j do, ds_j = p_j (do v_j - do o), dk_j = ds_j q / sqrt(size), dq = sum_j ds_j k_j / sqrt(size)
Shapes      N images, L tokens
"""

import math
from typing import Any

import torch
from torch import Tensor

from mgtta._lib.triton import tl, triton

ROWS = 64  # tokens that a program reads at a time


def attention_of_one(q: Tensor, kv: Tensor) -> Tensor:
    """Return the attention of one query (N, 1, heads, size) over keys and values (N, L, 2, heads, size), in float32.

    The result is (N, heads, size), from kernels in the dtype of q.
    """
    if _has_kernels(kv):
        if torch.is_grad_enabled():
            return _AttentionOfOne.apply(q, kv)
        found, _ = forward_kernel(q, kv)
        return found
    return plain_attention_of_one(q, kv)


def plain_attention_of_one(q: Tensor, kv: Tensor) -> Tensor:
    """Return the same, as the formulas say. This takes three passes over memory, and four in the backward pass."""
    k, v = kv.unbind(2)
    weights = (q.float() * k.float()).sum(-1, keepdim=True).mul(q.shape[-1] ** -0.5).softmax(1)
    return (weights * v.float()).sum(1)


def _has_kernels(kv: Tensor) -> bool:
    """Return whether the kernels take these: on a GPU, and not while a compiler traces, which fuses by itself."""
    return kv.is_cuda and triton is not None and not torch.compiler.is_compiling()


class _AttentionOfOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor) -> Tensor:
        found, log_sum = forward_kernel(q, kv)
        ctx.save_for_backward(q, kv, found, log_sum)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return backward_kernel(grads[0], *ctx.saved_tensors)


def forward_kernel(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return o (N, heads, size), in the dtype of q, and e (N, heads)."""
    n, length, _, heads, size = kv.shape
    q = q.contiguous()
    found = q.new_empty(n, heads, size)
    log_sum = q.new_empty(n, heads, dtype=torch.float32)
    _forward[(n * heads,)](
        q, kv.contiguous(), found, log_sum, length, heads, size**-0.5 / math.log(2), D=size, **_blocks(size)
    )
    return found, log_sum


def backward_kernel(grad: Tensor, q: Tensor, kv: Tensor, found: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of keys and values, from that of o and what `forward_kernel` gave."""
    n, length, _, heads, size = kv.shape
    q = q.contiguous()
    kv = kv.contiguous()
    dq = torch.empty_like(q)
    dkv = torch.empty_like(kv)
    _backward[(n * heads,)](
        grad.contiguous(),
        q,
        kv,
        found,
        log_sum,
        dq,
        dkv,
        length,
        heads,
        size**-0.5,
        1 / math.log(2),
        D=size,
        **_blocks(size),
    )
    return dq, dkv


def _blocks(size: int) -> dict[str, int]:
    return {"ROWS": ROWS, "BLOCK": triton.next_power_of_2(size), "num_warps": 4}


if triton is not None:

    @triton.jit
    def _forward(q, kv, found, log_sum, length, heads, scale, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        image = (tl.program_id(0) // heads).to(tl.int64)
        head = tl.program_id(0) % heads
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        own = (image * heads + head) * D + columns
        query = tl.load(q + own, mask=inside, other=0.0).to(tl.float32) * scale  # powers of 2 are taken, not of e
        wide = heads * D
        largest = float("-inf")
        total = 0.0
        mean = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, length, ROWS):
            rows = start + tl.arange(0, ROWS)
            there = (rows[:, None] < length) & inside[None, :]
            at = (image * length + rows[:, None]) * (2 * wide) + head * D + columns[None, :]
            k = tl.load(kv + at, mask=there, other=0.0).to(tl.float32)
            v = tl.load(kv + at + wide, mask=there, other=0.0).to(tl.float32)
            s = tl.where(rows < length, tl.sum(k * query[None, :], 1), float("-inf"))
            now = tl.maximum(largest, tl.max(s, 0))
            p = tl.exp2(s - now)
            fade = tl.exp2(largest - now)
            mean = mean * fade + tl.sum(p[:, None] * v, 0)
            total = total * fade + tl.sum(p, 0)
            largest = now
        tl.store(found + own, (mean / total).to(found.dtype.element_ty), mask=inside)
        tl.store(log_sum + tl.program_id(0), largest + tl.log2(total))

    @triton.jit
    def _backward(
        grad,
        q,
        kv,
        found,
        log_sum,
        dq,
        dkv,
        length,
        heads,
        scale,
        per_log,
        D: tl.constexpr,
        ROWS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        image = (tl.program_id(0) // heads).to(tl.int64)
        head = tl.program_id(0) % heads
        columns = tl.arange(0, BLOCK)
        inside = columns < D
        own = (image * heads + head) * D + columns
        query = tl.load(q + own, mask=inside, other=0.0).to(tl.float32) * scale
        g = tl.load(grad + own, mask=inside, other=0.0).to(tl.float32)
        o = tl.load(found + own, mask=inside, other=0.0).to(tl.float32)
        shared = tl.sum(g * o, 0)
        log = tl.load(log_sum + tl.program_id(0))
        wide = heads * D
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, length, ROWS):
            rows = start + tl.arange(0, ROWS)
            there = (rows[:, None] < length) & inside[None, :]
            at = (image * length + rows[:, None]) * (2 * wide) + head * D + columns[None, :]
            k = tl.load(kv + at, mask=there, other=0.0).to(tl.float32)
            v = tl.load(kv + at + wide, mask=there, other=0.0).to(tl.float32)
            p = tl.exp2(tl.sum(k * query[None, :], 1) * per_log - log)
            p = tl.where(rows < length, p, 0.0)
            ds = p * (tl.sum(v * g[None, :], 1) - shared)
            sums += tl.sum(ds[:, None] * k, 0)
            tl.store(dkv + at, (ds[:, None] * query[None, :]).to(dkv.dtype.element_ty), mask=there)
            tl.store(dkv + at + wide, (p[:, None] * g[None, :]).to(dkv.dtype.element_ty), mask=there)
        tl.store(dq + own, (sums * scale).to(dq.dtype.element_ty), mask=inside)
