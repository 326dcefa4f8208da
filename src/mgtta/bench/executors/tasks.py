"""Tasks that wait for a process: the most urgent first, and those that share what a process holds together."""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

Kin = Callable[[Any], Hashable]
Place = Callable[[Any], Any]


def no_kin(task: Any) -> Hashable:
    """Say that no two tasks share data."""
    return None


def no_place(task: Any) -> int:
    """Say that all tasks are as urgent."""
    return 0


class Tasks:
    """A queue to which tasks may be added at any time.

    Args:
        kin: the same for tasks that share data; None for a task that shares none.
        place: tasks are taken in its order; those of one place in the order in which they came.
    """

    def __init__(self, tasks: Iterable[Any] = (), kin: Kin = no_kin, place: Place = no_place):
        self.kin = kin
        self.place = place
        self._waiting: dict[Any, dict[Hashable, deque[Any]]] = {}  # place -> kin -> tasks
        self._places: list[Any] = []  # a heap
        self._of_kin: dict[Hashable, deque[Any]] = {}  # kin -> the places of its tasks
        self._count = 0
        for task in tasks:
            self.add(task)

    def __len__(self) -> int:
        return self._count

    def add(self, task: Any) -> None:
        place = self.place(task)
        kin = self.kin(task)
        if place not in self._waiting:
            self._waiting[place] = {}
            heapq.heappush(self._places, place)
        self._waiting[place].setdefault(kin, deque()).append(task)
        self._of_kin.setdefault(kin, deque()).append(place)
        self._count += 1

    def take(self, last: Any = None, in_hand: Collection[Hashable] = ()) -> Any:
        """Return the next task, which waits no longer.

        Args:
            last: what the process has run before; a task of its kin comes first.
            in_hand: the kins that other processes work on: of tasks in the same place, others come first.
        """
        kin = None if last is None else self.kin(last)
        if kin is not None and kin in self._of_kin:
            return self._pop(self._of_kin[kin][0], kin)
        place = self._places[0]
        kins = self._waiting[place]
        return self._pop(place, next((kin for kin in kins if kin not in in_hand), next(iter(kins))))

    def _pop(self, place: Any, kin: Hashable) -> Any:
        kins = self._waiting[place]
        task = kins[kin].popleft()
        self._count -= 1
        self._of_kin[kin].remove(place)
        if not self._of_kin[kin]:
            del self._of_kin[kin]
        if not kins[kin]:
            del kins[kin]
        if not kins:
            del self._waiting[place]
            self._places.remove(place)
            heapq.heapify(self._places)
        return task
