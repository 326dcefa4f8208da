"""Sweeps: settings are tried on the validation split, and the cells get the best ones.

First the learning rates, on a grid that grows as long as its best rate is its first or its last. Then, at the best
rate, the values of settings that a recipe declares to decide the method. A sweep is a plan: it yields cells that are to
be run, is sent their records, and so on; it does not wait for the sweeps of other methods.
"""

import dataclasses
from collections.abc import Generator, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from mgtta.bench.cells import RATES, SWEEP, Cell, Training
from mgtta.bench.needs import decisive_settings, default_rate
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS

GROWTHS = 4  # at most so often does a grid grow
STEPS = (2.0, 5.0)  # rates that a growth adds, relative to the edge

Records = Sequence[dict[str, Any]]
Returned = TypeVar("Returned")
Asking = Generator[list[Cell], Records, Returned]  # yields cells, is sent the records of each in turn
Plan = Asking[list[Cell]]  # returns the cells whose records are wanted


class Contender(NamedTuple):
    """What cells that share a learning rate have in common."""

    experiment: str
    method: str
    batch_size: int
    mixed: bool
    reset: str
    domains: int  # of a stream, where the method is not reset between them
    training: Training | None
    limit: int | None  # images per domain


def rates(method: str, factors: Sequence[float] = RATES, centre: float | None = None) -> list[float]:
    """Return a sweep's first learning rates for a method: as many for each method that has one.

    centre: by default the recipe's own learning rate.
    """
    default = default_rate(method)
    if default is None:
        return []
    return [_rounded((centre or default) * factor) for factor in factors]


def by_contender(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Return the cells in groups that share a learning rate."""
    found: dict[Contender, list[Cell]] = {}
    for cell in cells:
        found.setdefault(_contender(cell), []).append(cell)
    return list(found.values())


def tuning(cells: list[Cell], limit: int | None = None) -> Plan:
    """Return a plan that returns the cells of a contender at their best settings.

    limit: images per domain that settings are tried on; by default as many as the cells have.

    A rate for a long stream, mixed or never reset, is tried on a stream of the same kind and length, in which the
    validation corruptions repeat. A contender that runs at several rates already is not swept.
    """
    contender = _contender(cells[0])
    limit = min(filter(None, (contender.limit, limit)), default=None)
    contender = contender._replace(limit=limit)
    given = {dict(cell.settings).get("lr") for cell in cells}
    if len(given) > 1:
        return cells
    grid = rates(contender.method, centre=given.pop())
    if not grid:
        return cells
    tried = yield from _tried(contender, "lr", grid)
    for _ in range(GROWTHS):
        beyond = _beyond(tried)
        if not beyond:
            break
        tried |= yield from _tried(contender, "lr", beyond)
    best = _best(tried)
    chosen = yield from _decided(contender, {"lr": best}, tried[best])
    return [dataclasses.replace(_with(cell, chosen), chosen_from=tuple(sorted(tried))) for cell in cells]


def _beyond(tried: dict[float, float]) -> list[float]:
    """Return rates beyond the edge of the grid if its best one is its first or its last."""
    best = _best(tried)
    beyond: list[float] = []
    if best == max(tried):
        beyond += [_rounded(best * step) for step in STEPS]
    if best == min(tried):
        beyond += [_rounded(best / step) for step in STEPS]
    return beyond


def _decided(contender: Contender, settings: dict[str, Any], top: float) -> Asking[dict[str, Any]]:
    """Return the settings and the best values of those that decide the method.

    top: the accuracy at these settings.
    """
    for key, values in decisive_settings(contender.method).items():
        found = yield from _tried(contender, key, values, settings)
        best = max(found, key=lambda value: found[value])
        if found[best] > top:
            top = found[best]
            settings = {**settings, key: best}
    return settings


def _tried(
    contender: Contender, key: str, values: Sequence[Any], settings: dict[str, Any] | None = None
) -> Asking[dict[Any, float]]:
    """Return value of a setting -> mean accuracy on the validation streams, at the other settings."""
    streams = _validation_streams(contender.domains)
    tries = [
        Cell(
            SWEEP,
            contender.method,
            domains,
            settings=tuple(sorted({**(settings or {}), key: value}.items())),
            batch_size=contender.batch_size,
            mixed=contender.mixed,
            reset=contender.reset,
            split="validation",
            training=contender.training,
            limit=contender.limit,
        )
        for value in values
        for domains in streams
    ]
    records = yield tries
    each = len(records) // len(values)
    return {value: fmean(r["top1"] for r in records[i * each :][:each]) for i, value in enumerate(values)}


def _best(tried: dict[float, float]) -> float:
    """Return the rate of the best score; of several, the one nearest to the middle of the grid."""
    grid = sorted(tried)
    middle = (len(grid) - 1) / 2
    top = max(tried.values())
    return min((rate for rate in grid if tried[rate] == top), key=lambda rate: abs(grid.index(rate) - middle))


def _with(cell: Cell, settings: dict[str, Any]) -> Cell:
    return dataclasses.replace(cell, settings=tuple(sorted({**dict(cell.settings), **settings}.items())))


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


def _contender(cell: Cell) -> Contender:
    domains = 1
    if cell.mixed or cell.reset == "never":
        domains = len(cell.domains)
    how = (cell.batch_size, cell.mixed, cell.reset, domains, cell.training, cell.limit)
    return Contender(cell.experiment, cell.method, *how)


def _validation_streams(domains: int) -> list[tuple[str, ...]]:
    """Return the domains of the streams to try rates on: one corruption each, or so many in one."""
    if domains == 1:
        return [(name,) for name in VALIDATION_CORRUPTIONS]
    return [tuple(islice(cycle(VALIDATION_CORRUPTIONS), domains))]
