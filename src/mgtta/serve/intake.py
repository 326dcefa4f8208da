"""The body of a request -> files in memory, within limits of bytes and time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

RETRY_SECONDS = 1


@dataclass(frozen=True)
class HttpLimits:
    """What one request may cost."""

    body_bytes: int = 32 * 2**20
    bodies_bytes: int = 256 * 2**20  # of all requests that are being read or decoded
    image_pixels: int = 16_000_000  # of an image before it is resized
    read_seconds: float = 30.0  # for the whole body
    answer_seconds: float = 30.0  # from the whole body to the answer
    decoders: int = 2  # images that are decoded at the same time


class _InMemory(MultiPartParser):
    """A parser that never writes to disk: bodies are limited before they get here."""

    spool_max_size = 2**62  # bytes


class Intake:
    """Reads bodies, and counts the bytes of those in memory."""

    def __init__(self, limits: HttpLimits):
        self.limits = limits
        self.bytes = 0

    @asynccontextmanager
    async def files(self, request: Request, max_files: int) -> AsyncIterator[list[tuple[str, bytes]]]:
        """Yield name and content of each file of a request; its bytes count until the block ends."""
        claimed = request.headers.get("content-length", "0")
        if claimed.isdigit() and int(claimed) > self.limits.body_bytes:
            raise self._too_large()
        taken = [0]
        try:
            async with asyncio.timeout(self.limits.read_seconds):
                found = await _read(request, self._counted(request, taken), max_files)
            yield found
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self.limits.read_seconds:g} seconds") from None
        finally:
            self.bytes -= taken[0]

    async def _counted(self, request: Request, taken: list[int]) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a body as they come, as long as there is room for them."""
        async for chunk in request.stream():
            taken[0] += len(chunk)
            self.bytes += len(chunk)
            if taken[0] > self.limits.body_bytes:
                raise self._too_large()
            if self.bytes > self.limits.bodies_bytes:
                headers = {"Retry-After": str(RETRY_SECONDS)}
                raise HTTPException(429, "too many images are being read: try again later", headers)
            yield chunk

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than {self.limits.body_bytes:,} bytes")


async def _read(request: Request, body: AsyncGenerator[bytes, None], max_files: int) -> list[tuple[str, bytes]]:
    """Return the files of a multipart body, or the whole body as one file."""
    try:
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            parts = [chunk async for chunk in body]
            return [("body", b"".join(parts))]
        form = await _InMemory(request.headers, body, max_files=max_files, max_fields=max_files).parse()
    except MultiPartException as error:
        status = 413 if "Too many" in error.message else 400
        raise HTTPException(status, error.message) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the client has gone") from error
    files = []
    for _, value in form.multi_items():
        if isinstance(value, UploadFile):
            files.append((value.filename or "file", await value.read()))
            await value.close()
    return files
