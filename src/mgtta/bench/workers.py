"""Tasks spread over processes: each result as it comes, and one who dies is named."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any


class WorkerError(RuntimeError):
    """What went wrong in a worker process."""


def spread(
    tasks: Sequence[Any],
    start: Callable[[], Callable[[Any], Any]],
    workers: int,
    kin: Callable[[Any], Any] = lambda task: None,
) -> Iterator[tuple[Any, Any]]:
    """(task, result) for every task, as they finish; stopping early stops the workers.

    Args:
        start: called once in each process; what it gives is called with each task.
        kin: a worker goes on, where it can, with a task of the same kin as its last, whose data it still holds.
    """
    context = get_context("spawn")
    waiting = list(tasks)
    processes: dict[Connection, Any] = {}
    busy: dict[Connection, Any] = {}  # connection -> task

    def give(connection: Connection, last: Any = None) -> None:
        if waiting:
            own = (i for i, task in enumerate(waiting) if last is not None and kin(task) == kin(last))
            busy[connection] = waiting.pop(next(own, 0))
            with suppress(BrokenPipeError):  # it is dead, which the next reading tells
                connection.send(busy[connection])

    try:
        with _deaf_to_interrupts():
            for _ in range(min(workers, len(tasks))):
                connection, theirs = context.Pipe()
                processes[connection] = context.Process(target=_work, args=(theirs, start), daemon=True)
                processes[connection].start()
                theirs.close()
        for connection in processes:
            give(connection)
        while busy:
            ready = wait(list(busy))
            for connection in [c for c in busy if c in ready]:
                task = busy.pop(connection)
                try:
                    fine, result = connection.recv()
                except (EOFError, ConnectionResetError):
                    processes[connection].join()
                    code = processes[connection].exitcode
                    raise WorkerError(
                        f"a worker process died (exit code {code}; -9 is often a lack of memory) at {task}: what is "
                        "finished is kept; run the same command again, perhaps with fewer workers"
                    ) from None
                if not fine:
                    raise WorkerError(result)
                yield task, result
                give(connection, task)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()


def _work(connection: Connection, start: Callable[[], Callable[[Any], Any]]) -> None:
    try:
        run = None
        while True:
            task = connection.recv()
            try:
                run = run or start()
                answer = (True, run(task))
            except Exception as error:
                answer = (False, str(error) or type(error).__name__)
            connection.send(answer)
    except (EOFError, BrokenPipeError):  # nobody asks any more
        return


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which reaches all of a terminal's: the parent stops them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
