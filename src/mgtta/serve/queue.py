"""What waits: the requests of one stream in turn, what bounds them, and the errors of requests that are refused."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mgtta.serve.stream import Stream


class OverloadedError(RuntimeError):
    """Too much waits already; the same request may be accepted later.

    Attributes:
        retry_seconds: after which it is worth trying again.
    """

    def __init__(self, message: str, retry_seconds: int):
        super().__init__(message)
        self.retry_seconds = retry_seconds

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.retry_seconds)


class ClosedError(RuntimeError):
    """The service is stopping."""


class UnknownStreamError(KeyError):
    """There is no stream of this name."""


@dataclass(frozen=True)
class Limits:
    """What bounds memory and waiting; see streams.py."""

    batch_images: int = 64  # in one turn of a stream, and in one request
    wait_seconds: float = 0.005
    pause_seconds: float = 0.5
    loaded_streams: int = 64
    streams: int = 1000  # that are known, loaded or saved
    queue_images: int = 2048  # that wait in all streams together
    stream_queue_images: int = 512
    queue_seconds: float = 10.0  # for which images would wait, by what an image took so far
    stream_queue_commands: int = 64
    save_updates: int = 16
    save_seconds: float = 10.0
    thumbnails: int = 12  # pictures of a stream that the live view shows

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1
            if name.endswith("_seconds") or name == "thumbnails":
                least = 0
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, not {value}")


@dataclass
class Work:
    """A request: images, or a command if there are none."""

    future: "Future[Any]"
    images: Tensor | None = None
    command: Callable[[Stream], Any] | None = None
    fresh: bool = False  # do not load the saved state
    arrived: float = field(default_factory=time.monotonic)


@dataclass
class Queue:
    """The work of one stream that waits."""

    work: deque[Work] = field(default_factory=deque)
    images: int = 0

    def ready_at(self, limits: Limits, alone: bool) -> float:
        """Return the time at which the stream may take its turn.

        Args:
            alone: the last turn had only one request.
        """
        first = self.work[0]
        if first.command is not None or alone or self.images >= limits.batch_images:
            return first.arrived
        return first.arrived + limits.wait_seconds

    def take(self, most: int) -> list[Work]:
        """Return what one turn does: one command, or requests of at most so many images."""
        if self.work[0].command is not None:
            return [self.work.popleft()]
        taken: list[Work] = []
        count = 0
        while self.work and self.work[0].images is not None:
            n = len(self.work[0].images)
            if taken and count + n > most:
                break
            count += n
            taken.append(self.work.popleft())
        self.images -= count
        return taken
