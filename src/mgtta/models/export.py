"""A user's own network with the weights that a method has adapted."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mgtta.models.classifier import Classifier
from mgtta.models.head import linear_head
from mgtta.models.hooks import has_set_forward, remove_own_hooks
from mgtta.models.statistics import StreamStatistics, use_running_statistics

PREFIX = "net."  # of the network's parameters in a Classifier


@torch.inference_mode(False)
@torch.no_grad()
def export_net(
    model: Classifier,
    adapted: Mapping[str, Tensor] | None = None,
    *,
    statistics: StreamStatistics | None = None,
    head_shift: Tensor | None = None,
    head_layer: str | None = None,
) -> nn.Module:
    """Return a copy of the user's network with adapted weights: float32, evaluation mode, without the library's hooks.

    It takes normalised images and returns the logits of all of its classes, as the user's network does.

    Args:
        model: what the method adapts. Frozen weights that `mgtta.fast.bf16.lower` rounded are exported unrounded.
        adapted: name in `model.named_parameters()` -> value; parameters that are not named keep the model's values.
        statistics: those of the stream, for BatchNorm layers. None: their running statistics, the source's.
        head_shift: what is added to the logits, (all classes of the head,); it goes into the bias of the head.
        head_layer: name of the head, a linear layer or a convolution; None: the last linear layer.
    """
    net = copy.deepcopy(model.net)
    remove_own_hooks(net)
    use_running_statistics(net)
    _restore(net, model.full_precision)
    net.float()
    _load(net, adapted or {})
    if statistics is not None:
        blended = [name for name in statistics.layers if has_set_forward(model.net.get_submodule(name))]
        statistics.write_to(net, dict.fromkeys(blended, model.source_share))
    if head_shift is not None:
        head = linear_head(net, model.name) if head_layer is None else net.get_submodule(head_layer)
        _shift_logits(head, head_shift)
    return net.requires_grad_().eval()


def _restore(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put these values in the place of rounded parameters and buffers."""
    own = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for name, value in tensors.items():
        own[name].data = value.to(own[name].device, copy=True)


def _load(net: nn.Module, adapted: Mapping[str, Tensor]) -> None:
    own = dict(net.named_parameters())
    for full_name, value in adapted.items():
        name = full_name.removeprefix(PREFIX)
        if name not in own or not full_name.startswith(PREFIX):
            raise ValueError(f"the model has no parameter {full_name!r}: give names of model.named_parameters()")
        if own[name].shape != value.shape:
            raise ValueError(f"{full_name} is {tuple(value.shape)}, the model's is {tuple(own[name].shape)}")
        own[name].copy_(value)


def _shift_logits(head: nn.Module, shift: Tensor) -> None:
    """Add the shift to the bias of the head, which gets a bias if it has none."""
    weight = head.get_parameter("weight")
    if shift.shape != (len(weight),):
        raise ValueError(f"head_shift must be ({len(weight)},), one value per class, not {tuple(shift.shape)}")
    shift = shift.detach().to(weight)
    if head.bias is None:
        head.bias = nn.Parameter(shift.clone())
    else:
        head.get_parameter("bias").add_(shift)
