"""The frozen MLP of a transformer's block: y = GELU(h W1^T + b1) W2^T + b2.

The backward pass needs only GELU's slope, which is kept in 8 bits. GELU overwrites its input: a Triton kernel on a GPU,
with a plain version elsewhere. In the backward pass, one kernel multiplies by W2 and by the slope, on a Hopper GPU;
elsewhere it takes two steps. On request, the products of the backward pass multiply 8-bit floats: mgtta.fast.float8.

Notation    GELU(x) = x Phi(x), Phi the normal distribution; its slope D = Phi(x) + x phi(x) lies in [-0.129, 1.129]
            Phi by Abramowitz and Stegun, 7.1.26, to 1.5e-7
            g = dL/dy (M, d);  dL/dh = G W1, with G = (g W2) * D (M, hidden)
Shapes      M rows, the tokens of all images; d features, hidden features between the layers
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta._lib.timm import timm
from mgtta._lib.triton import TensorDescriptor, tl, triton
from mgtta.fast.float8 import Float8Weights, product, scaled_rows

LOWEST = -0.13  # slope that is kept as 0
STEPS = 202.0  # steps per unit of the slope
BLOCK = 1024  # values per program of GELU's kernel


def is_plain_mlp(module: Any) -> bool:
    """Return whether a module is an MLP of timm's that `mlp` computes: two linear layers and GELU between them."""
    if type(module) is not timm.layers.Mlp or not isinstance(module.norm, nn.Identity):
        return False
    gelu = isinstance(module.act, nn.GELU) and module.act.approximate == "none"
    gelu = gelu or type(module.act) is timm.layers.GELU  # that of timm's ConvNeXt, which has no other form
    return gelu and type(module.fc1) is nn.Linear and type(module.fc2) is nn.Linear


def mlp(
    h: Tensor, first: nn.Linear, second: nn.Linear, float8: Float8Weights | None = None, unseen: bool = False
) -> Tensor:
    """Return y of h (N, L, d). The layers get no gradients; the gradient of h has the rounding of what is kept.

    Args:
        float8: weights for the backward pass; None: the layers' own.
        unseen: whether only the gradient is needed: then y is zero, one value expanded to y's shape.
    """
    if torch.is_grad_enabled():
        return _MLP.apply(h, first.weight, first.bias, second.weight, second.bias, unseen, *(float8 or ()))
    hidden, _ = gelu_and_slope(h, first.weight, first.bias, False)
    return F.linear(hidden, second.weight, second.bias)


class _MLP(torch.autograd.Function):
    """An MLP that keeps only GELU's slope."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, unseen: bool, *float8: Tensor
    ) -> Tensor:
        hidden, slope = gelu_and_slope(h, w1, b1, True)
        ctx.save_for_backward(slope, *(float8 or (w1, w2)))
        if unseen:
            return hidden.new_zeros(()).expand(*hidden.shape[:-1], len(w2))
        return F.linear(hidden, w2, b2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        slope, *weights = ctx.saved_tensors
        if len(weights) == 2:
            w1, w2 = weights
            return _sloped_product(grad, w2, slope) @ w1, *[None] * 5
        return float8_backward(grad, slope, Float8Weights(*weights)), *[None] * (5 + len(weights))


def float8_backward(grad: Tensor, slope: Tensor, weights: Float8Weights) -> Tensor:
    """Return dL/dh from g and the kept slope, with products of 8-bit floats."""
    g, ratio, later_scale = scaled_rows(grad.contiguous(), weights.reach)
    later = _sloped_product(g, weights.second, slope, ratio, weights.second_scale)
    return product(later, later_scale, weights.first, weights.first_scale, grad.dtype)


def _sloped_product(
    grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Return (g W2) * D in the dtype of g; rows and columns scale the product if g and W2 are 8-bit floats."""
    if slope.is_cuda and TensorDescriptor is not None and _is_for_hopper(weight):
        return fused_sloped_product(grad, weight, slope, rows, columns)
    return plain_sloped_product(grad, weight, slope, rows, columns)


def _is_for_hopper(weight: Tensor) -> bool:
    """Return whether the fused kernel takes this weight: at most 16 bits, sizes that are multiples of 16."""
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and weight.dtype.itemsize <= 2 and all(size % 16 == 0 for size in weight.shape)


def plain_sloped_product(
    grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None, columns: Tensor | None
) -> Tensor:
    """Return the result of `_sloped_product`, in two steps."""
    if rows is None or columns is None:
        found = grad @ weight
    else:
        dtype = torch.bfloat16 if grad.is_cuda else torch.float32
        found = product(grad, rows, weight, columns, dtype)
    return (found.float() * (slope.float() * (1 / STEPS) + LOWEST)).to(grad.dtype)


