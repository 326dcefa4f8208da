"""What methods that re-centre features share: a linear head turns a move of its input into a move of the logits."""

import torch
from torch import Tensor

from mgtta.models.classifier import Classifier


def through_head(model: Classifier, direction: Tensor, every_class: bool = False) -> Tensor:
    """Return what a move of the head's input (D,) adds to the logits (C,)."""
    weight = model.head.weight
    if model.classes is not None and not every_class:
        weight = weight[model.classes]
    return weight.to(direction) @ direction


@torch.no_grad()
def check_head(model: Classifier, x: Tensor, remedy: str) -> None:
    """Check that the head takes what the last tap reads: the source's mean is known only there."""
    _, features = model.features(x[:1])
    _, taken = model.embed(x[:1])
    last = features[-1]
    if last.shape != taken.shape or not torch.allclose(last.to(taken), taken, equal_nan=True):
        raise ValueError(
            f"the head of {model.name} takes other features than its last normalisation layer gives, so the source's "
            f"mean before the head is not known: {remedy}"
        )
