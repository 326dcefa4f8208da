"""The head: what turns the last features into logits, and where these features are read.

Shapes: N images, C classes, d features.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LOGITS = ""  # in the place of a layer's name, for networks whose logits do not come from one such layer
HEADS = (nn.Linear, nn.Conv2d)


class HeadTap:
    """Where it is read what the head turns into logits.

    Attributes:
        name: of the layer that gives the logits, whose input is read; LOGITS: the logits themselves are read.
    """

    def __init__(self, name: str):
        self.name = name

    def features(self, inputs: tuple[Tensor, ...], output: Any, n: int) -> Tensor:
        """Return what the head reads, (N, d)."""
        read = logits_of(output) if self.name == LOGITS else inputs[0]
        return read.reshape(n, -1)


def logits_of(output: Any) -> Any:
    """Return the logits in a network's output: its `logits`, its first part, or the output itself.

    Models of Hugging Face return an object or a dict with logits; other networks a tuple that starts with them.
    """
    if isinstance(output, Mapping):
        return output.get("logits", output)
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, tuple | list) and output:
        return output[0]
    return output


def linear_head(net: nn.Module, name: str) -> nn.Linear:
    """Return the network's linear head: timm's `get_classifier()`, or the last linear layer."""
    modules = list(net.modules())
    get_classifier = getattr(net, "get_classifier", None)
    if get_classifier is not None:
        modules.append(get_classifier())
    for module in reversed(modules):
        if isinstance(module, nn.Linear):
            return module
    raise ValueError(f"{name} has no linear head, and this method needs one")


@torch.no_grad()
def head_layer(net: nn.Module, run: Callable[[], Tensor]) -> str:
    """Return the name of the layer whose output is the network's logits; LOGITS if there is none.

    It is a linear layer, or a convolution that sees one place. The mean of two heads has none.

    Args:
        run: runs the network on some images, and returns the logits of all classes.
    """
    calls: dict[str, list[tuple[tuple[Tensor, ...], Tensor]]] = {}
    layers = {name: layer for name, layer in net.named_modules() if isinstance(layer, HEADS)}

    def note(name: str, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.setdefault(name, []).append((inputs, output))

    handles = [layer.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        logits = run()
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(logits, Tensor):
        return LOGITS
    giving = [name for name, seen in calls.items() if len(seen) == 1 and _gives(layers[name], *seen[0], logits)]
    return giving[-1] if giving else LOGITS


def _gives(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, logits: Tensor) -> bool:
    """Return whether a layer turned one vector for each image into its logits."""
    values_of_an_image = head_weight(layer).shape[1]
    if not inputs or inputs[0].numel() != len(logits) * values_of_an_image or output.numel() != logits.numel():
        return False
    return torch.allclose(output.reshape(logits.shape), logits, equal_nan=True)


def head_weight(layer: nn.Module) -> Tensor:
    """Return the matrix (C, d) of a linear layer, or of a convolution that sees one place."""
    return layer.get_parameter("weight").flatten(1)
