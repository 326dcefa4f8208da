"""The streams on a Ray cluster: one front that speaks HTTP, and replicas that compute.

Each replica is a Ray actor with streams of its own over one shared state folder. A stream belongs to one replica at a
time: the front sends all its images there, so its state is never changed in two places. A stream that has no replica
goes to the one that rendezvous hashing of its name chooses among those that are alive.

When a replica is lost, Ray starts it again, perhaps on another machine. Its streams go to other replicas meanwhile,
which load what was saved last, and stay there. A request that was lost with it is sent again.

These are plain actors and not deployments of Ray Serve, whose multiplexing may send a stream to two replicas at once.
The state folder must be the same on all machines, for example on a network file system.
"""

import asyncio
import hashlib
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.estimate import Calibration
from mgtta.adaptation.wrapper import Adapting
from mgtta.serve.live import News
from mgtta.serve.store import StateFolder, check_name
from mgtta.serve.stream import Answer
from mgtta.serve.streams import BUSY, TOTALS, ClosedError, Limits, OverloadedError, Streams, UnknownStreamError

log = logging.getLogger("mgtta.serve")
HERE = "auto"  # the cluster that this machine belongs to, or a new one of this machine only
TRIES = 3  # of a request whose replica is lost
START_SECONDS = 120  # for the replicas to start
ASK_SECONDS = 5  # for figures of the live view
AT_ONCE = 4096  # requests in a replica
FIGURES = ("loaded_streams", "queued_images", "longest_pause_seconds")


class LostError(RuntimeError):
    """Ray has started the replica again, and it has no streams yet."""


class Replica:
    """The streams of one process of the cluster. After each start the front calls `begin`."""

    def __init__(self) -> None:
        self._streams: Streams | None = None

    async def begin(
        self, build: Callable[[], Adapting], side: int, folder: str, limits: Limits, calibration: Calibration | None
    ) -> None:
        """Make the method, and begin to answer."""
        torch.set_num_threads(1)
        if self._streams is None:
            self._streams = Streams(build(), side, folder, limits, calibration=calibration, shared=True)

    @property
    def streams(self) -> Streams:
        """The streams; before `begin`, raise an error."""
        if self._streams is None:
            raise LostError("this replica has started again")
        return self._streams

    async def predict(self, name: str, images: Any) -> tuple[Any, Exception | None]:
        """Return the answer to images, an array (n, 3, side, side), or the error that it met."""
        return await self._outcome(lambda: self.streams.predict(name, torch.from_numpy(images.copy())))

    async def command(self, what: str, name: str, *arguments: Any) -> tuple[Any, Exception | None]:
        """Return what a function of Streams gives, or the error that it met."""
        return await self._outcome(lambda: getattr(self.streams, what)(name, *arguments))

    async def _outcome(self, ask: Callable[[], "Future[Any]"]) -> tuple[Any, Exception | None]:
        try:
            return await asyncio.wrap_future(ask()), None
        except Exception as error:
            return None, error

    async def overview(self) -> list[dict[str, Any]]:
        """Return what Streams.overview gives."""
        return self.streams.overview()

    async def news(self, name: str, number: str | None, told: dict[str, int] | None) -> News | None:
        """Return what Streams.news gives."""
        return self.streams.news(name, number, told)

    async def figures(self) -> dict[str, Any]:
        """Return the counts for Prometheus."""
        own = {name: getattr(self.streams, name) for name in FIGURES}
        return {"totals": dict(self.streams.totals), "busy_seconds": dict(self.streams.busy_seconds), **own}

    async def close(self) -> None:
        """Answer what waits, and save all streams."""
        await asyncio.to_thread(self.streams.close)


