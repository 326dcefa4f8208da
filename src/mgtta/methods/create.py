"""`create`: a recipe, then an engine, then wrappers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from mgtta._lib.cpu import check_bfloat16
from mgtta._lib.ranks import ranks_of
from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.guarded import Guard, guarded
from mgtta.adaptation.method import Method
from mgtta.adaptation.recalled import Recalled
from mgtta.adaptation.scheduled import SCHEDULES, Scheduled
from mgtta.adaptation.wrapper import Adapting
from mgtta.methods._checks import check_choice, check_number, check_numbers, check_settings
from mgtta.methods._options import choosing, or_default, set_pull
from mgtta.methods.registry import Recipe, recipe
from mgtta.models.classifier import Classifier
from mgtta.models.loading import as_classifier
from mgtta.models.norms import Chosen

PRECISIONS = ("auto", "fp32", "bf16", "fp8")


def create(
    name: str,
    model: Classifier | nn.Module,
    *,
    max_updates: int | None = None,
    max_seconds: float | None = None,
    process_group: ProcessGroup | None = None,
    guard: Guard | bool | None = False,
    precision: str = "auto",
    low_memory: bool = False,
    schedule: str = "always",
    pull: float | None = None,
    gather: int | None = None,
    recall: int | None = None,
    params: Chosen | None = None,
    norm_types: Sequence[type[nn.Module]] | type[nn.Module] = (),
    settings: str | None = None,
    **given: Any,
) -> Adapting:
    """Return the method of a recipe around a copy of the model; settings that are given override the recipe's own.

    Args:
        max_updates, max_seconds: budgets; when one is spent, the method only predicts.
        process_group: ranks that share every batch, such as torch.distributed.group.WORLD. Each creates the same
            method and calls it, batch by batch, with its share of the images, which may be none.
        guard: True, or mgtta.Guard(...): watch for harm without labels, and answer with the source model meanwhile. A
            guarded method learns from at least 16 images together, unless `gather` says otherwise.
        precision: "fp32", exact; "bf16", the fast path: frozen weights in bfloat16, all that adapts in float32, on a
            GPU captured and compiled, or, for methods whose steps depend on values, only rounded; "fp8", the same with
            gradients that pass MLPs in 8 bits, for a plain ViT; "auto", the default: "bf16" for methods that have it,
            if a network of a known kind (ViT, Swin, ConvNeXt, ResNet of timm or torchvision) is in float32 on a GPU
            that has bfloat16, and no ranks or seconds are named; otherwise "fp32".
        low_memory: on the fast path, recompute activations instead of keeping them: slower.
        schedule: "auto" learns at once after a shift and then more and more rarely.
        pull: after each update the adapted parameters move this share of the distance to the source.
        gather: predict at once, and learn from at least so many images together: for small batches.
        recall: how many domains' states are kept, to be loaded when the stream returns to one of them.
            Without these three, a recipe has its own: mgtta+ has all of them (no recall over ranks), the others none.
            0 switches one off.
        params: the parameters that adapt, instead of the method's own choice: names of parameters or modules, patterns
            such as "blocks.*.norm1.*", or a function that takes the network and returns parameters of it.
        norm_types: for a plain module, classes of its layers that count as normalisation layers; see load_model.
        settings: the set of the recipe's own settings: "authors", by default, or "mgtta", those in which the MGTTA
            paper ran the method; `deyo@mgtta` as a name is the same.
    """
    check_choice("precision", precision, PRECISIONS)
    check_choice("schedule", schedule, SCHEDULES)
    if guard is not None and not isinstance(guard, Guard | bool):
        raise TypeError(f"guard must be True, or mgtta.Guard(...), not {type(guard).__name__}")
    if process_group is not None and (guard or schedule != "always" or recall):
        raise ValueError(
            "guard, schedule and recall judge by the images of their own rank: they cannot run over several ranks"
        )
    chosen = _recipe(name, settings)
    check_settings(chosen, given)
    check_numbers(max_updates=max_updates, gather=gather, recall=recall)
    check_number("max_seconds", max_seconds)
    pull, gather, recall = or_default(chosen, pull, gather, recall, bool(guard), process_group is not None)
    with torch.inference_mode(False):
        method = chosen.build(choosing(as_classifier(model, norm_types), params, chosen), given)
        method.name = chosen.name
        method.max_updates = max_updates
        method.max_seconds = max_seconds
        set_pull(method, pull)
        if process_group is not None:
            method.join(ranks_of(process_group))
            said = repr((chosen.name, max_updates, max_seconds, pull, gather, sorted(given.items())))
            adapted = repr(list(method.adapted))
            method.ranks.agree("model, method and settings", [method.fingerprint, method.kind, said, adapted])
        _set_engine(method, precision, low_memory)
        method.remember_start()
        return _wrapped(method, gather, schedule, recall, guard)


def _recipe(name: str, settings: str | None) -> Recipe:
    """Return the recipe at the set of settings that is asked for, in its name or beside it."""
    found = recipe(name)
    if settings is None:
        return found
    if "@" in name and found.chosen != settings:
        raise ValueError(f"{name} names a set of settings, and settings={settings!r} another: leave one out")
    return found.at(settings)


def _wrapped(
    method: Method, gather: int | None, schedule: str, recall: int | None, guard: Guard | bool | None
) -> Adapting:
    """Return the method in its wrappers, from the inside to the outside.

    Gather is innermost: a batch that rests is not kept, and a schedule counts the updates that gather makes. Recall is
    around both, since they begin again with each domain that returns. The guard undoes what any of them did.
    """
    wrapped: Adapting = method
    if gather:
        wrapped = Gathered(method, gather)
    if schedule == "auto":
        wrapped = Scheduled(wrapped)
    if recall:
        wrapped = Recalled(wrapped, recall)
    if guard:
        wrapped = guarded(wrapped, guard)
    return wrapped


def _set_engine(method: Method, precision: str, low_memory: bool) -> None:
    """Give the method the fast engine if that is asked for, or with "auto" if it pays."""
    on_gpu = next(method.model.parameters()).is_cuda
    if precision in ("bf16", "fp8") and not on_gpu:
        check_bfloat16()
    if precision in ("bf16", "fp8") or (precision == "auto" and on_gpu):
        from mgtta.fast.choice import engine_for  # compilers and kernels, only for those who ask

        method.engine = engine_for(method, precision, low_memory) or method.engine
    if low_memory and method.engine.precision == "fp32":
        raise ValueError("low_memory belongs to the fast path: precision='bf16' or 'fp8', with a method that has one")
