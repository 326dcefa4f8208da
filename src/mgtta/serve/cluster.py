"""The streams on a Ray cluster: one front that speaks HTTP, and replicas of a Ray Serve application that compute.

Each replica has streams of its own over one shared state folder. Ray Serve sends all requests of a stream to the same
replica (see affinity.py). When a replica is lost, Ray Serve starts another one. The lost streams go to other replicas,
which load what was saved last, and stay there. A request that was lost is sent again.

Routing only makes it rare that two replicas are asked for one stream. That its state is never changed in two places is
the state folder's doing (see store.py): the replica that loads a stream claims it, and the one that had it before
loads it again before it answers.

The state folder must be the same on all machines, for example on a network file system.
"""

import asyncio
import hashlib
import logging
import os
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
from mgtta.serve.queue import ClosedError, Limits, OverloadedError, UnknownStreamError
from mgtta.serve.store import StateFolder, check_name
from mgtta.serve.stream import Answer
from mgtta.serve.streams import BUSY, TOTALS, Streams

log = logging.getLogger("mgtta.serve")
HERE = "auto"  # the cluster that this machine belongs to, or a new one of this machine only
TRIES = 3  # of a request whose replica is lost
START_SECONDS = 120  # for the replicas to start
STOP_SECONDS = 120  # for a replica to answer what waits, and to save its streams
HEALTH_SECONDS = 5  # between two looks at a replica
LOOK_SECONDS = 5  # for figures of the live view
AT_ONCE = 4096  # requests in a replica
ROUTER: Any = "mgtta.serve.affinity.StickyRouter"
INSTALL = "pip install 'mgtta[serve,ray]', here and on every machine"


class Replica:
    """The streams of one process of the cluster.

    Args:
        build: a list with Ray's reference to the function that makes the method.
    """

    def __init__(self, build: list[Any], side: int, folder: str, limits: Limits, calibration: Calibration | None):
        import ray

        torch.set_num_threads(1)
        method = ray.get(build[0])()
        self.streams = Streams(method, side, folder, limits, calibration=calibration, shared=True)

    async def ask(self, what: str, name: str, *arguments: Any) -> tuple[Any, Exception | None]:
        """Return what a function of Streams gives, or the error that it met. Images are an array."""
        if what == "predict":
            arguments = tuple(torch.from_numpy(images.copy()) for images in arguments)
        try:
            return await asyncio.wrap_future(getattr(self.streams, what)(name, *arguments)), None
        except Exception as error:
            return None, error

    async def news(self, name: str, number: str | None, told: dict[str, int] | None) -> News | None:
        """Return what Streams.news gives."""
        return self.streams.news(name, number, told)

    async def figures(self) -> dict[str, Any]:
        """Return the counts for Prometheus, and what is known about each stream in memory."""
        return {
            "process": os.getpid(),
            "totals": dict(self.streams.totals),
            "busy_seconds": dict(self.streams.busy_seconds),
            "longest_pause_seconds": self.streams.longest_pause_seconds,
            "overview": [report for report in self.streams.overview() if report["loaded"]],
        }

    def check_health(self) -> None:
        """Let Ray Serve replace the replica if its thread has died."""
        if not self.streams.working:
            raise RuntimeError("the streams of this replica do not work")

    def __del__(self) -> None:
        """Answer what waits, and save all streams: Ray Serve calls this before it stops a replica."""
        if hasattr(self, "streams"):
            self.streams.close()


