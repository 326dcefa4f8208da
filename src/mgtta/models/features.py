"""Where a network's layer features are read: at normalisation layers, whose outputs are computed anyway.

Shapes: N images, L tokens or places, d features.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta.models.head import HeadTap
from mgtta.models.norms import NormTypes, channels_first, dotted, norm_layers


class Tap:
    """Where the features of one layer are read, and how they are pooled to (N, d).

    BatchNorm is read at its input, since the mean over the batch of its output is its own bias. All other layers are
    read at their output.
    """

    def __init__(self, name: str, layer: nn.Module, class_token: bool, prefix_tokens: int):
        self.name = name
        self.at_input = isinstance(layer, _BatchNorm)
        self.class_token = class_token
        self.prefix_tokens = prefix_tokens
        several_axes = isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1
        self.channels_last = not channels_first(layer) and not several_axes
        self.width = max(p.numel() for p in layer.parameters(recurse=False))

    def features(self, inputs: tuple[Tensor, ...], output: Tensor, n: int) -> Tensor:
        """Return the features (N, d) of n images, from the layer's inputs and its output."""
        if self.at_input:
            return self.pool(inputs[0], n)
        return self.pool(output, n)

    def pool(self, t: Tensor, n: int) -> Tensor:
        """Return (N, d), from (N, L, d), (L, N, d), (N, H, W, d) or (N, d, H, W).

        The first axis may have several windows of each image.
        """
        elsewhere = t.shape[-1] != self.width and t.shape[1] == self.width  # a layer of a user's own class
        if (elsewhere or not self.channels_last) and t.ndim > 2:
            t = t.flatten(2).transpose(1, 2)  # (N, d, H, W) -> (N, HW, d)
        elif t.ndim == 3 and t.shape[0] % n and t.shape[1] == n:
            t = t.transpose(0, 1)  # (L, N, d) -> (N, L, d)
        t = t.reshape(n, -1, t.shape[-1])  # (N, L, d)
        dtype = torch.promote_types(t.dtype, torch.float32)
        if self.class_token:
            return t[:, 0].to(dtype)
        if t.shape[1] > self.prefix_tokens:
            t = t[:, self.prefix_tokens :]
        return t.sum(1, dtype=dtype) / t.shape[1]  # a mean would write its gradient for each token


class TapReader:
    """Reads the features of each tapped layer in a network's forward passes, until it is removed.

    Attributes:
        images: number of images of the next pass; set it before the pass.
    """

    def __init__(self, net: nn.Module, taps: Sequence[Tap | HeadTap], name: str):
        self.taps = taps
        self.name = name
        self.images = 1
        self.found: dict[str, Tensor] = {}
        self.handles = [
            net.get_submodule(tap.name).register_forward_hook(partial(self._read, tap), prepend=True)  # before rounding
            for tap in taps
        ]

    def _read(self, tap: Tap | HeadTap, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.found[tap.name] = tap.features(inputs, output, self.images)

    def take(self) -> list[Tensor]:
        """Return the features of the last pass, layer by layer, and keep no reference to them."""
        features = [self.found[tap.name] for tap in self.taps if tap.name in self.found]
        self.found.clear()
        if not features:
            raise ValueError(f"no normalisation layer of {self.name} takes part in its forward pass")
        return features

    def remove(self) -> None:
        """Stop reading."""
        for handle in self.handles:
            handle.remove()


def feature_taps(net: nn.Module, norm_types: NormTypes = ()) -> list[Tap]:
    """Return where features are read, in module order.

    In a transformer, at the first norm of every block except the first block, and at the final norm: the paper's
    layers. In any other network, at every normalisation layer. A transformer is a module that has `blocks`, each with a
    `norm1`, and a final `norm` or `fc_norm`; it may be part of a larger module.
    """
    layers = norm_layers(net, norm_types)
    for prefix, module in net.named_modules():
        blocks = getattr(module, "blocks", None)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            continue
        first_norms = [dotted(prefix, f"blocks.{i}.norm1") for i in range(len(blocks))]
        final_norms = [name for name in (dotted(prefix, "fc_norm"), dotted(prefix, "norm")) if name in layers]
        if final_norms and all(name in layers for name in first_norms):
            tokens = getattr(module, "num_prefix_tokens", 0)
            class_token = getattr(module, "global_pool", None) == "token" and tokens > 0
            names = [*first_norms[1:], final_norms[0]]
            return [Tap(name, layers[name], class_token, tokens) for name in names]
    return [Tap(name, layer, False, 0) for name, layer in layers.items()]
