"""Load a Classifier: from a timm name, a shipped name or any nn.Module, with the weights of a checkpoint."""

import copy
import difflib
import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mgtta._lib.files import read_tensors, read_weights
from mgtta._lib.shipped import shipped
from mgtta._lib.timm import timm
from mgtta.models.checks import one_logit
from mgtta.models.classifier import Classifier

WRAPPERS = ("state_dict", "model", "model_state_dict")  # where a foreign checkpoint may keep its weights
PREFIXES = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name


def load_model(
    name_or_module: str | nn.Module,
    checkpoint: str | os.PathLike | None = None,
    classes: Sequence[int] | None = None,
    *,
    pretrained: bool | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    normalised: bool = False,
    **timm_arguments: Any,
) -> Classifier:
    """Return the Classifier of a timm name or of a copy of your own module, in evaluation mode.

    "glyphs_vit" and "patterns_vit" are small ViTs that come with the package, for mgtta.data.glyphs and
    mgtta.data.patterns. A module that torch.compile has wrapped is unwrapped.

    Args:
        checkpoint: safetensors, or a torch file of plain tensors; loaded strictly. Without it a timm name gets timm's
            pretrained weights (`pretrained=False`: random ones).
        classes: indices of the classes to score; logits of other classes are dropped before any other step.
        mean, std: the input normalisation; by default the timm model's own, and none for another module.
        normalised: your images are already normalised, so the model applies no mean and std.
        timm_arguments: passed to `timm.create_model`, such as `num_classes` or `img_size`.
    """
    is_timm_name = isinstance(name_or_module, str) and name_or_module not in shipped("models")
    only_for_timm = list(timm_arguments)
    if pretrained is not None:
        only_for_timm.append("pretrained")
    if only_for_timm and not is_timm_name:
        raise ValueError(f"{', '.join(only_for_timm)}: only for a timm name, not for a module that exists already")
    if isinstance(name_or_module, nn.Module):
        net = _copy(name_or_module)
        name = (getattr(net, "pretrained_cfg", None) or {}).get("architecture") or type(net).__name__
    elif not isinstance(name_or_module, str):
        raise TypeError(f"a timm name or an nn.Module is needed, not {type(name_or_module).__name__}")
    elif is_timm_name:
        name = name_or_module
        wants_pretrained = checkpoint is None if pretrained is None else pretrained
        net = _create(name, wants_pretrained, timm_arguments)
    else:
        name = name_or_module
        net = _shipped(name)
    _check_classes(net, name)
    if checkpoint is not None:
        _load_weights(net, checkpoint)
    if mean is None and std is None and not normalised:
        mean, std = _normalisation(net, name)
    return Classifier(net, name=name, mean=mean, std=std, classes=classes, normalised=normalised)


def as_classifier(model: nn.Module) -> Classifier:
    """Return the model itself, or, for a plain module, its Classifier."""
    model = _without_compile(model)
    return model if isinstance(model, Classifier) else load_model(model)


def _without_compile(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's OptimizedModule; any other module as it is."""
    return getattr(module, "_orig_mod", module)


def vision_transformer(stem: dict[str, Any] | None = None, **architecture: Any) -> nn.Module:
    """Return a timm VisionTransformer; with a stem, its tokens come from early convolutions (arXiv 2106.14881).

    Args:
        stem: for each convolution, its `channels`, `kernel_size`, `stride` and `padding`, as for timm's ConvStem.
            `norm` stands between two of them: "batch", by default, or "layer", over the channels of a place.
    """
    if stem is None:
        return timm.models.VisionTransformer(**architecture)
    norms: dict[str, Any] = {"batch": nn.BatchNorm2d, "layer": timm.layers.LayerNorm2d}
    norm = norms[stem.get("norm", "batch")]
    layers: dict[str, Any] = {name: tuple(values) for name, values in stem.items() if name != "norm"}
    convolutions = timm.models.vision_transformer_hybrid.ConvStem(
        depth=len(stem["channels"]), norm_layer=norm, act_layer=nn.GELU, **layers
    )
    embed = partial(timm.layers.HybridEmbed, backbone=convolutions)
    return timm.models.VisionTransformer(patch_size=1, embed_layer=embed, **architecture)


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy of a user's module, without the wrapper of torch.compile."""
    module = _without_compile(module)
    if isinstance(module, Classifier):
        raise ValueError("this is a Classifier already; use it as it is")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            "a TorchScript module cannot adapt, since its layers cannot be read or changed: give the nn.Module that it "
            "was made from, with its weights as checkpoint=..."
        )
    return copy.deepcopy(module)


