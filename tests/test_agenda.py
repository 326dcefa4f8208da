import dataclasses

import pytest

from mgtta.bench import run as bench
from mgtta.bench.agenda import Agenda, Drawing
from mgtta.bench.cells import Cell, Options, Setup, Training
from mgtta.bench.executors.base import WorkerError
from mgtta.bench.executors.processes import Processes
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.resources import Listener
from mgtta.bench.run import run_cells, run_experiments
from mgtta.bench.store import Store

CACHED = Setup(images=64, cache="somewhere")


def agenda(plans, setup=CACHED, known=None):
    """Return an agenda and the list of the cells that it finishes."""
    finished = []

    def finish(cell, work, records, fresh):
        finished.append((cell, fresh))
        return records

    return Agenda(plans, setup, {} if known is None else known, finish), finished


def taken(made):
    """Return the tasks in the order in which different processes take them."""
    return [made.tasks.take() for _ in range(len(made.tasks))]


def cells_of(made):
    return [task for task in taken(made) if isinstance(task, Cell)]


def test_a_plan_goes_on_without_waiting_for_others():
    slow, quick, last = (Cell("sweep", method, ("fog",)) for method in ("cotta", "tent", "noadapt"))
    sent = {}

    def plan(name, first, then):
        sent[name] = yield [first]
        sent[f"{name} at last"] = yield [then]
        return [then]

    made, finished = agenda([plan("slow", slow, last), plan("quick", quick, last)])
    assert cells_of(made) == [slow, quick]
    made.done(quick, [{"top1": 1.0}])
    assert sent == {"quick": [{"top1": 1.0}]}
    assert cells_of(made) == [last]
    made.done(last, [{"top1": 2.0}])
    assert sent["quick at last"] == [{"top1": 2.0}]
    assert made.returned == [[], [last]]
    made.done(slow, [{"top1": 3.0}])  # what it asks for next is there already
    assert sent["slow at last"] == [{"top1": 2.0}]
    assert made.returned == [[last], [last]]
    assert finished == [(quick, True), (last, True), (slow, True)]


def test_with_a_cache_the_longest_cells_come_first_and_images_before_them():
    cells = experiment_cells("corruptions", Options(["noadapt", "tent", "foa"], corruptions=("fog",)))
    tries = [dataclasses.replace(cell, split="validation", experiment="sweep") for cell in cells]
    made, _ = agenda([iter_of(cells), iter_of(tries)])
    first, second, *others = taken(made)
    assert (first, second) == (Drawing("validation", None, "fog", 5, 0), Drawing("test", None, "fog", 5, 0))
    assert [(cell.method, cell.split) for cell in others] == [
        ("foa", "validation"),
        ("foa", "test"),
        ("tent", "validation"),
        ("noadapt", "validation"),
        ("tent", "test"),
        ("noadapt", "test"),
    ]
    small = dataclasses.replace(cells[1], batch_size=2)  # as many images, and more steps
    made, _ = agenda([iter_of([cells[1], small])])
    assert cells_of(made) == [small, cells[1]]


def iter_of(cells):
    yield cells
    return cells


def test_trainings_come_before_all_else_and_once():
    training = Training(images=4)
    cells = [Cell("samples", "mgtta", (name,), training=training) for name in ("fog", "snow")]
    made, _ = agenda([iter_of(cells)])
    found = taken(made)
    assert found[0] == training
    assert found.count(training) == 1


def test_what_is_known_is_finished_at_once():
    cell = Cell("corruptions", "tent", ("fog",))
    made, finished = agenda([iter_of([cell])], known={cell.key(CACHED): [{"top1": 1.0}]})
    assert made.at_hand == 1
    assert not made.tasks
    made.settle()
    assert finished == [(cell, False)]
    assert made.returned == [[cell]]


def test_several_experiments_have_their_own_sweeps_and_share_the_tries(tmp_path, monkeypatch):
    monkeypatch.setattr("mgtta.bench.sweep.VALIDATION_CORRUPTIONS", ("saturate",))
    monkeypatch.setattr("mgtta.bench.sweep.rates", lambda method, centre=None: [5e-4, 1e-3, 2e-3])
    options = Options(["tent"], corruptions=("fog",), limits=[("sweep", 2)])
    names = ["corruptions", "continual"]
    setup = Setup(images=4, cache=str(tmp_path / "cache"))
    records = run_experiments(names, options, setup, Store(tmp_path / "runs"), sweep=True)
    assert [r["experiment"] for r in records] == names
    tried = [r for r in Store(tmp_path / "runs").records() if r["experiment"] == "sweep"]
    assert {r["images"] for r in tried} == {2}
    assert {r["reset"] for r in tried} == {"domain", "never"}
    assert {r["images"] for r in records} == {4}
    assert len(list((tmp_path / "cache").glob("saturate*.npy"))) == 1


def _all(tasks):
    while tasks:
        yield tasks.take()


class Notes(Listener):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize("ran", [0, 1])
def test_a_cell_that_fails_in_a_worker_stops_the_run_at_once_or_if_others_ran_at_its_end(tmp_path, monkeypatch, ran):
    cells = [Cell("corruptions", "noadapt", (name,), batch_size=3) for name in ("fog", "snow", "contrast")]
    setup = Setup(images=3)

    def here(executor, tasks, start):
        for i, (task, result) in enumerate(executor.run_in_turn(_all(tasks), start)):
            yield task, bench.Failed("too little memory") if i == ran else result

    monkeypatch.setattr(Processes, "run", here)
    watch = Notes()
    with pytest.raises(WorkerError, match="too little memory"):
        run_cells(cells, setup, Store(tmp_path), workers=2, watch=watch)
    assert len(Store(tmp_path).cells()) == 2 * ran
    assert watch.notes == [f"failed: {cells[ran]}: too little memory"]
