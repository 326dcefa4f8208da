"""Whether a method also looks at the mirror image of each image."""

from torch import Tensor

from mgtta.models.checks import IMAGE_AXES
from mgtta.models.source import SourceStatistics

ALIKE = 0.75  # share of clean images predicted alike when mirrored, from which mirror="auto" mirrors: docs/models.md


def mirrors(mirror: bool | str, source: SourceStatistics) -> bool:
    """Return whether images are mirrored, given the setting."""
    if isinstance(mirror, bool):
        return mirror
    if mirror != "auto":
        raise ValueError(f'mirror must be True, False or "auto", not {mirror!r}')
    return source.mirrored is None or source.mirrored >= ALIKE  # unknown in older files: mirror, as before


def check_mirrored(x: Tensor) -> None:
    """Raise an error unless the inputs are images, whose last axis can be mirrored."""
    if isinstance(x, Tensor) and x.ndim != IMAGE_AXES:
        raise ValueError(f"mirror=True needs images (N, channels, H, W), not {tuple(x.shape)}: give mirror=False")
