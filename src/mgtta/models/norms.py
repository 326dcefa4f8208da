"""Which parameters adapt: the affine parameters of the normalisation layers (theta in the paper)."""

import re

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from mgtta._lib.timm import timm


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


def channels_first(layer: nn.Module) -> bool:
    """Return whether a norm layer takes (N, channels, ...), not (N, ..., channels).

    The LayerNorm of ConvNeXt has both forms. In torchvision the first is a class LayerNorm2d; in Hugging Face, as in
    the authors' code, `data_format` tells.
    """
    if isinstance(layer, CHANNELS_FIRST) or type(layer).__name__.endswith("2d"):
        return True
    return getattr(layer, "data_format", None) == "channels_first"


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> normalisation layer, for every one that has affine parameters, in module order."""
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
    """Return the affine parameters of every normalisation layer, in module order."""
    found = {id(p): p for layer in norm_layers(model).values() for p in layer.parameters(recurse=False)}
    return list(found.values())  # a weight that two layers share counts once


def early_norm_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the norm layers before the last quarter of the network's depth, as in SAR.

    Depth is counted in a transformer's blocks (12: the last 3 are left out) or a convolutional network's stages
    (4: the last, ResNet's layer4). What comes after them, such as the final norm, is left out too. In a network
    that has neither, depth is counted in norm layers, the first of which always adapts.
    """
    layers = norm_layers(net)
    parts = blocks_of(net)
    middle = 3 * len(parts) // 4
    early = parts[:middle]
    late = parts[middle:]
    inside = [i for i, name in enumerate(layers) if _inside(name, early)]
    beyond = [i for i, name in enumerate(layers) if _inside(name, late)]
    end = min([inside[-1] + 1, *beyond]) if inside else max(1, 3 * len(layers) // 4)
    return [p for layer in list(layers.values())[:end] for p in layer.parameters(recurse=False)]


def blocks_of(net: nn.Module) -> list[str]:
    """Return the names of the blocks or stages, in order: `blocks`, `stages`, `layers`, `layer`, or `layer1`, ..."""
    for prefix, module in net.named_modules():
        for name in ("blocks", "stages", "layers", "layer"):
            container = getattr(module, name, None)
            if isinstance(container, nn.ModuleList | nn.Sequential) and len(container) > 1:
                return [dotted(prefix, name, child) for child, _ in container.named_children()]
        stages = [name for name, _ in module.named_children() if re.fullmatch(r"layer\d+", name)]
        if len(stages) > 1:
            return [dotted(prefix, name) for name in stages]
    return []


def _inside(name: str, parts: list[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers, in module order."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def dotted(prefix: str, *names: str) -> str:
    """Return the full name of a submodule or tensor of the module `prefix`; the root module has the prefix ""."""
    return ".".join([prefix, *names]).removeprefix(".")
