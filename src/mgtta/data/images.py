"""Encoded images, from anywhere, as uint8 tensors of one size; what is no honest image is refused.

Shapes: (3, H, W), H = W = size.
"""

import io
import math
import os
import warnings

import numpy as np
import torch
from PIL import Image
from torch import Tensor

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
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=FORMATS) as opened:
                if opened.width * opened.height > MAX_PIXELS:
                    raise ValueError(f"claims {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}")
                image = _crop(_rgb(opened), size, crop_pct)
    except Exception as error:  # PIL's decoders fail in many ways
        raise ImageError(f"cannot read image {name}: {_reason(error)}") from error
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _crop(image: Image.Image, size: int, crop_pct: float) -> Image.Image:
    if image.size == (size, size):
        return image
    short = math.floor(size / crop_pct)
    w, h = image.size
    w, h = (short, int(short * h / w)) if w <= h else (int(short * w / h), short)
    if w * h > MAX_PIXELS:  # a sliver, one pixel wide, grows to this
        raise ValueError(f"{image.width} x {image.height} pixels would be resized to {w} x {h}")
    if image.size != (w, h):
        image = image.resize((w, h), Image.Resampling.BICUBIC)
    left, top = round((w - size) / 2), round((h - size) / 2)
    return image.crop((left, top, left + size, top + size))


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return f"not an image (of {', '.join(FORMATS)})"
    return str(error) or type(error).__name__
