"""Tasks on a Ray cluster: each result once, as it comes; the tasks of a lost machine run again elsewhere.

The counterpart of `pool.spread` for many machines. Ray places the tasks, moves results and retries; mgtta must be
installed wherever tasks run.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from mgtta.bench.executors.base import Start, Work, WorkerError, begin, message
from mgtta.bench.executors.tasks import Tasks

RETRIES = 3  # of a task whose process or machine is lost
HERE = "auto"  # the cluster that this machine belongs to, or a new one of this machine only


class OnRay:
    """Runs tasks on a Ray cluster, in processes of one CPU, and of one GPU each if `gpus` is 1.

    Args:
        address: of the cluster, or "auto".
    """

    def __init__(self, address: str, gpus: int = 0):
        self.address = address
        self.gpus = gpus
        self._about = ""
        self._stack = ExitStack()

    def __enter__(self) -> "OnRay":
        self._about = f"on Ray: {self._stack.enter_context(connected(self.address))}"
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def about(self) -> str:
        return self._about

    def run(self, tasks: Tasks, start: Start) -> Iterator[tuple[Any, Any]]:
        return spread_on_ray(tasks, self._begun(start), gpus=self.gpus)

    def run_in_turn(self, tasks: Sequence[Any], start: Start) -> Iterator[tuple[Any, Any]]:
        return spread_on_ray(Tasks(tasks), self._begun(start), gpus=self.gpus, at_once=1)

    def run_fresh(self, tasks: Sequence[Any], start: Start) -> Iterator[tuple[Any, Any]]:
        return spread_on_ray(Tasks(tasks), partial(begin, start, 0, 1), gpus=self.gpus, at_once=1, fresh=True)

    def _begun(self, start: Start) -> Callable[[], Work]:
        return partial(begin, start, tasks_of_a_machine(gpus=self.gpus), 1)


def spread_on_ray(
    tasks: Tasks,
    start: Callable[[], Work],
    *,
    cpus: float = 1,
    gpus: float = 0,
    at_once: int | None = None,
    fresh: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) for every task, as they finish. For use inside `connected`, whose end stops the rest.

    Args:
        tasks: who reads the results may add others meanwhile.
        start: called once in each process; it returns the function that is called with each task.
        cpus, gpus: what a task declares to need.
        at_once: tasks at a time; by default as many as the cluster has room for.
        fresh: run every task in a new process.
    """
    import ray

    blob = ray.put(ray.cloudpickle.dumps(start))
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": RETRIES, "max_calls": int(fresh)}
    remote = ray.remote(**options)(_work)
    running: dict[Any, Any] = {}  # reference -> task
    while tasks or running:
        while tasks and (at_once is None or len(running) < at_once):
            task = tasks.take()
            running[remote.options(name=str(task)).remote(os.getcwd(), sys.argv, blob, task)] = task
        [done], _ = ray.wait(list(running), num_returns=1)
        task = running.pop(done)
        try:
            fine, result = ray.get(done)
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"{task} was lost {RETRIES + 1} times with the process or machine that ran it (Ray says: "
                f"{str(error).splitlines()[0]}; the usual cause is too little memory): finished cells are kept; "
                "run the same command again"
            ) from error
        if not fine:
            raise WorkerError(result)
        yield task, result


def _work(folder: str, command: list[str], blob: bytes, task: Any) -> tuple[bool, Any]:
    """Run a task in a process of the cluster. An error is returned as a value, so that Ray does not try again."""
    sys.argv = command  # records hold it
    if os.path.isdir(folder):  # where folders are shared, relative names mean what they mean to the driver
        os.chdir(folder)
    try:
        return True, _started(blob)(task)
    except Exception as error:
        return False, message(error)


@cache
def _started(blob: bytes) -> Work:
    import ray

    return ray.cloudpickle.loads(blob)()


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect to the cluster, of which a description is given."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("ray is not installed: pip install 'mgtta[ray]', here and on every machine") from error
    ours = not ray.is_initialized()
    if ours:
        try:
            ray.init(None if address == HERE else address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConnectionError(f"no Ray cluster answers at {address}: `ray start --head` starts one") from error
    try:
        found = ray.cluster_resources()
        machines = sum(node["Alive"] for node in ray.nodes())
        yield f"{machines} nodes, {found.get('CPU', 0):.0f} CPUs, {found.get('GPU', 0):.0f} GPUs"
    finally:
        if ours:
            ray.shutdown()


def tasks_of_a_machine(cpus: float = 1, gpus: float = 0) -> int:
    """Return how many tasks that need so much the largest machine of the cluster runs at once, at least 1."""
    import ray

    needs = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    rooms = [
        min(node["Resources"].get(name, 0) / amount for name, amount in needs.items())
        for node in ray.nodes()
        if node["Alive"]
    ]
    return max(1, int(max(rooms, default=1)))
