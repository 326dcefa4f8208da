"""From a model to a service that listens."""

import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from mgtta.adaptation.estimate import Calibration
from mgtta.adaptation.wrapper import Adapting
from mgtta.data.embedded import images_for
from mgtta.methods.registry import recipe
from mgtta.models.classifier import Classifier
from mgtta.serve.app import LOCAL_HOSTS, create_app
from mgtta.serve.cluster import AnyStreams, Cluster
from mgtta.serve.page import LiveView
from mgtta.serve.queue import Limits
from mgtta.serve.streams import Streams
from mgtta.serve.template import template

CONNECTIONS = 1024  # at the same time; more get a 503
DRAIN_SECONDS = 60  # for open requests, after a signal to stop


class Server(uvicorn.Server):
    """A server that tells viewers of the live view to leave before it waits for open requests."""

    def __init__(self, config: uvicorn.Config, live: LiveView):
        super().__init__(config)
        self.live = live

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to accept connections, wait for open requests, and stop the application."""
        self.live.stopping = True
        await super().shutdown(sockets)


def serve(
    model: Classifier,
    method: str,
    state: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    labels: Sequence[str] | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    settings: dict[str, Any] | None = None,
    calibration: Calibration | None = None,
    ray: str | None = None,
    replicas: int = 2,
    started: Callable[[str], object] = print,
) -> None:
    """Serve until a signal to stop; then answer what waits, save all streams and return.

    Args:
        state: folder for the states of all streams.
        port: 0 for any that is free.
        settings: of the method.
        calibration: what `mgtta.calibrate` gave; with it the live view estimates the accuracy.
        ray: address of a Ray cluster that computes, see cluster.py; None: this process does.
        replicas: processes of that cluster.
        started: called with the address when it is known.
    """
    if token is None and host not in LOCAL_HOSTS:
        raise ValueError(f"anyone who reaches {host} could use the service: name a file with a token, --token FILE")
    _check_device(model, ray)
    side, crop_pct = model.input_size
    build = partial(template, method, model, **settings or {})
    with _listen(host, port) as listening, _streams(build, side, state, limits, calibration, ray, replicas) as streams:
        app = create_app(streams, labels=labels, crop_pct=crop_pct, token=token)
        config = uvicorn.Config(
            app,
            log_level="warning",
            ws="none",
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        started(f"http://{_address(host)}:{listening.getsockname()[1]}")
        Server(config, app.state.live).run(sockets=[listening])


def _streams(
    build: Callable[[], Adapting],
    side: int,
    state: Path,
    limits: Limits | None,
    calibration: Calibration | None,
    ray: str | None,
    replicas: int,
) -> AnyStreams:
    if ray is None:
        return Streams(build(), side, state, limits, calibration=calibration)
    return Cluster(build, side, state, limits, calibration=calibration, replicas=replicas, address=ray)


def _check_device(model: Classifier, ray: str | None) -> None:
    if ray is not None and next(model.parameters()).device.type != "cpu":
        raise ValueError("replicas on a Ray cluster compute on CPUs: give --device cpu with --ray")


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; raise an error that names the port if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once only if it is named
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(CONNECTIONS)
    except OSError as error:
        found.close()
        raise OSError(f"cannot listen on {host}, port {port} ({error.strerror}): name another --port") from error
    return found


def _address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def defaults_for_embedded(model: str, method: str) -> tuple[list[str], dict[str, Any]]:
    """Return labels and settings for a shipped model; images are not mirrored: left and right matter to characters."""
    settings = {"mirror": False} if "mirror" in recipe(method).settings else {}
    return list(images_for(model).classes), settings


def read_labels(path: Path) -> list[str]:
    """Return the labels in a file, one in a line."""
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def read_token(path: Path) -> str:
    """Return the token in a file."""
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"{path} is empty: write a long random token into it")
    return token
