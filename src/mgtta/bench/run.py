"""Run the cells of experiments that the store does not hold yet.

A run's folder has the records (`records.jsonl`) and the generators that were trained for it (`generators/`).
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from mgtta._lib.profile import PARTS
from mgtta._lib.ranks import ranks_of
from mgtta.bench.agenda import Agenda, Drawing, Task
from mgtta.bench.cells import STILL, SWEEP, Cell, Options, Setup, Training, digest
from mgtta.bench.executors.base import Executor, WorkerError, message
from mgtta.bench.executors.here import Here
from mgtta.bench.executors.processes import Processes
from mgtta.bench.executors.ray import OnRay
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.needs import needs_clean_images
from mgtta.bench.protocol import asked, generator_of, training_of
from mgtta.bench.provenance import check_unchanged
from mgtta.bench.resources import HELD_BYTES, Lab, Listener, known_source
from mgtta.bench.store import Store
from mgtta.bench.streams import joint_tuning
from mgtta.bench.sweep import Plan, by_contender, tuning
from mgtta.learned.files import load_generator
from mgtta.models.source import load_source

Records = list[dict[str, Any]]


def run_experiments(
    names: Sequence[str], options: Options, setup: Setup, store: Store, *, sweep: bool = False, **how: Any
) -> Records:
    """Return the records of experiments; with `sweep`, at learning rates chosen on the validation corruptions.

    For `streams`, learning rate and pull are chosen for all kinds of stream together. `how`: see `run_plans`.
    """
    cells = [cell for name in names for cell in experiment_cells(name, options)]
    title = names[0] if len(names) == 1 else "bench"
    how = {"title": title, **how}
    if not sweep:
        return run_cells(cells, setup, store, **how)
    return run_swept(cells, setup, store, options, **how)[1]


def run_cells(cells: Sequence[Cell], setup: Setup, store: Store, workers: int = 0, **how: Any) -> Records:
    """Run the cells that the store does not hold, and return the records of all of them; see `run_plans`."""
    cells = list(dict.fromkeys(cells))
    [_], records = run_plans([_wanted(as_they_are(cells))], cells, setup, store, workers, **how)
    return records(cells)


def run_swept(
    cells: Sequence[Cell], setup: Setup, store: Store, options: Options | None = None, workers: int = 0, **how: Any
) -> tuple[list[Cell], Records]:
    """Return the cells at the best settings, and their records; see `run_plans`.

    options: with the images per domain that settings are tried on, and of the cells of `streams`.
    """
    cells = list(dict.fromkeys(cells))
    options = options or Options([])
    groups = by_contender([cell for cell in cells if cell.kind is None])
    plans = [_wanted(tuning(own, options.limit(SWEEP, own[0].method))) for own in groups]
    for method in dict.fromkeys(cell.method for cell in cells if cell.kind is not None):
        own = [cell for cell in cells if cell.kind is not None and cell.method == method]
        groups.append(own)
        plans.append(_wanted(joint_tuning(own, options)))
    returned, records = run_plans(plans, cells, setup, store, workers, **how)
    chosen: dict[Cell, Cell] = {}
    for own, found in zip(groups, returned, strict=True):
        chosen |= zip(own, found, strict=True)
    best = [chosen[cell] for cell in cells]
    return best, records(best)


def run_plans(
    plans: Sequence[Plan],
    cells: Sequence[Cell],
    setup: Setup,
    store: Store,
    workers: int = 0,
    watch: Listener | None = None,
    title: str = "",
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
    seconds: float | None = None,
) -> tuple[list[list[Cell]], Callable[[Sequence[Cell]], Records]]:
    """Run the cells that plans ask for and the store does not hold.

    Return what each plan returned, and a function that gives the records of cells that were asked for, in their order.
    Work that several cells ask for is done once, and its records are stored for each of them.

    Args:
        cells: those that plans begin with; what they need is checked before anything runs.
        workers: processes; 0 runs here, and only then does `watch` see each batch. A cell that is measured by the
            clock runs here, and an `alone` cell in a process of its own, one at a time, in any case.
        process_group: of ranks that run every cell together, each with its share of every batch. The first rank's
            store counts.
        ray: the address of a Ray cluster that runs the cells, or "auto". Cells that are measured by the clock run
            there one at a time, after all others.
        seconds: no cell begins in a worker process after so many, and a TimeoutError is raised if some are left; what
            is finished is in the store.
    """
    watch = watch or Listener()
    ranks = ranks_of(process_group)
    setup = dataclasses.replace(setup, ranks=ranks.size)
    executor = _executor(cells, setup, workers, ray, seconds)
    there = ranks.tell(lambda: _by_cell(store))

    def finish(cell: Cell, work: str, records: Records, fresh: bool) -> Records:
        own = [_as_asked(cell, record) for record in records]
        if _name(cell, work) not in there and ranks.first:
            store.add(_name(cell, work), own)
        watch.cell(cell, own, fresh)
        return own

    known = {name.rpartition("/")[2]: records for name, records in there.items()}
    agenda = Agenda(plans, setup, known, finish)
    first = [*cells, *agenda.works]
    _check_needs(first, setup)
    check_unchanged([r["protocol"] for records in there.values() for r in records], setup, first, store.path)
    watch.start(title, len(agenda.works), agenda.at_hand)
    agenda.settle()
    _run(agenda, _Start(setup, store.path.parent.resolve(), watch, process_group), executor)
    found = ranks.tell(lambda: _by_cell(store))

    def records_of(wanted: Sequence[Cell]) -> Records:
        return [record for cell in wanted for record in found[_name(cell, agenda.works[cell])]]

    return agenda.returned, records_of


def as_they_are(cells: list[Cell]) -> Plan:
    """Return a plan that tries nothing."""
    return cells
    yield  # makes it a generator


def _wanted(plan: Plan) -> Plan:
    """Return a plan that also asks for the records of what it returns."""
    cells = yield from plan
    yield cells
    return cells


class Failed(NamedTuple):
    """What a task returns that failed in another process."""

    text: str


class _Start:
    """Opens a lab in a process, and returns what runs its tasks: cells, trainings of generators, drawings of images.

    In another process the watch and the group are missing: these stay here. A task that fails there gives a `Failed`.
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

    def __call__(self, processes: int) -> Callable[[Task], Any]:
        held_bytes = 0
        if processes:
            held_bytes = HELD_BYTES // processes
        lab = Lab(self.setup, self.folder, held_bytes, self.watch, self.group)

        def work(task: Task) -> Any:
            if isinstance(task, Training):
                return lab.trained(task)
            if isinstance(task, Drawing):
                return lab.draw(task.cell)
            return lab.run(task)

        def forgiving(task: Task) -> Any:
            try:
                return work(task)
            except Exception as error:
                return Failed(message(error))

        return work if self.watch is not None else forgiving


