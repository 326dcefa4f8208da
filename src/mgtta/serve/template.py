"""Many methods over one frozen model: each has its own copy of what adapts, and shares everything else."""

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.guarded import Guarded
from mgtta.adaptation.recalled import Recalled
from mgtta.adaptation.wrapper import Adapting, find, innermost, wrappers
from mgtta.methods.create import create
from mgtta.methods.registry import recipe
from mgtta.models.classifier import Classifier

GATHER_IMAGES = 16  # that an update learns from, at least
RECALL_DOMAINS = 4  # whose states a stream keeps


def template(name: str, model: Classifier, **settings: Any) -> Adapting:
    """Return the method that every stream gets a copy of; `settings` are those of `mgtta.create`.

    A method that learns by gradients gets `gather` and `recall`, unless `settings` says otherwise. It computes in
    float32.
    """
    works_with = recipe(name).works_with
    options: dict[str, Any] = {"precision": "fp32"}
    if works_with["gather"]:
        options["gather"] = GATHER_IMAGES
    if works_with["recall"]:
        options["recall"] = RECALL_DOMAINS
    method = create(name, model, **{**options, **settings})
    method.remember_start()
    return method


def stream_copy(method: Adapting) -> Adapting:
    """Return a copy of a method that has not adapted yet; it shares what never changes with the method."""
    return copy.deepcopy(method, _shared(method))


def _shared(method: Adapting) -> dict[int, Any]:
    """Return what copies of a method share, by its id: frozen weights, source, start and generator."""
    inner = innermost(method)
    adapted = {id(p) for p in inner.adapted.values()}
    shared: list[Any] = [p for p in inner.model.parameters() if id(p) not in adapted]
    shared += list(inner.origin)
    shared.append(inner.start)
    gathered = find(method, Gathered)
    normalisation = None if gathered is None else gathered.normalisation
    guarded = find(method, Guarded)
    reference = None if guarded is None else guarded.reference
    for holder, attribute in (
        (inner, "source"),
        (inner.optimizer, "generator"),
        (normalisation, "unlearned"),
        (guarded, "guard"),
        (reference, "source"),
        (reference, "unlearned"),
    ):
        if getattr(holder, attribute, None) is not None:
            shared.append(getattr(holder, attribute))
    return {id(value): value for value in shared}


def own_bytes(method: Adapting, of: Adapting) -> int:
    """Return the bytes of the tensors that a copy holds and that the method it is a copy of does not."""
    shared = {t.untyped_storage().data_ptr() for t in _held(of)}
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _held(method)}
    return sum(size for pointer, size in own.items() if pointer not in shared)


def _held(method: Adapting) -> Iterator[Tensor]:
    """Yield the tensors that a method holds: weights, buffers, the optimizer's state, kept domains and images."""
    yield from method.parameters()
    yield from method.buffers()
    if method.optimizer is not None:
        yield from _tensors(dict(method.optimizer.state))
    yield from _tensors(innermost(method).start)
    for wrapper in wrappers(method):
        if isinstance(wrapper, Recalled):
            yield from _tensors(wrapper.domains)
        if isinstance(wrapper, Guarded):
            yield from _tensors(wrapper.watch)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name))
