"""A timm name, a shipped name or any nn.Module -> its Classifier, with the weights of a checkpoint."""

import copy
import difflib
import json
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from mgtta._lib.files import read_tensors, read_weights
from mgtta._lib.shipped import shipped
from mgtta._lib.timm import timm
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
    **timm_arguments: Any,
) -> Classifier:
    """The Classifier of a timm name or of your own module, in evaluation mode, your module left untouched.

    "glyphs_vit" and "glyphs_plain" are small ViTs that come with the package, for mgtta.data.glyphs.

    Args:
        checkpoint: safetensors, or a torch file of plain tensors; loaded strictly. Without it a timm name
            brings timm's pretrained weights (`pretrained=False`: random ones).
        classes: indices of the classes to score; logits outside them are dropped before anything sees them.
        mean, std: the input normalisation; by default the timm model's own, and none for another module.
        timm_arguments: passed to `timm.create_model`, such as `num_classes` or `img_size`.
    """
    if isinstance(name_or_module, str) and name_or_module not in shipped("models"):
        name = name_or_module
        net = _create(name, checkpoint is None if pretrained is None else pretrained, timm_arguments)
    elif timm_arguments or pretrained is not None:
        extra = ", ".join([*timm_arguments, *(["pretrained"] if pretrained is not None else [])])
        raise ValueError(f"{extra}: only for a timm name, not for a module that exists already")
    elif isinstance(name_or_module, str):
        name, net = name_or_module, _shipped(name_or_module)
    elif isinstance(name_or_module, Classifier):
        raise ValueError("this is a Classifier already; use it as it is")
    elif isinstance(name_or_module, nn.Module):
        net = copy.deepcopy(name_or_module)
        name = (getattr(net, "pretrained_cfg", None) or {}).get("architecture") or type(net).__name__
    else:
        raise TypeError(f"a timm name or an nn.Module is needed, not {type(name_or_module).__name__}")
    if getattr(net, "num_classes", None) == 0:
        raise ValueError(f"{name} has no classes, only features: name num_classes=... and a checkpoint that has them")
    if checkpoint is not None:
        _load_weights(net, checkpoint)
    if mean is None and std is None:
        mean, std = _normalisation(net, name)
    return Classifier(net, name=name, mean=mean, std=std, classes=classes)


def as_classifier(model: nn.Module) -> Classifier:
    """The model itself, or, for a plain module, its Classifier."""
    return model if isinstance(model, Classifier) else load_model(model)


def vision_transformer(stem: dict[str, Any] | None = None, **architecture: Any) -> nn.Module:
    """A timm VisionTransformer; with a stem, its tokens come from early convolutions (arXiv 2106.14881).

    stem: for each convolution, its `channels`, `kernel_size`, `stride` and `padding`, as for timm's ConvStem, which
        puts a BatchNorm after each.
    """
    if stem is None:
        return timm.models.VisionTransformer(**architecture)
    layers: dict[str, Any] = {name: tuple(values) for name, values in stem.items()}
    depth = len(stem["channels"])
    convolutions = timm.models.vision_transformer_hybrid.ConvStem(depth=depth, act_layer=nn.GELU, **layers)
    embed = partial(timm.layers.HybridEmbed, backbone=convolutions)
    return timm.models.VisionTransformer(patch_size=1, embed_layer=embed, **architecture)


def _shipped(name: str) -> nn.Module:
    tensors, metadata = read_tensors(shipped("models")[name])
    net = vision_transformer(**json.loads(metadata["model"]))
    net.load_state_dict({key: t.float() for key, t in tensors.items()})
    net.pretrained_cfg = json.loads(metadata["normalisation"])
    return net


def _normalisation(net: nn.Module, name: str) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    """The timm model's own, (None, None) for a module that says nothing of it."""
    config = getattr(net, "pretrained_cfg", None) or {}
    mean, first = config.get("mean"), config.get("first_conv")
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
            f"the pretrained weights of {name} could not be had ({type(error).__name__}: {error}); give a local "
            "file with checkpoint=..., or pretrained=False for random weights"
        ) from error


def _load_weights(net: nn.Module, checkpoint: str | os.PathLike) -> None:
    state = read_weights(checkpoint)
    for wrapper in WRAPPERS:
        if isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    own = net.state_dict()
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state) and not all(name.startswith(prefix) for name in own):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    wrong = [name for name in own.keys() & state.keys() if own[name].shape != getattr(state[name], "shape", None)]
    if missing or extra or wrong:
        problems = [f"missing: {_some(missing)}"] * bool(missing) + [f"unknown: {_some(extra)}"] * bool(extra)
        problems += [
            f"{name} is {tuple(getattr(state[name], 'shape', ()))}, the model's is {tuple(own[name].shape)}"
            for name in sorted(wrong)[:3]
        ]
        raise ValueError(
            f"{checkpoint} does not fit {type(net).__name__} ({'; '.join(problems)}): name the architecture it was "
            "made for, and num_classes=... where its head has another size"
        )
    net.load_state_dict(state)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
