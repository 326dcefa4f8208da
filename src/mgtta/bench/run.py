"""Run the cells of experiments that the store does not hold yet.

A run's folder has the records (`records.jsonl`) and the generators that were trained for it (`generators/`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mgtta._lib.profile import PARTS
from mgtta._lib.ranks import ranks_of
from mgtta.bench.cells import STILL, Cell, Options, Setup, Training, digest
from mgtta.bench.executors.base import Executor
from mgtta.bench.executors.here import Here
from mgtta.bench.executors.processes import Processes
from mgtta.bench.executors.ray import OnRay
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.needs import needs_clean_images
from mgtta.bench.provenance import check_unchanged
from mgtta.bench.resources import HELD_BYTES, Lab, Listener, asked, generator_of, known_source, training_of
from mgtta.bench.store import Store
from mgtta.bench.streams import stream_tries, tuned_jointly
from mgtta.bench.sweep import swept
from mgtta.learned.files import load_generator
from mgtta.models.source import load_source

Records = list[dict[str, Any]]


def run_experiment(
    name: str,
    options: Options,
    setup: Setup,
    store: Store,
    *,
    sweep: bool = False,
    workers: int = 0,
    watch: Listener | None = None,
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
) -> Records:
    """Return the records of an experiment; with `sweep`, at learning rates chosen on the validation corruptions.

    For `streams`, learning rate and pull are chosen for all kinds of stream together.
    """
    more: dict[str, Any] = {"workers": workers, "watch": watch, "process_group": process_group, "ray": ray}
    cells = experiment_cells(name, options)
    if sweep:

        def run(tries: Sequence[Cell]) -> list[dict[str, Any]]:
            return run_cells(tries, setup, store, title="sweep", **more)

        joint = [cell for cell in cells if cell.kind is not None]
        cells = [cell for cell in cells if cell.kind is None]
        if cells:
            cells = swept(cells, run)
        if joint:
            cells += tuned_jointly(joint, run(stream_tries(options)))
    return run_cells(cells, setup, store, title=name, **more)


def run_cells(
    cells: Sequence[Cell],
    setup: Setup,
    store: Store,
    workers: int = 0,
    watch: Listener | None = None,
    title: str = "",
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
) -> Records:
    """Run the cells that the store does not hold, and return the records of all of them, in the cells' order.

    Work that several experiments ask for is done once, and its records are stored for each of them.

    Args:
        workers: processes; 0 runs here, and only then does `watch` see each batch. A cell that is measured by the
            clock runs here, and an `alone` cell in a process of its own, one at a time, in any case.
        process_group: of ranks that run every cell together, each with its share of every batch. The first rank's
            store counts.
        ray: the address of a Ray cluster that runs the cells, or "auto". Cells that are measured by the clock run
            there one at a time, after all others.
    """
    watch = watch or Listener()
    ranks = ranks_of(process_group)
    setup = dataclasses.replace(setup, ranks=ranks.size)
    cells = list(dict.fromkeys(cells))
    executor = _executor(cells, setup, workers, ray)
    _check_needs(cells, setup)
    there = ranks.tell(lambda: _by_cell(store))
    check_unchanged([r["protocol"] for records in there.values() for r in records], setup, cells, store.path)
    works = {cell: cell.key(setup) for cell in cells}
    done = {name.rpartition("/")[2]: records for name, records in there.items()}
    asking: dict[str, list[Cell]] = {}  # work -> the cells that ask for it
    for cell in cells:
        asking.setdefault(works[cell], []).append(cell)
    watch.start(title, len(cells), sum(len(own) for work, own in asking.items() if work in done))

    def finish(work: str, records: Records, fresh: bool) -> None:
        for cell in asking[work]:
            own = [_as_asked(cell, record) for record in records]
            if _name(cell, work) not in there and ranks.first:
                store.add(_name(cell, work), own)
            watch.cell(cell, own, fresh)

    for work in asking:
        if work in done:
            finish(work, done[work], fresh=False)
    todo = [own[0] for work, own in asking.items() if work not in done]
    start = _Start(setup, store.path.parent.resolve(), watch, process_group)
    for cell, records in _run(_by_stream(todo, cells), start, executor):
        finish(works[cell], records, fresh=True)
    found = ranks.tell(lambda: _by_cell(store))
    return [record for cell in cells for record in found[_name(cell, works[cell])]]


class _Start:
    """Opens a lab in a process, and returns what runs its tasks: cells, or trainings of generators.

    In another process the watch and the group are missing: these stay here.
    """

    def __init__(
        self, setup: Setup, folder: Path, watch: Listener | None = None, group: ProcessGroup | None = None
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.watch = watch
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        return _Start, (self.setup, self.folder)

    def __call__(self, processes: int) -> Callable[[Cell | Training], Any]:
        held_bytes = 0
        if processes:
            held_bytes = HELD_BYTES // processes
        lab = Lab(self.setup, self.folder, held_bytes, self.watch, self.group)

        def work(task: Cell | Training) -> Any:
            if isinstance(task, Training):
                return lab.trained(task)
            return lab.run(task)

        return work


def _executor(cells: Sequence[Cell], setup: Setup, workers: int, ray: str | None) -> Executor:
    if (setup.ranks > 1) + bool(workers) + (ray is not None) > 1:
        raise ValueError(
            "torchrun's ranks run each cell together, workers and Ray run cells separately: take one of them"
        )
    alone = next((cell for cell in cells if cell.alone), None)
    if setup.ranks > 1 and alone is not None:
        raise ValueError(f"{alone} ({alone.experiment}) is measured in a process of its own: run it without torchrun")
    if ray is not None:
        return OnRay(ray, gpus=int(torch.device(setup.device).type == "cuda"))
    if workers:
        return Processes(workers)
    return Here()


def _run(cells: Sequence[Cell], start: _Start, executor: Executor) -> Iterator[tuple[Cell, Records]]:
    """Run cells side by side; then those that are timed, one at a time; then those in processes of their own."""
    if not cells:
        return
    watch = start.watch or Listener()
    free = [cell for cell in cells if not cell.timed]
    timed = [cell for cell in cells if cell.timed and not cell.alone]
    with executor:
        if executor.about():
            watch.note(executor.about())
        for task, result in executor.run([*_trainings(free, start.setup), *free], start, _data_of):
            if isinstance(task, Cell):
                yield task, result
        yield from executor.run_in_turn(timed, start)
        for cell in cells:
            if cell.alone:
                watch.note(f"{cell} in a process of its own")
                yield from executor.run_fresh([cell], start)


def _trainings(cells: Sequence[Cell], setup: Setup) -> list[Training]:
    """Return the trainings of the cells' generators: they run first, side by side, before any cell waits for one."""
    found = (training_of(cell, setup) for cell in cells)
    return list(dict.fromkeys(training for training in found if training is not None))


