"""The streams over HTTP.

Every error is JSON, {"error": reason}. An image that cannot be read is answered with a 4xx status, and nothing is
learned from its request.
"""

import asyncio
import hmac
import html
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from safetensors.torch import save
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from mgtta import __version__
from mgtta.data.images import ImageError
from mgtta.serve.cluster import AnyStreams
from mgtta.serve.intake import HttpLimits, Intake
from mgtta.serve.metrics import Metrics
from mgtta.serve.page import LiveView
from mgtta.serve.pictures import TooManyImagesError, batch_of
from mgtta.serve.queue import ClosedError, OverloadedError, UnknownStreamError
from mgtta.serve.store import check_name
from mgtta.serve.stream import Answer, CannotExportError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
BINARY = {"schema": {"type": "string", "format": "binary"}}
PREDICT_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "image/jpeg": BINARY,
            "image/png": BINARY,
            "image/webp": BINARY,
            "application/octet-stream": BINARY,
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"images": {"type": "array", "items": BINARY["schema"]}}}
            },
        },
    }
}


class Prediction(BaseModel):
    """The most probable class of one image."""

    class_: int = Field(alias="class")
    label: str | None
    probability: float


class Predictions(BaseModel):
    """The answer to a request, in the order of its images."""

    stream: str
    predictions: list[Prediction]
    updates: int
    shifted: bool


class Report(BaseModel):
    """What is known about a stream."""

    stream: str
    images: int
    updates: int
    skipped: int
    waiting: int
    dropped: int
    repeated: int
    entropy: float | None
    shifts: int
    recalled: int
    alarms: int
    resting: bool
    frozen: bool
    bytes: int
    loaded: bool


