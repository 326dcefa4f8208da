"""Tasks in worker processes of this machine."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from mgtta.bench.executors.base import Start, begin
from mgtta.bench.executors.here import Here
from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.tasks import Tasks


class Processes(Here):
    """Runs tasks in worker processes of one thread each; what is timed runs without them."""

    def __init__(self, workers: int):
        super().__init__()
        self.workers = workers

    def run(self, tasks: Tasks, start: Start) -> Iterator[tuple[Any, Any]]:
        return spread(tasks, partial(begin, start, self.workers, 1), self.workers)
