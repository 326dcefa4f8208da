"""Images that are decoded once and then held in memory, and the characters in other styles."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mgtta.data.glyphs import CLASSES, Glyphs


class Room:
    """Bytes that several data sets share."""

    def __init__(self, left: int):
        self.left = left

    def take(self, size: int) -> bool:
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


class Held(Dataset):
    """A data set whose images are kept, as they are asked for, as long as there is room; else as it was."""

    def __init__(self, dataset: Any, room: Room):
        self.dataset, self.room = dataset, room
        self._kept: dict[int, tuple[Tensor, int]] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i in self._kept:
            return self._kept[i]
        image, label = self.dataset[i]
        if self.room.take(image.nbytes):
            self._kept[i] = image, label
        return image, label

    def __getattr__(self, name: str) -> Any:  # labels, classes, class_indices, skip, ...
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def sketch(image: Tensor) -> Tensor:
    """Dark edges on white, (3, H, W) uint8."""
    grey = image.float().mean(0)
    edges = (grey.diff(dim=0, prepend=grey[:1]).abs() + grey.diff(dim=1, prepend=grey[:, :1]).abs()).clamp(max=255)
    return (255 - edges).to(torch.uint8).expand(3, -1, -1).contiguous()


def inverted(image: Tensor) -> Tensor:
    return 255 - image


class StyledGlyphs(Dataset):
    """The characters of a seed in another style; of some classes only, as ImageNet-R and -A have some."""

    def __init__(self, n: int, style: Callable[[Tensor], Tensor], classes: int = len(CLASSES)):
        self.glyphs, self.style = Glyphs(n * len(CLASSES) // classes), style
        self.rows = (self.glyphs.labels < classes).nonzero().flatten().tolist()
        self.labels = self.glyphs.labels[self.rows]
        self.classes = CLASSES[:classes]
        self.class_indices = None if classes == len(CLASSES) else list(range(classes))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image, label = self.glyphs[self.rows[i]]
        return self.style(image), label


# what stands in for -R and -Sketch where there is nothing but the characters
STAND_INS: dict[str, Callable[[int], StyledGlyphs]] = {
    "glyphs-inverted": lambda n: StyledGlyphs(n, inverted, classes=10),
    "glyphs-sketch": lambda n: StyledGlyphs(n, sketch),
}
