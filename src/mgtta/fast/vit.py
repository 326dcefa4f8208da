"""timm's plain VisionTransformer, block by block, for the fast path: bfloat16 weights, float32 norm layers.

It is the same function as the module's own, written so that little is computed and less is kept:

- Of the last block only the class token is read, so only the class token passes through that block's MLP.
- The backward pass of a norm layer needs its normalised input, which is kept as float8 (8 bits, any magnitude). The
  backward pass of GELU needs its slope, which is kept in 256 steps. Both are rounded only for the gradient, by 3 % and
  0.3 % of a typical value.
- One compiled block serves all blocks.
- With little memory, a block keeps only its input. In the backward pass it runs again, except for the last product.
- On request, the backward pass through the MLPs multiplies 8-bit floats: see mgtta.fast.mlp.

Shapes: N images, L tokens, d features, h hidden features of the MLP.
"""

from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta._lib.timm import timm
from mgtta.fast.attention import attention_of_one
from mgtta.fast.bf16 import How, Views
from mgtta.fast.float8 import FLOAT8, Float8Weights, float8_weights, multiplies_float8
from mgtta.fast.kernels import (
    Normed,
    has_norm_kernel,
    norm_backward,
    norm_forward,
    plain_norm_forward,
    qkv_backward,
)
from mgtta.fast.mlp import is_plain_mlp, mlp
from mgtta.models.classifier import Classifier

RECOMPUTED_IMAGES = 64  # with little memory, that pass a block at a time