def _check_classes(net: nn.Module, name: str) -> None:
    total = getattr(net, "num_classes", None)
    if total == 0:
        raise ValueError(f"{name} has no classes, only features: give num_classes=... and a checkpoint that has them")
    if total == 1:
        raise one_logit(name)


def _shipped(name: str) -> nn.Module:
    tensors, metadata = read_tensors(shipped("models")[name])
    net = vision_transformer(**json.loads(metadata["model"]))
    net.load_state_dict({key: t.float() for key, t in tensors.items()})
    net.pretrained_cfg = json.loads(metadata["normalisation"])
    return net


def _normalisation(net: nn.Module, name: str) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    """Return the timm model's own mean and std; None for both if a module has no such configuration."""
    config = getattr(net, "pretrained_cfg", None) or {}
    mean = config.get("mean")
    first = config.get("first_conv")
    if mean and isinstance(first, str):
        channels = getattr(net.get_submodule(first), "in_channels", len(mean))
        if channels != len(mean):
            raise ValueError(
                f"{name} takes {channels} channels, its normalisation has {len(mean)}: give mean= and std="
            )
    return mean, config.get("std")


def _create(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    architecture = name.split(".")[0]
    if ":" not in name and not timm.is_model(architecture):  # hf-hub:owner/name is for timm to look up
        close = difflib.get_close_matches(architecture, timm.list_models(), n=4)
        hint = f"; close names: {', '.join(close)}" if close else ""
        raise ValueError(f"timm has no model {name!r}{hint}; timm.list_models() shows all")
    try:
        return timm.create_model(name, pretrained=pretrained, **arguments)
    except TypeError as error:
        raise ValueError(f"timm refuses these arguments for {name}: {error}") from error
    except Exception as error:
        if not pretrained:
            raise
        raise RuntimeError(
            f"the pretrained weights of {name} could not be downloaded ({type(error).__name__}: {error}); give a local "
            "file with checkpoint=..., or pretrained=False for random weights"
        ) from error


def _load_weights(net: nn.Module, checkpoint: str | os.PathLike) -> None:
    """Load the weights of a checkpoint strictly."""
    own = net.state_dict()
    state = _unwrapped(read_weights(checkpoint), own)
    problems = _differences(state, own)
    if problems:
        raise ValueError(
            f"{checkpoint} does not fit {type(net).__name__} ({'; '.join(problems)}): name the architecture it was "
            "made for, and num_classes=... where its head has another size"
        )
    net.load_state_dict(state)


def _unwrapped(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the weights inside a foreign checkpoint, by the network's own names."""
    for wrapper in WRAPPERS:
        if isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state) and not all(name.startswith(prefix) for name in own):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _differences(state: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Return what keeps a state from being loaded; an empty list if nothing does."""
    problems = []
    missing = sorted(own.keys() - state.keys())
    if missing:
        problems.append(f"missing: {_first_names(missing)}")
    extra = sorted(state.keys() - own.keys())
    if extra:
        problems.append(f"unknown: {_first_names(extra)}")
    common = sorted(own.keys() & state.keys())
    wrong = [name for name in common if own[name].shape != getattr(state[name], "shape", None)]
    for name in wrong[:3]:
        found = tuple(getattr(state[name], "shape", ()))
        problems.append(f"{name} is {found}, the model's is {tuple(own[name].shape)}")
    return problems


def _first_names(names: Sequence[str]) -> str:
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
