"""Sweeps: learning rates are tried on the validation split, and the cells get the best ones."""

import dataclasses
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from mgtta.bench.cells import RATES, Cell, Training
from mgtta.bench.needs import default_rate
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS


class Contender(NamedTuple):
    """What cells that share a learning rate have in common."""

    method: str
    batch_size: int
    mixed: bool
    reset: str
    domains: int  # of a stream, where the method is not reset between them
    training: Training | None


def rates(method: str, factors: Sequence[float] = RATES) -> list[float]:
    """Return a sweep's learning rates for a method: as many for each method that has one."""
    default = default_rate(method)
    if default is None:
        return []
    return [float(f"{default * factor:.3g}") for factor in factors]


def sweep_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells that try every learning rate of whatever runs in `cells`, on the validation split.

    A rate for a long stream, mixed or never reset, is tried on a stream of the same kind and length, in which the
    validation corruptions repeat. A contender that runs at several rates already is not swept.
    """
    asked: dict[Contender, set[Any]] = {}
    for cell in cells:
        asked.setdefault(_contender(cell), set()).add(dict(cell.settings).get("lr"))
    return [
        _try(contender, domains, rate)
        for contender, found in asked.items()
        if len(found) == 1
        for domains in _validation_streams(contender.domains)
        for rate in rates(contender.method)
    ]


def tuned(cells: Sequence[Cell], sweep: Sequence[Cell], records: Sequence[dict[str, Any]]) -> list[Cell]:
    """Return the cells with the learning rates that did best, on average, in the records of the sweep's cells.

    records: of each cell in turn, one for each domain of its stream, or a single one if domains are mixed.
    """
    scores: dict[Contender, dict[float, list[float]]] = {}
    owners = [cell for cell in sweep for _ in range(1 if cell.mixed else len(cell.domains))]
    for cell, record in zip(owners, records, strict=True):
        rate = dict(cell.settings)["lr"]
        scores.setdefault(_contender(cell), {}).setdefault(rate, []).append(record["top1"])
    return [_with_best(cell, scores.get(_contender(cell), {})) for cell in cells]


def _try(contender: Contender, domains: tuple[str, ...], rate: float) -> Cell:
    return Cell(
        "sweep",
        contender.method,
        domains,
        settings=(("lr", rate),),
        batch_size=contender.batch_size,
        mixed=contender.mixed,
        reset=contender.reset,
        split="validation",
        training=contender.training,
    )


def _with_best(cell: Cell, tried: dict[float, list[float]]) -> Cell:
    if not tried:
        return cell
    best = max(tried, key=lambda rate: sum(tried[rate]) / len(tried[rate]))
    settings = tuple(sorted({**dict(cell.settings), "lr": best}.items()))
    return dataclasses.replace(cell, settings=settings, chosen_from=tuple(tried))


def _contender(cell: Cell) -> Contender:
    domains = 1
    if cell.mixed or cell.reset == "never":
        domains = len(cell.domains)
    return Contender(cell.method, cell.batch_size, cell.mixed, cell.reset, domains, cell.training)


def _validation_streams(domains: int) -> list[tuple[str, ...]]:
    """Return the domains of the streams to try rates on: one corruption each, or so many in one."""
    if domains == 1:
        return [(name,) for name in VALIDATION_CORRUPTIONS]
    return [tuple(islice(cycle(VALIDATION_CORRUPTIONS), domains))]
