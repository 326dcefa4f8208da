"""Cells on a Ray cluster of several nodes, one of which is killed in mid-run."""

import sys
import time
from collections import Counter
from functools import partial

import pytest
from small_bench import FEW, SMALL, without_timing

from mgtta.bench.cells import Cell
from mgtta.bench.executors.base import WorkerError
from mgtta.bench.executors.ray import connected, spread_on_ray
from mgtta.bench.executors.tasks import Tasks
from mgtta.bench.resources import Listener
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.cli.bench import bare_ray

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError:
    ray = None

with_ray = pytest.mark.skipif(ray is None, reason="ray is not installed: pip install 'mgtta[ray]'")


@pytest.fixture(scope="module")
def cluster():
    """A head that runs no tasks, and nodes of one CPU that come and go."""
    soon = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


def _noting(path):
    """For a worker: a line for every beginning and every end of a task."""

    def run(task):
        with open(path, "a") as file:
            file.write(f"begins {task}\n")
        time.sleep(1.5)
        if task == "bad":
            raise ValueError("this one is no good")
        with open(path, "a") as file:
            file.write(f"ends {task}\n")
        return task.upper()

    return run


@with_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_a_node_is_killed_in_mid_run(cluster, tmp_path):
    """Its tasks are begun again elsewhere; what had ended is not. Then cells, with the records of a local run."""
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(cluster.address, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not know this file
    try:
        log = tmp_path / "log"
        found = []
        for task, result in spread_on_ray(Tasks("abcdef"), partial(_noting, str(log))):
            found.append((task, result))
            if len(found) == 2:
                while log.read_text().count("begins") < log.read_text().count("ends") + 2:  # until both nodes are busy
                    time.sleep(0.02)
                cluster.remove_node(nodes.pop(), allow_graceful=False)
        assert sorted(found) == [(task, task.upper()) for task in "abcdef"]
        lines = Counter(log.read_text().split("\n"))
        assert all(lines[f"ends {task}"] == 1 for task in "abcdef")
        assert any(lines[f"begins {task}"] == 2 for task in "abcdef")

        with pytest.raises(WorkerError, match="this one is no good"):
            list(spread_on_ray(Tasks(["bad"]), partial(_noting, str(log))))
        assert log.read_text().count("begins bad") == 1  # an error is no reason to try again

        nodes.append(cluster.add_node(num_cpus=1))
        cells = [*FEW, Cell("runtime", "noadapt", ("fog",), batch_size=3, alone=True)]
        records = run_cells(cells, SMALL, Store(tmp_path / "there"), watch=Killer(cluster, nodes), ray="auto")
    finally:
        ray.shutdown()
    here = run_cells(FEW, SMALL, Store(tmp_path / "here"))
    assert without_timing(records)[:-1] == without_timing(here)
    assert [r["protocol"]["command"] for r in records[:-1]] == [r["protocol"]["command"] for r in here]
    assert records[-1]["alone"]
    lines = (tmp_path / "there" / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) == len(cells)


class Killer(Listener):
    """Kills a node when the first cell is finished."""

    def __init__(self, cluster, nodes):
        self.cluster, self.nodes = cluster, nodes

    def cell(self, cell, records, fresh):
        if len(self.nodes) > 1:
            self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"ray is not installed: pip install 'mgtta\[ray\]'"), connected("auto"):
        pass


def test_one_engine_at_a_time(tmp_path):
    with pytest.raises(ValueError, match="take one of them"):
        run_cells(FEW, SMALL, Store(tmp_path), workers=2, ray="auto")


def test_ray_on_the_command_line_with_and_without_an_address():
    assert bare_ray(["bench", "all", "--ray"]) == ["bench", "all", "--ray=auto"]
    assert bare_ray(["bench", "--ray", "--quick"]) == ["bench", "--ray=auto", "--quick"]
    assert bare_ray(["bench", "--ray", "ray://head:1", "all"]) == ["bench", "--ray", "ray://head:1", "all"]
