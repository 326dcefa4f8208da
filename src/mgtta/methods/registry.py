"""Recipes: a name -> a method with its settings. Each is registered in the method's own file."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import mgtta.methods
from mgtta._lib.errors import unknown
from mgtta._lib.names import spelled
from mgtta.methods._declared import (
    AUTHORS,
    BATCH_NORM,
    FISHER,
    GENERATOR,
    GRADIENTS,
    HEAD,
    MGTTA,
    REQUIRED,
    RESNETS,
    SETS,
    SOURCE,
    TOKENS,
    Paper,
)
from mgtta.methods._descent import Descent
from mgtta.methods._recipe import Recipe

__all__ = [
    "AUTHORS",
    "BATCH_NORM",
    "FISHER",
    "GENERATOR",
    "GRADIENTS",
    "HEAD",
    "MGTTA",
    "REQUIRED",
    "RESNETS",
    "SETS",
    "SOURCE",
    "TOKENS",
    "Paper",
    "Recipe",
    "recipe",
    "recipes",
    "register",
]

Make = TypeVar("Make", bound=Callable[..., Any])

_RECIPES: dict[str, Recipe] = {}


def register(
    name: str,
    *,
    papers: Sequence[Paper] = (),
    needs: Sequence[str] = (),
    descent: Descent | None = None,
    what: str = "",
    **declared: Any,
) -> Callable[[Make], Make]:
    """Register a class, or a function that makes one, as the recipe of this name.

    Args:
        what: one sentence on the recipe; by default the first paragraph of the docstring, the rest being `more`.
        declared: code, resnets, mgtta, tries, rate_at, options, passes, revision; see Recipe.
    """

    def registered(make: Make) -> Make:
        own = (GRADIENTS, *needs) if descent else tuple(needs)
        first, _, more = (inspect.getdoc(make) or "").partition("\n\n")
        sentence = what or " ".join(first.split())
        made = Recipe(name, make, tuple(papers), own, descent, sentence, more, **declared)
        for key in (*made.resnets, *(made.mgtta or ()), *made.tries):
            if key not in made.settings:
                raise ValueError(f"{name} declares a value of {key}, which is not among its settings")
        _RECIPES[name] = made
        return make

    return registered


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by name: NoAdapt first, the others in the order of the alphabet."""
    for module in pkgutil.iter_modules(mgtta.methods.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{mgtta.methods.__name__}.{module.name}")
    names = sorted(_RECIPES, key=lambda name: (name != "noadapt", name))
    return {name: _RECIPES[name] for name in names}


def recipe(name: str) -> Recipe:
    """Return a recipe by its name, written with hyphens or underscores, mgtta+ or mgtta_plus.

    `deyo@mgtta` is deyo at the set of settings "mgtta".
    """
    known = recipes()
    base, at, chosen = name.partition("@")
    found = known.get(base.replace("-", "_").replace("+", "_plus"))
    if found is None:
        raise unknown("recipe", name, map(spelled, known))
    return found.at(chosen) if at else found
