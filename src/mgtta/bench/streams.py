"""The experiment `streams`: eight kinds of stream, and one setting of each method for all of them.

A deployed method does not know which kind it will meet. So nothing is tuned for one kind: a sweep chooses learning rate
and pull by the mean over all kinds, on the validation images under the validation corruptions.
"""

import dataclasses
import math
from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

from mgtta._lib.errors import unknown
from mgtta.bench.cells import SWEEP, Cell, Options
from mgtta.bench.sweep import Plan, rates
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.data.streams import GRADUAL
from mgtta.methods.registry import Recipe, recipe

WRAPPERS = ("pull", "gather", "recall")  # arguments of `create` that every gradient method takes
PULLS = (0.0, 0.02, 0.05)  # tried by a sweep
Settings = tuple[tuple[str, Any], ...]


def streams(o: Options) -> list[Cell]:
    """Eight kinds of stream: reset, continual, rounds, mixed, labels, one, gradual, clean; one setting for all."""
    check_wrappers(o.wrappers)
    found = []
    for kind, fields in _kinds(o).items():
        for seed in range(o.seeds):
            for method in o.methods:
                settings, without = wrapped(recipe(method), o.wrappers)
                own = {"batch_size": o.batch_size, "settings": settings, "without": without, **fields}
                found.append(Cell("streams", method, seed=seed, kind=kind, **own))
    return found


def _kinds(o: Options) -> dict[str, dict[str, Any]]:
    """Return the fields of a cell of each kind; see mgtta.data.streams.STREAM_KINDS."""
    names = tuple(o.corruptions)
    rising_and_falling = tuple(f"{name}/{severity}" for name in names for severity in GRADUAL)
    return {
        "reset": {"domains": names},
        "continual": {"domains": names, "reset": "never"},
        "rounds": {"domains": names * o.rounds, "reset": "never", "limit": o.round_images},
        "mixed": {"domains": names, "mixed": True},
        "labels": {"domains": names, "reset": "never", "by_class": True},
        "one": {"domains": names, "reset": "never", "batch_size": 1, "limit": o.single},
        "gradual": {"domains": rising_and_falling, "reset": "never"},
        "clean": {"domains": ("clean",), "severity": 0},
    }


def check_wrappers(given: Sequence[tuple[str, Any]]) -> None:
    """Raise an error that lists the valid names if one of NAME or METHOD.NAME is unknown, or a value not finite."""
    for name, value in given:
        owner, _, setting = name.rpartition(".")
        known = list(WRAPPERS)
        if owner:
            known += recipe(owner).settings
        if setting not in known:
            what = f"setting of {owner}" if owner else "setting for all methods (for one, METHOD.NAME)"
            raise unknown(what, setting, known)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: records hold finite numbers only, so give a large one such as 1e9")


def wrapped(chosen: Recipe, given: Sequence[tuple[str, Any]]) -> tuple[Settings, tuple[str, ...]]:
    """Return a method's settings, and the names of those that it refuses and runs without.

    given: NAME and value for all methods, or METHOD.NAME and value for one.
    """
    settings = {}
    without = []
    for name, value in given:
        owner, _, setting = name.rpartition(".")
        if owner and recipe(owner).name != chosen.name:
            continue
        if not owner and not chosen.works_with[setting]:
            without.append(setting)
            continue
        settings[setting] = value
    return tuple(sorted(settings.items())), tuple(without)


def joint_tuning(cells: list[Cell], o: Options) -> Plan:
    """Return a plan that returns a method's cells with learning rate and pull chosen for all kinds of stream."""
    tries = stream_tries(dataclasses.replace(o, methods=[cells[0].method]))
    if not tries:
        return cells
    records = yield tries
    return tuned_jointly(cells, records)


def stream_tries(o: Options) -> list[Cell]:
    """Return cells that try learning rates and pulls of each method over all kinds of validation stream.

    Each method gets as many tries. A setting that was given is not swept.
    """
    validation = dataclasses.replace(o, corruptions=VALIDATION_CORRUPTIONS, seeds=1)
    return [
        dataclasses.replace(cell, experiment=SWEEP, split="validation", settings=tried)
        for cell in streams(validation)
        for tried in _tries(cell, o)
    ]


def _tries(cell: Cell, o: Options) -> list[Settings]:
    given = dict(cell.settings)
    learning_rates = rates(cell.method, o.rates)
    if not learning_rates or "lr" in given:
        return []
    pulls: tuple[float, ...] = PULLS
    if "pull" in given:
        pulls = (given["pull"],)
    both = product(learning_rates, pulls)
    return [tuple(sorted({**given, "lr": lr, "pull": pull}.items())) for lr, pull in both]


def tuned_jointly(cells: Sequence[Cell], records: Sequence[dict[str, Any]]) -> list[Cell]:
    """Return the cells with the settings that did best in the sweep's records, by the mean over all kinds."""
    scores: dict[str, dict[Settings, dict[str, list[float]]]] = {}  # method -> settings -> kind -> accuracies
    for record in records:
        settings = tuple(sorted(record["settings"].items()))
        by_kind = scores.setdefault(record["method"], {}).setdefault(settings, {})
        by_kind.setdefault(record["kind"], []).append(record["top1"])
    return [_with_best(cell, scores.get(cell.method, {})) for cell in cells]


def _with_best(cell: Cell, tried: dict[Settings, dict[str, list[float]]]) -> Cell:
    if not tried:
        return cell
    best = max(tried, key=lambda settings: mean(map(mean, tried[settings].values())))
    chosen_from = tuple(dict(settings)["lr"] for settings in tried)
    return dataclasses.replace(cell, settings=best, chosen_from=chosen_from)