class ViT:
    """A plain ViT as the fast path runs it; `fits` says which models are plain.

    Its head reads the class token, or the mean of the patches' tokens. It may have register tokens.

    Args:
        recompute: keep only the input of a block, and compute the rest again in the backward pass.
        float8: multiply in 8 bits in the backward pass, where that saves time.
    """

    def __init__(self, model: Classifier, recompute: bool, float8: bool = False):
        self.model = model
        self.recompute = recompute
        self.collecting = False  # there are no BatchNorm layers
        self.by_image = False
        self.net = cast(Any, model.net)
        self.pool = self.net.num_prefix_tokens if self.net.global_pool == "avg" else None
        self.keep = FLOAT8 if _has_float8(self.net.head.weight.device) else None  # dtype of normalised inputs
        early = [block.mlp for block in self.net.blocks[:-1]]
        self.float8 = [float8_weights(m.fc1.weight, m.fc2.weight) if float8 else None for m in early]

    @staticmethod
    def fits(model: Classifier) -> bool:
        """Return whether the model is a plain ViT. Its head reads the final norm, so nothing else is read there."""
        net = model.net
        if model.reads_head:
            return False
        if type(net) is not timm.models.vision_transformer.VisionTransformer or not _plain_embedding(net):
            return False
        return _plain_end(net) and all(map(_plain_block, net.blocks))

    @staticmethod
    def fits_float8(model: Classifier) -> bool:
        """Return whether the model is a plain ViT whose backward pass can multiply 8-bit floats on its device."""
        if not ViT.fits(model) or not multiplies_float8(next(model.parameters()).device):
            return False
        return all(size % 16 == 0 for block in cast(Any, model.net).blocks for size in block.mlp.fc1.weight.shape)

    def __call__(self, x: Tensor, how: How, views: Views) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the features of each layer, of views of x.

        The features are the class token, or the mean of the patches' tokens, after each block's first norm, except the
        first block's, and after the final norm.
        """
        patch = self.net.patch_embed
        if tuple(x.shape[1:]) != (patch.proj.in_channels, *patch.img_size):
            return self.model.features(views(x))  # which raises the network's own error
        last = self.net.blocks[-1]
        if self.recompute and torch.is_grad_enabled():
            h, x, taps = self._recomputed_blocks(x, how, views)
        else:
            h, x, taps = self._blocks(x, how, views)
        logits, tap = how(_end)(self.net, last, h, x, self.model.classes, self.keep, self.pool)
        return logits, [*taps, tap]

    def _blocks(self, x: Tensor, how: How, views: Views) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the last block's normed tokens, its tokens, and the taps so far."""
        taps: list[Tensor] = []
        h, x = how(_begin)(self.model, self.net.blocks[0], x, views, self.keep)
        for (block, following), float8 in zip(pairwise(self.net.blocks), self.float8, strict=True):
            h, x = how(_attend)(block, h, x, self.keep)  # two calls: what only the first one takes is freed
            h, x, tap = how(_feed)(block, following, h, x, self.keep, float8, self.pool)
            taps.append(tap)
        return h, x, taps

    def _recomputed_blocks(self, x: Tensor, how: How, views: Views) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the same as `_blocks`, where each block keeps only its input for the backward pass."""
        *early, last = self.net.blocks
        taps: list[Tensor] = []
        x = how(_embed)(self.model, x, views)
        for block, float8 in zip(early, self.float8, strict=True):
            x, tap = _Recomputed.apply(x, how, block, (self.keep, float8, self.pool), *_norms(block))
            taps.append(tap)
        h, x, tap = how(_norm)(last.norm1, x, self.keep, True, self.pool)
        taps.append(tap)
        return h, x, taps[1:]  # the first block's norm is not a tap


def _has_float8(device: torch.device) -> bool:
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9))


def _plain_embedding(net: Any) -> bool:
    patch = net.patch_embed
    if type(patch) is not timm.layers.PatchEmbed or type(patch.proj) is not nn.Conv2d:
        return False
    proj = patch.proj
    identities = (patch.norm, net.norm_pre, net.patch_drop)
    return (
        (patch.flatten, patch.strict_img_size, net.dynamic_img_size) == (True, True, False)
        and patch.img_size is not None
        and proj.kernel_size == proj.stride
        and (proj.padding, proj.dilation, proj.groups) == ((0, 0), (1, 1), 1)
        and all(isinstance(module, nn.Identity) for module in identities)
    )


def _plain_end(net: Any) -> bool:
    """Return whether one norm and a linear head follow the blocks, by the class token or the mean of the patches."""
    if getattr(net, "attn_pool", None) is not None or not isinstance(net.head, nn.Linear):
        return False
    norms = [layer for layer in (net.norm, net.fc_norm) if not isinstance(layer, nn.Identity)]
    if len(norms) != 1 or not _is_norm(norms[0]):
        return False
    if net.global_pool == "token":
        return net.cls_token is not None and norms[0] is net.norm
    return net.global_pool == "avg" and not getattr(net, "pool_include_prefix", False)


def _plain_block(block: Any) -> bool:
    vit = timm.models.vision_transformer
    if type(block) is not vit.Block or type(block.attn) is not vit.Attention or not is_plain_mlp(block.mlp):
        return False
    attn = block.attn
    identities = (attn.q_norm, attn.k_norm, getattr(attn, "norm", None))
    return (
        _is_norm(block.norm1)
        and _is_norm(block.norm2)
        and all(isinstance(module, nn.Identity) for module in identities)
        and getattr(attn, "gate", None) is None
    )


def _is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1 and layer.bias is not None


# --- the parts, each compiled separately


def _embed(model: Classifier, x: Tensor, views: Views) -> Tensor:
    """Return the tokens (N, L, d) that the first block takes."""
    x = model.prepare(views(x)).to(torch.bfloat16)
    net = cast(Any, model.net)
    proj = net.patch_embed.proj
    n, channels, height, width = x.shape
    a, b = proj.kernel_size
    patches = x.view(n, channels, height // a, a, width // b, b).permute(0, 2, 4, 1, 3, 5)
    patches = patches.reshape(n, -1, channels * a * b)  # (N, L - 1, pixels of a patch)
    return net._pos_embed(F.linear(patches, proj.weight.flatten(1), proj.bias))


def _begin(model: Classifier, block: Any, x: Tensor, views: Views, keep: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the first block's normed tokens and its tokens, both (N, L, d)."""
    h, x, _ = _norm(block.norm1, _embed(model, x, views), keep, tapped=False)
    return h, x


