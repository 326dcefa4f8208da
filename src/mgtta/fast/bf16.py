"""A classifier with its frozen weights in bfloat16, and how the fast path runs it.

Norm layers compute in float32 on float32 parameters. BatchNorm layers do so by themselves, from and to bfloat16, and
LayerNorm layers by a kernel; hooks convert what goes into others and comes out of them. Images are normalised in
float32; logits and features are float32.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from mgtta._lib.timm import timm
from mgtta.fast.batchnorm import Told, batch_norm, has_batch_norm_kernels
from mgtta.fast.kernels import has_norm_kernel, norm_backward, norm_forward
from mgtta.fast.mlp import is_plain_mlp, mlp
from mgtta.fast.residual import fuse_residual_blocks
from mgtta.models.blended import blended_forward, blended_norm
from mgtta.models.classifier import Classifier
from mgtta.models.head import logits_of
from mgtta.models.hooks import own_hook, set_forward
from mgtta.models.norms import blocks_of, dotted, norm_layers, with_running_statistics
from mgtta.models.statistics import BatchMoments, StreamStatistics, has_variance

PLAIN_NORMS = (nn.LayerNorm, timm.layers.LayerNorm, timm.layers.LayerNorm2d)
Views = Callable[[Tensor], Tensor]  # images -> those that go through the network
How = Callable[[Callable[..., Any]], Callable[..., Any]]  # a function -> the same function, or it compiled


def lower(model: Classifier) -> Classifier:
    """Round the model's frozen weights to bfloat16, in place, and return the model.

    `model.full_precision` keeps the values from before on the CPU, so that an export is not rounded.
    """
    norms = set(norm_layers(model.net, model.norm_types).values())
    for prefix, module in model.net.named_modules():
        if module in norms:
            _round_norm(module)
            continue
        if is_plain_mlp(module) and "forward" not in vars(module):
            set_forward(module, _frozen_mlp)
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if t.is_floating_point() and t.dtype != torch.bfloat16:  # shared weights are met twice
                model.full_precision[dotted(prefix, name)] = t.detach().to("cpu", copy=True)
                t.data = t.data.to(torch.bfloat16)
    model.net.register_forward_pre_hook(_round_input)
    model.net.register_forward_hook(_raise_output)
    model.image_dtype = torch.float32
    return model


def _frozen_mlp(module: Any, x: Tensor) -> Tensor:
    """Return what an MLP of timm's gives for x (..., d)."""
    rows = x.reshape(1, -1, x.shape[-1])
    return mlp(rows, module.fc1, module.fc2).view(*x.shape[:-1], -1)


def _round_norm(layer: nn.Module) -> None:
    """Let a norm layer take and give bfloat16, and compute in float32."""
    if isinstance(layer, _BatchNorm):
        return
    if _is_plain_norm(layer):
        set_forward(layer, _layer_norm_2d if isinstance(layer, timm.layers.LayerNorm2d) else _layer_norm)
        return
    layer.register_forward_pre_hook(_raise)
    layer.register_forward_hook(_round)


@own_hook
def _raise(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].float(), *inputs[1:]


@own_hook
def _round(_: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


@own_hook
def _round_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].to(torch.bfloat16), *inputs[1:]


@own_hook
def _raise_output(_: nn.Module, _inputs: tuple[Tensor, ...], output: Any) -> Any:
    logits = logits_of(output)
    return logits.float() if isinstance(logits, Tensor) else output


