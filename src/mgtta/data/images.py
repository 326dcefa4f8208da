"""Encoded images, from anywhere, as uint8 tensors of one size; what is no honest image is refused.

Shapes: (3, H, W), H = W = size.
"""

import contextlib
import io
import math
import os
import warnings
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

try:
    import simplejpeg
except (ImportError, ValueError):  # an extra, or built for another numpy: PIL gives the same pixels, later
    simplejpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM")  # no other parser of PIL's is ever tried
EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm")
MAX_PIXELS = 89_478_485  # PIL's own limit, above which it warns: here it is an error
MAX_BYTES = 256 * 2**20  # of one encoded image


class ImageError(ValueError):
    """An image that cannot be read; the message names it."""


def is_image(name: str) -> bool:
    """Whether a file name looks like an image; hidden files, such as archive leftovers, do not."""
    base = os.path.basename(name)
    return not base.startswith(".") and base.rpartition(".")[2].lower() in EXTENSIONS


def decode(file: bytes | str | os.PathLike, *, name: str, size: int = 224, crop_pct: float = 0.875) -> Tensor:
    """The image as uint8 (3, size, size).

    An image of that very size passes untouched. Any other has its shorter side resized to size / crop_pct
    (bicubic) and its centre cropped.

    Args:
        name: what an error calls the image.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's remarks on odd metadata; the bomb limit is checked below
            length = len(file) if isinstance(file, bytes) else os.path.getsize(file)
            if length > MAX_BYTES:
                raise ValueError(f"{length:,} bytes, more than {MAX_BYTES:,}")
            with (
                io.BytesIO(file) if isinstance(file, bytes) else open(file, "rb") as encoded,
                Image.open(encoded, formats=FORMATS) as opened,
            ):
                if opened.width * opened.height > MAX_PIXELS:
                    raise ValueError(f"claims {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
                pixels = torch.from_numpy(_pixels(opened, encoded)).permute(2, 0, 1)
                return _crop(pixels, size, crop_pct).clone(memory_format=torch.contiguous_format)
    except Exception as error:  # PIL's decoders fail in many ways
        raise ImageError(f"cannot read image {name}: {_reason(error)}") from error


def _pixels(image: Image.Image, encoded: BinaryIO) -> np.ndarray:
    """(H, W, 3), which may be read-only."""
    if simplejpeg is not None and image.format == "JPEG" and image.mode in ("RGB", "L"):
        with contextlib.suppress(Exception):  # any doubt, a mere warning too: PIL judges
            return _jpeg(encoded, image.height, image.width)
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _jpeg(encoded: BinaryIO, h: int, w: int) -> np.ndarray:
    """What PIL would give, bit for bit, or an error."""
    encoded.seek(0)
    pixels = np.empty((h, w, 3), np.uint8)  # the size that was checked: what turns out to be larger is refused
    if simplejpeg.decode_jpeg(encoded.read(), buffer=pixels, strict=True).shape != pixels.shape:
        raise ValueError("not the size that PIL has found")
    return pixels


def _crop(image: Tensor, size: int, crop_pct: float) -> Tensor:
    h, w = image.shape[1:]
    if (h, w) == (size, size):
        return image
    short = math.floor(size / crop_pct)
    new_h, new_w = (int(short * h / w), short) if w <= h else (short, int(short * w / h))
    if new_h * new_w > MAX_PIXELS:  # a sliver, one pixel wide, grows to this
        raise ValueError(f"{w} x {h} pixels would be resized to {new_w} x {new_h}")
    if (h, w) != (new_h, new_w):  # as PIL does but for a level here and there, and faster
        image = F.interpolate(image[None], (new_h, new_w), mode="bicubic", antialias=True)[0]
    top, left = round((new_h - size) / 2), round((new_w - size) / 2)
    return image[:, top : top + size, left : left + size]


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"not an image (of {', '.join(FORMATS)})"
    return str(error) or type(error).__name__
