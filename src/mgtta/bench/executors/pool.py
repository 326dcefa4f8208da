"""A pool of processes: each result as it comes, and a process that dies is named."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from mgtta.bench.executors.base import Work, WorkerError, message
from mgtta.bench.executors.tasks import Tasks

EXIT_SECONDS = 10  # for a worker to end by itself: on a GPU that others share, one that is killed can break these


def spread(
    tasks: Tasks, start: Callable[[], Work], workers: int, seconds: float | None = None, grace: float = 0.0
) -> Iterator[tuple[Any, Any]]:
    """Yield (task, result) for every task, as they finish; stopping early stops the workers.

    Args:
        tasks: who reads the results may add others meanwhile. A worker takes next, where it can, one of the same kin as
            its last, whose data it still holds.
        start: called once in each process; it returns the function that is called with each task.
        seconds: no task begins after so many; by default never. A TimeoutError says that some were left.
        grace: seconds more, in which tasks that have begun may finish; then their processes are killed.
    """
    ends = math.inf if seconds is None else time.monotonic() + seconds
    processes: dict[Connection, Any] = {}
    free: dict[Connection, Any] = {}  # connection -> its last task
    busy: dict[Connection, Any] = {}  # connection -> its task

    def give() -> None:
        if time.monotonic() >= ends:
            return
        _start_processes(processes, free, start, min(workers - len(processes), len(tasks) - len(free)))
        for connection in list(free)[: len(tasks)]:
            in_hand = {tasks.kin(task) for task in busy.values()}
            busy[connection] = tasks.take(free.pop(connection), in_hand)
            with suppress(BrokenPipeError):  # it is dead, which the next reading tells
                connection.send(busy[connection])

    try:
        give()
        while busy:
            ready = wait(list(busy), _seconds_until(ends + grace))
            if not ready:
                break
            for connection in [c for c in busy if c in ready]:
                task = busy[connection]
                result = _answer(connection, processes[connection], task)
                free[connection] = busy.pop(connection)
                give()  # before the result is looked at, so that nobody waits for that
                yield task, result
            give()
        if busy or len(tasks):
            raise TimeoutError(f"{seconds:.0f} seconds are over")
    finally:
        for connection, process in processes.items():
            if connection in busy:
                process.terminate()
            connection.close()  # a worker that waits for a task ends then
        _join(list(processes.values()))


def _join(processes: list[Any]) -> None:
    """Wait until processes, which end side by side, are gone; kill those that take too long."""
    ends = time.monotonic() + EXIT_SECONDS
    for process in processes:
        process.join(_seconds_until(ends))
        if process.is_alive():
            process.terminate()
            process.join()


def _seconds_until(ends: float) -> float | None:
    """Return the seconds until a moment, at least 0; None if it never comes."""
    if ends == math.inf:
        return None
    return max(0.0, ends - time.monotonic())


def _start_processes(
    processes: dict[Connection, Any], free: dict[Connection, Any], start: Callable[[], Work], count: int
) -> None:
    """Start so many more processes, each entered as soon as it exists, so that the caller can stop them."""
    if count <= 0:
        return
    context = get_context("spawn")
    with _ignored_interrupts():
        for _ in range(count):
            connection, theirs = context.Pipe()
            processes[connection] = context.Process(target=_work, args=(theirs, start), daemon=True)
            processes[connection].start()
            free[connection] = None
            theirs.close()


def _answer(connection: Connection, process: Any, task: Any) -> Any:
    """Return the task's result; raise a WorkerError if the task failed or its process died."""
    try:
        fine, result = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        raise WorkerError(
            f"a worker process died (exit code {process.exitcode}; -9 often means out of memory) at {task}: finished "
            "cells are kept; run the same command again, perhaps with fewer workers"
        ) from None
    if not fine:
        raise WorkerError(result)
    return result


def _work(connection: Connection, start: Callable[[], Work]) -> None:
    work = None
    try:
        while True:
            task = connection.recv()
            try:
                work = work or start()
                answer = (True, work(task))
            except Exception as error:
                answer = (False, message(error))
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody asks any more
        return


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Let processes that are started here ignore Ctrl-C, which reaches all of a terminal's: the parent stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
