"""Sweeps: settings are tried on the validation split, and the cells get the best ones.

First the learning rates, on a grid that grows as long as its best rate is its first or its last. Then, at the best
rate, the values of settings that a recipe declares to decide the method.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import Any, NamedTuple

from mgtta.bench.cells import RATES, Cell, Training
from mgtta.bench.needs import decisive_settings, default_rate
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS

GROWTHS = 4  # at most so often does a grid grow
STEPS = (2.0, 5.0)  # rates that a growth adds, relative to the edge

Records = Sequence[dict[str, Any]]
Run = Callable[[Sequence[Cell]], Records]


class Contender(NamedTuple):
    """What cells that share a learning rate have in common."""

    method: str
    batch_size: int
    mixed: bool
    reset: str
    domains: int  # of a stream, where the method is not reset between them
    training: Training | None


def rates(method: str, factors: Sequence[float] = RATES, centre: float | None = None) -> list[float]:
    """Return a sweep's first learning rates for a method: as many for each method that has one.

    centre: by default the recipe's own learning rate.
    """
    default = default_rate(method)
    if default is None:
        return []
    return [_rounded((centre or default) * factor) for factor in factors]


def swept(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """Return the cells at the settings that did best on the validation split.

    run: returns the records of cells, of each cell in turn.
    """
    tries = sweep_cells(cells)
    records = list(run(tries))
    for _ in range(GROWTHS):
        more = grown(tries, records)
        if not more:
            break
        records += run(more)
        tries += more
    return _decided(tuned(cells, tries, records), _scores(tries, records), run)


def sweep_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells that try the first learning rates of whatever runs in `cells`, on the validation split.

    A rate for a long stream, mixed or never reset, is tried on a stream of the same kind and length, in which the
    validation corruptions repeat. A contender that runs at several rates already is not swept.
    """
    asked: dict[Contender, set[Any]] = {}
    for cell in cells:
        asked.setdefault(_contender(cell), set()).add(dict(cell.settings).get("lr"))
    return [
        trial
        for contender, found in asked.items()
        if len(found) == 1
        for trial in _tries(contender, [{"lr": rate} for rate in rates(contender.method, centre=min(found))])
    ]


def grown(tries: Sequence[Cell], records: Records) -> list[Cell]:
    """Return cells beyond the edge of each grid whose best learning rate is its first or its last."""
    found = []
    for contender, tried in _scores(tries, records).items():
        best = _best(tried)
        beyond: list[float] = []
        if best == max(tried):
            beyond += [_rounded(best * step) for step in STEPS]
        if best == min(tried):
            beyond += [_rounded(best / step) for step in STEPS]
        found += _tries(contender, [{"lr": rate} for rate in beyond])
    return found


def tuned(cells: Sequence[Cell], sweep: Sequence[Cell], records: Records) -> list[Cell]:
    """Return the cells with the learning rates that did best, on average, in the records of the sweep's cells.

    records: of each cell in turn, one for each domain of its stream, or a single one if domains are mixed.
    """
    scores = _scores(sweep, records)
    return [_with_best(cell, scores.get(_contender(cell), {})) for cell in cells]


def _decided(cells: list[Cell], scores: dict[Contender, dict[float, float]], run: Run) -> list[Cell]:
    """Return the cells with the best values of the settings that decide their methods, at their best rates."""
    rate_of = {_contender(cell): dict(cell.settings)["lr"] for cell in cells if cell.chosen_from}
    chosen: dict[Contender, dict[str, Any]] = {}
    for contender, rate in rate_of.items():
        top = scores[contender][rate]
        chosen[contender] = {}
        for key, values in decisive_settings(contender.method).items():
            found = _tried_values(contender, {"lr": rate, **chosen[contender]}, key, values, run)
            best = max(found, key=lambda value: found[value])
            if found[best] > top:
                top = found[best]
                chosen[contender][key] = best
    return [_with(cell, chosen.get(_contender(cell), {})) for cell in cells]


def _tried_values(
    contender: Contender, settings: dict[str, Any], key: str, values: Sequence[Any], run: Run
) -> dict[Any, float]:
    """Return value of a setting -> mean accuracy."""
    tries = {value: _tries(contender, [{**settings, key: value}]) for value in values}
    records = run([cell for own in tries.values() for cell in own])
    each = len(records) // len(values)
    return {value: fmean(r["top1"] for r in records[i * each :][:each]) for i, value in enumerate(values)}


def _scores(tries: Sequence[Cell], records: Records) -> dict[Contender, dict[float, float]]:
    """Return contender -> learning rate -> mean accuracy."""
    found: dict[Contender, dict[float, list[float]]] = {}
    owners = [cell for cell in tries for _ in range(1 if cell.mixed else len(cell.domains))]
    for cell, record in zip(owners, records, strict=True):
        rate = dict(cell.settings)["lr"]
        found.setdefault(_contender(cell), {}).setdefault(rate, []).append(record["top1"])
    return {contender: {rate: fmean(of) for rate, of in tried.items()} for contender, tried in found.items()}


def _best(tried: dict[float, float]) -> float:
    """Return the rate of the best score; of several, the one nearest to the middle of the grid."""
    grid = sorted(tried)
    middle = (len(grid) - 1) / 2
    top = max(tried.values())
    return min((rate for rate in grid if tried[rate] == top), key=lambda rate: abs(grid.index(rate) - middle))


def _tries(contender: Contender, settings: Sequence[dict[str, Any]]) -> list[Cell]:
    return [
        Cell(
            "sweep",
            contender.method,
            domains,
            settings=tuple(sorted(own.items())),
            batch_size=contender.batch_size,
            mixed=contender.mixed,
            reset=contender.reset,
            split="validation",
            training=contender.training,
        )
        for domains in _validation_streams(contender.domains)
        for own in settings
    ]


def _with_best(cell: Cell, tried: dict[float, float]) -> Cell:
    if not tried:
        return cell
    return dataclasses.replace(_with(cell, {"lr": _best(tried)}), chosen_from=tuple(sorted(tried)))


def _with(cell: Cell, settings: dict[str, Any]) -> Cell:
    return dataclasses.replace(cell, settings=tuple(sorted({**dict(cell.settings), **settings}.items())))


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


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