class Cluster:
    """Streams over several replicas; it takes the place of `Streams` for the web.

    Args:
        build: makes the method, in each replica.
        replicas: their number.
        address: of the Ray cluster, such as host:6379.

    Attributes:
        method: a method of the front's own, which answers nothing.
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
        self.replicas = replicas
        self.store = StateFolder(folder)
        self._names = set(self.store.names())
        self._asked: set[str] = set()  # streams that a replica has answered for
        self._flying = 0  # images that were sent and not answered
        self._refused = 0
        self._closing = False
        self._lock = threading.Lock()
        where = str(Path(folder).resolve())
        self.app = f"mgtta-{hashlib.sha256(where.encode()).hexdigest()[:8]}"  # one for each state folder
        self._ray, self._ours = connect(address)
        try:
            self._build = self._ray.put(build)
            arguments = ([self._build], side, where, self.limits, calibration)
            self._handle = deploy(self.app, arguments, replicas)
        except BaseException:
            self._disconnect()
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mgtta-cluster", daemon=True)
        self._thread.start()

    # --- what the web uses

    def predict(self, name: str, images: Tensor) -> "Future[Answer]":
        """Queue images for a stream, as Streams does."""
        check_name(name)
        self._check_room(name, len(images))
        with self._lock:
            self._names.add(name)
            self._flying += len(images)
        future = self._send("predict", name, images.numpy())
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
        if self._flying + images > self.limits.queue_images * self.replicas:
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
        """Return whether a replica has been asked for a stream since the start."""
        return name in self._asked

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
        if self._closing:
            raise ClosedError("the service is stopping")
        return self._send(what, name, *arguments)

    def _send(self, what: str, name: str, *arguments: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(self._ask(what, name, *arguments), self._loop)

    async def _ask(self, what: str, name: str, *arguments: Any) -> Any:
        """Ask the stream's replica, and another one if that is lost meanwhile."""
        lost = self._ray.exceptions.RayActorError
        for _ in range(TRIES):
            try:
                found, refused = await self._handle.options(session_id=name).ask.remote(what, name, *arguments)
            except lost:
                log.warning("the replica of stream %s is lost: the request goes to another one", name)
                continue
            if refused is not None:
                raise refused
            self._asked.add(name)
            return found
        raise ClosedError(f"the replicas of stream {name!r} were lost {TRIES} times: try again later")

    # --- figures

    def _figures(self) -> list[dict[str, Any]]:
        """Return the figures of each replica; one that does not answer is left out."""
        try:
            told = self._handle.broadcast("figures").results(timeout_s=LOOK_SECONDS, return_exceptions=True)
        except Exception as error:  # no replica lives, or Ray Serve has been stopped by another program
            log.warning("the replicas cannot be asked for figures: %s", error)
            return []
        return [figures for figures in told if isinstance(figures, dict)]

    def processes(self) -> list[int]:
        """Return the process number of each replica that lives."""
        return [figures["process"] for figures in self._figures()]

    def overview(self) -> list[dict[str, Any]]:
        """Return what is known about each stream, by the replica that it belongs to."""
        found: dict[str, dict[str, Any]] = {name: {"stream": name, "loaded": False} for name in self.names()}
        for figures in self._figures():
            for report in figures["overview"]:
                found[report["stream"]] = report
        return [found[name] for name in sorted(found)]

    def news(self, name: str, number: str | None = None, told: dict[str, int] | None = None) -> News | None:
        """Return what is new in the live view of a stream; None if no replica has it."""
        if name not in self._asked:
            return None
        try:
            response = self._handle.options(session_id=name).news.remote(name, number, told)
            return response.result(timeout_s=LOOK_SECONDS)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None

    def _sum(self, name: str, kind: tuple[str, ...]) -> dict[str, Any]:
        found = self._figures()
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
        return sum(len(figures["overview"]) for figures in self._figures())

    @property
    def longest_pause_seconds(self) -> float:
        """The longest pause of any living replica."""
        return max((figures["longest_pause_seconds"] for figures in self._figures()), default=0.0)

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
        self._disconnect()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _disconnect(self) -> None:
        from ray import serve

        try:
            stop(self.app)
            if not serve.status().applications:
                serve.shutdown()
        finally:
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
        import ray.serve
    except ImportError as error:
        raise ImportError(f"Ray Serve is not installed ({error.name}): {INSTALL}") from error
    if ray.is_initialized():
        return ray, False
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(None if address == HERE else address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address}: `ray start --head` starts one; if it asks for a token, set "
            "RAY_AUTH_MODE=token"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray's own handler aborts the process
    return ray, True


def deploy(app: str, arguments: tuple[Any, ...], replicas: int) -> Any:
    """Start the replicas, and return Ray Serve's handle to them."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=quiet)  # the front speaks HTTP itself
    stop(app)  # a front that was lost has left it
    router = RequestRouterConfig(request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": 0})
    deployment = serve.deployment(
        name="streams",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=AT_ONCE,
        request_router_config=router,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=STOP_SECONDS,
        logging_config=quiet,
    )(Replica)
    target = serve.RunTarget(deployment.bind(*arguments), name=app, route_prefix=None)
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    end = time.monotonic() + START_SECONDS
    while (status := serve.status().applications[app]).status != "RUNNING":
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(f"the replicas cannot start: {status.message}")
        if time.monotonic() > end:
            raise RuntimeError(
                f"{replicas} replicas did not start within {START_SECONDS} seconds: each needs a CPU of the cluster; "
                "name fewer with --replicas"
            )
        time.sleep(0.1)
    return handle


def stop(app: str) -> None:
    """Stop an application, if it runs; its replicas answer what waits and save their streams.

    Ray Serve waits for a minute only. A replica that has just been lost starts again before it stops.
    """
    from ray import serve

    end = time.monotonic() + START_SECONDS + STOP_SECONDS
    while True:
        try:
            serve.delete(app)
            return
        except TimeoutError:
            if time.monotonic() > end:
                raise
