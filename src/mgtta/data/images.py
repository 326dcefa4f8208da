"""Reads encoded images. This is the only file that opens one: every other part of mgtta calls it.

Only the formats in FORMATS are read, up to MAX_BYTES and MAX_PIXELS. Everything else is rejected with an ImageError.

Shapes: pixels are (H, W, 3) uint8 arrays; decoded images are (3, size, size) uint8 tensors.
"""

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

try:
    import simplejpeg
except (ImportError, ValueError):  # not installed, or built for another numpy: PIL gives the same pixels, more slowly
    simplejpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM")  # PIL never tries its other parsers
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm")
OTHER_EXTENSIONS = ("tif", "tiff", "avif", "heic", "heif", "jp2", "jxl", "exr", "tga", "pgm", "pfm", "jfif", "ico")
MAX_PIXELS = 89_478_485  # PIL's own limit, above which it warns: here it is an error
MAX_BYTES = 256 * 2**20  # of one encoded image


class ImageError(ValueError):
    """An image that cannot be read; the message names it.

    Attributes:
        reason: the message without the image's name.
    """

    def __init__(self, message: str, reason: str | None = None):
        super().__init__(message)
        self.reason = reason or message


def is_image(name: str) -> bool:
    """Return whether a file name looks like an image that can be read; hidden files do not."""
    return _extension(name) in EXTENSIONS


def is_other_image(name: str) -> bool:
    """Return whether a file name looks like an image of a format that is not read, such as TIFF."""
    return _extension(name) in OTHER_EXTENSIONS


def _extension(name: str) -> str | None:
    base = os.path.basename(name)
    if base.startswith("."):  # such as the files that some archivers leave behind
        return None
    return base.rpartition(".")[2].lower()


def left_out(files: Sequence[str]) -> str:
    """Return a remark for an error about image files whose format is not read, or "" if there are none."""
    if not files:
        return ""
    return (
        f", but left out {len(files)} image file(s) of other formats ({files[0]}, ...): "
        f"only {', '.join(FORMATS)} are read; convert them, for example to PNG"
    )


def warn_left_out(files: Sequence[str], where: str | os.PathLike) -> None:
    """Warn once for all image files of a folder or archive whose format is not read."""
    if files:
        warnings.warn(f"images of {os.fspath(where)} are read{left_out(files)}", stacklevel=3)


def read_image(file: bytes | str | os.PathLike, *, name: str) -> np.ndarray:
    """Return the pixels of an image at its own size: (H, W, 3) uint8, which may be read-only.

    Args:
        file: the encoded image, or the path of its file.
        name: what an error calls the image.
    """
    with _rejections(name):
        return _read(file)


def decode(
    file: bytes | str | os.PathLike,
    *,
    name: str,
    size: int = 224,
    crop_pct: float = 0.875,
    max_pixels: int | None = None,
) -> Tensor:
    """Return the image as uint8 (3, size, size).

    An image of exactly that size is not changed. The shorter side of any other is resized to size / crop_pct
    (bicubic), and its centre is cropped.

    Args:
        file: the encoded image, or the path of its file.
        name: what an error calls the image.
        max_pixels: that an image may have, before and after it is resized; by default MAX_PIXELS.
    """
    with _rejections(name):
        pixels = torch.from_numpy(_read(file, max_pixels)).permute(2, 0, 1)
        return crop(pixels, size, crop_pct, max_pixels).clone(memory_format=torch.contiguous_format)


def jpeg_bytes(file: bytes | str | os.PathLike, *, name: str) -> Tensor | None:
    """Return the bytes of a JPEG in RGB or grey, (n,) uint8, within the limits by its header; None for other images."""
    with _rejections(name), _opened(file) as (image, encoded):
        if image.format != "JPEG" or image.mode not in ("RGB", "L"):
            return None
        encoded.seek(0)
        return torch.frombuffer(bytearray(encoded.read()), dtype=torch.uint8)


@contextlib.contextmanager
def _rejections(name: str) -> Iterator[None]:
    """Turn any error inside the block into an ImageError that names the image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's remarks on odd metadata; _read checks the size itself
            yield
    except Exception as error:  # PIL's decoders fail in many ways
        reason = _reason(error)
        raise ImageError(f"cannot read image {name}: {reason}", reason) from error


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"not an image of a format that is read ({', '.join(FORMATS)})"
    return str(error) or type(error).__name__


def _read(file: bytes | str | os.PathLike, max_pixels: int | None = None) -> np.ndarray:
    with _opened(file, max_pixels) as (image, encoded):
        return _pixels(image, encoded)


@contextlib.contextmanager
def _opened(file: bytes | str | os.PathLike, max_pixels: int | None = None) -> Iterator[tuple[Image.Image, BinaryIO]]:
    """Open an image whose size, in bytes and by its header in pixels, is within the limits."""
    length = len(file) if isinstance(file, bytes) else os.path.getsize(file)
    if length > MAX_BYTES:
        raise ValueError(f"{length:,} bytes, more than {MAX_BYTES:,}")
    most = max_pixels or MAX_PIXELS
    with (
        io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb") as encoded,
        Image.open(encoded, formats=FORMATS) as image,
    ):
        if image.width * image.height > most:
            raise ValueError(f"claims {image.width} x {image.height} pixels, more than {most:,}")
        yield image, encoded


def _pixels(image: Image.Image, encoded: BinaryIO) -> np.ndarray:
    """Return the pixels in 8 bits a channel: (H, W, 3), which may be read-only."""
    if simplejpeg is not None and image.format == "JPEG" and image.mode in ("RGB", "L"):
        with contextlib.suppress(Exception):  # at any error or warning, PIL decides
            return _jpeg(encoded, image.height, image.width)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bits(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of unknown range; save it with 8 bits a channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode != "RGB":
        image = image.convert("RGB")
    return np.asarray(image)


def _from_16_bits(image: Image.Image) -> np.ndarray:
    """Return the upper 8 of 16 bits, as PIL does for colour images; its own conversion of grey ones clips at 255."""
    levels = np.asarray(image) >> 8
    grey = levels.clip(0, 255).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _jpeg(encoded: BinaryIO, h: int, w: int) -> np.ndarray:
    """Return the same pixels as PIL, bit for bit, or raise an error."""
    encoded.seek(0)
    pixels = np.empty((h, w, 3), np.uint8)  # the size that was checked: a larger image is rejected
    if simplejpeg.decode_jpeg(encoded.read(), buffer=pixels, strict=True).shape != pixels.shape:
        raise ValueError("not the size that PIL has found")
    return pixels


def crop(image: Tensor, size: int, crop_pct: float, max_pixels: int | None = None) -> Tensor:
    """Return the centre (3, size, size) of an image (3, H, W) whose shorter side is resized to size / crop_pct."""
    h, w = image.shape[1:]
    if (h, w) == (size, size):
        return image
    short = math.floor(size / crop_pct)
    if w <= h:
        new_h = int(short * h / w)
        new_w = short
    else:
        new_h = short
        new_w = int(short * w / h)
    if new_h * new_w > (max_pixels or MAX_PIXELS):  # an image that is one pixel wide grows to this
        raise ValueError(f"{w} x {h} pixels would be resized to {new_w} x {new_h}")
    if (h, w) != (new_h, new_w):  # the same as PIL up to single levels, and faster
        image = F.interpolate(image[None], (new_h, new_w), mode="bicubic", antialias=True)[0]
    top = round((new_h - size) / 2)
    left = round((new_w - size) / 2)
    return image[:, top : top + size, left : left + size]
