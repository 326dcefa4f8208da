"""The progress of a benchmark: bars for people, lines of text for a log, lines of JSON for programs."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import TaskID, TextColumn

from mgtta._lib.bars import progress_bar
from mgtta._lib.names import spelled
from mgtta.bench.cells import Cell
from mgtta.bench.resources import Listener
from mgtta.evaluation.record import Record

SHORTEST_SECONDS = 1e-9  # so that no speed is a division by zero


class Bars(Listener):
    """Show a bar with the cells done and the time left, and what runs: accuracy so far and images a second."""

    def __init__(self) -> None:
        self.progress = progress_bar(TextColumn("{task.fields[now]}"), compact=True, transient=True)
        self.task: TaskID | None = None
        self.finished = 0
        self.total = 0
        self.running: Cell | None = None
        self.since = 0.0  # when the first batch of the running cell was done
        self.seen = 0  # images of the running cell since then

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def start(self, title: str, cells: int, finished: int) -> None:
        self.finished = 0
        self.total = cells
        self.task = self.progress.add_task(title, total=cells, completed=finished, now="")

    def grow(self, cells: int) -> None:
        self.total = cells
        if self.task is not None:
            self.progress.update(self.task, total=cells)

    def note(self, text: str) -> None:
        self._show(text)

    def batch(self, cell: Cell, record: Record, part: float) -> None:
        now = time.perf_counter()
        speed = ""
        if self.running is not cell:
            self.running = cell
            self.since = now
            self.seen = 0
        else:
            self.seen += record.sizes[-1]
            seconds = max(now - self.since, SHORTEST_SECONDS)
            speed = f", {self.seen / seconds:.0f} images/s"
        accuracy = "" if record.top1 is None else f": {record.top1:.1f} %"
        self._show(f"{spelled(cell.method)} on {record.domain}{accuracy}{speed}", part)

    def cell(self, cell: Cell, records: list[dict[str, Any]], fresh: bool) -> None:
        self.finished += 1
        if fresh:
            self._show(_result(cell, records))

    def _show(self, text: str, part: float = 0.0) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=min(self.finished + part, self.total), now=text)


class Log(Listener):
    """Print a line of text to standard error for each finished cell: for a log, where a bar cannot be drawn."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.title = ""
        self.finished = 0
        self.total = 0

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, title: str, cells: int, finished: int) -> None:
        self.title = title
        self.finished = 0
        self.total = cells

    def grow(self, cells: int) -> None:
        self.total = cells

    def note(self, text: str) -> None:
        print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def cell(self, cell: Cell, records: list[dict[str, Any]], fresh: bool) -> None:
        self.finished += 1
        if fresh:
            seconds = time.monotonic() - self.began
            now = f"{self.finished}/{self.total}: {_result(cell, records)}"
            print(f"{self.title} {now} ({cell.experiment}, {seconds:.0f} s)", file=sys.stderr, flush=True)


def shown_progress() -> Bars | Log:
    """Return bars if standard error is a terminal, otherwise lines of text."""
    if sys.stderr.isatty():
        return Bars()
    return Log()


class Lines(Listener):
    """Print one line of JSON for each event: start, note, record; at last end or error."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.records = 0

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, kind: type | None, error: object, _: object) -> None:
        if kind is None:
            self._say("end", records=self.records, out=str(self.out))
        elif issubclass(kind, Exception):
            self._say("error", text=str(error))

    def start(self, title: str, cells: int, finished: int) -> None:
        self._say("start", experiment=title, cells=cells, finished=finished)

    def note(self, text: str) -> None:
        self._say("note", text=text)

    def cell(self, cell: Cell, records: list[dict[str, Any]], fresh: bool) -> None:
        for record in records:
            self.records += 1
            self._say("record", fresh=fresh, **record)

    def _say(self, event: str, **content: Any) -> None:
        print(json.dumps({"event": event, **content}), flush=True)


def _result(cell: Cell, records: list[dict[str, Any]]) -> str:
    found = [r["top1"] for r in records if r["top1"] is not None]
    accuracy = f": {sum(found) / len(found):.1f} %" if found else ""
    return f"{cell}{accuracy}"