def _executor(cells: Sequence[Cell], setup: Setup, workers: int, ray: str | None, seconds: float | None) -> Executor:
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
        return Processes(workers, seconds)
    return Here()


def _run(agenda: Agenda, start: _Start, executor: Executor) -> None:
    """Run cells side by side; then those that are timed, one at a time; then those in processes of their own.

    A cell that fails stops its own plan only, unless nothing has run yet; it is named at the end.
    """
    if not (agenda.tasks or agenda.timed or agenda.alone):
        return
    watch = start.watch or Listener()
    failed: list[str] = []
    ran = 0

    def take(task: Task, result: Any) -> None:
        nonlocal ran
        if isinstance(result, Failed):
            failed.append(f"{task}: {result.text}")
            watch.note(f"failed: {failed[-1]}")
            if not ran:
                raise WorkerError(result.text)
        elif isinstance(task, Cell):
            ran += 1
            agenda.done(task, result)
            watch.grow(len(agenda.works))

    with executor:
        if executor.about():
            watch.note(executor.about())
        for task, result in executor.run(agenda.tasks, start):
            take(task, result)
        for task, result in executor.run_in_turn(agenda.timed, start):
            take(task, result)
        for cell in agenda.alone:
            watch.note(f"{cell} in a process of its own")
            for task, result in executor.run_fresh([cell], start):
                take(task, result)
    if failed:
        raise WorkerError(
            f"{len(failed)} tasks failed, the first was {failed[0]}; finished cells are kept, the same command resumes"
        )


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
