"""Whether a method also looks at the mirror image of each image."""

import torch
from torch import Tensor

from mgtta.models.checks import IMAGE_AXES
from mgtta.models.classifier import Classifier
from mgtta.models.source import SourceStatistics

ALIKE = 0.75  # share of clean images predicted alike when mirrored, from which mirror="auto" mirrors: docs/models.md


def mirrors(mirror: bool | str, source: SourceStatistics) -> bool:
    """Return whether images are mirrored, given the setting."""
    if isinstance(mirror, bool):
        return mirror
    if mirror != "auto":
        raise ValueError(f'mirror must be True, False or "auto", not {mirror!r}')
    return source.mirrored is None or source.mirrored >= ALIKE  # unknown in older files: mirror, as before


def with_mirror_images(x: Tensor, model: Classifier) -> Tensor:
    """Return images that a model takes, and after them their mirror images: (n, 3, H, W) -> (2n, 3, H, W)."""
    if isinstance(x, Tensor) and x.ndim == IMAGE_AXES - 1:
        model.check(x)  # which says how one image becomes a batch
    if isinstance(x, Tensor) and x.ndim != IMAGE_AXES:
        raise ValueError(f"mirror=True needs images (N, channels, H, W), not {tuple(x.shape)}: give mirror=False")
    model.check(x)
    device = next(model.parameters()).device
    x = x.to(device, non_blocking=True)  # bytes, a quarter of the floats that come of them
    return torch.cat([x, x.flip(-1)])
