"""How cells are run: each once, in order, resumed after a stop, here or in worker processes."""

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from small_bench import FEW, SMALL, TINY, without_timing

from mgtta.bench import resources as lab
from mgtta.bench import run as bench
from mgtta.bench.cells import Cell, Setup
from mgtta.bench.executors.processes import Processes
from mgtta.bench.resources import Lab, Listener
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store


@pytest.fixture
def counted(monkeypatch):
    """The cells that were really run."""
    run, ran = Lab.run, []
    monkeypatch.setattr(Lab, "run", lambda lab, cell: (ran.append(cell), run(lab, cell))[1])
    return ran


def test_what_a_cell_will_need_is_asked_for_before_the_first_runs(tmp_path, tree, counted):
    cells = [dataclasses.replace(FEW[0], method=m) for m in ("noadapt", "mgtta")]
    with pytest.raises(FileNotFoundError, match="unknown generator 'gone"):
        run_cells(cells, dataclasses.replace(SMALL, generator="gone.safetensors"), Store(tmp_path))
    with pytest.raises(FileNotFoundError, match="gone"):
        run_cells(cells, dataclasses.replace(SMALL, source="gone.safetensors"), Store(tmp_path))
    trained = dataclasses.replace(cells[1], training=TINY)
    with pytest.raises(ValueError, match=r"needed for mgtta \(corruptions\): name them with --validation"):
        run_cells([cells[0], trained], Setup(data=str(tree)), Store(tmp_path))
    assert not counted


def test_finished_cells_are_not_run_again_and_a_stopped_run_goes_on(tmp_path, monkeypatch, counted):
    counting = Lab.run

    def stopping(lab, cell):
        if len(counted) == 2:
            raise KeyboardInterrupt
        return counting(lab, cell)

    monkeypatch.setattr(Lab, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_cells(FEW, SMALL, Store(tmp_path))
    assert len(Store(tmp_path).cells()) == 2
    monkeypatch.setattr(Lab, "run", counting)
    records = run_cells(FEW, SMALL, Store(tmp_path))
    assert counted == FEW
    assert run_cells(FEW, SMALL, Store(tmp_path)) == records
    assert counted == FEW


def test_work_that_several_experiments_ask_for_is_done_once_and_stored_for_each(tmp_path, counted):
    cell = dataclasses.replace(FEW[0], experiment="budgets", max_updates=1)
    cells = [FEW[0], cell, dataclasses.replace(cell, max_updates=2)]
    records = run_cells(cells, SMALL, Store(tmp_path))
    assert counted == FEW[:1]
    assert [(r["experiment"], r["max_updates"]) for r in records] == [
        ("corruptions", None),
        ("budgets", 1),
        ("budgets", 2),
    ]
    assert [r["remaining"] for r in records] == [None, 100 * records[0]["curve"][1] / 3, None]
    again = [dataclasses.replace(FEW[0], experiment="ablation", chosen_from=(1.0, 2.0))]
    [record] = run_cells(again, SMALL, Store(tmp_path))
    assert counted == FEW[:1]
    assert record["experiment"] == "ablation"
    assert record["protocol"]["chosen_from"] == [1.0, 2.0]
    assert record["top1"] == records[0]["top1"]
    assert len(Store(tmp_path).records()) == 4


def test_cells_that_share_a_stream_run_one_after_another(tmp_path, counted):
    cells = [FEW[0], FEW[2], FEW[1], FEW[3]]
    run_cells(cells, SMALL, Store(tmp_path))
    assert counted == FEW


def test_a_method_that_was_run_before_is_reset_and_not_made_again(tmp_path, monkeypatch):
    made = []
    create = lab.create
    monkeypatch.setattr(lab, "create", lambda name, *a, **k: (made.append(name), create(name, *a, **k))[1])
    methods = ["tent", "roid", "t3a", "mgtta_plus"]
    corrupted = [Cell("corruptions", m, (c,), batch_size=3) for m in methods for c in ("contrast", "fog")]
    long = [Cell("continual", "roid", ("contrast", "fog"), batch_size=3, reset="never", seed=seed) for seed in (0, 1)]
    cells = sorted([*corrupted, *long], key=lambda cell: cell.method)
    setup = dataclasses.replace(SMALL, cache=str(tmp_path / "cache"))
    together = Lab(setup, tmp_path)
    found = [record for cell in cells for record in together.run(cell)]
    assert made == sorted(methods)
    each = [record for cell in cells for record in Lab(setup, tmp_path).run(cell)]
    assert without_timing(found) == without_timing(each)


def test_what_stays_in_this_process_is_not_sent_to_another(tmp_path):
    start = pickle.loads(pickle.dumps(bench._Start(SMALL, tmp_path, Listener(), group=None)))
    assert start.setup == SMALL
    assert start.folder == tmp_path
    assert start.watch is None


@pytest.mark.slow
def test_worker_processes_give_the_same_records(tmp_path):
    here = run_cells(FEW, SMALL, Store(tmp_path / "here"))
    there = run_cells(FEW, SMALL, Store(tmp_path / "there"), workers=2)
    assert without_timing(here) == without_timing(there)


def test_workers_train_the_generators_side_by_side_before_anyone_waits_for_one(tmp_path, monkeypatch):
    asked: list = []

    def here(executor, tasks, start):
        asked.extend(tasks.take() for _ in range(len(tasks)))
        return executor.run_in_turn(asked, start)

    monkeypatch.setattr(Processes, "run", here)
    sizes = [dataclasses.replace(TINY, hidden_size=d) for d in (2, 4)]
    cells = [Cell("hidden-size", "mgtta", (c,), batch_size=3, training=t) for c in ("fog", "contrast") for t in sizes]
    records = run_cells(cells, SMALL, Store(tmp_path), workers=2)
    assert asked == [*sizes, *cells]
    assert [r["protocol"]["hidden_size"] for r in records] == [2, 4, 2, 4]


@pytest.mark.slow
def test_what_is_measured_runs_alone(tmp_path):
    class Listening(Listener):
        def note(self, text):
            notes.append(text)

    notes: list[str] = []
    cells = [Cell("runtime", "eq7_sgd", ("fog", "contrast"), batch_size=3, alone=True)]
    cells += [dataclasses.replace(cells[0], experiment="memory")]
    records = run_cells(cells, SMALL, Store(tmp_path), watch=Listening())
    assert [r["experiment"] for r in records] == ["runtime"] * 2 + ["memory"] * 2
    assert [r["updates"] for r in records] == [2] * 4
    assert notes == ["eq7_sgd on 2 corruptions in a process of its own"]
    assert records[0]["process_peak_memory"] > 10**8


@pytest.mark.slow
def test_an_interrupt_leaves_a_store_to_go_on_from(tmp_path):
    """Ctrl-C of the whole process group, as a terminal sends it, while workers are busy."""
    code = """
import os, signal, sys
from mgtta.cli.progress import Lines
finish = Lines.cell
def cell(self, *arguments):
    finish(self, *arguments)
    os.killpg(0, signal.SIGINT)
Lines.cell = cell
sys.argv = ["mgtta", "bench", "corruptions", "--methods", "noadapt", "--images", "2", "--workers", "2", "--json",
            "--out", sys.argv[1], "--device", "cpu"]
from mgtta.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    main()
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    assert done.returncode == 130, done.stderr
    assert "the same command resumes" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(Store(tmp_path / "run").cells()) >= 1
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][:2] == ["start", "record"]
