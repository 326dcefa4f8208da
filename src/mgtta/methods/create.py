"""Recipes: a name -> a method with its paper's settings. One function each; the signature is the documentation."""

import inspect
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mgtta._lib.errors import unknown
from mgtta._lib.ranks import ranks_of
from mgtta.adaptation.guarded import Guard, guarded
from mgtta.adaptation.method import Method
from mgtta.adaptation.scheduled import SCHEDULES, Schedule
from mgtta.learned.files import load_generator
from mgtta.learned.generator import MetaGradientGenerator
from mgtta.methods._optimizers import optimizer_factory
from mgtta.methods.bn import BatchNormStatistics
from mgtta.methods.cotta import CoTTA
from mgtta.methods.deyo import DeYO
from mgtta.methods.eata import EATA
from mgtta.methods.foa import FOA
from mgtta.methods.lame import LAME
from mgtta.methods.mgtta import MGTTA
from mgtta.methods.mgtta_plus import MGTTAPlus
from mgtta.methods.noadapt import NoAdapt
from mgtta.methods.roid import ROID
from mgtta.methods.sar import SAR
from mgtta.methods.spa import SPA
from mgtta.methods.t3a import T3A
from mgtta.methods.tent import Tent
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher, load_fisher
from mgtta.models.loading import as_classifier
from mgtta.models.source import SourceStatistics, load_source

PRECISIONS = ("auto", "fp32", "bf16", "fp8")
OF_ALL = ("max_updates", "max_seconds", "process_group", "guard", "precision", "low_memory", "schedule")  # methods
Source = SourceStatistics | str | os.PathLike
Generator = MetaGradientGenerator | str | os.PathLike

RECIPES: dict[str, Callable[..., Method]] = {}


def recipe(function: Callable[..., Any]) -> Callable[..., Any]:
    RECIPES[function.__name__] = function
    return function


@recipe
def noadapt(model: Classifier) -> NoAdapt:
    """The source model as it is."""
    return NoAdapt(model)


@recipe
def bn(model: Classifier, *, prior: float = 0.0) -> BatchNormStatistics:
    """Batch statistics in BatchNorm layers (Nado et al., 2020; Schneider et al., NeurIPS 2020).

    prior: how many images the source's statistics count for, 0 being Nado's, who drop them.
    """
    return BatchNormStatistics(model, prior)


@recipe
def lame(model: Classifier, *, neighbours: int = 5, steps: int = 100) -> LAME:
    """Predictions smoothed over a batch's nearest neighbours (Boudiaf et al., CVPR 2022)."""
    return LAME(model, neighbours, steps)


@recipe
def t3a(model: Classifier, *, supports: int = 20) -> T3A:
    """Classes as centroids of their most certain test features (Iwasawa & Matsuo, NeurIPS 2021)."""
    return T3A(model, supports)


@recipe
def foa(
    model: Classifier,
    *,
    source: Source,
    prompts: int = 3,
    population: int = 28,
    trade_off: float = 0.4,
    momentum: float = 0.9,
    seed: int = 0,
) -> FOA:
    """Prompts evolved by CMA-ES and activations shifted to the source, for ViTs (Niu et al., ICML 2024).

    The paper takes trade_off 0.2 on ImageNet-R.
    """
    return FOA(model, _source(source), prompts, population, trade_off, momentum, seed)


