"""timm's plain VisionTransformer, block by block, for the fast path: bfloat16 weights, float32 norm layers.

The same function as the module's own, written so that little is computed and less is kept:

- Of the last block only the class token is read, so only it passes through that block's MLP.
- The way back needs of a norm layer its normalised input, which is kept as float8 (8 bits, of any size), and of GELU
  its slope, kept in 256 steps. Both are rounded for the gradient alone, by 3 % and 0.3 % of a typical value.
- One block is compiled for all.
- With little memory a block keeps its input alone. On the way back it is run again, but for the last product.
- On request the way back through the MLPs is one of 8-bit floats: see mgtta.fast.mlp.

Shapes: N images, L tokens, d features, h hidden features of the MLP.
"""

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta._lib.timm import timm
from mgtta.fast.bf16 import How
from mgtta.fast.kernels import norm_backward, qkv_backward
from mgtta.fast.mlp import FLOAT8, Float8Weights, float8_weights, mlp, multiplies_float8
from mgtta.models.classifier import Classifier


class ViT:
    """A plain ViT with a class token, in the fast path's way; `fits` says which.

    Args:
        recompute: keep a block's input alone, and compute the rest again on the way back.
        float8: multiply in 8 bits on the way back, where that pays.
    """

    def __init__(self, model: Classifier, recompute: bool, float8: bool = False):
        self.model, self.recompute = model, recompute
        self.net = cast(Any, model.net)
        self.keep = FLOAT8 if _has_float8(self.net.head.weight.device) else None  # how: the normalised inputs
        early = [block.mlp for block in self.net.blocks[:-1]]
        self.float8 = [float8_weights(m.fc1.weight, m.fc2.weight) if float8 else None for m in early]

    @staticmethod
    def fits(model: Classifier) -> bool:
        net, vit = model.net, timm.models.vision_transformer
        if type(net) is not vit.VisionTransformer or not _plain_embedding(net):
            return False
        plain = net.global_pool == "token" and net.num_prefix_tokens == 1 and getattr(net, "attn_pool", None) is None
        return plain and isinstance(net.head, nn.Linear) and _is_norm(net.norm) and all(map(_plain_block, net.blocks))

    @staticmethod
    def fits_float8(model: Classifier) -> bool:
        if not ViT.fits(model) or not multiplies_float8(next(model.parameters()).device):
            return False
        return all(size % 16 == 0 for block in cast(Any, model.net).blocks for size in block.mlp.fc1.weight.shape)

    def __call__(self, x: Tensor, how: How) -> tuple[Tensor, list[Tensor]]:
        """The logits, and the features of each layer: the class token after each block's first norm but the first's."""
        patch = self.net.patch_embed
        if tuple(x.shape[1:]) != (patch.proj.in_channels, *patch.img_size):
            return self.model.features(x)  # which refuses them in the network's own words
        *early, last = self.net.blocks
        taps: list[Tensor] = []
        if self.recompute and torch.is_grad_enabled():
            x = how(_embed)(self.model, x)
            for block, float8 in zip(early, self.float8, strict=True):
                x, tap = _Again.apply(x, how, block, self.keep, float8, *_norms(block))
                taps.append(tap)
            h, x, tap = how(_norm)(last.norm1, x, self.keep)
            taps = [*taps[1:], tap] if early else []
        else:
            h, x = how(_begin)(self.model, early[0] if early else last, x, self.keep)
            for (block, following), float8 in zip(pairwise(self.net.blocks), self.float8, strict=True):
                h, x, tap = how(_block)(block, following, h, x, self.keep, float8)
                taps.append(tap)
        logits, tap = how(_end)(self.net, last, h, x, self.model.classes, self.keep)
        return logits, [*taps, tap]


def _has_float8(device: torch.device) -> bool:
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9))


