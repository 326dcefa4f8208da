"""Load a Classifier: from a timm name, a shipped name or any nn.Module, with the weights of a checkpoint."""

import copy
import difflib
import importlib
import json
import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from mgtta._lib.files import read_tensors
from mgtta._lib.shipped import shipped
from mgtta._lib.timm import timm
from mgtta.models import architectures  # noqa: F401  (adds names to timm's)
from mgtta.models.checks import one_logit
from mgtta.models.classifier import Classifier
from mgtta.models.norms import as_norm_types
from mgtta.models.processor import preprocessing
from mgtta.models.weights import load_weights

BUILDER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:build; timm's own hf-hub:owner/name differs


def load_model(
    name_or_module: str | nn.Module,
    checkpoint: str | os.PathLike | None = None,
    classes: Sequence[int] | None = None,
    *,
    pretrained: bool | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    normalised: bool = False,
    processor: Any = None,
    norm_types: Sequence[type[nn.Module]] | type[nn.Module] = (),
    **timm_arguments: Any,
) -> Classifier:
    """Return the Classifier of a timm name or of a copy of your own module, in evaluation mode.

    "glyphs_vit" and "patterns_vit" are small ViTs that come with the package, for mgtta.data.glyphs and
    mgtta.data.patterns.
    "package.module:build" calls your own function without arguments, which returns a module or a Classifier. A module
    that torch.compile has wrapped is unwrapped. Outputs with `logits`, as those of Hugging Face, and tuples that start
    with logits are unwrapped, too.

    Args:
        checkpoint: safetensors, or a torch file of plain tensors; loaded strictly. Without it a timm name gets timm's
            pretrained weights (`pretrained=False`: random ones).
        classes: indices of the classes to score; logits of other classes are dropped before any other step.
        mean, std: the input normalisation; by default the timm model's own, and none for another module.
        normalised: your images are already normalised, so the model applies no mean and std.
        processor: a Hugging Face image processor, its configuration or its file: normalisation and size come from it.
        norm_types: classes of your own layers that count as normalisation layers.
        timm_arguments: passed to `timm.create_model`, such as `num_classes` or `img_size`.
    """
    net, name = _net(name_or_module, checkpoint, pretrained, timm_arguments)
    given = {"mean": mean, "std": std, "normalised": normalised, "processor": processor}
    if isinstance(net, Classifier):
        own = _settings_of(net, name_or_module, given)
        net = net.net
    else:
        own = _settings(net, name, given)
    _check_classes(net, name)
    if checkpoint is not None:
        load_weights(net, checkpoint)
    if classes is not None:
        own["classes"] = classes
    if norm_types:
        own["norm_types"] = norm_types
    return Classifier(net, name=name, **own)


def as_classifier(model: nn.Module, norm_types: Sequence[type[nn.Module]] | type[nn.Module] = ()) -> Classifier:
    """Return the model itself, or, for a plain module, its Classifier."""
    model = _without_compile(model)
    if not isinstance(model, Classifier):
        return load_model(model, norm_types=norm_types)
    if norm_types and as_norm_types(norm_types) != model.norm_types:
        raise ValueError("give norm_types to mgtta.load_model, so that source statistics read the same layers")
    return model


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
    net.load_state_dict(tensors)
    net.pretrained_cfg = json.loads(metadata["normalisation"])
    return net


def _net(
    name_or_module: str | nn.Module,
    checkpoint: str | os.PathLike | None,
    pretrained: bool | None,
    timm_arguments: dict[str, Any],
) -> tuple[nn.Module, str]:
    """Return the network, or the Classifier that a user's function built, and its name."""
    is_timm_name = isinstance(name_or_module, str) and not (
        name_or_module in shipped("models") or BUILDER.fullmatch(name_or_module)
    )
    only_for_timm = list(timm_arguments)
    if pretrained is not None:
        only_for_timm.append("pretrained")
    if only_for_timm and not is_timm_name:
        raise ValueError(f"{', '.join(only_for_timm)}: only for a timm name, not for a module that exists already")
    if isinstance(name_or_module, nn.Module):
        net = _copy(name_or_module)
        return net, _name_of(net)
    if not isinstance(name_or_module, str):
        raise TypeError(f"a timm name or an nn.Module is needed, not {type(name_or_module).__name__}")
    if is_timm_name:
        wants_pretrained = checkpoint is None if pretrained is None else pretrained
        return _create(name_or_module, wants_pretrained, timm_arguments), name_or_module
    if name_or_module in shipped("models"):
        return _shipped(name_or_module), name_or_module
    net = _built(name_or_module)
    return net, _name_of(net)


def _name_of(net: nn.Module) -> str:
    """Return a Classifier's name, timm's name of the architecture, or the name of the class."""
    if isinstance(net, Classifier):
        return net.name
    return (getattr(net, "pretrained_cfg", None) or {}).get("architecture") or type(net).__name__


def _built(name: str) -> nn.Module:
    """Return what the function of "package.module:build" returns: a module, or a Classifier."""
    module_name, _, attribute = name.partition(":")
    try:
        build = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module is there, and imports another that is not
        raise ValueError(f"{name}: Python finds no module {error.name!r}: run the command where it lies") from error
    except AttributeError as error:
        raise ValueError(f"{name}: the module {module_name} has no {attribute!r}") from error
    net = _without_compile(build())
    if not isinstance(net, nn.Module):
        raise TypeError(f"{name} returned a {type(net).__name__}; an nn.Module or a Classifier is needed")
    return net


def _settings_of(built: Classifier, name: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a Classifier that a user's function built."""
    twice = [key for key, value in given.items() if value is not None and value is not False]
    if twice:
        raise ValueError(f"{name} returned a Classifier, which has its own settings: leave out {', '.join(twice)}")
    return {
        "mean": None if built.mean is None else built.mean.flatten().tolist(),
        "std": None if built.std is None else built.std.flatten().tolist(),
        "classes": None if built.classes is None else built.classes.tolist(),
        "normalised": built.normalised,
        "size": built.size,
        "norm_types": built.norm_types,
    }


def _settings(net: nn.Module, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return normalisation and size: those that were given, then the processor's, then the network's own."""
    mean = given["mean"]
    std = given["std"]
    size = None
    unknown = mean is None and std is None and not given["normalised"]
    if given["processor"] is not None:
        found = preprocessing(given["processor"])
        size = found.size
        if unknown:
            mean = found.mean
            std = found.std
    elif unknown:
        mean, std = _normalisation(net, name)
    return {"mean": mean, "std": std, "normalised": given["normalised"], "size": size}


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
    if os.path.isfile(name):
        raise ValueError(f"{name} is a file: give the model's name, and the file as checkpoint={name!r} (--checkpoint)")
    if ":" not in name and not timm.is_model(architecture):  # hf-hub:owner/name is for timm to look up
        close = difflib.get_close_matches(architecture, [*shipped("models"), *timm.list_models()], n=4)
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
