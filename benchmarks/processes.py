"""Jobs in several processes, each of which reads its images and its model once."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.processes import GRACE_SECONDS
from mgtta.bench.executors.tasks import Tasks

_ends = math.inf  # when the time of this process is over


class Failed(NamedTuple):
    """What a job gives that failed."""

    error: str


class TimeOverError(Exception):
    """A job stops, since the time is over."""


def check_time() -> None:
    """Raise an error if the time is over: for jobs that can stop between two batches."""
    if time.monotonic() > _ends:
        raise TimeOverError


def in_processes(
    jobs: Iterable[Any],
    work: Callable[[Any], Any],
    begin: Callable[..., None],
    setup: tuple[Any, ...],
    workers: int,
    seconds: float,
) -> Iterator[tuple[Any, Any]]:
    """Yield each job and its result, as they finish; stop after so many seconds.

    A job that fails is named and left out. When the time is over, jobs that call `check_time` stop, others have
    GRACE_SECONDS to finish, and no new one begins.

    Args:
        work: a function of a module that gives a job's result.
        begin: what each process does first, with `setup`.
    """
    ends = time.monotonic() + seconds
    start = partial(_working, work, begin, setup, ends)
    stopped = False
    try:
        for job, result in spread(Tasks(jobs), start, workers, seconds, GRACE_SECONDS):
            if isinstance(result, TimeOverError):
                stopped = True
                continue
            if isinstance(result, Failed):
                print(job, "failed:", result.error, flush=True)
                continue
            print(f"{ends - time.monotonic():.0f} s left:", end=" ")
            yield job, result
    except TimeoutError:
        stopped = True
    if stopped:
        print("time is over; the same command takes up what is missing", flush=True)


def _working(
    work: Callable[[Any], Any], begin: Callable[..., None], setup: tuple[Any, ...], ends: float
) -> Callable[[Any], Any]:
    """Begin in a process, and return what runs its jobs."""
    global _ends
    _ends = ends
    begin(*setup)

    def run(job: Any) -> Any:
        try:
            check_time()
            return work(job)
        except TimeOverError as over:
            return over
        except Exception as error:
            return Failed(repr(error))

    return run
