import os

import pytest

from mgtta.bench.executors import WorkerError
from mgtta.bench.executors.pool import spread


def _strange():
    """For a worker: dies at 2, fails at 3, else doubles."""

    def run(task):
        if task == 2:
            os._exit(7)
        if task == 3:
            raise ValueError("three is no good")
        return 2 * task

    return run


def test_a_worker_that_dies_or_fails_is_named():
    with pytest.raises(WorkerError, match=r"exit code 7.*at 2.*run the same command again"):
        list(spread([1, 2], _strange, 1))
    with pytest.raises(WorkerError, match="three is no good"):
        list(spread([3], _strange, 1))
    assert sorted(spread([1, 4, 5], _strange, 2)) == [(1, 2), (4, 8), (5, 10)]


def test_kin_stay_with_the_worker_that_knows_them():
    """A worker keeps what it saw last; with one worker the order tells."""
    found = [task for task, _ in spread([10, 20, 11, 21], _strange, 1, kin=lambda task: task // 10)]
    assert found == [10, 11, 20, 21]
