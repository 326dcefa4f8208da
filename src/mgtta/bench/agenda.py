"""What a run has to do: plans ask for cells, and go on as soon as they have the records.

A plan is a generator. It yields cells, is sent their records, and returns the cells whose records are wanted. The plans
of different methods do not wait for one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgtta.bench.cells import Cell, Setup, Training
from mgtta.bench.executors.tasks import Tasks
from mgtta.bench.needs import passes_of
from mgtta.bench.protocol import training_of
from mgtta.bench.resources import IMAGES
from mgtta.bench.sweep import Plan

SMALLEST_BATCH = 16  # on a GPU, smaller ones take about as long
FOLLOWED = 4  # a try counts as if it took so many times its time, since other cells follow it

Records = list[dict[str, Any]]
Finish = Callable[[Cell, str, Records, bool], Records]


@dataclass(frozen=True)
class Drawing:
    """The images of one domain, which are corrupted for the cache before cells ask for them."""

    split: str
    data: str | None
    domain: str
    severity: int
    seed: int

    @property
    def cell(self) -> Cell:
        """A cell that sees these images."""
        fields: dict[str, Any] = {"severity": self.severity, "split": self.split, "data": self.data}
        return Cell("drawing", "noadapt", (self.domain,), self.seed, **fields)


Task = Cell | Training | Drawing


@dataclass
class _Running:
    """A plan that was begun."""

    plan: Plan
    asked: Sequence[Cell] = ()
    missing: set[str] = field(default_factory=set)  # works it waits for
    returned: list[Cell] = field(default_factory=list)


class Agenda:
    """The tasks that are still to be given out, and the plans that wait for their results.

    Work that several cells ask for is done once. Without a cache, cells of a stream follow one another; with one, those
    that take longest come first.

    Args:
        known: work -> records, of what is done.
        finish: called with a cell, its work, the records of the work, and whether they are new; returns the cell's own.
    """

    def __init__(self, plans: Sequence[Plan], setup: Setup, known: dict[str, Records], finish: Finish):
        self.setup = setup
        self.tasks = Tasks(kin=self._kin, place=self._place)  # to be run side by side
        self.timed: list[Cell] = []  # to be run one at a time
        self.alone: list[Cell] = []  # each in a new process
        self.works: dict[Cell, str] = {}  # of all cells that were asked for
        self.known = known
        self._finish = finish
        self._at_hand: list[Cell] = []  # whose work was done before they asked
        self._records: dict[Cell, Records] = {}
        self._asking: dict[str, list[Cell]] = {}  # work -> the cells that ask for it
        self._places: dict[Any, int] = {}  # stream -> its place
        self._prepared: set[Training | Drawing] = set()
        self._plans = [_Running(plan) for plan in plans]
        for running in self._plans:
            self._go_on(running, None)

    @property
    def returned(self) -> list[list[Cell]]:
        """What each plan returned."""
        return [running.returned for running in self._plans]

    @property
    def at_hand(self) -> int:
        """The number of cells that `settle` will finish."""
        return len(self._at_hand)

    def settle(self) -> None:
        """Finish the cells whose work is done already, and let plans go on that have all they asked for."""
        while True:
            while self._at_hand:
                cell = self._at_hand.pop(0)
                self._records[cell] = self._finish(cell, self.works[cell], self.known[self.works[cell]], False)
            ready = [running for running in self._plans if running.asked and not running.missing]
            if not ready:
                return
            for running in ready:
                self._go_on(running, [record for cell in running.asked for record in self._records[cell]])

    def done(self, cell: Cell, records: Records) -> None:
        """Take the records of a cell that was run."""
        work = self.works[cell]
        self.known[work] = records
        for asking in self._asking.pop(work):
            self._records[asking] = self._finish(asking, work, records, True)
        for running in self._plans:
            running.missing.discard(work)
        self.settle()

    def _go_on(self, running: _Running, records: Records | None) -> None:
        running.asked = ()
        try:
            running.asked = running.plan.send(records)  # type: ignore[arg-type]  # None begins it
        except StopIteration as end:
            running.returned = end.value
            return
        works = {self._enter(cell) for cell in running.asked}
        running.missing = works - self.known.keys()

    def _enter(self, cell: Cell) -> str:
        """Return the cell's work, and put it on the list if nobody has asked for it yet."""
        if cell in self.works:
            return self.works[cell]
        work = cell.key(self.setup)
        self.works[cell] = work
        if work in self.known:
            self._at_hand.append(cell)
        elif work in self._asking:
            self._asking[work].append(cell)
        else:
            self._asking[work] = [cell]
            self._list(cell)
        return work

    def _list(self, cell: Cell) -> None:
        if cell.alone:
            self.alone.append(cell)
        elif cell.timed:
            self.timed.append(cell)
        else:
            self._prepare(cell)
            self._places.setdefault(cell.stream, len(self._places))
            self.tasks.add(cell)

    def _prepare(self, cell: Cell) -> None:
        """List what the cell needs and others need, too, so that no process waits for another that makes it."""
        needed: list[Training | Drawing] = []
        training = training_of(cell, self.setup)
        if training is not None:
            needed.append(training)
        if self.setup.cache is not None and cell.severity and not cell.sets:
            needed += [Drawing(cell.split, cell.data, name, cell.severity, cell.seed) for name in cell.domains]
        for task in needed:
            if task not in self._prepared:
                self._prepared.add(task)
                self.tasks.add(task)

    def _kin(self, task: Task) -> Any:
        """Return the same for tasks that share what a process holds: images, or with a cache of these the method."""
        if not isinstance(task, Cell):
            return None
        if self.setup.cache is None:
            return task.stream
        return (task.method, task.settings)

    def _place(self, task: Task) -> tuple[int, float]:
        if isinstance(task, Training):
            return 0, 0
        if isinstance(task, Drawing):
            return 1, float(task.split != "validation")
        if self.setup.cache is None:
            return 2, self._places[task.stream]
        return 2, -self._length(task)

    def _length(self, cell: Cell) -> float:
        """Return how long a cell takes in comparison with others."""
        images = min(filter(None, (cell.limit, self.setup.images)), default=IMAGES)
        batches = len(cell.domains) * -(-images // cell.batch_size)
        followed = FOLLOWED if cell.split == "validation" else 1
        return followed * batches * max(cell.batch_size, SMALLEST_BATCH) * passes_of(cell.method)
