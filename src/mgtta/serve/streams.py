"""The service without the web: many named streams, each with its own adapted state over one frozen model.

One thread does all computing, in rounds. In a round, each stream that has work gets one turn: a batch of its waiting
images is predicted and answered. After the round, updates and saves run for `pause_seconds`; the last update and the
last save may end later. So an answer waits for learning at most `pause_seconds`, one update and one save, before the
round that it is in.

Images of one stream are gathered into a batch until there are `batch_images` of them, or the first has waited
`wait_seconds`. A stream whose last turn had only one request does not wait, since it has only one client.
At most `loaded_streams` streams are in memory. The one that was used least recently is saved and leaves first; its next
request loads it again.

The source model is asked about a sample of the images (see live.py), between rounds and for all streams together: when
ASK_IMAGES of them wait, or the first has waited ASK_SECONDS.

A stream is saved after `save_updates` updates, or `save_seconds` after its first change that is not saved. A kill loses
what was learned since then. `close` answers what waits, and saves everything.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.estimate import Calibration
from mgtta.adaptation.wrapper import Adapting, innermost, source_model
from mgtta.serve.live import News, Sampled
from mgtta.serve.queue import ClosedError, Limits, OverloadedError, Queue, UnknownStreamError, Work
from mgtta.serve.store import StateFolder, check_name
from mgtta.serve.stream import Answer, Stream
from mgtta.serve.template import own_bytes, stream_copy

log = logging.getLogger("mgtta.serve")
TOTALS = (
    "images",
    "batches",
    "updates",
    "asked",
    "refused",
    "failed",
    "saves",
    "failed_saves",
    "loads",
    "evictions",
)
BUSY = ("answer", "learn", "ask", "save")
LEAST_RETRY_SECONDS = 1
FIRST_IMAGE_SECONDS = 0.01  # the guess of an image's cost before one is measured
COST_IMAGES = 64  # that the running mean of an image's cost looks back on
ASK_IMAGES = 16
LEAST_PROBABILITY = 1e-30  # so that its logarithm is finite
ASK_SECONDS = 0.5


class Streams:
    """Named streams over copies of one method. All functions may be called from any thread.

    Args:
        method: see `mgtta.serve.template.template`; it stays as it is.
        side: of the images in pixels.
        folder: for the saved states.
        calibration: what `mgtta.calibrate` gave, for the live view's estimate of accuracy.
        shared: other processes of the same service use the folder, too; the last one that is asked for a stream has it.

    Attributes:
        totals: counts since the start, by name.
        busy_seconds: time spent since the start, by what it was spent on.
    """

    def __init__(
        self,
        method: Adapting,
        side: int,
        folder: str | Path,
        limits: Limits | None = None,
        *,
        calibration: Calibration | None = None,
        shared: bool = False,
    ):
        if calibration is not None:
            calibration.check(method.name, method.model.name, innermost(method).fingerprint)
        self.calibration = calibration
        self.method = method
        self.side = side
        self.limits = limits or Limits()
        self.store = StateFolder(folder, shared)
        self.source = source_model(method)
        self.totals = dict.fromkeys(TOTALS, 0)
        self.busy_seconds = dict.fromkeys(BUSY, 0.0)
        self.longest_pause_seconds = 0.0  # between two rounds: updates and saves
        self._reports: dict[str, dict[str, Any] | None] = dict.fromkeys(self.store.names())  # None: not read yet
        self._queues: OrderedDict[str, Queue] = OrderedDict()  # of streams with work, the next turn first
        self._queued_images = 0
        self._alone: set[str] = set()  # streams whose last turn had only one request
        self._loaded: OrderedDict[str, Stream] = OrderedDict()  # the least recently used first
        self._due: OrderedDict[str, None] = OrderedDict()  # streams that have enough images for an update
        self._asking: OrderedDict[str, None] = OrderedDict()  # streams with images for the source model
        self._asking_since = math.inf
        self._image_seconds = FIRST_IMAGE_SECONDS
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mgtta-streams", daemon=True)
        self._thread.start()

    # --- what callers use

    def predict(self, name: str, images: Tensor) -> "Future[Answer]":
        """Queue images, uint8 (n, 3, side, side), for a stream, which begins with its first images.

        Raises:
            ValueError: the name or the images are invalid.
            OverloadedError: too much waits.
            ClosedError: the service is stopping.
        """
        check_name(name)
        self._check(images)
        work = Work(Future(), images=images)
        with self._change:
            self._check_room(name, len(images))
            self._reports.setdefault(name, None)
            queue = self._queues.setdefault(name, Queue())
            queue.images += len(images)
            self._queued_images += len(images)
            queue.work.append(work)
            self._change.notify()
        return work.future

    def check_room(self, name: str) -> None:
        """Raise what `predict` would for one image, before it is read."""
        check_name(name)
        with self._change:
            self._check_room(name, 1)

    def names(self) -> list[str]:
        """Return the names of all streams, loaded or saved."""
        with self._change:
            return sorted(self._reports)

    def is_loaded(self, name: str) -> bool:
        """Return whether a stream is in memory now."""
        return name in self._loaded

    def news(self, name: str, number: str | None = None, told: dict[str, int] | None = None) -> News | None:
        """Return what is new in the live view of a stream; None if the stream is not in memory. See Live.news."""
        stream = self._loaded.get(name)
        return None if stream is None else stream.live.news(number, told)

    def overview(self) -> list[dict[str, Any]]:
        """Return what is known about each stream, with its running figures if it is in memory."""
        with self._change:
            reports = dict(self._reports)
            loaded = {name: stream.live for name, stream in self._loaded.items()}
        found = []
        for name, report in sorted(reports.items()):
            live = loaded.get(name)
            figures = {} if live is None else live.figures()
            found.append({"stream": name, **(report or {}), "loaded": live is not None, **figures})
        return found

    def report(self, name: str) -> "Future[dict[str, Any]]":
        """Return what is known about a stream: its counts, its running entropy and whether it is frozen."""
        with self._change:
            known = self._reports.get(name)
        if known is None or not self.store.holds(name):
            return self._ask(name, lambda stream: stream.report())
        future: Future[dict[str, Any]] = Future()
        future.set_result(known)
        return future

    def reset(self, name: str) -> "Future[dict[str, Any]]":
        """Let a stream go back to the source model, also if its saved state is damaged."""
        return self._ask(name, _reset, fresh=True)

    def freeze(self, name: str, frozen: bool = True) -> "Future[dict[str, Any]]":
        """Let a stream only predict from now on; or, with False, learn again."""

        def command(stream: Stream) -> dict[str, Any]:
            stream.freeze(frozen)
            return stream.report()

        return self._ask(name, command)

    def weights(self, name: str) -> "Future[dict[str, Tensor]]":
        """Return the adapted weights of a stream's network."""
        return self._ask(name, lambda stream: stream.weights())

    @property
    def queued_images(self) -> int:
        return self._queued_images

    @property
    def loaded_streams(self) -> int:
        return len(self._loaded)

    @property
    def working(self) -> bool:
        """False if the service is stopping, or its thread has died."""
        return self._thread.is_alive() and not self._closing

    def close(self, timeout_seconds: float | None = None) -> None:
        """Accept nothing more, answer what waits, save every stream, and stop."""
        with self._change:
            self._closing = True
            self._change.notify()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise RuntimeError(f"the streams were not saved within {timeout_seconds} seconds")
        self.store.close()

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- accepting work

    def _ask(self, name: str, command: Callable[[Stream], Any], fresh: bool = False) -> "Future[Any]":
        """Queue a command for a stream that is known."""
        work = Work(Future(), command=command, fresh=fresh)
        with self._change:
            if name not in self._reports and not self.store.has(name):
                raise UnknownStreamError(name)
            self._check_room(name, 0)
            self._queues.setdefault(name, Queue()).work.append(work)
            self._change.notify()
        return work.future

    def _check(self, images: Tensor) -> None:
        expected = (3, self.side, self.side)
        if images.dtype != torch.uint8 or images.ndim != 4 or tuple(images.shape[1:]) != expected:
            raise ValueError(f"images must be uint8 (n, 3, {self.side}, {self.side}), not {tuple(images.shape)}")
        if not 1 <= len(images) <= self.limits.batch_images:
            raise ValueError(f"{len(images)} images in a request: 1 to {self.limits.batch_images} are taken")

    def _check_room(self, name: str, images: int) -> None:
        limits = self.limits
        queue = self._queues.get(name)
        commands = 0
        waiting = 0
        if queue is not None:
            commands = len(queue.work)
            waiting = queue.images
        if self._closing:
            raise ClosedError("the service is stopping")
        if not self._thread.is_alive():
            raise ClosedError("the service has failed: restart it")
        reason = None
        seconds = self._queued_images * self._image_seconds
        if self._queued_images + images > limits.queue_images:
            reason = f"{self._queued_images} images wait already"
        elif images and seconds > limits.queue_seconds:
            reason = f"{self._queued_images} images wait already, for about {seconds:.0f} seconds"
        elif waiting + images > limits.stream_queue_images:
            reason = f"{waiting} images of stream {name!r} wait already"
        elif not images and commands >= limits.stream_queue_commands:
            reason = f"{commands} requests of stream {name!r} wait already"
        elif name not in self._reports and len(self._reports) >= limits.streams:
            reason = f"there are {len(self._reports)} streams already"
        if reason is not None:
            self.totals["refused"] += 1
            raise OverloadedError(f"{reason}: try again later", max(math.ceil(seconds), LEAST_RETRY_SECONDS))

    # --- the thread

    def _run(self) -> None:
        try:
            while (turns := self._next_round()) is not None:
                self._round(turns)
        except BaseException:
            log.exception("the service has failed")
        finally:
            self._refuse_all()
            for stream in list(self._loaded.values()):
                self._save(stream)

    def _round(self, turns: list[str]) -> None:
        """Answer each of these streams once; then learn and save for a while."""
        start = time.monotonic()
        images = self.totals["images"]
        for name in turns:
            self._turn(name)
        began = time.monotonic()
        end = began + self.limits.pause_seconds
        self._learn(end)
        self._ask_source()
        self._save_due(end)
        now = time.monotonic()
        self.longest_pause_seconds = max(self.longest_pause_seconds, now - began)
        answered = self.totals["images"] - images
        if answered:
            share = answered / (answered + COST_IMAGES)
            self._image_seconds += share * ((now - start) / answered - self._image_seconds)

    def _next_round(self) -> list[str] | None:
        """Wait for work; return the streams that are ready, in their order. None: closed, and nothing is left."""
        with self._change:
            while True:
                now = time.monotonic()
                due = {name: q.ready_at(self.limits, name in self._alone) for name, q in self._queues.items()}
                ready = [name for name, at in due.items() if at <= now or self._closing]
                if ready:
                    return ready
                if self._closing:
                    return None
                if self._due:
                    return []
                wake = min([*due.values(), *self._save_times().values(), self._asking_since + ASK_SECONDS])
                if wake <= now:
                    return []
                self._change.wait(min(wake - now, threading.TIMEOUT_MAX))

    def _turn(self, name: str) -> None:
        """Do the next work of one stream, and put the stream behind all others."""
        with self._change:
            queue = self._queues[name]
            taken = queue.take(self.limits.batch_images)
            self._queued_images -= sum(len(work.images) for work in taken if work.images is not None)
            self._alone.discard(name)
            if len(taken) == 1:
                self._alone.add(name)
            if queue.work:
                self._queues.move_to_end(name)
            else:
                del self._queues[name]
        work = [w for w in taken if w.future.set_running_or_notify_cancel()]  # one that has gone is not learned from
        if not work:
            return
        try:
            stream = self._stream(name, fresh=any(w.fresh for w in work))
            results = self._results(stream, work)
            report = stream.report()
        except Exception as error:
            self.totals["failed"] += len(work)
            for w in work:
                w.future.set_exception(error)
            return
        with self._change:
            self._reports[name] = report
        now = time.monotonic()
        stream.live.took(now - w.arrived for w in work if w.images is not None)
        for w, result in zip(work, results, strict=True):
            w.future.set_result(result)

    def _results(self, stream: Stream, work: list[Work]) -> list[Any]:
        """Return what each request gets: that of a command, or a share of the answer to all images."""
        if work[0].command is not None:
            return [work[0].command(stream)]
        began = time.monotonic()
        parts = [w.images for w in work if w.images is not None]
        answer = stream.answer(torch.cat(parts))
        if stream.due:
            self._due.setdefault(stream.name)
        if stream.live.sampled:
            self._asking.setdefault(stream.name)
            self._asking_since = min(self._asking_since, began)
        images = len(answer.probabilities)
        self.totals["images"] += images
        self.totals["batches"] += 1
        self.busy_seconds["answer"] += time.monotonic() - began
        shares = answer.probabilities.split([len(x) for x in parts])
        return [answer._replace(probabilities=share) for share in shares]

    def _learn(self, end: float) -> None:
        """Make updates where they are due, at least one; the stream that has waited longest comes first."""
        while self._due:
            name, _ = self._due.popitem(last=False)
            stream = self._loaded.get(name)
            if stream is None or not stream.due:
                continue
            began = time.monotonic()
            try:
                stream.learn()
                self.totals["updates"] += 1
            except Exception:
                stream.kept.clear()
                log.exception("stream %s cannot learn from its images", stream.name)
            if stream.due:
                self._due[name] = None
            with self._change:
                self._reports[name] = stream.report()
            self.busy_seconds["learn"] += time.monotonic() - began
            if time.monotonic() >= end:
                return

    def _ask_source(self) -> None:
        """Ask the source model about the sample of all streams, if there is enough of it or it has waited."""
        began = time.monotonic()
        lives = [self._loaded[name].live for name in self._asking if name in self._loaded]
        sampled = [live.sampled for live in lives]
        images = sum(map(len, sampled))
        if images < ASK_IMAGES and began < self._asking_since + ASK_SECONDS:
            return
        self._asking.clear()
        self._asking_since = math.inf
        if not images:
            return
        for live in lives:
            live.sampled = []
        try:
            with torch.no_grad():
                x = torch.stack([s.pixels for part in sampled for s in part])
                logits = torch.cat([self.source(batch).cpu() for batch in x.split(self.limits.batch_images)])
            for live, part, share in zip(lives, sampled, logits.split([len(part) for part in sampled]), strict=True):
                live.asked(part, share.softmax(1), self._right(part, share))
            self.totals["asked"] += images
        except Exception:
            log.exception("the source model cannot answer images of the live view")
        self.busy_seconds["ask"] += time.monotonic() - began

    def _right(self, sampled: list[Sampled], logits: Tensor) -> Tensor | None:
        """Return the probabilities that the adapted and the source model are right, (n, 2); None if nobody can tell."""
        if self.calibration is None:
            return None
        given = torch.stack([s.probabilities for s in sampled])
        return self.calibration.estimates(given.clamp(min=LEAST_PROBABILITY).log(), logits)

    # --- which streams are in memory

    def _stream(self, name: str, fresh: bool) -> Stream:
        """Return a stream, loaded if need be; with `fresh`, its saved state is not read."""
        stream = self._loaded.get(name)
        if stream is not None and self.store.holds(name):
            self._loaded.move_to_end(name)
            return stream
        self._leave(name)
        while len(self._loaded) >= self.limits.loaded_streams:
            self._evict()
        stream = Stream(name, stream_copy(self.method), self.limits.batch_images, self.limits.thumbnails)
        self.store.claim(stream)
        if not fresh and self.store.load(stream):
            self.totals["loads"] += 1
        else:
            stream.changed_at = -math.inf  # a new stream is saved at once, so that a kill does not lose it
        with self._change:
            self._loaded[name] = stream
        return stream

    def _evict(self) -> None:
        """Save the stream that was used least recently, and let it go."""
        name, stream = next(iter(self._loaded.items()))
        stream.drop_kept()
        if stream.changed_at is not None:
            self._write(stream)
        self._leave(name)
        with self._change:
            self._reports[name] = stream.report()
        self.totals["evictions"] += 1

    def _leave(self, name: str) -> None:
        """Remove a stream from memory as it is."""
        with self._change:
            self._loaded.pop(name, None)
            self._alone.discard(name)

    def _save_times(self) -> dict[str, float]:
        """Return when each loaded stream must be saved; those without a change are left out."""
        limits = self.limits
        times = {}
        for name, stream in self._loaded.items():
            if stream.unsaved >= limits.save_updates:
                times[name] = -math.inf
            elif stream.changed_at is not None:
                times[name] = stream.changed_at + limits.save_seconds
        return times

    def _save_due(self, end: float) -> None:
        """Save the streams whose time is up, at least one; the others follow after the next round."""
        times = self._save_times()
        for name in sorted(times, key=times.__getitem__):
            if times[name] > time.monotonic():
                return
            self._save(self._loaded[name])
            if time.monotonic() >= end:
                return

    def _save(self, stream: Stream) -> None:
        """Save a stream that has changed. If the disk fails, try again after `save_seconds`."""
        if stream.changed_at is None:
            return
        try:
            self._write(stream)
        except Exception:
            self.totals["failed_saves"] += 1
            stream.changed_at = time.monotonic()
            stream.unsaved = 0
            log.exception("stream %s cannot be saved", stream.name)

    def _write(self, stream: Stream) -> None:
        began = time.monotonic()
        stream.bytes = own_bytes(stream.method, self.method)
        if not self.store.save(stream):
            log.warning("another process has stream %s now: what is not saved here is lost", stream.name)
            self._leave(stream.name)
            return
        self.totals["saves"] += 1
        self.busy_seconds["save"] += time.monotonic() - began
        with self._change:
            self._reports[stream.name] = stream.report()

    def _refuse_all(self) -> None:
        """Refuse what still waits: only after a failure there is any."""
        with self._change:
            self._closing = True
            for queue in self._queues.values():
                for work in queue.work:
                    if work.future.set_running_or_notify_cancel():
                        work.future.set_exception(ClosedError("the service has failed: restart it"))
            self._queues.clear()
            self._queued_images = 0


def _reset(stream: Stream) -> dict[str, Any]:
    stream.reset()
    return stream.report()
