"""The interface of executors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from mgtta.bench.executors.tasks import Tasks

Work = Callable[[Any], Any]  # a task -> its result
Start = Callable[[int], Work]


class WorkerError(RuntimeError):
    """A task failed in another process, or its process died."""


class Executor(Protocol):
    """Runs tasks, inside `with executor:`, and yields (task, result) for each as it finishes.

    `start` is called once in each process that runs tasks, with the number of processes that share the machine's
    memory, or 0 in a process that runs a single task. It returns the function that is called with each task. It must
    be picklable, and the same all the time. The work stops when nobody reads the results any more.
    """

    def __enter__(self) -> "Executor": ...

    def __exit__(self, *_: object) -> None: ...

    def about(self) -> str:
        """Return a description of the place; empty for this machine."""

    def run(self, tasks: Tasks, start: Start) -> Iterator[tuple[Any, Any]]:
        """Run tasks side by side, as many as there is room for; who reads the results may add others meanwhile."""

    def run_in_turn(self, tasks: Sequence[Any], start: Start) -> Iterator[tuple[Any, Any]]:
        """Run one task at a time, with nothing beside it: its time is measured."""

    def run_fresh(self, tasks: Sequence[Any], start: Start) -> Iterator[tuple[Any, Any]]:
        """Run one task at a time, each in a new process: its time and its memory are measured."""


def begin(start: Start, processes: int, threads: int) -> Work:
    """Return what `start` returns, in a process that uses so many threads."""
    import torch  # only here, so that a process starts quickly where tasks don't need it

    torch.set_num_threads(threads)
    return start(processes)


def message(error: Exception) -> str:
    """Return the error's text, or its type if it has none."""
    return str(error) or type(error).__name__
