"""Frost textures: grown by the project, or the images of a folder that the user names."""

from functools import lru_cache
from math import ceil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .random import Random

SIDE = 360
# mean level of red, green, blue; contrast; how long and thin the crystals are
ICES = (
    ((78, 149, 166), 13.5, 2.0),
    ((201, 205, 214), 19, 5.0),
    ((201, 205, 214), 19, 7.0),
    ((138, 153, 165), 23, 4.0),
    ((112, 123, 135), 31, 6.0),
    ((148, 158, 170), 20, 5.0),
)


def frost_source(folder: str | Path | None = None) -> str:
    """What to write in the records: which textures frost was made with."""
    if folder is None:
        return f"generated ({len(ICES)} textures)"
    return f"folder {Path(folder).name} ({len(_files(Path(folder)))} images)"


def _files(folder: Path) -> list[Path]:
    Image.init()
    known = Image.registered_extensions()
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in known) if folder.is_dir() else []
    if not files:
        raise ValueError(f"no frost textures in {str(folder)!r}: name a folder of images, or none to grow them")
    return files


@lru_cache(maxsize=8)
def textures(folder: Path | None, H: int, W: int, device: torch.device) -> tuple[Tensor, ...]:
    """Textures that an (H, W) window fits: all pixels (3, pixels) uint8; each one's start, height, width.

    A texture is shown at 1.1 times its size, or larger where the window needs it; to windows below 224, at
    the size that shows as much of it as 224 would.
    """
    images = grow() if folder is None else [Image.open(f).convert("RGB") for f in _files(folder)]
    flat, sizes = [], []
    for image in images:
        w, h = image.size
        scale = 1.1 * max(min(1, min(H, W) / 224), H / h, W / w)
        w, h = ceil(w * scale), ceil(h * scale)
        pixels = np.array(image.resize((w, h), Image.Resampling.BICUBIC))
        flat.append(torch.from_numpy(pixels).permute(2, 0, 1).flatten(1))
        sizes.append((w * h, h, w))
    areas, heights, widths = torch.tensor(sizes).T
    start = areas.cumsum(0) - areas
    return torch.cat(flat, 1).to(device), start.to(device), heights.to(device), widths.to(device)


@lru_cache(maxsize=1)
def grow() -> list[Image.Image]:
    """One image for each of ICES: crystals of several sizes laid over each other."""
    rng = Random(0, "frost textures", torch.arange(len(ICES)))
    length = torch.tensor([length for _, _, length in ICES]).view(-1, 1, 1)
    sizes = ((120, 0.6), (60, 0.9), (30, 1.0), (15, 1.0))
    ice = torch.stack([weight * _crystals(rng, cell, length) for cell, weight in sizes]).sum(0)
    ice = (ice - ice.mean((1, 2), keepdim=True)) / ice.std((1, 2), keepdim=True)
    images = []
    for (tint, contrast, _), texture in zip(ICES, ice, strict=True):
        rgb = torch.tensor(tint) + contrast * texture[..., None]
        images.append(Image.fromarray(rgb.clamp(0, 255).to(torch.uint8).numpy()))
    return images


def _crystals(rng: Random, cell: int, length: Tensor) -> Tensor:
    """(T, SIDE, SIDE): the plane cut into crystals round random centres, each a bundle of needles."""
    n = SIDE // cell
    jitter_y, jitter_x, turn, phase, pitch, level = rng.uniform(6, n + 2, n + 2).unbind(1)
    cos, sin = (turn * torch.pi).cos(), (turn * torch.pi).sin()
    within = (torch.arange(SIDE) % cell) / cell
    nearest = torch.full((1,), torch.inf)
    value = torch.zeros(1)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):

            def here(field: Tensor, dy: int = dy, dx: int = dx) -> Tensor:
                """What that neighbour's cell holds, at each pixel: (T, n + 2, n + 2) -> (T, SIDE, SIDE)."""
                field = field[:, 1 + dy : n + 1 + dy, 1 + dx : n + 1 + dx]
                return field.repeat_interleave(cell, 1).repeat_interleave(cell, 2)

            y = within[:, None] - dy - here(jitter_y)
            x = within - dx - here(jitter_x)
            along, aside = x * here(cos) + y * here(sin), y * here(cos) - x * here(sin)
            distance = along.square() / length + aside.square() * length
            needles = (aside * (12 + 24 * here(pitch)) + 6 * here(phase)).sin().abs()
            crystal = 1.2 * here(level) - needles - 0.5 * distance.sqrt()
            value = torch.where(distance < nearest, crystal, value)
            nearest = torch.minimum(distance, nearest)
    return value
