"""Jobs in several processes, each of which reads its images and its model once."""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.tasks import Tasks


class Failed(NamedTuple):
    """What a job gives that failed."""

    error: str


def in_processes(
    jobs: Iterable[Any],
    work: Callable[[Any], Any],
    begin: Callable[..., None],
    setup: tuple[Any, ...],
    workers: int,
    seconds: float,
) -> Iterator[tuple[Any, Any]]:
    """Yield each job and its result, as they finish; stop after so many seconds.

    A job that fails is named and left out. The processes are ended at the end, also while they work.

    Args:
        work: a function of a module that gives a job's result.
        begin: what each process does first, with `setup`.
    """
    ends = time.monotonic() + seconds
    start = partial(_working, work, begin, setup)
    try:
        for job, result in spread(Tasks(jobs), start, workers, seconds):
            if isinstance(result, Failed):
                print(job, "failed:", result.error, flush=True)
                continue
            print(f"{ends - time.monotonic():.0f} s left:", end=" ")
            yield job, result
    except TimeoutError:
        print("time is over; the same command takes up what is missing", flush=True)


def _working(work: Callable[[Any], Any], begin: Callable[..., None], setup: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Begin in a process, and return what runs its jobs."""
    begin(*setup)

    def run(job: Any) -> Any:
        try:
            return work(job)
        except Exception as error:
            return Failed(repr(error))

    return run