@recipe
def tent(
    model: Classifier,
    *,
    lr: float = 1e-3,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> Tent:
    """Entropy minimisation (Wang et al., ICLR 2021)."""
    return Tent(model, optimizer_factory(optimizer, lr, momentum=momentum, generator=generator))


@recipe
def eata(
    model: Classifier,
    *,
    fisher: Fisher | str | os.PathLike | None = None,
    lr: float = 2.5e-4,
    margin: float = 0.5,
    redundancy: float = 0.05,
    fisher_weight: float = 2000.0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> EATA:
    """Entropy of reliable, non-redundant images, without forgetting (Niu et al., ICML 2022).

    fisher: what mgtta.fisher_information gave, or its file; None is the paper's ETA, without the last part.
    margin: E_0, in units of ln C.
    """
    make = optimizer_factory(optimizer, lr, momentum=momentum, generator=generator)
    found = fisher if fisher is None or isinstance(fisher, Fisher) else load_fisher(fisher)
    return EATA(model, make, found, margin, redundancy, fisher_weight)


@recipe
def sar(
    model: Classifier,
    *,
    lr: float = 1e-3,
    margin: float = 0.4,
    rho: float = 0.05,
    recovery: float = 0.2,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> SAR:
    """Sharpness-aware entropy minimisation on reliable images, with recovery (Niu et al., ICLR 2023).

    margin: E_0, in units of ln C.
    """
    make = optimizer_factory(optimizer, lr, momentum=momentum, generator=generator)
    return SAR(model, make, margin, rho, recovery)


@recipe
def deyo(
    model: Classifier,
    *,
    lr: float = 5e-4,
    margin: float = 0.4,
    entropy_threshold: float = 0.3,
    plpd_threshold: float = 0.2,
    grid: int = 4,
    seed: int = 0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> DeYO:
    """Entropy of images whose prediction hangs on the object's shape (Lee et al., ICLR 2024).

    margin, entropy_threshold: Ent_0 of the weights and tau_Ent of the selection, in units of ln C.
    """
    make = optimizer_factory(optimizer, lr, momentum=momentum, generator=generator)
    return DeYO(model, make, margin, entropy_threshold, plpd_threshold, grid, seed)


@recipe
def cotta(
    model: Classifier,
    *,
    lr: float = 0.05,
    confidence: float = 0.1,
    augmentations: int = 32,
    restore: float = 0.01,
    ema: float = 0.999,
    symmetric: bool = True,
    seed: int = 0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> CoTTA:
    """A teacher averaged over time and augmentations, weights restored at random (Wang et al., CVPR 2022).

    confidence: p_th, under which the anchor's mean confidence calls for augmentations.
    symmetric: the loss of the authors' ImageNet system; False is the paper's, for which see methods/cotta.py.
    """
    make = optimizer_factory(optimizer, lr, momentum=momentum, generator=generator)
    return CoTTA(model, make, confidence, augmentations, restore, ema, symmetric, seed)


@recipe
def spa(
    model: Classifier,
    *,
    lr: float = 0.01,
    predictor_lr: float = 0.05,
    mask_ratio: float = 0.2,
    low_frequencies: float = 0.2,
    noise_ratio: float = 0.4,
    noise_lr: float = 1.0,
    entropy_weight: float = 0.0,
    seed: int = 0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> SPA:
    """Consistency of an image with its deteriorated twins (Niu et al., ICML 2025).

    entropy_weight: 0.1 joins it with TENT. For ResNet-50 with GroupNorm the authors take lr 2.5e-3, predictor_lr
    0.025 and ratios of 0.1.
    """
    make = optimizer_factory(optimizer, lr, momentum=momentum, generator=generator)
    return SPA(
        model,
        make,
        predictor_lr,
        mask_ratio,
        low_frequencies,
        noise_ratio,
        noise_lr,
        entropy_weight,
        seed,
    )


@recipe
def roid(
    model: Classifier,
    *,
    lr: float = 2.5e-4,
    temperature: float = 1 / 3,
    source_ema: float = 0.99,
    probs_ema: float = 0.9,
    seed: int = 0,
    momentum: float = 0.9,
    optimizer: str = "sgd",
    generator: Generator = "imagenet",
) -> ROID:
    """Weighted likelihood ratios, weights ensembled with the source, priors corrected (Marsden et al., WACV 2024)."""
    make = optimizer_factory(optimizer, lr, momentum=momentum, generator=generator)
    return ROID(model, make, temperature, source_ema, probs_ema, seed)


@recipe
def eq7_sgd(model: Classifier, *, source: Source, lr: float = 0.05, trade_off: float = 0.4) -> MGTTA:
    """MGTTA's objective with plain SGD: the paper's "w/o MGG"."""
    return MGTTA(model, _source(source), optimizer_factory("sgd", lr, momentum=0.0), trade_off)


@recipe
def eq7_adam(
    model: Classifier, *, source: Source, lr: float = 5e-3, trade_off: float = 0.4, decay: float = math.inf
) -> MGTTA:
    """MGTTA's objective with Adam, which the paper does not compare with.

    decay: the learning rate of step t is lr / sqrt(1 + t / decay).
    """
    return MGTTA(model, _source(source), optimizer_factory("adam", lr), trade_off, decay)


@recipe
def mgtta(
    model: Classifier,
    *,
    source: Source,
    generator: Generator = "imagenet",
    lr: float = 1e-3,
    trade_off: float = 0.4,
    decay: float = math.inf,
) -> MGTTA:
    """Entropy and feature discrepancy, lowered by a learned optimizer (Deng et al., AAAI 2025).

    The paper takes lr 1e-4 at batch sizes 2 and 4, and trade_off 0.2 on ImageNet-R.

    decay: the learning rate of step t is lr / sqrt(1 + t / decay); the paper's does not fall.
    """
    return MGTTA(model, _source(source), optimizer_factory("mgg", lr, generator=generator), trade_off, decay)


@recipe
def mgtta_lstm(
    model: Classifier,
    *,
    source: Source,
    generator: Generator = "imagenet-lstm",
    lr: float = 1e-3,
    trade_off: float = 0.4,
) -> MGTTA:
    """MGTTA with an LSTM cell in place of the gradient memory (Table 4)."""
    if not isinstance(generator, MetaGradientGenerator):
        generator = load_generator(generator)
    if generator.memory_kind != "lstm":
        raise ValueError(f"mgtta_lstm needs a generator with memory='lstm', not {generator.memory_kind!r}")
    return mgtta(model, source=source, generator=generator, lr=lr, trade_off=trade_off)


@recipe
def mgtta_plus(
    model: Classifier,
    *,
    source: Source,
    generator: Generator = "imagenet",
    lr: float = 5e-3,
    trade_off: float = 0.8,
    recentre: float = 1.0,
    mirror: bool = True,
    decay: float = 5.0,
) -> MGTTAPlus:
    """MGTTA+: MGTTA with mirrored twins, re-centred predictions and a shrinking step (ours, see docs/research.md).

    It sees every image twice, so a step costs about two of MGTTA's.

    recentre: share of the features' shift from the source that is taken back before the head.
    mirror: False where left and right matter, as for characters; then a step costs what MGTTA's does.
    decay: the learning rate of step t is lr / sqrt(1 + t / decay); inf for a stream that shifts again and again.
    """
    make = optimizer_factory("mgg", lr, generator=generator)
    return MGTTAPlus(model, _source(source), make, trade_off, recentre, mirror, decay)


def recipe_of(name: str) -> Callable[..., Method]:
    found = RECIPES.get(name.replace("-", "_").replace("+", "_plus"))
    if found is None:
        raise unknown("recipe", name, RECIPES)
    return found


def recipe_settings(name: str) -> dict[str, Any]:
    """Setting -> default of a recipe; inspect.Parameter.empty for one that must be given."""
    parameters = list(inspect.signature(recipe_of(name)).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


def needs_source(name: str) -> bool:
    return "source" in recipe_settings(name)


def create(
    name: str,
    model: Classifier | nn.Module,
    *,
    max_updates: int | None = None,
    max_seconds: float | None = None,
    process_group: ProcessGroup | None = None,
    guard: Guard | bool = False,
    precision: str = "auto",
    low_memory: bool = False,
    schedule: str = "always",
    **settings: Any,
) -> Method:
    """The method of a recipe around a copy of the model; `settings` overrides what the recipe's paper says.

    Args:
        max_updates, max_seconds: when one is spent, the method only predicts.
        process_group: ranks that share every batch, such as torch.distributed.group.WORLD. Each creates the same
            method and calls it, batch by batch, with its share of the images, which may be none.
        guard: True, or mgtta.Guard(...): watch for collapse, see mgtta.adaptation.guarded.
        precision: "fp32", exact; "bf16", the fast path: frozen weights in bfloat16, all that adapts in float32, on a
            GPU compiled and captured, see mgtta.fast; "fp8", the same with gradients that pass MLPs in 8 bits, for a
            plain ViT; "auto", the default: "bf16" for NoAdapt, TENT and Eq. 7 with any optimizer where a plain ViT in
            float32 is on a GPU that has bfloat16, and no ranks or seconds are named.
        low_memory: on the fast path, recompute activations where they would be kept: slower.
        schedule: "auto" learns at once after a shift and then ever more rarely, see mgtta.adaptation.scheduled.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    function = recipe_of(name)
    parameters = recipe_settings(name)
    for key in settings:
        if key not in parameters:
            valid = [*parameters, *OF_ALL]
            raise unknown(f"setting of {name}", key, valid)
    if "source" in parameters and settings.get("source") is None:
        raise ValueError(f"{name} needs source=...: mgtta.source_statistics(model, clean_images) makes it")
    _check_number("max_updates", max_updates, int)
    _check_number("max_seconds", max_seconds, float)
    _check_number("lr", settings.get("lr"), float)
    if not settings.get("decay", math.inf) > 0:
        raise ValueError(f"decay must be above 0 (inf: the learning rate does not fall), not {settings['decay']}")
    with torch.inference_mode(False):
        method = function(as_classifier(model), **settings)
    method.name = function.__name__
    method.max_updates, method.max_seconds = max_updates, max_seconds
    if schedule == "auto":
        if not method.learns_from_all or process_group is not None:
            raise ValueError(
                "schedule='auto' is for those that learn from every batch, tent and Eq. 7's, in one process"
            )
        method._schedule = Schedule()
    if process_group is not None:
        if guard is not False:
            raise ValueError("a guard judges by the images of its own rank: it cannot stand over several")
        method.join(ranks_of(process_group))
        chosen = repr((max_updates, max_seconds, sorted(settings.items())))  # of tensors, a few digits of some numbers
        method.ranks.agree("model, method and settings", [method.fingerprint, method.kind, chosen])
    if precision in ("bf16", "fp8") or (precision == "auto" and next(method.model.parameters()).is_cuda):
        from mgtta.fast.engine import takes

        if takes(method, precision):
            method.quicken(low_memory, "bf16" if precision == "auto" else precision)
    if low_memory and method.fast is None:
        raise ValueError("low_memory belongs to the fast path: precision='bf16' or 'fp8', with a method that has one")
    return method if guard is False else guarded(method, guard)


def _check_number(name: str, value: Any, kind: type[int] | type[float]) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise TypeError(f"{name} must be a {'whole ' if kind is int else ''}number, not {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0, not {value}")


def _source(source: Source) -> SourceStatistics:
    if isinstance(source, str | os.PathLike):
        return load_source(source)
    if not isinstance(source, SourceStatistics):
        raise TypeError(f"source must be source statistics or a file of them, not {type(source).__name__}")
    return source
