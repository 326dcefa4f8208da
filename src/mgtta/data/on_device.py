"""JPEGs decoded, resized and cropped on a GPU, for streams that ask for it.

nvJPEG's pixels differ from the CPU's by some levels, so a stream that is decoded on a GPU has other images than the
same stream on a CPU. What a GPU does not decode is read as always: other formats, colours that are not RGB or grey, and
files that its decoder rejects, about which the CPU decides.

Shapes: a file is a tensor of its bytes, (n,) uint8; images are (3, size, size) uint8.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mgtta.data.images import ImageError, crop, jpeg_bytes

Place = tuple[Any, int]  # a data set, and the number of an image in it


def file_or_image(dataset: Any, i: int) -> tuple[Tensor, Any]:
    """Return the file of image i if a GPU decodes it, or else the image; and its label."""
    if not hasattr(dataset, "encoded"):
        return dataset[i]
    file, name = dataset.encoded(i)
    found = jpeg_bytes(file, name=name)
    if found is None:
        return dataset[i]
    return found, -1 if dataset.labels is None else dataset.labels[i]


def decoded(files: Sequence[Tensor], places: Sequence[Place], device: torch.device) -> list[Tensor | ImageError]:
    """Return the image of each file on the device, or the error of one that cannot be read.

    Args:
        files: images among them are only moved.
        places: where each of them is from.
    """
    from mgtta._lib.timm import torchvision  # it takes a while, and only this needs it

    raw = [file for file in files if file.ndim == 1]
    try:
        pixels = iter(torchvision.io.decode_jpeg(raw, torchvision.io.ImageReadMode.RGB, device) if raw else [])
    except RuntimeError:  # one bad file spoils them all
        return [_read_here(*place, device) for place in places]
    found: list[Tensor | ImageError] = []
    for file, (dataset, _) in zip(files, places, strict=True):
        image = _cropped(next(pixels), dataset) if file.ndim == 1 else file.to(device)
        found.append(image)
    return found


def _cropped(pixels: Tensor, dataset: Any) -> Tensor:
    """Return the centre of an image, in the size that the data set has."""
    if pixels.shape[1:] == (dataset.size, dataset.size):
        return pixels
    found = crop(pixels.float(), dataset.size, dataset.crop_pct)
    return found.round().clamp(0, 255).to(torch.uint8)


def _read_here(dataset: Any, i: int, device: torch.device) -> Tensor | ImageError:
    """Return an image that the CPU decodes."""
    try:
        return dataset[i][0].to(device)
    except ImageError as error:
        return error