def _data_of(task: Cell | Training) -> Any:
    """Return the same for tasks that read the same data."""
    if isinstance(task, Training):
        return task
    return task.stream


def _by_stream(todo: Sequence[Cell], cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells to run such that those of a stream follow one another, streams in the order of `cells`."""
    streams = list(dict.fromkeys(cell.stream for cell in cells))
    place = {stream: i for i, stream in enumerate(streams)}
    return sorted(todo, key=lambda cell: place[cell.stream])


def _check_needs(cells: Sequence[Cell], setup: Setup) -> None:
    """Raise an error before anything runs if something is missing that a cell will ask for."""
    source = known_source(setup)
    if source is not None:
        load_source(source)
    for generator in filter(None, dict.fromkeys(generator_of(cell, setup) for cell in cells)):
        load_generator(generator)
    if setup.data is None or setup.validation is not None:
        return
    for cell in cells:
        clean = needs_clean_images(cell.method, source is not None)
        if cell.split == "validation" or training_of(cell, setup) is not None or clean:
            raise ValueError(
                f"validation images are needed for {cell.method} ({cell.experiment}): name them with --validation, "
                "other images than the test's"
            )


def _as_asked(cell: Cell, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record as the cell asks for it, whichever cell it was made for."""
    own = {key: value for key, value in record.items() if key not in ("cell", "part", "parts")}
    protocol = {**record["protocol"], "chosen_from": list(cell.chosen_from) or None}
    return {**own, **asked(cell), **_remaining(cell, record), "protocol": protocol}


def _name(cell: Cell, work: str) -> str:
    """Return the store's name for the cell; the hash of its work comes last."""
    return f"{digest(dataclasses.replace(cell, chosen_from=()))}/{work}"


def _remaining(cell: Cell, record: dict[str, Any]) -> dict[str, Any]:
    """Return `remaining` of a method that never learns: its accuracy after the batches that others learn from."""
    if cell.method not in STILL or cell.max_updates is None or not record["curve"]:
        return {}
    images = sum(record["sizes"][cell.max_updates :])
    if not images:
        return {"remaining": None}
    return {"remaining": 100 * sum(record["curve"][cell.max_updates :]) / images}


def _by_cell(store: Store) -> dict[str, Records]:
    found: dict[str, Records] = {}
    for record in store.records():
        found.setdefault(record["cell"], []).append(record)
    return found


def time_table(records: Iterable[dict[str, Any]]) -> str:
    """Return a markdown table of where the time of all records went; empty where no record says so."""
    found = [record["profile"] for record in records if "profile" in record]
    if not found:
        return ""
    seconds = {name: sum(profile[name] for profile in found) for name in PARTS}
    total = sum(seconds.values())
    rows = [f"| {name} | {value:.2f} | {100 * value / total:.1f} |" for name, value in seconds.items()]
    return "\n".join(["| time | seconds | % |", "|---|---:|---:|", *rows])


def by_experiment(records: Iterable[dict[str, Any]]) -> dict[str, Records]:
    """Return the records of each experiment."""
    found: dict[str, Records] = {}
    for record in records:
        found.setdefault(record["experiment"], []).append(record)
    return found