def _attend(block: Any, h: Tensor, x: Tensor, keep: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return the tokens before a block's MLP, normed and as they are, from the block's normed tokens and tokens."""
    attn = block.attn
    n, length, _ = x.shape
    q, k, v = _QKV.apply(h, attn.qkv.weight, attn.qkv.bias, attn.num_heads)
    a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, -1)
    h, x, _ = _norm(block.norm2, x, keep, tapped=False, added=block.ls1(attn.proj(a)))
    return h, x


def _feed(
    block: Any,
    following: Any,
    h: Tensor,
    x: Tensor,
    keep: torch.dtype | None,
    float8: Float8Weights | None,
    pool: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the following block's normed tokens, its tokens and its tap (N, d), from what `_attend` gives.

    What the MLP gives is added by the norm layer that follows, which saves a pass over memory.
    """
    return _norm(following.norm1, x, keep, True, pool, _mlp(block, h, float8))


def _mlp(block: Any, h: Tensor, float8: Float8Weights | None = None, unseen: bool = False) -> Tensor:
    """Return what a block's MLP adds to its tokens, from its normed tokens."""
    return block.ls2(mlp(h, block.mlp.fc1, block.mlp.fc2, float8, unseen))


def _whole(
    block: Any,
    x: Tensor,
    keep: torch.dtype | None,
    float8: Float8Weights | None,
    pool: int | None,
    unseen: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the following block's tokens and this block's tap, from this block's tokens.

    Args:
        unseen: whether only the gradients are needed: then the values of the tokens are not computed to the end.
    """
    h, x, tap = _norm(block.norm1, x, keep, True, pool)
    h, x = _attend(block, h, x, keep)
    return x + _mlp(block, h, float8, unseen), tap


def _end(
    net: Any, block: Any, h: Tensor, x: Tensor, classes: Tensor | None, keep: torch.dtype | None, pool: int | None
) -> tuple[Tensor, Tensor]:
    """Return the logits (N, C) and the final norm's tap (N, d), from the last block's normed tokens and tokens."""
    if pool is None:
        x, more = _class_token(block, h, x, keep)
        h, _, tap = _norm(net.norm, x, keep, added=more)
        read = h[:, 0]
    else:
        h, x = _attend(block, h, x, keep)
        tap = _averaged(net, x, _mlp(block, h), keep, pool)
        read = tap.to(x.dtype)
    logits = net.head(read).float()
    return logits if classes is None else logits[:, classes], tap


def _averaged(net: Any, x: Tensor, more: Tensor, keep: torch.dtype | None, pool: int) -> Tensor:
    """Return what the head reads of the last tokens, (N, d): their mean after the norm, or the norm of their mean.

    The tokens are the sum of x and `more`.
    """
    if isinstance(net.fc_norm, nn.Identity):
        _, _, tap = _norm(net.norm, x, keep, True, pool, more)
        return tap
    layer = net.fc_norm
    mean = (x + more)[:, pool:].mean(1, dtype=torch.float32)
    return F.layer_norm(mean, layer.normalized_shape, layer.weight, layer.bias, layer.eps)


def _class_token(block: Any, h: Tensor, x: Tensor, keep: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return two parts, (N, 1, d) each, whose sum only the class token after the last block is."""
    attn = block.attn
    n, length, _ = x.shape
    weight = attn.qkv.weight
    bias = attn.qkv.bias
    size = len(weight) // 3
    q = F.linear(h[:, :1], weight[:size], None if bias is None else bias[:size])
    kv = F.linear(h, weight[size:], None if bias is None else bias[size:])
    pairs = kv.view(n, length, 2, attn.num_heads, -1)
    a = attention_of_one(q.view(n, 1, attn.num_heads, -1), pairs).to(x.dtype).view(n, 1, -1)
    h, x, _ = _norm(block.norm2, x[:, :1], keep, tapped=False, added=block.ls1(attn.proj(a)))
    return x, _mlp(block, h)


# --- what is kept for the backward pass


def _norm(
    layer: Any,
    x: Tensor,
    keep: torch.dtype | None,
    tapped: bool = True,
    pool: int | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return LayerNorm(x), computed in float32 and rounded to x's dtype; x; and the tap (N, d), not rounded.

    Args:
        tapped: whether the tap is used.
        pool: the tap is the mean of LayerNorm(x) over all tokens after so many; None: it is that of the first token.
        added: what is added to x before; None: nothing.
    """
    if not torch.is_grad_enabled():
        normed = _normed(x, layer.weight, layer.bias, layer.eps, None, pool, added)
        return normed.y, normed.x, normed.first
    if keep is None:
        if added is not None:
            x = x + added
        h = F.layer_norm(x.float(), layer.normalized_shape, layer.weight, layer.bias, layer.eps)
        return h.to(x.dtype), x, h[:, 0] if pool is None else h[:, pool:].mean(1)
    return _Norm.apply(x, added, layer.weight, layer.bias, layer.eps, keep, tapped, pool)


def _normed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    keep: torch.dtype | None,
    pool: int | None,
    added: Tensor | None,
) -> Normed:
    """Return LayerNorm(x), what its backward pass needs, and in the place of the first token the tap of `pool`."""
    forward = norm_forward if has_norm_kernel(x) else plain_norm_forward
    normed = forward(x, weight, bias, eps, keep, added)
    if pool is None:
        return normed
    return normed._replace(first=normed.y[:, pool:].mean(1, dtype=torch.float32))


class _Norm(torch.autograd.Function):
    """LayerNorm that keeps its normalised input in a few bits.

    It also returns x, with what is added to it, so that one pass computes all of the gradient of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        keep: torch.dtype,
        tapped: bool,
        pool: int | None,
    ) -> Any:
        normed = _normed(x, weight, bias, eps, keep, pool, added)
        ctx.save_for_backward(normed.z, normed.scale, weight)
        ctx.tapped = tapped
        ctx.pool = pool
        ctx.adds = added is not None
        return normed.y, x.view_as(x) if added is None else normed.x, normed.first

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        z, scale, weight = ctx.saved_tensors
        grad, through, tap = grads
        first = tap if ctx.tapped and ctx.pool is None else None
        if ctx.tapped and ctx.pool is not None:
            grad = _spread(grad, tap, ctx.pool)
        dx, dw, db = norm_backward(grad, z, scale, weight, through, first)
        return dx, dx if ctx.adds else None, dw, db, None, None, None, None


def _spread(grad: Tensor, tap: Tensor, pool: int) -> Tensor:
    """Return the gradient of tokens (N, L, d) in float32, with that of the mean (N, d) over those after `pool`."""
    share = tap.unsqueeze(1) / (grad.shape[1] - pool)
    own = grad.float()
    return torch.cat([own[:, :pool], own[:, pool:] + share], 1)


class _QKV(torch.autograd.Function):
    """Queries, keys and values (N, heads, L, size) of h, from one frozen linear layer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Any:
        ctx.save_for_backward(weight)
        n, length, _ = h.shape
        return F.linear(h, weight, bias).view(n, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return qkv_backward(*grads, *ctx.saved_tensors), None, None, None


class _Recomputed(torch.autograd.Function):
    """A block that keeps only its input, and runs again in the backward pass; both runs are compiled.

    Both take RECOMPUTED_IMAGES images at a time: what a block needs meanwhile does not grow with the batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: How, block: Any, given: tuple[Any, ...], *_: Tensor) -> Any:
        ctx.save_for_backward(x)
        ctx.how = how
        ctx.block = block
        ctx.given = given
        return _joined([how(_whole)(block, part, *given) for part in x.split(RECOMPUTED_IMAGES)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [x] = ctx.saved_tensors
        norms = _norms(ctx.block)
        moved = [p for p in norms if p.requires_grad]
        dx = []
        found: list[list[Tensor]] = []  # the gradients of the norms, of each part of the images
        for part, *own in zip(*(t.split(RECOMPUTED_IMAGES) for t in (x, *grads)), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                outputs = ctx.how(_whole)(ctx.block, part, *ctx.given, True)
            first, *others = torch.autograd.grad(outputs, [part, *moved], own)
            dx.append(first)
            found.append(others)
        sums = (sum(each[1:], each[0]) for each in zip(*found, strict=True))
        [whole] = _joined([(t,) for t in dx])
        return whole, None, None, None, *(next(sums) if p.requires_grad else None for p in norms)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return each of several tensors whole, from its parts."""
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _norms(block: Any) -> list[Tensor]:
    return [*block.norm1.parameters(), *block.norm2.parameters()]
