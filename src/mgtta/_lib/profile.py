"""Measures where the time of a run goes: seconds by part, inside a `profiled()` block."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PARTS = ("loading", "moving", "corrupting", "predicting", "adapting", "optimizer", "other")

_asked: list[dict[str, float]] = []  # one dict for each open `profiled()` block


def now(wait: bool = True) -> float:
    """Return the time in seconds; with `wait`, when the GPU has done all that it was given."""
    if wait and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Yield a dict that holds the seconds of each part when the block ends; "other" is the rest."""
    found = dict.fromkeys(PARTS, 0.0)
    began = now()
    _asked.append(found)
    try:
        yield found
    finally:
        _asked.remove(found)
        found["other"] = now() - began - sum(found.values())


@contextmanager
def part(name: str) -> Iterator[None]:
    """Count the seconds of the block as this part, inside a `profiled()` block."""
    if not _asked:
        yield
        return
    began = now()
    try:
        yield
    finally:
        add(name, now() - began)


def add(name: str, seconds: float) -> None:
    """Add seconds to a part; a negative number takes them away."""
    for found in _asked:
        found[name] += seconds


@contextmanager
def optimizer_apart(optimizer: Any) -> Iterator[None]:
    """Count the steps of a torch optimizer as "optimizer" and not as "adapting"."""
    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = now()

    def after(*_: Any) -> None:
        took = now() - began
        add("optimizer", took)
        add("adapting", -took)

    if not _asked or optimizer is None:
        yield
        return
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
