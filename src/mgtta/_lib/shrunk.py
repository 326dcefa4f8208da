"""Weights in 8 bits: whole numbers, and a scale for each row."""

from torch import Tensor

SCALE = ":scale"  # after the name of a weight in 8 bits: the factors of its rows


def widened(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a file in float32; those in 8 bits are multiplied by the scales of their rows."""
    weights = {name: tensor.float() for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, weight in weights.items():
        if name + SCALE in tensors:
            scale = tensors[name + SCALE]
            weights[name] = weight * scale.view(-1, *[1] * (weight.ndim - 1))
    return weights