class Cluster:
    """Streams over several replicas; it takes the place of `Streams` for the web.

    Args:
        build: makes the method, in each replica.
        replicas: their number.
        address: of the Ray cluster, such as host:6379.

    Attributes:
        method: a method of the front's own, which answers nothing.
        alive: whether each replica can be asked.
        owners: the replica of each stream that has one.
    """

    def __init__(
        self,
        build: Callable[[], Adapting],
        side: int,
        folder: str | Path,
        limits: Limits | None = None,
        *,
        calibration: Calibration | None = None,
        replicas: int = 2,
        address: str = HERE,
    ):
        self.method = build()
        self.calibration = calibration
        self.side = side
        self.limits = limits or Limits()
        self.store = StateFolder(folder)
        self._ray, self._ours = connect(address)
        try:
            options = {"num_cpus": 1, "max_restarts": -1, "max_concurrency": AT_ONCE}
            actor = self._ray.remote(**options)(Replica)
            self._how = (self._ray.put(build), side, str(Path(folder).resolve()), self.limits, calibration)
            self.replicas = [actor.remote() for _ in range(replicas)]
            self._ray.get([replica.begin.remote(*self._how) for replica in self.replicas], timeout=START_SECONDS)
        except self._ray.exceptions.GetTimeoutError as error:
            self._disconnect()
            raise RuntimeError(
                f"{replicas} replicas did not start within {START_SECONDS} seconds: each needs a CPU of the cluster; "
                "name fewer with --replicas"
            ) from error
        except BaseException:
            self._disconnect()
            raise
        self.alive = [True] * replicas
        self.owners: dict[str, int] = {}
        self._names = set(self.store.names())
        self._flying = 0  # images that were sent and not answered
        self._refused = 0
        self._closing = False
        self._lock = threading.Lock()

    # --- which replica

    def owner(self, name: str) -> int:
        """Return the replica that a stream belongs to; choose one if it has none."""
        with self._lock:
            if name not in self.owners:
                living = [i for i, lives in enumerate(self.alive) if lives]
                if not living:
                    raise OverloadedError("all replicas are starting again: try again later", 5)
                self.owners[name] = max(living, key=lambda i: _weight(name, i))
            return self.owners[name]

    def _lost(self, number: int) -> None:
        """Let the streams of a replica go to others until it is back."""
        with self._lock:
            if not self.alive[number] or self._closing:
                return
            self.alive[number] = False
            self.owners = {name: owner for name, owner in self.owners.items() if owner != number}
        log.warning("replica %d is lost: its streams go to others", number)
        self._ray.kill(self.replicas[number], no_restart=False)  # if it is only cut off, it must not save any more
        threading.Thread(target=self._await_return, args=(number,), daemon=True).start()

    def _await_return(self, number: int) -> None:
        while not self._closing:
            try:
                self._ray.get(self.replicas[number].begin.remote(*self._how), timeout=START_SECONDS)
                self.alive[number] = True
                return
            except self._ray.exceptions.RayError:
                time.sleep(1)

    # --- what the web uses

    def predict(self, name: str, images: Tensor) -> "Future[Answer]":
        """Queue images for a stream, as Streams does."""
        check_name(name)
        self._check_room(name, len(images))
        with self._lock:
            self._names.add(name)
            self._flying += len(images)
        future = self._send(name, lambda replica: replica.predict.remote(name, images.numpy()))
        future.add_done_callback(lambda _: self._landed(len(images)))
        return future

    def _landed(self, images: int) -> None:
        with self._lock:
            self._flying -= images

    def check_room(self, name: str) -> None:
        """Raise what `predict` would for one image, before it is read."""
        check_name(name)
        self._check_room(name, 1)

    def _check_room(self, name: str, images: int) -> None:
        if self._closing:
            raise ClosedError("the service is stopping")
        reason = None
        if self._flying + images > self.limits.queue_images * len(self.replicas):
            reason = f"{self._flying} images wait already"
        elif name not in self._names and len(self._names) >= self.limits.streams:
            reason = f"there are {len(self._names)} streams already"
        if reason is not None:
            self._refused += 1
            raise OverloadedError(f"{reason}: try again later", 1)

    def names(self) -> list[str]:
        """Return the names of all streams, loaded or saved."""
        with self._lock:
            return sorted(self._names)

    def is_loaded(self, name: str) -> bool:
        """Return whether a stream belongs to a replica now."""
        return name in self.owners

    def report(self, name: str) -> "Future[dict[str, Any]]":
        """Return what is known about a stream."""
        return self._command("report", name)

    def reset(self, name: str) -> "Future[dict[str, Any]]":
        """Let a stream go back to the source model."""
        return self._command("reset", name)

    def freeze(self, name: str, frozen: bool = True) -> "Future[dict[str, Any]]":
        """Let a stream only predict from now on; or, with False, learn again."""
        return self._command("freeze", name, frozen)

    def weights(self, name: str) -> "Future[dict[str, Tensor]]":
        """Return the adapted weights of a stream's network."""
        return self._command("weights", name)

    def _command(self, what: str, name: str, *arguments: Any) -> "Future[Any]":
        if name not in self._names:
            raise UnknownStreamError(name)
        return self._send(name, lambda replica: replica.command.remote(what, name, *arguments))

    def _send(self, name: str, call: Callable[[Any], Any]) -> "Future[Any]":
        """Send a request to the stream's replica, and to another one if that is lost meanwhile."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        tries = itertools.count(1)

        def attempt() -> None:
            try:
                number = self.owner(name)
                call(self.replicas[number]).future().add_done_callback(lambda done: arrived(done, number))
            except Exception as error:
                future.set_exception(error)

        def again(number: int) -> None:
            self._lost(number)
            attempt()

        def arrived(done: "Future[Any]", number: int) -> None:
            error = done.exception()
            answer, refused = (None, None) if error is not None else done.result()
            lost = isinstance(error, self._ray.exceptions.RayActorError) or isinstance(refused, LostError)
            if lost and next(tries) < TRIES:
                threading.Thread(target=again, args=(number,), daemon=True).start()  # in Ray's own thread it would hang
                return
            if error is not None:
                future.set_exception(ClosedError(f"the replica of stream {name!r} is lost: try again later"))
                return
            if refused is None:
                future.set_result(answer)
            else:
                future.set_exception(refused)

        attempt()
        return future

    # --- figures

    def _ask_all(self, what: str) -> list[Any]:
        """Return what each living replica tells; one that does not answer is left out."""
        living = [replica for replica, lives in zip(self.replicas, self.alive, strict=True) if lives]
        asked = [getattr(replica, what).remote() for replica in living]
        found = []
        for reference in asked:
            try:
                found.append(self._ray.get(reference, timeout=ASK_SECONDS))
            except self._ray.exceptions.RayError:
                continue
        return found

    def overview(self) -> list[dict[str, Any]]:
        """Return what is known about each stream, by the replica that it belongs to."""
        found: dict[str, dict[str, Any]] = {name: {"stream": name, "loaded": False} for name in self.names()}
        for reports in self._ask_all("overview"):
            for report in reports:
                if report["loaded"]:
                    found[report["stream"]] = report
        return [found[name] for name in sorted(found)]

    def news(self, name: str, number: str | None = None, told: dict[str, int] | None = None) -> News | None:
        """Return what is new in the live view of a stream; None if it belongs to no replica."""
        owner = self.owners.get(name)
        if owner is None:
            return None
        try:
            return self._ray.get(self.replicas[owner].news.remote(name, number, told), timeout=ASK_SECONDS)
        except self._ray.exceptions.RayError:
            return None

    def _sum(self, name: str, kind: tuple[str, ...]) -> dict[str, Any]:
        found = self._ask_all("figures")
        return {key: sum(figures[name][key] for figures in found) for key in kind}

    @property
    def totals(self) -> dict[str, int]:
        """Counts of all living replicas; a replica that was lost begins again at 0."""
        found = self._sum("totals", TOTALS)
        return {**found, "refused": found["refused"] + self._refused}

    @property
    def busy_seconds(self) -> dict[str, float]:
        """Time spent by all living replicas."""
        return self._sum("busy_seconds", BUSY)

    @property
    def queued_images(self) -> int:
        """Images that were sent to replicas and are not answered."""
        return self._flying

    @property
    def loaded_streams(self) -> int:
        """Streams in the memory of all living replicas."""
        return sum(figures["loaded_streams"] for figures in self._ask_all("figures"))

    @property
    def longest_pause_seconds(self) -> float:
        """The longest pause of any living replica."""
        return max((figures["longest_pause_seconds"] for figures in self._ask_all("figures")), default=0.0)

    @property
    def working(self) -> bool:
        """False if the service is stopping."""
        return not self._closing

    # --- the end

    def close(self) -> None:
        """Accept nothing more, answer what waits, save every stream, and stop all replicas."""
        if self._closing:
            return
        self._closing = True
        self._ask_to_close()
        self._disconnect()

    def _ask_to_close(self) -> None:
        closing = [replica.close.remote() for replica, lives in zip(self.replicas, self.alive, strict=True) if lives]
        for reference in closing:
            try:
                self._ray.get(reference, timeout=START_SECONDS)
            except self._ray.exceptions.RayError:
                log.exception("a replica was lost before its streams were saved")
        for replica in self.replicas:
            self._ray.kill(replica)

    def _disconnect(self) -> None:
        if self._ours:
            self._ray.shutdown()
        self.store.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


AnyStreams = Streams | Cluster


def connect(address: str) -> tuple[Any, bool]:
    """Return ray, connected to a cluster, and whether the connection is ours to end."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("ray is not installed: pip install 'mgtta[ray]', here and on every machine") from error
    if ray.is_initialized():
        return ray, False
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(None if address == HERE else address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: `ray start --head` starts one") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own handler aborts the process
    return ray, True


def _weight(name: str, replica: int) -> bytes:
    return hashlib.sha256(f"{replica} {name}".encode()).digest()
