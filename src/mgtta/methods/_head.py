"""What methods that re-centre features share: a linear head turns a move of its input into a move of the logits."""

import torch
from torch import Tensor

from mgtta.models.classifier import Classifier
from mgtta.models.head import LOGITS, head_weight
from mgtta.models.source import SourceStatistics


def through_head(model: Classifier, direction: Tensor, every_class: bool = False, layer: str | None = None) -> Tensor:
    """Return what a move of what the head reads (..., D) adds to the logits (..., C).

    Args:
        layer: name of the layer that gives the logits; LOGITS if the move is of the logits themselves; None: the
            linear head.
    """
    if layer == LOGITS:
        if model.classes is not None and not every_class:
            direction = direction[..., model.classes]
        return direction
    weight = head_weight(model.head if layer is None else model.net.get_submodule(layer))
    if model.classes is not None and not every_class:
        weight = weight[model.classes]
    return direction @ weight.to(direction).T


def linear_centre(source: SourceStatistics, model: Classifier, remedy: str) -> Tensor:
    """Return the source's mean of what the linear head reads (D,), for methods that need such a head."""
    if source.head is not None and model.net.get_submodule(source.head_layer) is not model.head:
        raise ValueError(f"the logits of {model.name} do not come from its last linear layer: {remedy}")
    return source.before_head.to(model.head.weight)


@torch.no_grad()
def check_head(model: Classifier, x: Tensor, remedy: str) -> None:
    """Check that the head takes what the last tap reads: old source statistics have the mean only there."""
    _, features = model.features(x[:1])
    _, taken = model.embed(x[:1])
    last = features[-1]
    if last.shape != taken.shape or not torch.allclose(last.to(taken), taken, equal_nan=True):
        raise ValueError(
            f"the head of {model.name} takes other features than its last normalisation layer gives, and these source "
            "statistics are older and lack the mean before the head: make them again with "
            f"mgtta.source_statistics(model, clean_images), or {remedy}"
        )
