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
    found: list[Tensor | ImageError] = [file if file.ndim == 1 else file.to(device) for file in files]
    raw = [k for k, file in enumerate(files) if file.ndim == 1]
    if not raw:
        return found
    try:
        images = _decoded_there([files[k] for k in raw], [places[k][0] for k in raw], device)
    except (RuntimeError, ValueError):  # one bad file spoils them all
        return [_read_here(*place, device) for place in places]
    for k, image in zip(raw, images, strict=True):
        found[k] = image
    return found


def _decoded_there(files: list[Tensor], datasets: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Return images that the device decodes; those of one size are resized together."""
    from mgtta._lib.timm import torchvision  # it takes a while, and only this needs it

    pixels = torchvision.io.decode_jpeg(files, torchvision.io.ImageReadMode.RGB, device)
    alike: dict[Any, list[int]] = {}
    for k, dataset in enumerate(datasets):
        alike.setdefault((pixels[k].shape, dataset.size, dataset.crop_pct), []).append(k)
    found = list(pixels)
    for (_, size, crop_pct), group in alike.items():
        images = _cropped(torch.stack([pixels[k] for k in group]), size, crop_pct)
        for k, image in zip(group, images, strict=True):
            found[k] = image
    return found


def _cropped(images: Tensor, size: int, crop_pct: float) -> Tensor:
    """Return the centres (n, 3, size, size) of images (n, 3, H, W), resized as `decode` does."""
    if images.shape[2:] == (size, size):
        return images
    found = crop(images.flatten(0, 1).float(), size, crop_pct)  # all channels of all images, as of one
    return found.round().clamp(0, 255).to(torch.uint8).unflatten(0, (len(images), 3))


def _read_here(dataset: Any, i: int, device: torch.device) -> Tensor | ImageError:
    """Return an image that the CPU decodes."""
    try:
        return dataset[i][0].to(device)
    except ImageError as error:
        return error
