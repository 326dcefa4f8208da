"""BatchNorm by a blend of the statistics of the batch, of the source and of single images.

A batch of a few dozen images has poor statistics, and one that mixes kinds of shift has statistics that fit none of
them. The source's are known well. A blend of both is better than either: Schneider et al., "Improving robustness
against common corruptions by covariate shift adaptation" (NeurIPS 2020).

Few images have no statistics of a batch. Each is normalised by the source's statistics and a little of its own: its
places are many, and of its own domain. For the same reason they may have a share in batches, too.

In a batch that mixes kinds of shift, an image's statistics may be those of the images that look like it (alike.py).

Notation    x (N, C, ...); m, v (C,) its mean and biased variance; a the source's share; P values of a channel
            M = (1 - a) m + a m_S;  V = (1 - a) v + a v_S;  r = 1 / sqrt(V + eps);  y = w r (x - M) + b
            dx = w r (dy - (1 - a) / P (sum(dy) + r^2 (x - m) sum(dy (x - M))))
With the share o of image i, whose mean and biased variance are m_i, v_i (C,), the share e = 1 - a - o of the batch, and
Q places of an image:
            M_i = e m + a m_S + o m_i;  V_i = e v + a v_S + o v_i;  r_i = 1 / sqrt(V_i + eps)
            dM_i = -w r_i sum(dy_i);  dV_i = -w r_i^3 sum(dy_i (x_i - M_i)) / 2, the gradients for M_i and V_i
            dx_i = w r_i dy_i + o / Q (dM_i + 2 (x_i - m_i) dV_i) + e / P (sum(dM) + 2 (x_i - m) sum(dV))
With weights W (N, N), whose rows add up to 1, image i has means m'_i = sum_j W_ij m_j and variances
v'_i = sum_j W_ij (v_j + m_j^2) - m'_i^2 in the place of m and v, and in dx_i the last term is
            e / Q sum_j W_ji (dM_j + 2 (x_i - m'_j) dV_j)
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta._lib.timm import timm
from mgtta.models.alike import LookAlikes

SINGLE_SHARE = 0.07  # of an image's own statistics, where few images come at a time; the rest are the source's
ROUNDING = 1e-9  # of shares that add up to 1


class Normalised(NamedTuple):
    """What a layer gives, and mean and biased variance (C,) of what it was given."""

    y: Tensor
    mean: Tensor
    var: Tensor


def can_blend(layer: Any) -> bool:
    """Return whether a BatchNorm layer is of a kind that can be blended: affine, with running statistics."""
    if "forward" in vars(layer):  # the user's own
        return False
    known = type(layer).forward in (_BatchNorm.forward, timm.layers.BatchNormAct2d.forward)
    return known and layer.affine and layer.running_mean is not None


def blended_norm(
    x: Tensor, layer: _BatchNorm, source_share: float, own_share: float = 0.0, alikes: LookAlikes | None = None
) -> Normalised:
    """Return x, normalised by the layer's running statistics, those of each image, and for the rest the batch's.

    Inputs without places, such as vectors, have no statistics of their own: the batch's take their place.

    Args:
        alikes: tell which images of the batch count how much; None: all the same.
    """
    if (own_share or alikes is not None) and x.shape[2:].numel() > 1:
        weight = None if alikes is None else alikes.seen_by(layer, x)
        return _with_own(x, layer, source_share, own_share, weight)
    args = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    return Normalised(*_Blended.apply(x, *args, source_share, layer.eps))


def single_norm(x: Tensor, layer: _BatchNorm) -> Tensor:
    """Return images (N, C, ...), each normalised by the layer's running statistics and, by SINGLE_SHARE, by its own."""
    return _with_own(x, layer, 1 - SINGLE_SHARE, SINGLE_SHARE).y


def blended_forward(
    layer: Any, x: Tensor, source_share: float, own_share: float = 0.0, alikes: LookAlikes | None = None
) -> Tensor:
    """Return what the layer gives in the place of its own `forward`.

    In training mode it is blended with the batch's statistics, otherwise only with those of each image, if it has
    places.
    """
    if layer.training:
        y = blended_norm(x, layer, source_share, own_share, alikes).y
    elif source_share < 1 and x.shape[2:].numel() > 1:
        y = single_norm(x, layer)
    else:
        return type(layer).forward(layer, x)
    if isinstance(layer, timm.layers.BatchNormAct2d):
        y = layer.act(layer.drop(y))
    return y


