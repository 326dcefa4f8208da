"""Keeps decoded images in memory, so that each is decoded once."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from mgtta.data.images import ImageError


class Room:
    """A number of bytes that several data sets share."""

    def __init__(self, left: int):
        self.left = left

    def take(self, size: int) -> bool:
        """Take `size` bytes and return True, or take nothing and return False if they do not fit."""
        if size > self.left:
            return False
        self.left -= size
        return True


class Around(Dataset):
    """A data set around another one.

    What the other does not know (labels, names of classes) is None here.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def labels(self) -> Tensor | None:
        return getattr(self.dataset, "labels", None)

    @property
    def classes(self) -> Sequence[str] | None:
        return getattr(self.dataset, "classes", None)

    @property
    def class_indices(self) -> list[int] | None:
        return getattr(self.dataset, "class_indices", None)

    @property
    def size(self) -> int | None:
        """The side of an image in pixels."""
        return getattr(self.dataset, "size", None)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """The (name, reason) of each image that was found unreadable so far."""
        return getattr(self.dataset, "skipped", [])

    def skip(self, i: int, reason: str) -> None:
        """Count image i as unreadable, or raise an ImageError if the data set does not skip images."""
        if not hasattr(self.dataset, "skip"):
            raise ImageError(reason)
        self.dataset.skip(i, reason)

    def name(self, i: int) -> str:
        """Return the name of image i, or its number if the data set does not name images."""
        if not hasattr(self.dataset, "name"):
            return str(i)
        return self.dataset.name(i)


class Held(Around):
    """A data set whose images are kept after the first access, as long as there is room."""

    def __init__(self, dataset: Any, room: Room):
        super().__init__(dataset)
        self.room = room
        self._kept: dict[int, tuple[Tensor, int]] = {}

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i in self._kept:
            return self._kept[i]
        image, label = self.dataset[i]
        if self.room.take(image.nbytes):
            self._kept[i] = image, label
        return image, label
