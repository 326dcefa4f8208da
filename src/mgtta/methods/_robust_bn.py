"""Robust BatchNorm: statistics that follow the stream slowly, in training too (RoTTA, Yuan et al., CVPR 2023)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mgtta.models.statistics import StreamStatistics


class RobustStatistics(StreamStatistics):
    """The statistics of the BatchNorm layers of one network, which take in a share of each update's batch."""

    @contextmanager
    def normalising(self, net: nn.Module, share: float = 0.0) -> Iterator[None]:
        """Let the layers normalise by these statistics, after they took in this share of the batch."""
        handles = [
            net.get_submodule(name).register_forward_hook(partial(self._normalise, i, share))
            for i, name in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _normalise(self, i: int, share: float, layer: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        x = inputs[0]
        mean = self.get_buffer(f"mean_{i}")
        var = self.get_buffer(f"var_{i}")
        if share:
            axes = [axis for axis in range(x.ndim) if axis != 1]
            batch_var, batch_mean = torch.var_mean(x, axes, correction=0)
            mean = (1 - share) * mean + share * batch_mean
            var = (1 - share) * var + share * batch_var
            setattr(self, f"mean_{i}", mean.detach())
            setattr(self, f"var_{i}", var.detach())
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        x = (x - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
        return x * layer.weight.view(shape) + layer.bias.view(shape) if layer.affine else x