class Web:
    """The endpoints.

    Args:
        labels: the name of each class; None: no names.
        crop_pct: share of an image that the centre crop keeps.
        token: what clients send as a bearer token; None: anyone on this machine may ask.
    """

    def __init__(
        self,
        streams: AnyStreams,
        *,
        labels: Sequence[str] | None,
        crop_pct: float,
        token: str | None,
        limits: HttpLimits,
    ):
        self.streams = streams
        self.labels = labels
        self.crop_pct = crop_pct
        self.token = token
        self.limits = limits
        self.intake = Intake(limits)
        self.metrics = Metrics(streams)
        self.live = LiveView(streams, labels)
        self._decoders = anyio.CapacityLimiter(limits.decoders)
        self._exports = asyncio.Semaphore(1)  # each holds a whole network in memory

    def authorise(
        self, given: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> None:
        """Raise a 401 unless the token is right; the comparison takes the same time for any wrong one."""
        if self.token is None:
            return
        said = given.credentials if given else ""
        if not hmac.compare_digest(said.encode(), self.token.encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, "send the service's token as `Authorization: Bearer TOKEN`", headers)

    async def predict(self, name: str, request: Request) -> Response:
        """Predict one image or several, and learn from them. A new name begins a new stream."""
        self.streams.check_room(_checked(name))  # what will be refused is not read
        most = self.streams.limits.batch_images
        async with self.intake.files(request, most) as files:
            began = time.perf_counter()
            images = await self._decode(files)
        answer = await self._answer(self.streams.predict(name, images))
        self.metrics.seconds.observe(time.perf_counter() - began)
        return JSONResponse(self._told(name, answer))

    async def _decode(self, files: list[tuple[str, bytes]]) -> Tensor:
        def work() -> Tensor:
            return batch_of(
                files,
                side=self.streams.side,
                crop_pct=self.crop_pct,
                max_images=self.streams.limits.batch_images,
                max_pixels=self.limits.image_pixels,
            )

        try:
            return await anyio.to_thread.run_sync(work, limiter=self._decoders)
        except ImageError as error:
            raise HTTPException(400, str(error)) from error
        except TooManyImagesError as error:
            raise HTTPException(413, str(error)) from error

    async def _answer(self, future: "Future[Any]") -> Any:
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            headers = {"Retry-After": "1"}
            raise HTTPException(503, f"no answer within {self.limits.answer_seconds:g} seconds", headers) from None
        except (ClosedError, OverloadedError, UnknownStreamError):
            raise
        except CannotExportError as error:
            raise HTTPException(409, str(error)) from error
        except (ValueError, OSError, RuntimeError) as error:
            raise HTTPException(500, str(error)) from error

    def _told(self, name: str, answer: Answer) -> dict[str, Any]:
        probability, number = answer.probabilities.max(1)
        predictions = [
            {"class": c, "label": self.labels[c] if self.labels else None, "probability": p}
            for c, p in zip(number.tolist(), probability.tolist(), strict=True)
        ]
        return {"stream": name, "predictions": predictions, "updates": answer.updates, "shifted": answer.shifted}

    async def names(self) -> dict[str, Any]:
        """List all streams, in memory or saved."""
        found = [{"stream": name, "loaded": self.streams.is_loaded(name)} for name in self.streams.names()]
        return {"streams": found}

    async def report(self, name: str) -> dict[str, Any]:
        """Tell what is known about a stream."""
        return self._loaded(await self._answer(self.streams.report(_checked(name))))

    async def reset(self, name: str) -> dict[str, Any]:
        """Go back to the source model, and learn again."""
        return self._loaded(await self._answer(self.streams.reset(_checked(name))))

    async def freeze(self, name: str, frozen: bool = True) -> dict[str, Any]:
        """Only predict from now on; with `frozen=false`, learn again."""
        return self._loaded(await self._answer(self.streams.freeze(_checked(name), frozen)))

    async def export(self, name: str) -> Response:
        """Send the adapted weights as safetensors."""
        async with self._exports:
            weights = await self._answer(self.streams.weights(_checked(name)))
            content = await anyio.to_thread.run_sync(lambda: save(weights, {"format": "pt"}))
        headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    def _loaded(self, report: dict[str, Any]) -> dict[str, Any]:
        return {**report, "loaded": self.streams.is_loaded(report["stream"])}

    async def health(self) -> Response:
        """Answer 200 while requests are taken, 503 otherwise."""
        if not self.streams.working:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def figures(self) -> Response:
        """Send figures for Prometheus."""
        text = await anyio.to_thread.run_sync(generate_latest, self.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def create_app(
    streams: AnyStreams,
    *,
    labels: Sequence[str] | None = None,
    crop_pct: float = 0.875,
    token: str | None = None,
    limits: HttpLimits | None = None,
) -> FastAPI:
    """Return the web application; when it stops, it closes the streams. For the arguments see Web."""
    classes = streams.method.model.num_classes
    if labels is not None and len(labels) != classes:
        raise ValueError(f"{len(labels)} labels for {classes} classes: give one for each class")
    web = Web(streams, labels=labels, crop_pct=crop_pct, token=token, limits=limits or HttpLimits())

    @asynccontextmanager
    async def closing(_: FastAPI) -> AsyncIterator[None]:
        yield
        await anyio.to_thread.run_sync(streams.close)

    app = FastAPI(title="mgtta serve", version=__version__, docs_url=None, redoc_url=None, lifespan=closing)
    app.include_router(_endpoints(web))
    app.state.live = web.live
    app.add_api_route("/", web.live.page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/healthz", web.health, methods=["GET"])
    app.add_api_route("/docs", lambda: HTMLResponse(_page(app.openapi())), methods=["GET"], include_in_schema=False)
    _add_errors(app)
    app.add_middleware(Checks, web=web)
    return app


def _endpoints(web: Web) -> APIRouter:
    """Return the routes that need the token, if there is one."""
    router = APIRouter(dependencies=[Depends(web.authorise)])
    stream = "/v1/streams/{name}"
    predict: dict[str, Any] = {"response_model": Predictions, "openapi_extra": PREDICT_BODY}
    router.add_api_route(f"{stream}/predict", web.predict, methods=["POST"], **predict)
    router.add_api_route("/v1/streams", web.names, methods=["GET"])
    router.add_api_route(stream, web.report, methods=["GET"], response_model=Report)
    router.add_api_route(f"{stream}/reset", web.reset, methods=["POST"], response_model=Report)
    router.add_api_route(f"{stream}/freeze", web.freeze, methods=["POST"], response_model=Report)
    router.add_api_route(f"{stream}/export", web.export, methods=["GET"])
    router.add_api_route("/v1/live", web.live.events, methods=["GET"])
    router.add_api_route("/metrics", web.figures, methods=["GET"])
    return router


def _add_errors(app: FastAPI) -> None:
    """Let every error be JSON with its reason."""

    @app.exception_handler(StarletteHTTPException)
    async def of_http(_: Request, error: StarletteHTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(OverloadedError)
    async def of_load(_: Request, error: OverloadedError) -> Response:
        return JSONResponse({"error": str(error)}, 429, headers={"Retry-After": str(error.retry_seconds)})

    @app.exception_handler(ClosedError)
    async def of_closing(_: Request, error: ClosedError) -> Response:
        return JSONResponse({"error": str(error)}, 503, headers={"Retry-After": "1"})

    @app.exception_handler(UnknownStreamError)
    async def of_names(_: Request, error: UnknownStreamError) -> Response:
        return JSONResponse({"error": f"there is no stream {error.args[0]!r}: its first images begin it"}, 404)


class Checks:
    """Refuses requests that a web page of another site has sent, and counts all requests by status."""

    def __init__(self, app: ASGIApp, web: Web):
        self.app = app
        self.web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.web.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        app = self.app
        if _is_foreign(Headers(scope=scope), self.web.token):
            app = JSONResponse({"error": "this request comes from the page of another site"}, 403)
        await app(scope, receive, counted)


def _is_foreign(headers: Headers, token: str | None) -> bool:
    """Return whether a browser sends this for another site. Without a token, only names of this machine are asked."""
    host = headers.get("host", "")
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return True
    return token is None and urlsplit(f"//{host}").hostname not in LOCAL_HOSTS


def _checked(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def _page(schema: dict[str, Any]) -> str:
    """Return the list of all endpoints as a page that loads nothing else."""
    rows = []
    for path, methods in schema["paths"].items():
        for method, what in methods.items():
            text = html.escape(what.get("description", ""))
            rows.append(f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td><td>{text}</td></tr>")
    title = html.escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font-family:sans-serif;margin:2em}td{padding:.3em 1em .3em 0}</style>"
        f'<h1>{title}</h1><table>{"".join(rows)}</table><p><a href="openapi.json">openapi.json</a></p></html>'
    )