class Hooked:
    """Any network, for the fast path: the same tensors in modules of its own, whose features are read by hooks.

    These hooks stay, and torch.compile traces through them. The hooks of the model itself may change meanwhile.

    Args:
        recompute: keep no activations inside a block, but compute them again in the backward pass; not compiled.
        statistics: those of the stream, of BatchNorm layers; they follow batches while `collecting` is True.
        reads_features: False: features are not computed.
    """

    def __init__(
        self,
        model: Classifier,
        recompute: bool,
        statistics: StreamStatistics | None = None,
        reads_features: bool = True,
    ):
        shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
        shared[id(model.full_precision)] = model.full_precision
        self.model = copy.deepcopy(model, shared)
        self.recompute = recompute
        self.collecting = False
        self.by_image = False  # BatchNorm layers normalise image by image: see models/blended.py
        self.collected: dict[int, int] = {}  # BatchNorm layers of the present pass -> values of a channel
        self.room: list[BatchMoments] = []  # where BatchNorm layers leave mean and unbiased variance of a batch
        self.statistics = statistics
        for layer in with_running_statistics(self.model.net):
            layer.register_forward_pre_hook(self._one_by_one)
        for prefix, block in self.model.net.named_modules():
            if _scales_plain_mlp(block):
                _scale_weights(self.model, prefix, block)
            if _has_plain_start(block):
                _shift_in_norm(self.model, prefix, block)
        if statistics is not None:
            self._follow(statistics)
        self.reader = self.model.reader() if reads_features else None
        if _is_convolutional(self.model):
            for convolution in _convolutions(self.model):  # those in bfloat16 are made for channels last
                convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
                if is_depthwise(convolution):
                    turned = convolution.weight.flip(2, 3).contiguous(memory_format=torch.channels_last)
                    set_forward(convolution, partial(depthwise, turned=turned))
            self.model.net.register_forward_pre_hook(_last_channels)
        for name in blocks_of(self.model.net) if recompute else ():
            block = self.model.net.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    def _follow(self, statistics: StreamStatistics) -> None:
        """Let BatchNorm layers tell the stream's statistics what they see."""
        telling = []
        for i, name in enumerate(statistics.layers):
            layer = self.model.net.get_submodule(name)
            if type(layer).forward is _BatchNorm.forward and layer.affine and not self.recompute:
                layer.forward = partial(self._normalised, i, layer)
                telling.append(i)
            else:
                layer.register_forward_pre_hook(partial(self._collect, i))
        fuse_residual_blocks(self.model.net, {self.model.net.get_submodule(statistics.layers[i]) for i in telling})
        statistics.places(telling)
        sizes = [len(statistics.get_buffer(f"mean_{i}")) for i in range(len(statistics.layers))]
        both = statistics.images.new_zeros(2, sum(sizes))
        self.room = list(zip(*(row.split(sizes) for row in both), strict=True))

    def __call__(self, x: Tensor, how: How, views: Views) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the features of each layer, of views of x."""
        if not self.recompute:
            return how(_hooked)(self, x, views)
        found = _hooked(self, x, views)
        self.collecting = False  # blocks run again in the backward pass
        return found

    def _normalised(self, i: int, layer: Any, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Return what a BatchNorm layer does, and follow the statistics that it has computed anyway.

        Args:
            residual: what is added to the output; None: nothing.
            relu: whether ReLU follows.
        """
        quick = layer.training and has_variance(x) and not self.model.own_share and self.model.alikes is None
        if quick and has_batch_norm_kernels(x):
            told = None
            if self.collecting:
                self.collected[i] = x.numel() // x.shape[1]
                told = Told(*self.room[i])
            return batch_norm(x, layer, self.model.source_share, residual, relu, told)
        y = self._normalised_alone(i, layer, x)
        if residual is not None:
            y = y + residual
        return y.relu() if relu else y

    def _normalised_alone(self, i: int, layer: Any, x: Tensor) -> Tensor:
        if not layer.training or not has_variance(x):
            return blended_forward(layer, x, self.model.source_share, self.model.own_share)
        mean, var = self.room[i]
        values = x.numel() // x.shape[1]
        if self.collecting:
            self.collected[i] = values
        if self.model.source_share:
            found = blended_norm(x, layer, self.model.source_share, self.model.own_share, self.model.alikes)
            if self.collecting:
                mean.copy_(found.mean)
                var.copy_(found.var * (values / (values - 1)))
            return found.y
        if not self.collecting:
            return _BatchNorm.forward(layer, x)
        momentum = 1.0  # mean and var become those of the batch
        return F.batch_norm(x, mean, var, layer.weight, layer.bias, True, momentum, layer.eps)

    def _one_by_one(self, layer: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        if self.by_image:
            layer.training = False

    def begin(self) -> None:
        """Prepare for a pass: forget what was left of the last one, which may not be finite."""
        if self.room and self.collecting:
            torch._foreach_zero_([t for moments in self.room for t in moments])

    def end(self, n: int) -> None:
        """Take what BatchNorm layers left of a batch of n images into the stream's statistics."""
        if not self.collected:
            return
        assert self.statistics is not None
        layers = sorted(self.collected)
        shares = [(self.collected[i] - 1) / self.collected[i] for i in layers]  # biased / unbiased variance
        variances = torch._foreach_mul([self.room[i][1] for i in layers], shares)
        means = [self.room[i][0] for i in layers]
        self.statistics.follow_all(dict(zip(layers, zip(means, variances, strict=True), strict=True)), n)
        self.collected.clear()

    def _collect(self, i: int, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if self.collecting:
            assert self.statistics is not None
            self.statistics.update(i, inputs[0])


def _scales_plain_mlp(block: Any) -> bool:
    """Return whether a module is a block of timm's ConvNeXt whose MLP's output is multiplied by a frozen vector."""
    if type(block) is not timm.models.convnext.ConvNeXtBlock or not is_plain_mlp(block.mlp):
        return False
    return block.gamma is not None and not block.gamma.requires_grad


def _scale_weights(model: Classifier, prefix: str, block: Any) -> None:
    """Multiply the last weights of a block's MLP by its vector, once, instead of its output at each batch."""
    gamma = _exact_value(model, dotted(prefix, "gamma"))
    last = block.mlp.fc2
    for name, values in last.named_parameters():
        exact = _exact_value(model, dotted(prefix, "mlp.fc2", name))
        scaled = gamma.view(-1, *(1 for _ in exact.shape[1:])) * exact
        setattr(last, name, nn.Parameter(scaled.to(values), requires_grad=False))
    block.gamma = None


def _has_plain_start(block: Any) -> bool:
    """Return whether a module is a block of timm's ConvNeXt that begins with a frozen bias and a plain LayerNorm."""
    if type(block) is not timm.models.convnext.ConvNeXtBlock or type(block.norm) not in PLAIN_NORMS:
        return False
    bias = getattr(block.conv_dw, "bias", None)
    frozen = bias is not None and not bias.requires_grad
    return frozen and getattr(vars(block.norm).get("forward"), "func", None) in (_layer_norm, _layer_norm_2d)


def _shift_in_norm(model: Classifier, prefix: str, block: Any) -> None:
    """Let a block's LayerNorm add the bias of the convolution before it, which saves a pass over memory."""
    bias = _exact_value(model, dotted(prefix, "conv_dw.bias"))
    set_forward(block.norm, partial(block.norm.forward.func, shift=bias.to(block.norm.weight)))
    block.conv_dw.bias = None


def _exact_value(model: Classifier, name: str) -> Tensor:
    """Return a tensor of the network as it was before it was rounded."""
    known = model.full_precision.get(name)
    return model.net.get_parameter(name).detach() if known is None else known


def _is_plain_norm(layer: Any) -> bool:
    """Return whether a layer is a LayerNorm over the last axis, or over channels, with weight and bias."""
    if type(layer) not in PLAIN_NORMS or "forward" in vars(layer):
        return False
    return len(layer.normalized_shape) == 1 and layer.bias is not None


def _layer_norm_2d(layer: Any, x: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return LayerNorm over the channels of x (N, d, H, W), which is quick if they are last in memory."""
    return _layer_norm(layer, x.permute(0, 2, 3, 1), shift).permute(0, 3, 1, 2)


def _layer_norm(layer: Any, x: Tensor, shift: Tensor | None = None) -> Tensor:
    """Return LayerNorm of x (..., d), computed in float32, in bfloat16.

    Args:
        shift: what is added to x before, (d,); None: nothing.
    """
    if x.dtype != torch.bfloat16 or not has_norm_kernel(x):
        t = x.float() if shift is None else x.float() + shift
        return F.layer_norm(t, layer.normalized_shape, layer.weight, layer.bias, layer.eps).to(torch.bfloat16)
    rows = x.reshape(1, -1, x.shape[-1])
    if torch.is_grad_enabled():
        found = _LayerNorm.apply(rows, layer.weight, layer.bias, layer.eps, shift)
    else:
        found = norm_forward(rows, layer.weight, layer.bias, layer.eps, None, shift=shift).y
    return found.view(x.shape)


class _LayerNorm(torch.autograd.Function):
    """LayerNorm of rows (1, rows, d), by one kernel in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, shift: Tensor | None) -> Tensor:
        normed = norm_forward(x, weight, bias, eps, x.dtype, shift=shift)
        ctx.save_for_backward(normed.z, normed.scale, weight)
        return normed.y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [grad] = grads
        z, scale, weight = ctx.saved_tensors
        return *norm_backward(grad, z, scale, weight, None, None), None, None


def _is_convolutional(model: Classifier) -> bool:
    """Return True for a network on a GPU with more convolutions than that of its patches."""
    convolutions = _convolutions(model)
    return len(convolutions) > 1 and convolutions[0].weight.is_cuda


def is_depthwise(layer: nn.Conv2d) -> bool:
    """Return whether a frozen convolution filters each channel by itself and keeps the size of images.

    A subclass, or a layer with a forward function of the user's, may do something else with its weights.
    """
    if type(layer) is not nn.Conv2d or "forward" in vars(layer):
        return False
    if layer.weight.requires_grad or layer.groups == 1 or layer.padding_mode != "zeros":
        return False
    if not layer.groups == layer.in_channels == layer.out_channels:
        return False
    half = tuple((k - 1) / 2 for k in layer.kernel_size)  # not whole if k is even
    return layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.padding == half


def depthwise(layer: nn.Conv2d, x: Tensor, turned: Tensor) -> Tensor:
    """Return what such a convolution gives.

    Args:
        turned: its weight, turned by half a circle.
    """
    return _Depthwise.apply(x, layer.weight, turned, layer.bias, layer.padding)


class _Depthwise(torch.autograd.Function):
    """A depthwise convolution whose backward pass is another one: cuDNN takes half the time for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, turned: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
        ctx.save_for_backward(turned)
        ctx.padding = padding
        return F.conv2d(x, weight, bias, padding=padding, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [turned] = ctx.saved_tensors
        return F.conv2d(grads[0], turned, None, padding=ctx.padding, groups=len(turned)), *[None] * 4


def _convolutions(model: Classifier) -> list[nn.Conv2d]:
    return [module for module in model.net.modules() if isinstance(module, nn.Conv2d)]


def _last_channels(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].contiguous(memory_format=torch.channels_last), *inputs[1:]


def _hooked(network: Hooked, x: Tensor, views: Views) -> tuple[Tensor, list[Tensor]]:
    x = views(x)
    reader = network.reader
    if reader is not None:
        reader.images = len(x)
    network.begin()
    logits = network.model(x)
    network.end(len(x))
    return logits, [] if reader is None else reader.take()
