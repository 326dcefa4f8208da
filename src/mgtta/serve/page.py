"""The live view: a page that needs no other file, and the events that it draws.

The page itself holds no data, so anyone may load it. What it shows comes from `/v1/live`, which needs the token if
there is one. Its policy lets it load nothing else.
"""

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import Any

import anyio
from fastapi import HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse

from mgtta import __version__
from mgtta._lib.names import spelled
from mgtta.serve.cluster import AnyStreams
from mgtta.serve.live import Picture, Prediction

VIEWERS = 32  # at the same time
EVENT_SECONDS = 0.5  # between two looks at the streams
QUIET_SECONDS = 15.0  # after which a viewer is told that the service is still there


class LiveView:
    """The page and its events.

    Attributes:
        stopping: True ends the events, so that the service can stop.
    """

    def __init__(self, streams: AnyStreams, labels: Sequence[str] | None):
        self.streams = streams
        self.labels = labels
        self.stopping = False
        self._viewers = 0
        self._page, self._headers = _page()

    async def page(self) -> HTMLResponse:
        """Send the live view."""
        return HTMLResponse(self._page, headers=self._headers)

    async def events(self, stream: str | None = None) -> StreamingResponse:
        """Send what happens, as server-sent events: all streams in brief, and one of them in full."""
        if self._viewers >= VIEWERS:
            raise HTTPException(429, f"{VIEWERS} viewers are watching already", {"Retry-After": "10"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not hold events back
        return StreamingResponse(self.told(stream), media_type="text/event-stream", headers=headers)

    async def told(self, name: str | None) -> AsyncIterator[str]:
        """Yield the events of one viewer, who looks at the stream of this name."""
        self._viewers += 1
        brief = Brief(self.streams)
        full = Full(self.streams, name, self.labels)
        quiet_since = time.monotonic()
        try:
            yield _event("about", self._about())
            while self.streams.working and not self.stopping:
                for kind, look in (("streams", brief.news), ("stream", full.news)):
                    news = await anyio.to_thread.run_sync(look)
                    if news is not None:
                        yield _event(kind, news)
                        quiet_since = time.monotonic()
                if time.monotonic() - quiet_since > QUIET_SECONDS:
                    yield ": still here\n\n"
                    quiet_since = time.monotonic()
                await asyncio.sleep(EVENT_SECONDS)
        finally:
            self._viewers -= 1

    def _about(self) -> dict[str, Any]:
        method = self.streams.method
        calibration = self.streams.calibration
        error = None if calibration is None else calibration.error
        return {
            "model": method.model.name,
            "method": spelled(method.name),
            "version": __version__,
            "error_points": error,
        }


class Brief:
    """All streams in brief, for one viewer: each is told again when something about it has changed."""

    def __init__(self, streams: AnyStreams):
        self.streams = streams
        self._told: dict[str, dict[str, Any]] | None = None

    def news(self) -> list[dict[str, Any]] | None:
        """Return the streams that have changed; None if there are none. The first time, return all."""
        now = {report["stream"]: short(report) for report in self.streams.overview()}
        before = self._told
        self._told = now
        if before is None:
            return list(now.values())
        changed = [report for name, report in now.items() if before.get(name) != report]
        return changed or None


class Full:
    """One stream in full, for one viewer."""

    def __init__(self, streams: AnyStreams, name: str | None, labels: Sequence[str] | None):
        self.streams = streams
        self.name = name
        self.labels = labels
        self._number: str | None = None
        self._told: dict[str, int] | None = None

    def news(self) -> dict[str, Any] | None:
        """Return what is new; None if nothing is."""
        if self.name is None:
            return None
        news = self.streams.news(self.name, self._number, self._told)
        if news is None or (not news.fresh and news.told == self._told):
            return None
        self._number = news.number
        self._told = news.told
        return {
            "stream": self.name,
            "fresh": news.fresh,
            "points": [short(point._asdict()) for point in news.points],
            "marks": [mark._asdict() for mark in news.marks],
            "pictures": [self._picture(picture) for picture in news.pictures],
        }

    def _picture(self, picture: Picture) -> dict[str, Any]:
        named = {"before": self._named(picture.before), "after": self._named(picture.after)}
        return {"image": picture.image, "thumbnail": picture.thumbnail, **named}

    def _named(self, prediction: Prediction) -> dict[str, Any]:
        label = self.labels[prediction.number] if self.labels else f"class {prediction.number}"
        return {"label": label, "probability": round(prediction.probability, 3)}


def short(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with at most three decimals."""
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def _event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _page() -> tuple[str, dict[str, str]]:
    """Return the page with its style and script in it, and the headers that it is sent with."""
    folder = resources.files("mgtta.serve")
    html, style, script = (
        folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return html.replace("STYLE", style).replace("SCRIPT", script), headers


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
