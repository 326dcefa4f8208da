"""Jobs in several processes, each of which reads its images and its model once."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any


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
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin, setup)
    futures = {pool.submit(work, job): job for job in jobs}
    try:
        for future in as_completed(futures, seconds):
            if future.exception() is not None:
                print(futures[future], "failed:", future.exception(), flush=True)
                continue
            print(f"{ends - time.monotonic():.0f} s left:", end=" ")
            yield futures[future], future.result()
    except TimeoutError:
        print("time is over; the same command takes up what is missing", flush=True)
    finally:
        for process in pool._processes.values():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
