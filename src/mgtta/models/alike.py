"""Which images of a batch look alike, so that BatchNorm layers can normalise each of them by those that do.

A batch may mix several kinds of shift, and its statistics fit none of them. How strongly the channels of the first
layers respond tells kinds of shift apart, if it is measured by how much it differs from one clean image to the next.

Notation    n images; C channels of what the first BatchNorm layer is given
            s (n, C) deviations of each image's channels over its places; l = log s
            S (C, C) covariance of l over clean images, its diagonal times 1 + RIDGE
            D_ij = (l_i - l_j) S^-1 (l_i - l_j)^T / C: somewhat below 1 for two clean images
            W_ij = exp(-D_ij / FADING), divided so that each row adds up to 1
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mgtta.models.checks import IMAGE_AXES

RIDGE = 0.1  # less tells kinds of shift apart more sharply, and leaves fewer images for one that is alone
FADING = 1.0  # D over which the weight falls by a factor of e
LEAST_VARIANCE = 1e-3  # of a channel, as a share of the source's
LEAST_SHARE = 1e-9  # of the largest variance of a direction, below which it tells nothing; and the least variance


class Looks(NamedTuple):
    """How the looks of clean images vary.

    Attributes:
        layer: name of the BatchNorm layer that is the first one in a forward pass.
        root: R (C, C) with R R^T = S^-1.
    """

    layer: str
    root: Tensor

    def to(self, like: Tensor) -> "Looks":
        """Return the same on another tensor's device and in its dtype; itself if nothing changes."""
        root = self.root.to(like.device, like.dtype)
        return self if root is self.root else Looks(self.layer, root)


class LookAlikes:
    """How much the images of the present batch count for one another, as the first BatchNorm layer sees them.

    Attributes:
        layer: that layer.
        weight: W (n, n); None before the first batch.
    """

    def __init__(self, net: nn.Module, looks: Looks):
        self.layer: Any = net.get_submodule(looks.layer)
        self.root = looks.root.float()
        self.weight: Tensor | None = None

    @torch.no_grad()
    def seen_by(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return W, found by the first layer from its input x (n, C, ...); None if it has not seen these images."""
        if layer is self.layer:
            self.root = self.root.to(x.device)
            looks = _looks(x, self.layer.running_var)
            white = (looks - looks.mean(0)) @ self.root
            distance = torch.cdist(white, white).square() / white.shape[1]
            self.weight = (-distance / FADING).softmax(1)
        if self.weight is None or len(self.weight) != len(x):
            return None
        return self.weight


class LooksOfClean:
    """Collects the looks of clean images.

    Args:
        net: whose layers have names.
        layers: the BatchNorm layers among which the first one is looked for.
    """

    def __init__(self, net: nn.Module, layers: Sequence[Any]):
        self.net = net
        self.layers = layers
        self.found: list[Tensor] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, take in what the first of the layers in a forward pass is given."""
        handles = [layer.register_forward_pre_hook(self._take) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        if not self.found:
            self.layers = [layer]
        if layer is self.layers[0] and inputs[0].ndim == IMAGE_AXES:
            self.found.append(_looks(inputs[0], layer.running_var))

    def fitted(self, dtype: torch.dtype) -> Looks | None:
        """Return how looks vary; None if there is no such layer, or if they do not. A dead channel tells nothing."""
        if not self.found or sum(map(len, self.found)) < 2:
            return None
        found = torch.cat(self.found).double()
        covariance = torch.cov(found.T)
        covariance = covariance + RIDGE * covariance.diagonal().diag()
        values, directions = torch.linalg.eigh(covariance)
        varies = values > LEAST_SHARE * values.max()
        if not varies.any():
            return None
        name = next(name for name, module in self.net.named_modules() if module is self.layers[0])
        return Looks(name, (directions * torch.where(varies, values, math.inf).rsqrt()).to(dtype))


def _looks(x: Tensor, source_var: Tensor) -> Tensor:
    """Return l (n, C) of x (n, C, ...)."""
    variance = x.float().flatten(2).var(2, correction=0)
    return (variance + (LEAST_VARIANCE * source_var.to(variance)).clamp(min=LEAST_SHARE)).log() / 2
