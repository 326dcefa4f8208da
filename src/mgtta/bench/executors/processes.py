"""Tasks in worker processes of this machine."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from mgtta.bench.executors.base import Start, begin
from mgtta.bench.executors.here import Here
from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.tasks import Tasks

GRACE_SECONDS = 60  # after the end of the time, for tasks that have begun


class Processes(Here):
    """Runs tasks in worker processes of one thread each; what is timed runs without them.

    Args:
        seconds: no task begins there after so many; by default never. A TimeoutError says that some were left.
    """

    def __init__(self, workers: int, seconds: float | None = None):
        super().__init__()
        self.workers = workers
        self.ends = None if seconds is None else time.monotonic() + seconds

    def run(self, tasks: Tasks, start: Start) -> Iterator[tuple[Any, Any]]:
        left = None if self.ends is None else max(0.0, self.ends - time.monotonic())
        return spread(tasks, partial(begin, start, self.workers, 1), self.workers, left, GRACE_SECONDS)
