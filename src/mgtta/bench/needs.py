"""What a benchmark must give to a method, from the declaration of its recipe."""

from typing import Any

from mgtta.methods._checks import check_tokens
from mgtta.methods.registry import (
    AUTHORS,
    BATCH_NORM,
    FISHER,
    GENERATOR,
    MGTTA,
    SOURCE,
    TOKENS,
    Recipe,
    recipe,
    recipes,
)
from mgtta.models.classifier import Classifier
from mgtta.models.norms import batch_norms


def needs_source(method: str) -> bool:
    """Return whether the method compares with statistics of the source."""
    return SOURCE in recipe(method).needs


def needs_fisher(method: str) -> bool:
    """Return whether the method uses the Fisher information of the source model."""
    return FISHER in recipe(method).needs


def needs_clean_images(method: str, source_is_known: bool) -> bool:
    """Return whether clean images are needed before the method can be made."""
    return needs_fisher(method) or (needs_source(method) and not source_is_known)


def default_mirror(method: str) -> bool | str | None:
    """Return the recipe's own setting of mirror images; None if the method has none."""
    return recipe(method).settings.get("mirror")


def takes_trade_off(method: str) -> bool:
    """Return whether the method weighs two losses, by the paper's lambda."""
    return "trade_off" in recipe(method).settings


def takes_generator(method: str) -> bool:
    """Return whether the method takes a generator, be it as one of several optimizers."""
    return "generator" in recipe(method).settings


def is_moved_by_generator(method: str) -> bool:
    """Return whether a generator is the method's only optimizer."""
    return GENERATOR in recipe(method).needs


def default_generator(method: str) -> str | None:
    """Return the generator of the method's recipe; None if it takes none."""
    return recipe(method).settings.get("generator")


def default_rate(method: str) -> float | None:
    """Return the learning rate of the method's recipe, for a ViT; None if it has none."""
    return recipe(method).settings.get("lr")


def rate_at(method: str, images: int) -> float | None:
    """Return the recipe's learning rate for batches of so many images, by its authors' rule."""
    default = default_rate(method)
    if default is None:
        return None
    return float(f"{recipe(method).rate_at(default, images):.6g}")


def passes_of(method: str) -> int:
    """Return the passes of an image through the network; a backward pass counts as two."""
    forward, backward = recipe(method).cost
    return forward + 2 * backward


def decisive_settings(method: str) -> dict[str, list[Any]]:
    """Return the settings that a sweep tries besides the learning rate, with the values besides the default."""
    found = recipe(method)
    if found.chosen != AUTHORS:
        return {}
    return {key: [value for value in tries if value != found.settings[key]] for key, tries in found.tries.items()}


def work_of(method: str) -> tuple[str, int]:
    """Return what tells a method's work apart in hashes: its name, and how often its settings have changed.

    Before the first change, a recipe had the settings that are now its set "mgtta".
    """
    found = recipe(method)
    if found.chosen == MGTTA and found.revision:
        return found.base, 0
    return found.name, found.revision


def registered_name(method: str) -> str:
    """Return the name that records have for a method; raise an error with the valid names if there is none."""
    return recipe(method).name


def methods_for(model: Classifier) -> list[str]:
    """Return the names of all recipes that the network can run; twice if the MGTTA paper's settings differ."""
    found = []
    for name, declared in recipes().items():
        if not _fits(declared, model):
            continue
        found.append(name)
        if declared.mgtta is not None and declared.at(MGTTA).settings != declared.settings:
            found.append(declared.at(MGTTA).name)
    return found


def _fits(declared: Recipe, model: Classifier) -> bool:
    """Return False if the network lacks the layers that the recipe needs."""
    if BATCH_NORM in declared.needs and not batch_norms(model.net):
        return False
    if TOKENS not in declared.needs:
        return True
    try:
        check_tokens(model)
    except ValueError:
        return False
    return True