@torch.library.custom_op("mgtta::gelu_and_slope", mutates_args=())
def gelu_and_slope(h: Tensor, weight: Tensor, bias: Tensor | None, sloped: bool) -> tuple[Tensor, Tensor]:
    """Return GELU of h W^T + b, and, if `sloped`, its slope in steps of 1 / STEPS from LOWEST."""
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


class _Tile(NamedTuple):
    """What a program of the fused kernel computes: tall x wide values of G, from pieces of `deep` features."""

    tall: int
    wide: int
    deep: int
    stages: int  # pieces that are loaded ahead


_TILE = _Tile(128, 128, 64, 2)
_EIGHT_BIT_TILE = _Tile(128, 128, 128, 3)


@torch.library.custom_op("mgtta::fused_sloped_product", mutates_args=())
def fused_sloped_product(
    grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None, columns: Tensor | None
) -> Tensor:
    """Return the result of plain_sloped_product, from one kernel.

    An 8-bit weight lies column by column in memory, any other row by row.
    """
    d, hidden = weight.shape
    m = slope.numel() // hidden
    found = torch.empty_like(slope, dtype=grad.dtype)
    eight = rows is not None
    tile = _EIGHT_BIT_TILE if eight else _TILE
    blocks = triton.cdiv(m, tile.tall) * triton.cdiv(hidden, tile.wide)
    if eight:
        weights = TensorDescriptor.from_tensor(weight.t(), [tile.wide, tile.deep])
    else:
        weights = TensorDescriptor.from_tensor(weight, [tile.deep, tile.wide])
    grads = TensorDescriptor.from_tensor(grad.contiguous().view(-1, d), [tile.tall, tile.deep])
    slopes = TensorDescriptor.from_tensor(slope.view(-1, hidden), [tile.tall, tile.wide])
    out = TensorDescriptor.from_tensor(found.view(-1, hidden), [tile.tall, tile.wide])
    sizes = (m, hidden, d)
    _sloped_kernel[(blocks,)](
        grads, weights, slopes, out, rows, columns, *sizes, eight, LOWEST, STEPS, *tile, num_warps=4
    )
    return found


@fused_sloped_product.register_fake
def _(grad: Tensor, weight: Tensor, slope: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    return torch.empty_like(slope, dtype=grad.dtype)


def plain_gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU(x) and its slope in steps, as the formulas say."""
    z = x.float()
    density = torch.exp(-0.5 * z * z)
    below = _below(z, density)
    slope = below + z * density / math.sqrt(2 * math.pi)
    return (z * below).to(x.dtype), (slope * STEPS + (0.5 - LOWEST * STEPS)).to(torch.uint8)


def _below(z: Tensor, density: Tensor) -> Tensor:
    """Return Phi(z), from density = exp(-z^2 / 2)."""
    t = 1 / (1 + (0.3275911 / math.sqrt(2)) * z.abs())
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    beyond = 0.5 * series * density  # 1 - Phi(|z|)
    return torch.where(z < 0, beyond, 1 - beyond)


if triton is not None:

    @triton.jit
    def _gelu_kernel(
        x, slope, size, lowest: tl.constexpr, steps: tl.constexpr, sloped: tl.constexpr, BLOCK: tl.constexpr
    ):
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
        grad,
        weight,
        slope,
        out,
        row_scales,
        column_scales,
        m,
        n,
        k,
        eight: tl.constexpr,
        lowest: tl.constexpr,
        steps: tl.constexpr,
        M: tl.constexpr,
        N: tl.constexpr,
        K: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        across = tl.cdiv(n, N)
        i = (tl.program_id(0) // across) * M
        j = (tl.program_id(0) % across) * N
        product = tl.zeros((M, N), dtype=tl.float32)
        for at in tl.range(0, k, K, num_stages=STAGES):
            if eight:
                product = tl.dot(grad.load([i, at]), weight.load([j, at]).T, product)
            else:
                product = tl.dot(grad.load([i, at]), weight.load([at, j]), product)
        if eight:
            rows = i + tl.arange(0, M)
            columns = j + tl.arange(0, N)
            product *= tl.load(row_scales + rows, mask=rows < m, other=0.0)[:, None]
            product *= tl.load(column_scales + columns, mask=columns < n, other=0.0)[None, :]
        product *= slope.load([i, j]).to(tl.float32) * (1 / steps) + lowest
        out.store([i, j], product.to(out.dtype))
