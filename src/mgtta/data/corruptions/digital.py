"""Digital: contrast, saturate, elastic, pixelate, JPEG. x is uint8 (N, 3, H, W); results are on its scale.

c: the corruption's constants at a severity; scale: the factor for lengths in pixels.
"""

from functools import lru_cache, reduce
from io import BytesIO
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mgtta.data.images import read_image

from .filters import gaussian
from .random import Random


def contrast(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    keep = c
    mean = x.sum((2, 3), keepdim=True, dtype=torch.int64) / (x.shape[2] * x.shape[3])
    return (x - mean) * keep + mean


def saturate(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Scale and shift HSV's saturation and keep its hue and value; grey has the hue of red."""
    gain, shift = c
    x = x.float()
    value = x.amax(1, keepdim=True)
    spread = value - x.amin(1, keepdim=True)
    saturation = (spread / value.clamp(min=1) * gain + shift).clamp(0, 1)
    red = torch.arange(3, device=x.device).clamp(max=1).view(3, 1, 1)
    # 0 for the largest channel, 1 for the smallest
    depth = torch.where(spread > 0, (value - x) / spread.clamp(min=1), red)
    return value * (1 - saturation * depth)


def elastic_transform(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Take each pixel from a place displaced by smooth noise, after a random affine map where there is one."""
    strength, smoothness, shear = c
    alpha = strength * scale
    H, W = x.shape[-2:]
    if shear:
        x = _sheared(x, rng, shear * min(H, W))
    if not alpha:
        return x
    noise = (rng.bits(2, H, W) >> 8) + 0.5  # within ±128
    shift = gaussian(noise, smoothness * (H + W), truncate=3, mirror=True) * (alpha * 0.005 * H / 128)  # pixels
    columns = torch.arange(W, device=x.device) + shift[:, 0]  # (N, H, W)
    rows = torch.arange(H, device=x.device)[:, None] + shift[:, 1]
    return _sampled(x, columns, rows)


def _sheared(x: Tensor, rng: Random, reach: float) -> Tensor:
    """Apply the affine map that moves three corners of a square around the centre by up to `reach` pixels each."""
    H, W = x.shape[-2:]
    half = min(H, W) // 3
    centre = torch.tensor([W // 2, H // 2], dtype=torch.float64, device=x.device)
    corners = centre + half * torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64, device=x.device)
    moved = corners + reach * (2 * rng.uniform(3, 2).double() - 1)  # (N, 3, 2)
    ones = torch.ones_like(moved[..., :1])
    back = torch.linalg.solve(torch.cat([moved, ones], -1), corners.expand_as(moved))  # (N, 3, 2)
    row, column = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    here = torch.stack([column, row, torch.ones_like(row)], -1).to(back)  # (H, W, 3)
    from_columns, from_rows = torch.einsum("hwi,nij->nhwj", here, back).float().unbind(-1)
    return _sampled(x, from_columns, from_rows)


def _sampled(x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Return the pixels of x (N, C, H, W) at places (N, H, W) between pixels."""
    H, W = x.shape[-2:]
    grid = torch.stack(((columns + 0.5) * (2 / W) - 1, (rows + 0.5) * (2 / H) - 1), dim=-1)
    return F.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False)


def pixelate(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    """Replace each box of pixels by its average."""
    keep = c
    (rows, heights, up), (columns, widths, left) = (_boxes(n, int(n * keep), x.device) for n in x.shape[-2:])
    y = F.pad(x.short(), (0, 1, 0, 1))  # the last row and column, zero, stand for "no pixel"
    y = reduce(add, (y.index_select(2, tap) for tap in rows))
    y = reduce(add, (_columns(y, tap) for tap in columns))
    y = (y / (heights[:, None] * widths) + 0.5).to(torch.uint8)
    return _columns(y, left).index_select(2, up)


def _columns(x: Tensor, which: Tensor) -> Tensor:
    return x.gather(3, which.expand(*x.shape[:3], -1))  # faster than index_select on a CPU


@lru_cache(maxsize=32)
def _boxes(n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Split n pixels into m boxes: return each box's pixels (taps, m) and their number (m,), each pixel's box (n,)."""
    edges = (torch.arange(m + 1, dtype=torch.float64) * n / m + 0.5).long()
    sizes = edges.diff()
    taps = torch.arange(int(sizes.max()))[:, None]
    pixels = torch.where(taps < sizes, edges[:-1] + taps, n)
    shown = ((torch.arange(n, dtype=torch.float64) + 0.5) * m / n).long()
    return pixels.to(device), sizes.to(device, torch.float32), shown.to(device)


def jpeg_compression(x: Tensor, rng: Random, c: Any, scale: float) -> Tensor:
    quality = c
    out = torch.empty_like(x, device="cpu")
    for image, new in zip(x.cpu().numpy(), out, strict=True):
        buffer = BytesIO()
        Image.merge("RGB", [Image.fromarray(plane) for plane in image]).save(buffer, "JPEG", quality=quality)
        compressed = read_image(buffer.getvalue(), name="after JPEG compression")
        new.copy_(torch.tensor(compressed).permute(2, 0, 1))
    return out.to(x.device)
