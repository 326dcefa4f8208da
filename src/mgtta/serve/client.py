"""A client of the service. It needs only the standard library, and numpy for arrays."""

import io
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

Picture = bytes | str | os.PathLike | Any  # an encoded image, its file, or an array


class ServiceError(RuntimeError):
    """The service has refused a request.

    Attributes:
        status: of the reply.
        retry_seconds: after which the same request may be accepted; None if it will not be.
    """

    def __init__(self, status: int, reason: str, retry_seconds: int | None):
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.retry_seconds = retry_seconds


class Client:
    """Calls a service at an address such as http://127.0.0.1:8000. One may be used from several threads."""

    def __init__(self, address: str = "http://127.0.0.1:8000", token: str | None = None, timeout_seconds: float = 60):
        self.address = address.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._opener = build_opener(ProxyHandler({}))  # proxies of the environment are for other machines

    def predict(self, stream: str, pictures: Picture | Sequence[Picture]) -> dict[str, Any]:
        """Return the service's answer to one picture or a list of them.

        Args:
            pictures: encoded images as bytes, paths of files, or uint8 arrays (side, side, 3).
        """
        several = pictures if isinstance(pictures, list | tuple) else [pictures]
        boundary = uuid.uuid4().hex
        parts = []
        for i, picture in enumerate(several):
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="{i}"\r\n\r\n'
            parts += [head.encode(), _content(picture), b"\r\n"]
        parts.append(f"--{boundary}--\r\n".encode())
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        return self._json("POST", f"{_path(stream)}/predict", b"".join(parts), headers)

    def streams(self) -> list[dict[str, Any]]:
        """Return the names of all streams, and whether they are in memory."""
        return self._json("GET", "/v1/streams")["streams"]

    def report(self, stream: str) -> dict[str, Any]:
        """Return what is known about a stream."""
        return self._json("GET", _path(stream))

    def reset(self, stream: str) -> dict[str, Any]:
        """Let a stream go back to the source model."""
        return self._json("POST", f"{_path(stream)}/reset")

    def freeze(self, stream: str, frozen: bool = True) -> dict[str, Any]:
        """Let a stream only predict; or, with False, learn again."""
        query = urlencode({"frozen": str(frozen).lower()})
        return self._json("POST", f"{_path(stream)}/freeze?{query}")

    def export(self, stream: str, path: str | os.PathLike) -> None:
        """Write the adapted weights of a stream to a .safetensors file."""
        Path(path).write_bytes(self._send("GET", f"{_path(stream)}/export"))

    def _json(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
        return json.loads(self._send(method, path, body, headers))

    def _send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
        request = Request(self.address + path, body, {**self._headers, **(headers or {})}, method=method)
        try:
            with self._opener.open(request, timeout=self.timeout_seconds) as reply:
                return reply.read()
        except HTTPError as error:
            with error:
                retry = error.headers.get("Retry-After", "")
                seconds = int(retry) if retry.isdigit() else None
                raise ServiceError(error.code, _reason(error.read()), seconds) from None


def _path(stream: str) -> str:
    return f"/v1/streams/{quote(stream, safe='')}"


def _content(picture: Picture) -> bytes:
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, str | os.PathLike):
        return Path(picture).read_bytes()
    import numpy as np

    file = io.BytesIO()
    np.save(file, np.asarray(picture), allow_pickle=False)
    return file.getvalue()


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
