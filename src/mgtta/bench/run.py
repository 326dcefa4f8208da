"""Runs the cells of experiments: those that the store does not hold yet, here or in worker processes.

A run's folder has the records (`records.jsonl`) and the generators that were trained for it (`generators/`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mgtta._lib.profile import PARTS
from mgtta._lib.ranks import ranks_of
from mgtta.bench.cluster import connected, spread_on_ray, tasks_of_a_machine
from mgtta.bench.experiments import (
    STILL,
    Cell,
    Options,
    Setup,
    Training,
    digest,
    experiment_cells,
    sweep_cells,
    tuned,
)
from mgtta.bench.provenance import check_unchanged
from mgtta.bench.resources import HELD_BYTES, Lab, Watch, asked, generator_of, known_source, training_of
from mgtta.bench.store import Store
from mgtta.bench.workers import spread
from mgtta.learned.files import load_generator
from mgtta.methods.create import needs_source, recipe_settings
from mgtta.models.source import load_source


def run_experiment(
    name: str,
    options: Options,
    setup: Setup,
    store: Store,
    *,
    sweep: bool = False,
    workers: int = 0,
    watch: Watch | None = None,
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
) -> list[dict[str, Any]]:
    """The records of an experiment; with `sweep`, at learning rates chosen on the validation corruptions."""
    more: dict[str, Any] = {"workers": workers, "watch": watch, "process_group": process_group, "ray": ray}
    cells = experiment_cells(name, options)
    if sweep:
        tries = sweep_cells(cells)
        cells = tuned(cells, tries, run_cells(tries, setup, store, title="sweep", **more))
    return run_cells(cells, setup, store, title=name, **more)


def run_cells(
    cells: Sequence[Cell],
    setup: Setup,
    store: Store,
    workers: int = 0,
    watch: Watch | None = None,
    title: str = "",
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
) -> list[dict[str, Any]]:
    """Run the cells that the store does not hold, and give the records of all of them, in the cells' order.

    Work that several experiments ask for is done once, and its records are stored for each of them.

    Args:
        workers: processes; 0 runs here, and then alone does `watch` see each batch. What is measured by the clock
            runs here, and what is `alone` in a process of its own, one at a time, in any case.
        process_group: of ranks that run every cell together, each with its share of every batch. The first one's
            store counts.
        ray: the address of a Ray cluster that runs the cells, or "auto". What is measured by the clock runs there
            one cell at a time, after all else.
    """
    watch, ranks = watch or Watch(), ranks_of(process_group)
    setup = dataclasses.replace(setup, ranks=ranks.size)
    cells = list(dict.fromkeys(cells))
    _check_engines(cells, ranks.size, workers, ray)
    _check_needs(cells, setup)
    works = {cell: cell.key(setup) for cell in cells}
    there = ranks.tell(lambda: _by_cell(store))
    check_unchanged([r["protocol"] for records in there.values() for r in records], setup, cells, store.path)
    done = {name.rpartition("/")[2]: records for name, records in there.items()}
    wanted: dict[str, list[Cell]] = {}  # work -> the cells that ask for it
    for cell in cells:
        wanted.setdefault(works[cell], []).append(cell)
    watch.start(title, len(cells), sum(len(asking) for work, asking in wanted.items() if work in done))

    def finish(work: str, records: list[dict[str, Any]], fresh: bool) -> None:
        for cell in wanted[work]:
            chosen_from = {"chosen_from": list(cell.chosen_from) or None}
            own = [
                {**r, **asked(cell), **_remaining(cell, r), "protocol": {**r["protocol"], **chosen_from}}
                for r in map(_bare, records)
            ]
            if _name(cell, work) not in there and ranks.first:
                store.add(_name(cell, work), own)
            watch.cell(cell, own, fresh)

    for work in wanted:
        if work in done:
            finish(work, done[work], fresh=False)
    first_seen = {stream: i for i, stream in reversed(list(enumerate(cell.stream for cell in cells)))}
    todo = sorted((asking[0] for w, asking in wanted.items() if w not in done), key=lambda c: first_seen[c.stream])
    folder = store.path.parent
    if ray is None:
        ran = _run(todo, setup, folder, workers, watch, process_group)
    else:
        ran = _run_on_ray(todo, setup, folder, watch, ray)
    for cell, records in ran:
        finish(works[cell], records, fresh=True)
    found = ranks.tell(lambda: _by_cell(store))
    return [record for cell in cells for record in found[_name(cell, works[cell])]]


def _run(
    cells: Sequence[Cell], setup: Setup, folder: Path, workers: int, watch: Watch, group: ProcessGroup | None
) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    free = [cell for cell in cells if not cell.timed]
    here = [cell for cell in cells if cell.timed and not cell.alone]
    if workers:
        start = partial(_start, setup, folder, HELD_BYTES // workers, 1)
        done = spread(_tasks(free, setup), start, workers, kin=lambda t: t.stream if isinstance(t, Cell) else t)
        yield from ((task, records) for task, records in done if isinstance(task, Cell))
    else:
        here = free + here
    if here:
        lab = Lab(setup, folder, watch=watch, group=group)
        yield from ((cell, lab.run(cell)) for cell in here)
    for cell in cells:
        if cell.alone:
            watch.note(f"{cell.method} in a process of its own")
            yield from spread([cell], partial(_start, setup, folder, 0, torch.get_num_threads()), 1)


def _run_on_ray(
    cells: Sequence[Cell], setup: Setup, folder: Path, watch: Watch, address: str
) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    if not cells:
        return
    needs: dict[str, Any] = {"cpus": 1, "gpus": int(torch.device(setup.device).type == "cuda")}
    with connected(address) as cluster:
        watch.note(f"on Ray: {cluster}")
        held = HELD_BYTES // tasks_of_a_machine(**needs)
        start, bare = (partial(_start, setup, folder.resolve(), size, 1) for size in (held, 0))
        done = spread_on_ray(_tasks([c for c in cells if not c.timed], setup), start, **needs)
        yield from ((task, records) for task, records in done if isinstance(task, Cell))
        yield from spread_on_ray([c for c in cells if c.timed and not c.alone], start, **needs, at_once=1)
        yield from spread_on_ray([c for c in cells if c.alone], bare, **needs, at_once=1, fresh=True)


def _tasks(cells: Sequence[Cell], setup: Setup) -> list[Cell | Training]:
    """Each generator's training first, side by side, before all wait for the first; then the cells."""
    return [*dict.fromkeys(t for cell in cells if (t := training_of(cell, setup))), *cells]


