"""Which parameters adapt: the affine parameters of the normalisation layers (theta in the paper)."""

import re

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mgtta._timm import timm


def _timm_norms(pattern: str) -> tuple[type[nn.Module], ...]:
    return tuple(layer for name, layer in vars(timm.layers).items() if re.fullmatch(pattern, name))


CHANNELS_FIRST: tuple[type[nn.Module], ...] = (  # (N, channels, ...)
    _BatchNorm,
    _InstanceNorm,
    nn.GroupNorm,
    *_timm_norms("(Layer|Rms|Simple)Norm(Act)?2d(Fp32)?"),
)
CHANNELS_LAST: tuple[type[nn.Module], ...] = (  # (N, ..., channels)
    nn.LayerNorm,
    nn.RMSNorm,
    *_timm_norms("(Rms|Simple)Norm(Act)?(Fp32)?"),
)


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> normalisation layer, for every one that has affine parameters, in module order."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, CHANNELS_FIRST + CHANNELS_LAST) and any(True for _ in module.parameters(recurse=False))
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no normalisation layer with affine parameters "
            "(LayerNorm, GroupNorm, BatchNorm, InstanceNorm or RMSNorm), so there is nothing to adapt"
        )
    return layers


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The affine parameters of every normalisation layer, in module order."""
    return [p for layer in norm_layers(model).values() for p in layer.parameters(recurse=False)]


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
