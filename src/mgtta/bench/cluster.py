"""Tasks spread over a Ray cluster: each result once, as it comes; what a lost machine had in hand is done again.

The counterpart of `workers.spread` for many machines. Ray places the tasks, moves results and retries; mgtta must be
installed wherever tasks run.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from mgtta.bench.workers import WorkerError

RETRIES = 3  # of a task whose process or machine is lost
HERE = "auto"  # the cluster that this machine belongs to, else one of this machine alone


def spread_on_ray(
    tasks: Sequence[Any],
    start: Callable[[], Callable[[Any], Any]],
    *,
    cpus: float = 1,
    gpus: float = 0,
    at_once: int | None = None,
    fresh: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """(task, result) for every task, as they finish. For use inside `connected`, whose end stops what still runs.

    Args:
        start: called once in each process; what it gives is called with each task.
        cpus, gpus: what a task declares to need.
        at_once: so many tasks at a time; by default as many as the cluster has room for.
        fresh: every task in a process of its own.
    """
    import ray

    blob = ray.put(ray.cloudpickle.dumps(start))
    options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": RETRIES, "max_calls": int(fresh)}
    remote = ray.remote(**options)(_work)
    waiting = list(tasks)
    running: dict[Any, Any] = {}  # reference -> task
    while waiting or running:
        while waiting and (at_once is None or len(running) < at_once):
            task = waiting.pop(0)
            running[remote.options(name=str(task)).remote(os.getcwd(), sys.argv, blob, task)] = task
        [done], _ = ray.wait(list(running), num_returns=1)
        task = running.pop(done)
        try:
            fine, result = ray.get(done)
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"{task} was lost {RETRIES + 1} times with the process or machine that ran it (Ray says: "
                f"{str(error).splitlines()[0]}; a lack of memory is the usual cause): what is finished is kept; "
                "run the same command again"
            ) from error
        if not fine:
            raise WorkerError(result)
        yield task, result


def _work(folder: str, command: list[str], blob: bytes, task: Any) -> tuple[bool, Any]:
    """In a worker process of the cluster; an error comes back as a value, since it is no reason to try again."""
    sys.argv = command  # records hold it
    if os.path.isdir(folder):  # relative names of files mean what they mean to the driver, where folders are shared
        os.chdir(folder)
    try:
        return True, _begun(blob)(task)
    except Exception as error:
        return False, str(error) or type(error).__name__


@cache
def _begun(blob: bytes) -> Callable[[Any], Any]:
    import ray

    return ray.cloudpickle.loads(blob)()


@contextmanager
def connected(address: str) -> Iterator[str]:
    """In touch with the cluster, of which a description is given."""
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
    """How many tasks that need so much the largest machine of the cluster runs at once, at least 1."""
    import ray

    needs = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
    rooms = [
        min(node["Resources"].get(name, 0) / amount for name, amount in needs.items())
        for node in ray.nodes()
        if node["Alive"]
    ]
    return max(1, int(max(rooms, default=1)))
