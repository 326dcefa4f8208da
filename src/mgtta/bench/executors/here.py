"""Tasks in this process, one after another."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mgtta.bench.executors.base import Start, Work, begin
from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.tasks import Tasks


class Here:
    """Runs tasks in this process; those that ask for a new process get one."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        self._work = None

    def about(self) -> str:
        return ""

    def run(self, tasks: Tasks, start: Start) -> Iterator[tuple[Any, Any]]:
        last = None
        while tasks:
            last = tasks.take(last)
            yield from self.run_in_turn([last], start)

    def run_in_turn(self, tasks: Sequence[Any], start: Start) -> Iterator[tuple[Any, Any]]:
        for task in tasks:
            if self._work is None:
                self._work = start(1)
            yield task, self._work(task)

    def run_fresh(self, tasks: Sequence[Any], start: Start) -> Iterator[tuple[Any, Any]]:
        import torch

        for task in tasks:
            yield from spread(Tasks([task]), partial(begin, start, 0, torch.get_num_threads()), workers=1)
