import atexit
import importlib
import os
import time
from functools import partial
from pathlib import Path

import pytest

from mgtta.bench.cells import Cell, Setup
from mgtta.bench.executors.base import WorkerError
from mgtta.bench.executors.here import Here
from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.processes import Processes
from mgtta.bench.executors.tasks import Tasks
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store


def _strange():
    """For a worker: dies at 2, fails at 3, else doubles."""

    def run(task):
        if task == 2:
            os._exit(7)
        if task == 3:
            raise ValueError("three is no good")
        return 2 * task

    return run


def test_a_worker_that_dies_or_fails_is_named():
    with pytest.raises(WorkerError, match=r"exit code 7.*at 2.*run the same command again"):
        list(spread(Tasks([1, 2]), _strange, 1))
    with pytest.raises(WorkerError, match="three is no good"):
        list(spread(Tasks([3]), _strange, 1))
    assert sorted(spread(Tasks([1, 4, 5]), _strange, 2)) == [(1, 2), (4, 8), (5, 10)]


def test_kin_stay_with_the_worker_that_knows_them():
    """A worker keeps what it saw last; with one worker the order tells."""
    tasks = Tasks([10, 20, 11, 21], kin=lambda task: task // 10)
    assert [task for task, _ in spread(tasks, _strange, 1)] == [10, 11, 20, 21]


def test_tasks_come_by_place_and_other_kins_than_those_in_hand():
    tasks = Tasks([10, 11, 20, 21, 105, 30], kin=lambda task: task // 10, place=lambda task: -(task > 100))
    assert len(tasks) == 6
    assert tasks.take() == 105
    assert tasks.take() == 10
    assert tasks.take(in_hand={1}) == 20
    assert tasks.take(in_hand={1, 2}) == 30
    assert tasks.take(last=20, in_hand={1, 3}) == 21
    tasks.add(200)
    assert tasks.take(last=10) == 11  # its kin, although another is more urgent
    assert tasks.take(last=10) == 200
    assert not tasks


def _telling(processes):
    """For an executor: a result says in which process it was made, and with how many others."""
    seen = []

    def run(task):
        seen.append(task)
        return os.getpid(), processes, len(seen)

    return run


def test_here_starts_once_for_all_of_its_tasks():
    with Here() as executor:
        assert executor.about() == ""
        found = [*executor.run(Tasks([1, 2]), _telling), *executor.run_in_turn([3], _telling)]
    assert found == [(1, (os.getpid(), 1, 1)), (2, (os.getpid(), 1, 2)), (3, (os.getpid(), 1, 3))]


@pytest.mark.slow
def test_processes_time_tasks_here_and_give_fresh_processes():
    here = os.getpid()
    with Processes(1) as executor:
        [(_, first), (_, second)] = executor.run(Tasks([1, 2]), _telling)
        [(_, timed)] = executor.run_in_turn([3], _telling)
        [(_, fresh)] = executor.run_fresh([4], _telling)
    assert first[1:] == (1, 1)
    assert second == (first[0], 1, 2)
    assert timed == (here, 1, 1)
    assert fresh[0] not in (here, first[0])
    assert fresh[1:] == (0, 1)


def test_tasks_may_be_added_while_results_are_read():
    tasks = Tasks([1])
    found = []
    for task, result in spread(tasks, _strange, 2):
        found.append((task, result))
        if task == 1:
            tasks.add(4)
            tasks.add(5)
    assert sorted(found) == [(1, 2), (4, 8), (5, 10)]
    assert not tasks
    tasks = Tasks([1])
    found = []
    with Here() as executor:
        for task, _ in executor.run(tasks, _telling):
            found.append(task)
            if task < 3:
                tasks.add(task + 1)
    assert found == [1, 2, 3]


def _sleeper():
    return time.sleep


def test_time_that_is_over_ends_the_processes():
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="1 seconds are over"):
        list(spread(Tasks([600]), _sleeper, 1, seconds=1))
    assert time.monotonic() - began < 60


def _told_and_slow(folder):
    """For a worker: says when it ends by itself, and takes as many seconds as the task."""
    atexit.register((folder / f"{os.getpid()}").touch)

    def run(task):
        time.sleep(task)
        return os.getpid()

    return run


def test_what_has_begun_may_finish_within_the_grace_and_workers_end_by_themselves(tmp_path):
    found = []
    with pytest.raises(TimeoutError, match="1 seconds are over"):
        found.extend(spread(Tasks([1.5, 0.1]), partial(_told_and_slow, tmp_path), 1, seconds=1, grace=60))
    [(task, process)] = found
    assert task == 1.5
    assert [path.name for path in tmp_path.iterdir()] == [str(process)]


def test_no_cell_begins_when_the_time_of_a_run_is_over(tmp_path):
    cell = Cell("corruptions", "noadapt", ("fog",))
    store = Store(tmp_path)
    with pytest.raises(TimeoutError, match="0 seconds are over"):
        run_cells([cell], Setup(images=4), store, workers=1, seconds=0)
    assert store.records() == []
    [record] = run_cells([cell], Setup(images=4), store)
    assert record["images"] == 4


def _begin(known):
    global _known
    _known = known


def _add(job):
    if job == 0:
        raise ValueError("nothing to add")
    return _known + job


def test_benchmarks_leave_out_jobs_that_fail(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    processes = importlib.import_module("processes")
    assert sorted(processes.in_processes([1, 0, 2], _add, _begin, (10,), workers=1, seconds=60)) == [(1, 11), (2, 12)]
    assert "0 failed: ValueError('nothing to add')" in capsys.readouterr().out


def _without_end(job):
    processes = importlib.import_module("processes")
    while True:
        processes.check_time()
        time.sleep(0.05)


def test_jobs_that_look_at_the_time_stop_and_the_rest_is_left(monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent / "benchmarks"), prepend=os.pathsep)
    processes = importlib.import_module("processes")
    began = time.monotonic()
    assert list(processes.in_processes([1, 2], _without_end, _begin, (10,), workers=1, seconds=1)) == []
    assert time.monotonic() - began < processes.GRACE_SECONDS
    assert "time is over" in capsys.readouterr().out
