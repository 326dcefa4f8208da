"""Recipes: a name -> a method with its paper's settings. One function each; the signature is the documentation."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from mgtta.errors import unknown
from mgtta.generator import MetaGradientGenerator
from mgtta.methods.base import Method
from mgtta.methods.mgtta import MGTTA
from mgtta.methods.noadapt import NoAdapt
from mgtta.methods.tent import Tent
from mgtta.models import Classifier, load_model
from mgtta.optim import optimizer_factory
from mgtta.source import SourceStatistics, load_source

Source = SourceStatistics | str | os.PathLike
Generator = MetaGradientGenerator | str | os.PathLike

RECIPES: dict[str, Callable[..., Method]] = {}


def recipe(function: Callable[..., Method]) -> Callable[..., Method]:
    RECIPES[function.__name__] = function
    return function


@recipe
def noadapt(model: Classifier) -> Method:
    """The source model as it is."""
    return NoAdapt(model)


@recipe
def tent(
    model: Classifier,
    *,
    lr: float = 1e-3,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> Method:
    """Entropy minimisation (Wang et al., ICLR 2021)."""
    return Tent(model, optimizer_factory(optimizer, lr, momentum=momentum, generator=generator))


@recipe
def eq7_sgd(model: Classifier, *, source: Source, lr: float = 0.05, trade_off: float = 0.4) -> Method:
    """MGTTA's objective with plain SGD: the paper's "w/o MGG"."""
    return MGTTA(model, _source(source), optimizer_factory("sgd", lr, momentum=0.0), trade_off)


@recipe
def eq7_adam(model: Classifier, *, source: Source, lr: float = 5e-3, trade_off: float = 0.4) -> Method:
    """MGTTA's objective with Adam, which the paper does not compare with."""
    return MGTTA(model, _source(source), optimizer_factory("adam", lr), trade_off)


@recipe
def mgtta(
    model: Classifier,
    *,
    source: Source,
    generator: Generator = "imagenet",
    lr: float = 1e-3,
    trade_off: float = 0.4,
) -> Method:
    """Entropy and feature discrepancy, lowered by a learned optimizer (Deng et al., AAAI 2025).

    The paper takes lr 1e-4 at batch sizes 2 and 4, and trade_off 0.2 on ImageNet-R.
    """
    return MGTTA(model, _source(source), optimizer_factory("mgg", lr, generator=generator), trade_off)


@recipe
def mgtta_lstm(
    model: Classifier,
    *,
    source: Source,
    generator: Generator = "imagenet-lstm",
    lr: float = 1e-3,
    trade_off: float = 0.4,
) -> Method:
    """MGTTA with an LSTM cell in place of the gradient memory (Table 4)."""
    return mgtta(model, source=source, generator=generator, lr=lr, trade_off=trade_off)


def recipe_of(name: str) -> Callable[..., Method]:
    if name.replace("-", "_") not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name.replace("-", "_")]


def needs_source(name: str) -> bool:
    return "source" in inspect.signature(recipe_of(name)).parameters


def create(
    name: str,
    model: Classifier | nn.Module,
    *,
    max_updates: int | None = None,
    max_seconds: float | None = None,
    **settings: Any,
) -> Method:
    """The method of a recipe around a copy of the model; `settings` overrides what the recipe's paper says.

    Args:
        max_updates, max_seconds: when one is spent, the method only predicts.
    """
    function = recipe_of(name)
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    for key in settings:
        if key not in parameters:
            raise unknown(f"setting of {name}", key, [*parameters, "max_updates", "max_seconds"])
    if "source" in parameters and settings.get("source") is None:
        raise ValueError(f"{name} needs source=...: mgtta.source_statistics(model, clean_images) makes it")
    for key, budget in (("max_updates", max_updates), ("max_seconds", max_seconds)):
        if budget is not None and not budget >= 0:
            raise ValueError(f"{key} must be at least 0, not {budget}")
    if settings.get("lr") is not None and not settings["lr"] >= 0:
        raise ValueError(f"lr must be at least 0, not {settings['lr']}")
    if not isinstance(model, Classifier):
        model = load_model(model)
    method = function(model, **settings)
    method.max_updates, method.max_seconds = max_updates, max_seconds
    return method


def _source(source: Source) -> SourceStatistics:
    return source if isinstance(source, SourceStatistics) else load_source(source)
