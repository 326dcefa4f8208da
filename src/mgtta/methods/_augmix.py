"""AugMix views of one image, as MEMO takes them: a random crop, mixed with three chains of weak operations.

Hendrycks et al., ICLR 2020; operations and strengths are those of MEMO's code, at its severity 1 of 10. They are
computed in 8 bits, as there. Ours: shears are around the centre of the image.
"""

import math

import torch
from torch import Tensor

from mgtta._lib.timm import transforms

CHAINS = 3
LONGEST = 3  # operations of a chain
GREY = 128.0  # where an operation leaves an image empty
OPERATIONS = (
    *("autocontrast", "equalize", "posterize", "solarize"),
    *("rotate", "shear_x", "shear_y", "translate_x", "translate_y"),
)
F = transforms.functional


def augmix(image: Tensor, random: torch.Generator) -> Tensor:
    """Return a random view of an image (channels, H, W) in [0, 1], in the same shape and range.

    All random numbers are drawn from `random`, a generator on the CPU.
    """
    if len(image) not in (1, 3):
        raise ValueError(f"AugMix changes the colours of images with 1 or 3 channels, not {len(image)}")
    start = (crop_and_flip(image, random).clamp(0, 1) * 255).round().to(torch.uint8)
    weights = -torch.rand(CHAINS, generator=random).clamp(min=1e-12).log()
    weights = weights / weights.sum()  # of Dirichlet(1, 1, 1)
    kept = _uniform(random)  # of Beta(1, 1): the share of the view without operations
    mix = torch.zeros_like(image)
    for weight in weights.tolist():
        view = start
        for _ in range(_whole(LONGEST, random) + 1):
            view = operate(view, OPERATIONS[_whole(len(OPERATIONS), random)], random)
        mix = mix + weight * view.to(image)
    return (kept * start.to(image) + (1 - kept) * mix) / 255


def crop_and_flip(image: Tensor, random: torch.Generator) -> Tensor:
    """Return a random part of the image in its own size, mirrored half of the time: 8 to 100 % of its area."""
    height, width = image.shape[1:]
    area = height * width * _uniform(random, 0.08, 1)
    ratio = math.exp(_uniform(random, math.log(3 / 4), math.log(4 / 3)))
    h = min(height, max(1, round(math.sqrt(area / ratio))))
    w = min(width, max(1, round(math.sqrt(area * ratio))))
    top = _whole(height - h + 1, random)
    left = _whole(width - w + 1, random)
    part = F.resized_crop(image, top, left, h, w, [height, width], antialias=True)
    return part.flip(-1) if _uniform(random) < 0.5 else part


def operate(image: Tensor, name: str, random: torch.Generator) -> Tensor:
    """Return an image (channels, H, W) of 8 bits after one operation of random strength."""
    level = _uniform(random, 0.1, 1) / 10
    sign = 1 if _uniform(random) < 0.5 else -1
    height, width = image.shape[1:]
    if name == "autocontrast":
        return F.autocontrast(image)
    if name == "equalize":
        return F.equalize(image)
    if name == "posterize":
        return F.posterize(image, 4 - int(level * 4))
    if name == "solarize":
        return F.solarize(image, 256 - int(level * 256))
    angle = float(sign * int(level * 30)) if name == "rotate" else 0.0
    shear = math.degrees(math.atan(sign * level * 0.3))
    shears = {"shear_x": [shear, 0.0], "shear_y": [0.0, shear]}.get(name, [0.0, 0.0])
    across = sign * int(level * width / 3)
    down = sign * int(level * height / 3)
    moves = {"translate_x": [across, 0], "translate_y": [0, down]}.get(name, [0, 0])
    bilinear = transforms.InterpolationMode.BILINEAR
    return F.affine(image, angle, moves, 1.0, shears, interpolation=bilinear, fill=[GREY])


def _uniform(random: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * float(torch.rand((), generator=random))


def _whole(end: int, random: torch.Generator) -> int:
    """Return a whole number from 0 to end - 1."""
    return int(torch.randint(end, (), generator=random))
