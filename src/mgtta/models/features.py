"""Where a network's layer features are read: at normalisation layers, whose outputs are there anyway.

Shapes: N images, L tokens or places, d features.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta.models.norms import CHANNELS_FIRST, norm_layers


class Tap:
    """One layer's features, pooled to (N, d).

    BatchNorm is read at its input, since the mean over the batch of its output is its own bias; all others at
    their output.
    """

    def __init__(self, name: str, layer: nn.Module, class_token: bool, prefix_tokens: int):
        self.name = name
        self.at_input = isinstance(layer, _BatchNorm)
        self.class_token = class_token
        self.prefix_tokens = prefix_tokens
        several_axes = isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1
        self.channels_last = not isinstance(layer, CHANNELS_FIRST) and not several_axes

    def attach(self, net: nn.Module, n: int, found: dict[str, Tensor]) -> Any:
        """Put the features of the next pass, of n images, into `found`, until the handle is removed."""

        def read(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            found[self.name] = self.features(inputs, output, n)

        return net.get_submodule(self.name).register_forward_hook(read, prepend=True)  # before any rounding

    def features(self, inputs: tuple[Tensor, ...], output: Tensor, n: int) -> Tensor:
        """Of n images, (N, d), from what the layer took and gave."""
        return self.pool(inputs[0] if self.at_input else output, n)

    def pool(self, t: Tensor, n: int) -> Tensor:
        """(N, L, d), (L, N, d), (N, H, W, d) or (N, d, H, W) -> (N, d); windows may lie along the first axis."""
        if not self.channels_last and t.ndim > 2:
            t = t.flatten(2).transpose(1, 2)  # (N, d, H, W) -> (N, HW, d)
        elif t.ndim == 3 and t.shape[0] % n and t.shape[1] == n:
            t = t.transpose(0, 1)  # (L, N, d) -> (N, L, d)
        t = t.reshape(n, -1, t.shape[-1])  # (N, L, d)
        if self.class_token:
            return t[:, 0]
        return t[:, self.prefix_tokens if t.shape[1] > self.prefix_tokens else 0 :].mean(1)


class FirstPass:
    """The features of each tapped layer in a network's first pass within the block, whoever calls it.

    Attributes:
        found: name of the layer -> (N, d), detached.
    """

    def __init__(self, net: nn.Module, taps: Sequence[Tap]):
        self.net, self.taps = net, taps
        self.found: dict[str, Tensor] = {}
        self.images, self.over = 0, False

    def __enter__(self) -> "FirstPass":
        self.handles = [
            self.net.register_forward_pre_hook(self._begin),
            *(
                self.net.get_submodule(tap.name).register_forward_hook(partial(self._read, tap), prepend=True)
                for tap in self.taps
            ),
            self.net.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, _net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.images = len(inputs[0])

    def _read(self, tap: Tap, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not self.over:
            self.found[tap.name] = tap.features(inputs, output, self.images).detach()

    def _end(self, *_: object) -> None:
        self.over = True


def feature_taps(net: nn.Module) -> list[Tap]:
    """In a transformer, the first norm of every block but the first, and the final norm (the paper's layers).

    In any other network, every normalisation layer. A transformer is what has `blocks`, each with a `norm1`, and a
    final `norm` or `fc_norm`; it may stand inside a module of yours.
    """
    layers = norm_layers(net)
    for prefix, module in net.named_modules():
        blocks = getattr(module, "blocks", None)
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            continue
        dot = f"{prefix}." if prefix else ""
        first_norms = [f"{dot}blocks.{i}.norm1" for i in range(len(blocks))]
        final_norms = [name for name in (f"{dot}fc_norm", f"{dot}norm") if name in layers]
        if final_norms and all(name in layers for name in first_norms):
            tokens = getattr(module, "num_prefix_tokens", 0)
            class_token = getattr(module, "global_pool", None) == "token" and tokens > 0
            names = [*first_norms[1:], final_norms[0]]
            return [Tap(name, layers[name], class_token, tokens) for name in names]
    return [Tap(name, layer, False, 0) for name, layer in layers.items()]