def _check_needs(cells: Sequence[Cell], setup: Setup) -> None:
    """Before anything runs: is all there that some cell will ask for?"""
    source = known_source(setup)
    if source is not None:
        load_source(source)
    for generator in filter(None, dict.fromkeys(generator_of(cell, setup) for cell in cells)):
        load_generator(generator)
    for cell in cells if setup.data is not None and setup.validation is None else ():
        clean = (needs_source(cell.method) and source is None) or "fisher" in recipe_settings(cell.method)
        if cell.split == "validation" or training_of(cell, setup) is not None or clean:
            raise ValueError(
                f"validation images are needed for {cell.method} ({cell.experiment}): --validation, some that are not "
                "among the test's"
            )


def _check_engines(cells: Sequence[Cell], ranks: int, workers: int, ray: str | None) -> None:
    if (ranks > 1) + bool(workers) + (ray is not None) > 1:
        raise ValueError("torchrun's ranks run each cell together, workers and Ray run cells apart: take one of them")
    if ranks > 1 and (alone := next((cell for cell in cells if cell.alone), None)):
        raise ValueError(f"{alone} ({alone.experiment}) is measured in a process of its own: run it without torchrun")


def _start(setup: Setup, folder: Path, held: int, threads: int) -> Callable[[Cell | Training], Any]:
    torch.set_num_threads(threads)
    lab = Lab(setup, folder, held)
    return lambda task: lab.run(task) if isinstance(task, Cell) else lab.trained(task)


def _name(cell: Cell, work: str) -> str:
    """What the store calls the cell; the work it asks for comes last."""
    return f"{digest(dataclasses.replace(cell, chosen_from=()))}/{work}"


def _remaining(cell: Cell, record: dict[str, Any]) -> dict[str, Any]:
    """For one who never learns: what is left after as many batches as another would have learned from."""
    if cell.method not in STILL or cell.max_updates is None or not record["curve"]:
        return {}
    hits, images = (sum(record[key][cell.max_updates :]) for key in ("curve", "sizes"))
    return {"remaining": 100 * hits / images if images else None}


def _bare(record: dict[str, Any]) -> dict[str, Any]:
    """The record as it was before a store gave it a place."""
    return {key: value for key, value in record.items() if key not in ("cell", "part", "parts")}


def _by_cell(store: Store) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in store.records():
        found.setdefault(record["cell"], []).append(record)
    return found


def time_table(records: Iterable[dict[str, Any]]) -> str:
    """Where the time of all records went, as markdown; empty where none of them says."""
    found = [record["profile"] for record in records if "profile" in record]
    if not found:
        return ""
    seconds = {name: sum(profile[name] for profile in found) for name in PARTS}
    total = sum(seconds.values())
    rows = [f"| {name} | {value:.2f} | {100 * value / total:.1f} |" for name, value in seconds.items()]
    return "\n".join(["| time | seconds | % |", "|---|---:|---:|", *rows])


def by_experiment(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record["experiment"], []).append(record)
    return found
