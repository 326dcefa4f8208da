"""Which parameters adapt: the affine parameters of the normalisation layers (theta in the paper), or chosen ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

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

NormTypes = tuple[type[nn.Module], ...]
Chosen = str | Sequence[str] | Callable[[nn.Module], Iterable[nn.Parameter]]


def channels_first(layer: nn.Module) -> bool:
    """Return whether a norm layer takes (N, channels, ...), not (N, ..., channels).

    The LayerNorm of ConvNeXt has both forms. In torchvision the first is a class LayerNorm2d; in Hugging Face, as in
    the authors' code, `data_format` tells.
    """
    if isinstance(layer, CHANNELS_FIRST) or type(layer).__name__.endswith("2d"):
        return True
    return getattr(layer, "data_format", None) == "channels_first"


def norm_layers(model: nn.Module, norm_types: NormTypes = ()) -> dict[str, nn.Module]:
    """Return name -> normalisation layer, for every one that has affine parameters, in module order.

    Args:
        norm_types: classes of your own that count as normalisation layers, besides those that a Classifier has.
    """
    known = (*CHANNELS_FIRST, *CHANNELS_LAST, *norm_types, *getattr(model, "norm_types", ()))
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, known) and any(True for _ in module.parameters(recurse=False))
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no normalisation layer with affine parameters "
            "(LayerNorm, GroupNorm, BatchNorm, InstanceNorm or RMSNorm), so there is nothing to adapt; if it has a "
            "class of its own for them, give mgtta.load_model(..., norm_types=[THE_CLASS])"
        )
    return layers


def normalises_like_a_resnet(net: nn.Module) -> bool:
    """Return whether most affine parameters of norm layers are of BatchNorm or GroupNorm; a ViT may have a few."""
    balance = 0
    for layer in net.modules():
        if isinstance(layer, (*CHANNELS_FIRST, *CHANNELS_LAST)):
            size = sum(p.numel() for p in layer.parameters(recurse=False))
            balance += size if isinstance(layer, _BatchNorm | nn.GroupNorm) else -size
    return balance > 0


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the affine parameters of every normalisation layer, in module order."""
    found = {id(p): p for layer in norm_layers(model).values() for p in layer.parameters(recurse=False)}
    return list(found.values())  # a weight that two layers share counts once


def chosen_parameters(net: nn.Module, chosen: Chosen) -> list[nn.Parameter]:
    """Return the parameters that a user chose, in the network's order.

    Args:
        chosen: names of parameters or modules, patterns such as "blocks.*.norm1.*", both also as one text with commas;
            or a function that takes the network and returns parameters of it.
    """
    own = dict(net.named_parameters())
    if callable(chosen):
        wanted = {id(p) for p in chosen(net)}
        if not wanted <= {id(p) for p in own.values()}:
            raise ValueError("the function of params= must return parameters of the network that it was given")
    else:
        wanted = {id(own[name]) for pattern in _patterns(chosen) for name in _matches(pattern, own)}
    if not wanted:
        raise ValueError("params= chooses no parameter: give names, patterns such as 'blocks.*.norm1.*' or a function")
    return [p for p in own.values() if id(p) in wanted]


def _patterns(chosen: Any) -> list[str]:
    patterns = chosen.split(",") if isinstance(chosen, str) else list(chosen)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"params must be names, patterns or a function, not {chosen!r}")
    return [pattern.strip() for pattern in patterns]


def _matches(pattern: str, own: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches; it may name a whole module. One that matches nothing is an error."""
    found = [name for name in own if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
    if not found:
        raise ValueError(f"params: no parameter is named {pattern!r}; the names are those of net.named_parameters()")
    return found


def as_norm_types(norm_types: Sequence[type[nn.Module]] | type[nn.Module]) -> NormTypes:
    """Return the classes as a tuple; one class may stand by itself."""
    classes = (norm_types,) if isinstance(norm_types, type) else tuple(norm_types)
    for found in classes:
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            raise TypeError(f"norm_types are classes of nn.Module, not {found!r}")
    return classes


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


def with_running_statistics(net: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that have statistics of the source."""
    return [layer for layer in batch_norms(net) if layer.running_mean is not None]


def dotted(prefix: str, *names: str) -> str:
    """Return the full name of a submodule or tensor of the module `prefix`; the root module has the prefix ""."""
    return ".".join([prefix, *names]).removeprefix(".")
