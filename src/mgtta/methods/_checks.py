"""What `create` rejects before anything is built: settings that a recipe does not have, and values out of range."""

import math
from typing import Any

from mgtta._lib.errors import unknown
from mgtta.methods.registry import REQUIRED, Recipe

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
            raise unknown(f"setting of {chosen.name}", key, [*known, *OF_ALL])
    for key, default in known.items():
        if default is REQUIRED and settings.get(key) is None:
            raise ValueError(f"{chosen.name} needs {key}=...: {MADE_BY.get(key, 'give it')}")
    check_number("lr", settings.get("lr"))
    if not settings.get("decay", math.inf) > 0:
        raise ValueError(f"decay must be above 0 (inf: the learning rate does not fall), not {settings['decay']}")


def check_number(name: str, value: Any, whole: bool = False) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, not {value}")
