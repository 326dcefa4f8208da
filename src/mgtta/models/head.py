"""The head: what turns the last features into logits, and where these features are read.

Shapes: N images, C classes, d features.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

LOGITS = ""  # in the place of a layer's name, for networks whose logits do not come from one linear layer


class HeadTap:
    """Where it is read what the head turns into logits.

    Attributes:
        name: of the linear layer that gives the logits, whose input is read; LOGITS: the logits themselves are read.
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
    """Return the name of the linear layer whose output is the network's logits; LOGITS if there is none.

    Networks with a convolution as head, or with the mean of two heads, have none.

    Args:
        run: runs the network on some images, and returns the logits of all classes.
    """
    try:
        head = linear_head(net, type(net).__name__)
    except ValueError:
        return LOGITS
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []
    with head.register_forward_hook(lambda _head, inputs, output: calls.append((inputs, output))):
        logits = run()
    if len(calls) != 1 or not isinstance(logits, Tensor):
        return LOGITS
    [(inputs, output)] = calls
    if not inputs or inputs[0].numel() != len(logits) * head.in_features:
        return LOGITS
    if output.numel() != logits.numel() or not torch.allclose(output.reshape(logits.shape), logits, equal_nan=True):
        return LOGITS
    return next(name for name, module in net.named_modules() if module is head)