def _plain_embedding(net: Any) -> bool:
    patch = net.patch_embed
    if type(patch) is not timm.layers.PatchEmbed or type(patch.proj) is not nn.Conv2d:
        return False
    proj, identities = patch.proj, (patch.norm, net.norm_pre, net.patch_drop, net.fc_norm)
    return (
        (patch.flatten, patch.strict_img_size, net.dynamic_img_size) == (True, True, False)
        and patch.img_size is not None
        and proj.kernel_size == proj.stride
        and (proj.padding, proj.dilation, proj.groups) == ((0, 0), (1, 1), 1)
        and all(isinstance(module, nn.Identity) for module in identities)
    )


def _plain_block(block: Any) -> bool:
    vit = timm.models.vision_transformer
    if type(block) is not vit.Block or type(block.attn) is not vit.Attention or type(block.mlp) is not timm.layers.Mlp:
        return False
    attn, mlp = block.attn, block.mlp
    return (
        _is_norm(block.norm1)
        and _is_norm(block.norm2)
        and all(isinstance(m, nn.Identity) for m in (attn.q_norm, attn.k_norm, getattr(attn, "norm", None), mlp.norm))
        and getattr(attn, "gate", None) is None
        and isinstance(mlp.fc1, nn.Linear)
        and isinstance(mlp.act, nn.GELU)
        and mlp.act.approximate == "none"
    )


def _is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1 and layer.bias is not None


# --- the parts, each compiled by itself


