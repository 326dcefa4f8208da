"""Images as clients send them -> a batch. Nothing is written to disk.

Shapes: n images of a request, uint8 (n, 3, side, side).
"""

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mgtta.data.images import ImageError, decode

NPY = b"\x93NUMPY"  # how a .npy file begins
THUMBNAIL_PIXELS = 64  # the longer side, at most


class TooManyImagesError(ValueError):
    """A request has more images than are taken."""


def batch_of(
    files: Sequence[tuple[str, bytes]], *, side: int, crop_pct: float, max_images: int, max_pixels: int
) -> Tensor:
    """Return all images of a request.

    Args:
        files: name and content of each: JPEG, PNG, WebP, or .npy with one or several images.

    Raises:
        ImageError: a file is not an image; the message says which one, and why.
        TooManyImagesError: there are more than `max_images`.
    """
    found: list[Tensor] = []
    count = 0
    for name, content in files:
        if content.startswith(NPY):
            images = _npy(name, content, side)
        else:
            images = decode(content, name=name, size=side, crop_pct=crop_pct, max_pixels=max_pixels)[None]
        count += len(images)
        if count > max_images:
            raise TooManyImagesError(f"more than {max_images} images in a request: send them in several")
        found.append(images)
    if not count:
        raise ImageError("there is no image in the request: send one as the body, or several as multipart files")
    return torch.cat(found)


def thumbnail(image: Tensor) -> str:
    """Return an image (3, H, W), uint8, as a small JPEG in a data address, which a page can show."""
    picture = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _npy(name: str, content: bytes, side: int) -> Tensor:
    """Return the images of a .npy file: uint8 (n, side, side, 3) or (side, side, 3)."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read_header(file)
    except (ValueError, KeyError, EOFError) as error:
        raise _bad_npy(name, f"its header is damaged ({error})") from error
    if dtype != np.uint8 or len(shape) not in (3, 4) or tuple(shape[-3:]) != (side, side, 3):
        raise _bad_npy(name, f"it must be uint8 (n, {side}, {side}, 3), not {dtype} {tuple(shape)}")
    pixels = content[file.tell() :]
    if len(pixels) != math.prod(shape):
        raise _bad_npy(name, f"{math.prod(shape):,} bytes were expected after its header, not {len(pixels):,}")
    order = "F" if fortran_order else "C"
    array = np.frombuffer(pixels, np.uint8).reshape(shape, order=order)  # type: ignore[call-overload]
    return torch.from_numpy(np.array(array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2), order="C"))


def _bad_npy(name: str, reason: str) -> ImageError:
    return ImageError(f"cannot read image {name}: {reason}", reason)
