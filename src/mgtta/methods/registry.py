"""Recipes: a name -> a method with its paper's settings. Each is registered in the method's own file.

A recipe's settings are the keyword arguments of what is registered, and those of its `Descent`.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

import mgtta.methods
from mgtta._lib.errors import unknown
from mgtta.adaptation.method import Method
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.methods._descent import Descent

GRADIENTS = "gradients"
SOURCE = "source statistics"
FISHER = "Fisher information of source images"
GENERATOR = "a generator"
HEAD = "linear head"
TOKENS = "tokens"
BATCH_NORM = "BatchNorm layers"
Make = TypeVar("Make", bound=Callable[..., Any])
REQUIRED = inspect.Parameter.empty  # the default of a setting that must be given


class Paper(NamedTuple):
    title: str
    arxiv: str | None = None  # its number, if it is there


@dataclass(frozen=True)
class Recipe:
    """A registered method.

    Attributes:
        make: called with the model, the optimizer's factory if there is a descent, and settings.
        needs: what must be there besides the model and the images.
        descent: the optimizer and its learning rate; None for methods without gradients.
    """

    name: str
    make: Callable[..., Method]
    papers: tuple[Paper, ...]
    needs: tuple[str, ...]
    descent: Descent | None
    what: str  # one sentence on what it is
    more: str  # what else there is to say of it and of its settings

    @property
    def settings(self) -> dict[str, Any]:
        """Setting -> default; REQUIRED for one that must be given."""
        parameters = inspect.signature(self.make).parameters.values()
        own = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return own | (self.descent.settings() if self.descent else {})

    @property
    def method(self) -> type[Method]:
        """The class that is made."""
        return self.make if isinstance(self.make, type) else get_type_hints(self.make)["return"]

    @property
    def works_with(self) -> dict[str, bool]:
        """Option of every method -> True if the recipe takes it, False if `create` or `export` refuses it by name."""
        pure = issubclass(self.method, ObjectiveMethod)
        learns = self.descent is not None
        return {
            "guard": True,
            "schedule": pure and learns,
            "pull": learns,
            "gather": learns,
            "recall": learns,
            "bf16": pure,
            "ranks": self.method.shares_batches,
            "resume": True,
            "export": not self.method.cannot_export,
        }

    def build(self, model: Any, settings: dict[str, Any]) -> Method:
        """Return the method around a copy of the model."""
        if self.descent is None:
            return self.make(model, **settings)
        chosen = {key: value for key, value in settings.items() if key in self.descent.settings()}
        own = {key: value for key, value in settings.items() if key not in chosen}
        descent = Descent(**{**vars(self.descent), **chosen})
        return self.make(model, descent.factory(), **own)


_RECIPES: dict[str, Recipe] = {}


def register(
    name: str,
    *,
    papers: Sequence[Paper] = (),
    needs: Sequence[str] = (),
    descent: Descent | None = None,
    what: str = "",
) -> Callable[[Make], Make]:
    """Register a class, or a function that makes one, as the recipe of this name.

    Args:
        what: one sentence on the recipe; by default the first paragraph of the docstring, the rest being `more`.
    """

    def registered(make: Make) -> Make:
        own = (GRADIENTS, *needs) if descent else tuple(needs)
        first, _, more = (inspect.getdoc(make) or "").partition("\n\n")
        sentence = what or " ".join(first.split())
        _RECIPES[name] = Recipe(name, make, tuple(papers), own, descent, sentence, more)
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
    """Return a recipe by its name, written with hyphens or underscores, mgtta+ or mgtta_plus."""
    known = recipes()
    found = known.get(name.replace("-", "_").replace("+", "_plus"))
    if found is None:
        raise unknown("recipe", name, known)
    return found