def _embed(model: Classifier, x: Tensor) -> Tensor:
    """The tokens (N, L, d), as the first block takes them."""
    x, net = model.prepare(x).to(torch.bfloat16), cast(Any, model.net)
    proj = net.patch_embed.proj
    n, channels, height, width = x.shape
    a, b = proj.kernel_size
    x = x.view(n, channels, height // a, a, width // b, b).permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * a * b)
    return net._pos_embed(F.linear(x, proj.weight.flatten(1), proj.bias))


def _begin(model: Classifier, block: Any, x: Tensor, keep: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The first block's normed tokens and its tokens, both (N, L, d)."""
    return _norm(block.norm1, _embed(model, x), keep, tapped=False)[:2]


def _block(
    block: Any, following: Any, h: Tensor, x: Tensor, keep: torch.dtype | None, float8: Float8Weights | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From a block's normed tokens and its tokens to the following one's, and to the latter's tap (N, d)."""
    return _norm(following.norm1, _through(block, h, x, keep, float8), keep)


def _whole(
    block: Any, x: Tensor, keep: torch.dtype | None, float8: Float8Weights | None, unseen: bool = False
) -> tuple[Tensor, Tensor]:
    """From a block's tokens to the following one's, and its own tap.

    Args:
        unseen: whether only their gradients matter: the tokens' values are not computed to the end.
    """
    h, x, tap = _norm(block.norm1, x, keep)
    return _through(block, h, x, keep, float8, unseen), tap


def _through(
    block: Any, h: Tensor, x: Tensor, keep: torch.dtype | None, float8: Float8Weights | None, unseen: bool = False
) -> Tensor:
    attn, (n, length, _) = block.attn, x.shape
    q, k, v = _QKV.apply(h, attn.qkv.weight, attn.qkv.bias, attn.num_heads)
    a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, -1)
    return _mlp(block, x + block.ls1(attn.proj(a)), keep, float8, unseen)


def _end(
    net: Any, block: Any, h: Tensor, x: Tensor, classes: Tensor | None, keep: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The last block, for the class token alone, and the head: logits (N, C) and the final norm's tap (N, d)."""
    attn, (n, length, _) = block.attn, x.shape
    weight, bias = attn.qkv.weight, attn.qkv.bias
    size = len(weight) // 3
    q = F.linear(h[:, :1], weight[:size], None if bias is None else bias[:size])
    kv = F.linear(h, weight[size:], None if bias is None else bias[size:])
    k, v = kv.view(n, length, 2, attn.num_heads, -1).unbind(2)
    a = _attention_of_one(q.view(n, 1, attn.num_heads, -1), k, v).to(x.dtype).view(n, 1, -1)
    x = _mlp(block, x[:, :1] + block.ls1(attn.proj(a)), keep)
    h, _, tap = _norm(net.norm, x, keep)
    logits = net.head(h[:, 0]).float()
    return logits if classes is None else logits[:, classes], tap


def _attention_of_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query (N, 1, heads, size) over keys and values (N, L, heads, size), in float32.

    Kernels for attention are made for many queries: here it is three passes over memory, and four on the way back.
    """
    weights = (q.float() * k.float()).sum(-1, keepdim=True).mul(q.shape[-1] ** -0.5).softmax(1)
    return (weights * v.float()).sum(1)


def _mlp(
    block: Any, x: Tensor, keep: torch.dtype | None, float8: Float8Weights | None = None, unseen: bool = False
) -> Tensor:
    h, x, _ = _norm(block.norm2, x, keep, tapped=False)
    return x + block.ls2(mlp(h, block.mlp.fc1, block.mlp.fc2, float8, unseen))


# --- what is kept for the way back


def _norm(layer: Any, x: Tensor, keep: torch.dtype | None, tapped: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm of x in float32, rounded to x's dtype; x itself; and the first token of the former, not rounded.

    Args:
        tapped: whether the last one is read.
    """
    if not torch.is_grad_enabled():
        _, _, h, tap = _normed(x, layer.weight, layer.bias, layer.eps)
        return h, x, tap
    if keep is None:
        h = F.layer_norm(x.float(), layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return h.to(x.dtype), x, h[:, 0]
    return _Norm.apply(x, layer.weight, layer.bias, layer.eps, keep, tapped)


def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalised x; 1 / std of its rows; LayerNorm of x in x's dtype; and the latter's first token in float32.

    The first token is computed by itself: taken from the whole, it would have a compiler write all of it in float32.
    """
    mean = x.float().mean(-1, keepdim=True)
    scale = ((x.float() - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    z = (x.float() - mean) * scale
    tap = (x[:, 0].float() - mean[:, 0]) * scale[:, 0] * weight + bias
    return z, scale, (z * weight + bias).to(x.dtype), tap


class _Norm(torch.autograd.Function):
    """LayerNorm that keeps its normalised input in a few bits. x goes through it, so that all of its gradient is
    found in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, keep: torch.dtype, tapped: bool) -> Any:
        z, scale, h, tap = _normed(x, weight, bias, eps)
        ctx.save_for_backward(z.to(keep), scale, weight)
        ctx.tapped = tapped
        return h, x.view_as(x), tap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, scale, weight = ctx.saved_tensors
        grad, through, tap = grads
        return *norm_backward(grad, z, scale, weight, through, tap if ctx.tapped else None), None, None, None


class _QKV(torch.autograd.Function):
    """Queries, keys and values (N, heads, L, size) of h, from one frozen layer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Any:
        ctx.save_for_backward(weight)
        n, length, _ = h.shape
        return F.linear(h, weight, bias).view(n, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return qkv_backward(*grads, *ctx.saved_tensors), None, None, None


class _Again(torch.autograd.Function):
    """A block that keeps its input alone; what it computes, and computes again on the way back, is compiled."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, how: How, block: Any, keep: torch.dtype | None, float8: Float8Weights | None, *_: Tensor
    ) -> Any:
        ctx.save_for_backward(x)
        ctx.how, ctx.block, ctx.given = how, block, (keep, float8)
        return how(_whole)(block, x, keep, float8)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, norms = ctx.saved_tensors[0].detach().requires_grad_(), _norms(ctx.block)
        with torch.enable_grad():
            outputs = ctx.how(_whole)(ctx.block, x, *ctx.given, True)
        found = iter(torch.autograd.grad(outputs, [x, *(p for p in norms if p.requires_grad)], grads))
        return next(found), None, None, None, None, *(next(found) if p.requires_grad else None for p in norms)


def _norms(block: Any) -> list[Tensor]:
    return [*block.norm1.parameters(), *block.norm2.parameters()]
