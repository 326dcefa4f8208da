"""A classifier with its frozen weights in bfloat16, and how the fast path runs it.

Norm layers compute in float32 on float32 parameters; images are normalised in float32, logits and features are float32.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mgtta.models.classifier import Classifier
from mgtta.models.norms import blocks_of, norm_layers

How = Callable[[Callable[..., Any]], Callable[..., Any]]  # a function -> itself, or compiled


def lower(model: Classifier) -> Classifier:
    """The model itself with its frozen weights rounded to bfloat16."""
    norms = list(norm_layers(model.net).values())
    for module in model.net.modules():
        if any(module is norm for norm in norms):
            module.register_forward_pre_hook(_raise)
            module.register_forward_hook(_round)
            continue
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if t.is_floating_point():
                t.data = t.data.to(torch.bfloat16)
    model.net.register_forward_pre_hook(_round_input)
    model.net.register_forward_hook(_raise_output)
    model.image_dtype = torch.float32
    return model


def _raise(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].float(), *inputs[1:]


def _round(_: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(torch.bfloat16)


def _round_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs[0].to(torch.bfloat16), *inputs[1:]


def _raise_output(_: nn.Module, _inputs: tuple[Tensor, ...], output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else output


class Hooked:
    """Any network: the same tensors in modules of its own, whose features are read by hooks that stay.

    torch.compile sees through those, and the model's own hooks may come and go.

    Args:
        recompute: keep no activations within a block, but compute them again on the way back; without compiling.
    """

    def __init__(self, model: Classifier, recompute: bool):
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self.model, self.recompute = copy.deepcopy(model, shared), recompute
        self.found: dict[str, Tensor] = {}
        self.images = 0
        for tap in self.model._taps:
            self.model.net.get_submodule(tap.name).register_forward_hook(partial(self._read, tap), prepend=True)
        for name in blocks_of(self.model.net) if recompute else ():
            block = self.model.net.get_submodule(name)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    def __call__(self, x: Tensor, how: How) -> tuple[Tensor, list[Tensor]]:
        """The logits, and the features of each layer."""
        return (_hooked if self.recompute else how(_hooked))(self, x)

    def _read(self, tap: Any, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.found[tap.name] = tap.features(inputs, output, self.images)


def _hooked(network: Hooked, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    network.images = len(x)
    logits = network.model(x)
    features = network.model.in_order(network.found)
    network.found.clear()
    return logits, features
