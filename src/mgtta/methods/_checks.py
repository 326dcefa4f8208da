"""What `create` rejects: settings that a recipe does not have, values out of range, networks without tokens."""

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from mgtta._lib.errors import unknown
from mgtta._lib.names import spelled
from mgtta.methods._declared import REQUIRED
from mgtta.methods._recipe import Recipe
from mgtta.models.classifier import Classifier

OF_ALL = (  # settings of every method
    "max_updates",
    "max_seconds",
    "process_group",
    "guard",
    "precision",
    "low_memory",
    "schedule",
    "pull",
    "gather",
    "recall",
    "params",
    "norm_types",
    "settings",
)
MADE_BY = {  # required setting -> its remedy
    "source": "mgtta.source_statistics(model, clean_images) makes it",
    "fisher": "mgtta.fisher_information(model, clean_images) makes it; eta is the method without it",
}


def check_settings(chosen: Recipe, settings: dict[str, Any]) -> None:
    """Reject settings that the recipe does not have, or values that make no sense, before anything is built."""
    known = chosen.settings
    for key in settings:
        if key not in known:
            raise unknown(f"setting of {spelled(chosen.name)}", key, [*known, *OF_ALL])
    for key, default in known.items():
        if isinstance(default, bool) and not isinstance(settings.get(key, default), bool):
            raise TypeError(f"{key} must be True or False, not {settings[key]!r}")
        if default is REQUIRED and settings.get(key) is None:
            raise ValueError(f"{spelled(chosen.name)} needs {key}=...: {MADE_BY.get(key, 'give it')}")
    check_number("lr", settings.get("lr"))
    if not settings.get("decay", math.inf) > 0:
        raise ValueError(f"decay must be above 0 (inf: the learning rate does not fall), not {settings['decay']}")


def check_choice(what: str, value: str, valid: Sequence[str]) -> None:
    """Reject what is not one of the valid values."""
    if value not in valid:
        raise unknown(what, value, valid)


def check_numbers(**values: int | None) -> None:
    """Reject values that are not whole numbers of at least 0."""
    for name, value in values.items():
        check_number(name, value, whole=True)


def check_number(name: str, value: Any, whole: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, not {value}")


def check_tokens(model: Classifier) -> None:
    """Raise an error that says what is missing if prompts cannot be put among the tokens of the model."""
    net: Any = model.net
    blocks = getattr(net, "blocks", None)
    patches = getattr(net, "patch_embed", None)
    needs = {
        "blocks, a sequence of transformer blocks": isinstance(blocks, nn.Sequential | nn.ModuleList),
        "patch_embed and _pos_embed": hasattr(patches, "proj") and hasattr(net, "_pos_embed"),
        "a class token that is pooled": getattr(net, "global_pool", "") == "token" and net.num_prefix_tokens > 0,
        "one linear head": isinstance(getattr(net, "get_classifier", lambda: None)(), nn.Linear),
        "absolute positions": getattr(net, "rope", None) is None and getattr(net, "rel_pos_bias", None) is None,
    }
    missing = [what for what, there in needs.items() if not there]
    if missing:
        raise ValueError(
            f"FOA puts prompts among the tokens of a model like timm's VisionTransformer; {model.name} lacks "
            f"{'; '.join(missing)}. For other models take another method, such as lame, t3a or eq7_adam"
        )
