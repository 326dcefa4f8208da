"""The characters in other styles, which stand in for ImageNet-R and -Sketch without a download."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mgtta.data.glyphs.dataset import Glyphs
from mgtta.data.glyphs.drawing import CLASSES


def sketch(image: Tensor) -> Tensor:
    """Return the image (3, H, W) uint8 as dark edges on white."""
    grey = image.float().mean(0)
    vertical = grey.diff(dim=0, prepend=grey[:1]).abs()
    horizontal = grey.diff(dim=1, prepend=grey[:, :1]).abs()
    edges = (vertical + horizontal).clamp(max=255)
    return (255 - edges).to(torch.uint8).expand(3, -1, -1).contiguous()


def inverted(image: Tensor) -> Tensor:
    """Return the negative of a uint8 image."""
    return 255 - image


class StyledGlyphs(Dataset):
    """About `n` characters of the test seed in another style; of fewer classes if asked, like ImageNet-R and -A."""

    def __init__(self, n: int, style: Callable[[Tensor], Tensor], classes: int = len(CLASSES)):
        self.glyphs = Glyphs(n * len(CLASSES) // classes)
        self.style = style
        self.rows = (self.glyphs.labels < classes).nonzero().flatten().tolist()
        self.labels = self.glyphs.labels[self.rows]
        self.classes = CLASSES[:classes]
        self.class_indices = None if classes == len(CLASSES) else list(range(classes))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, label = self.glyphs[self.rows[i]]
        return self.style(image), label


# name -> the data set of about n images that stands in for ImageNet-R or -Sketch
STAND_INS: dict[str, Callable[[int], StyledGlyphs]] = {
    "glyphs-inverted": lambda n: StyledGlyphs(n, inverted, classes=10),
    "glyphs-sketch": lambda n: StyledGlyphs(n, sketch),
}
