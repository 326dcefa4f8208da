"""What `mgtta adapt` tells: lines of JSON for programs, sentences for people, and what its page shows."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from mgtta._lib.names import spelled
from mgtta.adaptation.monitor import Monitor, Signals
from mgtta.adaptation.wrapper import Adapting
from mgtta.running.adapt import StreamResult
from mgtta.running.page import Gallery, write_page

ACTIONS = {  # of an event -> who did what
    "slow": "the guard went back, and let the source answer",
    "rest": "the guard stopped learning for a while",
    "trust": "the guard trusted the method again",
    "shift": "recall noticed another domain",
    "recall": "recall loaded the state of a domain that came back",
    "one by one": "images were normalised one by one, since classes come in turn",
    "by batch": "images were normalised by batch again",
}


class Story:
    """Follows a run with a monitor: give it to `adapt_stream` as `watch`, and call `end` with the result.

    Args:
        lines: print one line of JSON for each batch, and one at the start and at the end.
        report: file for a page of your own pictures, .html; None: no page.
        names: number of an image in its data set -> its name.
        classes: class -> its name.
    """

    def __init__(
        self,
        monitor: Monitor,
        lines: bool = False,
        report: Path | None = None,
        names: Callable[[int], str] = str,
        classes: Callable[[int], str] = str,
    ):
        self.monitor = monitor
        self.lines = lines
        self.report = report
        self.gallery = Gallery(names, classes) if report is not None else None
        self.signals: Signals | None = None
        self.over_time: list[Signals] = []

    def start(self, images: int, side: int) -> None:
        """Say what runs, and where, on how many images of so many pixels a side."""
        about = settings_of(self.monitor.method)
        if self.lines:
            self._say("start", images=images, size=side, **about)
        else:
            lr = "" if about["lr"] is None else f", learning rate {about['lr']:g}"
            how = f"{about['method']} on {about['device']}, {about['precision']}{lr}"
            print(f"{how}: {images:,} images of {side} pixels", file=sys.stderr)

    def __call__(self, batch: Any, logits: Tensor) -> None:
        """Follow a batch."""
        self.signals = self.monitor(batch.x, logits)
        if self.lines:
            self._say("batch", **self.signals.plain())
        if self.gallery is not None:
            self.over_time.append(self.signals)
            if self.monitor.last is not None:
                self.gallery.add(batch, self.monitor.last)

    def end(self, result: StreamResult) -> None:
        """Say what came of it, and write the page."""
        if self.report is not None and self.gallery is not None:
            write_page(self.report, self.gallery, self.over_time, sentences(self.monitor, self.signals), str(result))
        if self.lines:
            totals = vars(result.totals)
            self._say("end", out=str(result.out), unreadable=len(result.unreadable), speed=result.speed, **totals)
            return
        print(result)
        if result.speed is not None:
            print(f"{result.speed:.3g} images/s")
        for sentence in sentences(self.monitor, self.signals):
            print(sentence)
        if self.report is not None:
            print(f"page: {self.report}")

    def _say(self, event: str, **content: Any) -> None:
        print(json.dumps({"event": event, **content}), flush=True)


def settings_of(method: Adapting) -> dict[str, Any]:
    """Return what a run's first line says of a method: its name, device, precision and learning rate."""
    lr = None if method.optimizer is None else method.optimizer.param_groups[0]["lr"]
    device = str(next(method.model.parameters()).device)
    return {"method": spelled(method.name), "device": device, "precision": method.precision, "lr": lr}


def sentences(monitor: Monitor, signals: Signals | None) -> list[str]:
    """Return what the last signals say, in words."""
    if signals is None:
        return []
    found = []
    if signals.changed is not None:
        share = f"{100 * monitor.share:.0f} % of them" if monitor.share < 1 else "all of them"
        found.append(
            f"Adaptation changed {100 * signals.changed:.0f} % of the predictions of the last "
            f"{min(monitor.window, signals.images):,} images ({share} compared)."
        )
    if signals.shifts:
        found.append(f"A shift of the domain was noticed {_times(signals.shifts)}.")
    if signals.alarms:
        last = signals.events[-1] if signals.events else monitor.seen.events[-1]
        times = _times(signals.alarms)
        action = str(last.get("action"))
        found.append(f"Guard, recall or normalisation acted {times}; the last time, {ACTIONS.get(action, action)}.")
    if signals.gain is not None and monitor.calibration is not None:
        found.append(
            f"Estimated accuracy: {signals.source_accuracy:.0f} % without adaptation, {signals.accuracy:.0f} % with it."
            f" Such estimates were off by {monitor.calibration.error:.0f} points on corruptions not learned from."
        )
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