def _with_own(x: Tensor, layer: Any, source_share: float, own_share: float, weight: Tensor | None = None) -> Normalised:
    """Return what `blended_norm` does, with statistics for each image."""
    args = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    return Normalised(*_BlendedWithOwn.apply(x, *args, weight, source_share, own_share, layer.eps))


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance (N, C) of each image, over its places.

    On a CPU torch.var_mean is many times slower than these two sums.
    """
    values = x.flatten(2)
    mean = values.mean(2)
    squares = torch.linalg.vector_norm(values, dim=2).square() / values.shape[2]
    return mean, (squares - mean.square()).clamp(min=0)


class _Blended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean_s: Tensor, var_s: Tensor, share: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _has_kernels(x):
            mean, scale = torch.batch_norm_stats(x, eps)
            var = scale.square().reciprocal() - eps
        else:
            var, mean = torch.var_mean(_exact(x), _axes(x), correction=0)
        blend = torch.lerp(mean, mean_s.to(mean), share)
        scale = (torch.lerp(var, var_s.to(var), share) + eps).rsqrt()
        if _has_kernels(x):
            y = torch.batch_norm_elemt(x, weight, bias, blend, scale, eps)
        else:
            y = ((_exact(x) - _wide(blend, x)) * _wide(weight * scale, x) + _wide(bias, x)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, blend, scale)
        ctx.share = share
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, blend, scale = ctx.saved_tensors
        if _has_kernels(x):
            if x.is_contiguous(memory_format=torch.channels_last):
                dy = dy.contiguous(memory_format=torch.channels_last)
            else:
                dy = dy.contiguous()
            total, moved, dw, db = torch.batch_norm_backward_reduce(dy, x, blend, scale, weight, True, True, True)
        else:
            away = _exact(x) - _wide(blend, x)
            total = _exact(dy).sum(_axes(x))
            moved = (_exact(dy) * away).sum(_axes(x))
            dw = moved * scale
            db = total
        values = x.numel() // x.shape[1]
        keep = 1 - ctx.share
        total = keep * (total + (blend - mean) * scale.square() * moved)
        moved = keep * moved
        if _has_kernels(x):
            count = torch.full((1,), values, dtype=torch.int32, device=x.device)
            dx = torch.batch_norm_backward_elemt(dy, x, blend, scale, weight, total, moved, count)
        else:
            slope = _exact(dy) - _wide(total / values, x) - away * _wide(scale.square() * moved / values, x)
            dx = (slope * _wide(weight * scale, x)).to(x.dtype)
        return dx, dw, db, None, None, None, None


class _BlendedWithOwn(torch.autograd.Function):
    """All means are taken from the source's, so that few digits are lost."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean_s: Tensor,
        var_s: Tensor,
        among: Tensor | None,
        source_share: float,
        own_share: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        away = _exact(x) - _wide(mean_s, x)
        own_mean, own_var = _moments(away)  # (N, C)
        mean = own_mean.mean(0)  # (C,)
        var = own_var.mean(0) + own_mean.var(0, correction=0)
        blend = own_share * own_mean  # (N, C)
        spread = source_share * var_s.to(var) + own_share * own_var
        batch_share = 1 - source_share - own_share
        near_mean = mean
        near_var = var
        if among is not None:
            among = among.to(own_mean)
            near_mean = among @ own_mean  # (N, C)
            near_var = (among @ (own_var + own_mean.square()) - near_mean.square()).clamp(min=0)
        if batch_share > ROUNDING:  # otherwise an image that is not finite leaves the others alone
            blend = blend + batch_share * near_mean
            spread = spread + batch_share * near_var
        scale = (spread + eps).rsqrt()
        slope = weight * scale
        y = torch.addcmul(_wide(bias - blend * slope, x), away, _wide(slope, x)).to(x.dtype)
        found = mean + mean_s
        ctx.save_for_backward(x, weight, mean_s, own_mean, near_mean, blend, scale, among)
        ctx.shares = (own_share, batch_share)
        ctx.mark_non_differentiable(found, var)
        return y, found, var

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean_s, own_mean, near_mean, blend, scale, among = ctx.saved_tensors
        own_share, batch_share = ctx.shares
        away = _exact(x) - _wide(mean_s, x)
        exact = _exact(dy)
        total = exact.flatten(2).sum(2)  # (N, C)
        moved = (exact * away).flatten(2).sum(2) - blend * total
        slope = weight * scale
        to_mean = -slope * total
        to_var = -slope * scale.square() * moved / 2
        places = x.shape[2:].numel()
        rise = own_share * to_var
        start = own_share * (to_mean - 2 * to_var * own_mean)
        if batch_share > ROUNDING:
            rise = rise + batch_share * _of_all(to_var, among)
            start = start + batch_share * _of_all(to_mean - 2 * to_var * near_mean, among)
        rise = 2 / places * rise
        start = start / places
        dx = torch.addcmul(_wide(start, x), away, _wide(rise, x)).addcmul_(exact, _wide(slope, x))
        return dx.to(x.dtype), (moved * scale).sum(0), total.sum(0), None, None, None, None, None, None


def _of_all(t: Tensor, among: Tensor | None) -> Tensor:
    """Return what comes back to each image from all that it counts for: t (N, C), by W or by 1 / N."""
    return t.mean(0) if among is None else among.T @ t


def _has_kernels(x: Tensor) -> bool:
    """Return whether torch's own kernels for parts of BatchNorm are used: on a GPU; a compiler does not know them."""
    return x.is_cuda and not torch.compiler.is_compiling()


def _exact(x: Tensor) -> Tensor:
    """Return x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _axes(x: Tensor) -> list[int]:
    return [axis for axis in range(x.ndim) if axis != 1]


def _wide(t: Tensor, x: Tensor) -> Tensor:
    """Return values of channels (C,), or of each image's (N, C), so that they can be combined with x (N, C, ...)."""
    return t.view(*t.shape, *(1 for _ in x.shape[2:]))
