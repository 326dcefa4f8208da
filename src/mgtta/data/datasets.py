"""Image data sets on disk or in WebDataset tars: numbered images with labels, decoded when asked for.

A label is a column of the scored logits. Where a set has fewer than ImageNet's 1000 classes (-R, -A),
`class_indices` says which they are, so that `load_model(..., classes=dataset.class_indices)` fits.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mgtta._lib.errors import unknown
from mgtta.data.images import ImageError, decode, is_image
from mgtta.data.shards import expand, is_tar, split
from mgtta.data.shards import samples as read_samples

OnError = Literal["raise", "skip"]

# kind -> what a folder of it looks like, and where it is to be had
KINDS = {
    "imagenet": "1000 synset folders (n01440764/*.JPEG); the ILSVRC2012 validation set, from image-net.org",
    "imagenet-c": "<corruption>/<severity>/<synset>/*.JPEG; from zenodo.org/records/2235448",
    "imagenet-r": "200 synset folders; from github.com/hendrycks/imagenet-r",
    "imagenet-a": "200 synset folders; from github.com/hendrycks/natural-adv-examples",
    "imagenet-sketch": "1000 synset folders; from github.com/HaohanWang/ImageNet-Sketch",
    "imagenet-v2": "1000 folders named 0 to 999; from github.com/modestyachts/ImageNetV2",
    "folder": "one folder of images for each class",
    "flat": "images without labels, in one folder",
    "tar": "WebDataset shards: KEY.jpg beside KEY.cls, in one .tar or several",
}
SUBSETS = ("imagenet-r", "imagenet-a")  # scored over the classes that they hold
SYNSET = re.compile(r"n\d{8}")


class ImageDataset(Dataset):
    """Images by number: `dataset[i]` is (uint8 (3, size, size), label), the label -1 where there is none.

    Attributes:
        labels: (N,) int64, or None.
        classes: the name of each class, or None where the set does not say.
        class_indices: the model's classes that are scored, or None for all of them.
        on_error: what iterating, here or in a stream, does at an unreadable image: raise, or skip and count.
    """

    def __init__(
        self,
        names: Sequence[str],
        labels: Sequence[int] | None = None,
        *,
        classes: Sequence[str] | None = None,
        class_indices: Sequence[int] | None = None,
        size: int = 224,
        crop_pct: float = 0.875,
        on_error: OnError = "raise",
    ):
        if on_error not in ("raise", "skip"):
            raise unknown("on_error", on_error, ("raise", "skip"))
        if size < 1 or not 0 < crop_pct <= 1:
            raise ValueError(f"size must be at least 1 and crop_pct in (0, 1]; got {size} and {crop_pct}")
        self.names = list(names)
        self.labels = None if labels is None else torch.tensor(labels, dtype=torch.int64)
        self.classes = None if classes is None else list(classes)
        self.class_indices = None if class_indices is None else list(class_indices)
        self.size, self.crop_pct, self.on_error = size, crop_pct, on_error
        self._skipped: dict[int, str] = {}

    def encoded(self, i: int) -> tuple[bytes | str, str]:
        """The encoded image, or the path of the file that holds it; and what to call it in an error."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        file, where = self.encoded(i)
        image = decode(file, name=where, size=self.size, crop_pct=self.crop_pct)
        return image, -1 if self.labels is None else int(self.labels[i])

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for i in range(len(self)):
            try:
                yield self[i]
            except ImageError as error:
                self.skip(i, str(error))

    def name(self, i: int) -> str:
        return self.names[i]

    def skip(self, i: int, reason: str) -> None:
        """Count image i as unreadable, or raise if that is how this set was opened."""
        if self.on_error == "raise":
            raise ImageError(reason)
        self._skipped[i] = reason

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """(name, reason) of each image found unreadable so far."""
        return [(self.name(i), reason) for i, reason in self._skipped.items()]


class ImageFolder(ImageDataset):
    """A folder of images, with one folder for each class or with none."""

    def __init__(self, root: str | os.PathLike, kind: str = "folder", **options: Any):
        self.root = Path(root)
        if kind == "flat":
            super().__init__(_image_files(self.root), **options)
        else:
            folders = _class_folders(self.root)
            label_of, class_indices = _labels(folders, kind, self.root)
            _check_tree(self.root, folders)
            names = [f"{folder}/{file}" for folder in folders for file in _image_files(self.root / folder)]
            labels = [label_of[name.partition("/")[0]] for name in names]
            super().__init__(names, labels, classes=_names(label_of), class_indices=class_indices, **options)
        if not self.names:
            raise _not_found(self.root, kind, "it holds no images")

    def encoded(self, i: int) -> tuple[str, str]:
        path = os.path.join(self.root, self.names[i])
        return path, path


class ImageTars(ImageDataset):
    """WebDataset shards; see `mgtta.data.shards`."""

    def __init__(self, shards: Sequence[str], cache_dir: str | os.PathLike | None = None, **options: Any):
        samples = read_samples(shards, cache_dir) if shards else []
        labels = [sample.label for sample in samples if sample.label is not None]
        if labels and len(labels) < len(samples):
            bare = next(sample for sample in samples if sample.label is None)
            raise ValueError(f"{bare.image.name} has no .cls beside it, though others do: label all or none")
        self._places = [sample.image for sample in samples]
        super().__init__([sample.key for sample in samples], labels or None, **options)

    def encoded(self, i: int) -> tuple[bytes, str]:
        return self._places[i].read(), self._places[i].name


def open_dataset(
    path: str | os.PathLike | Sequence[str],
    *,
    kind: str | None = None,
    size: int = 224,
    crop_pct: float = 0.875,
    on_error: OnError = "raise",
    cache_dir: str | os.PathLike | None = None,
    part: tuple[int, int] | None = None,
) -> ImageDataset:
    """The data set at `path`, by what is found there.

    A `.tar`, several by braces or globs (`val-{000..049}.tar`), or a URL: WebDataset. A folder of folders:
    one class each, ImageNet's synsets in ImageNet's order. A folder of images: no labels.

    Args:
        kind: one of KINDS, where the guess is wrong or a missing folder should say where to get the set.
        size, crop_pct: see `mgtta.data.images.decode`.
        on_error: "raise" at an unreadable image, or "skip" and count it in `dataset.skipped`.
        cache_dir: where shards from URLs are kept.
        part: (rank, ranks): of several shards those of this rank alone, which may be none; the others are neither
            opened nor fetched. Every shard is one rank's.
    """
    if kind is not None and kind not in KINDS:
        raise unknown("kind of data set", kind, KINDS)
    options = {"size": size, "crop_pct": crop_pct, "on_error": on_error}
    if kind == "tar" or not isinstance(path, str | os.PathLike) or is_tar(os.fspath(path)):
        return ImageTars(split(expand(path), part), cache_dir, **options)
    if part is not None:
        raise ValueError(f"only WebDataset shards are split over ranks, and {path} is none")
    root = Path(path).expanduser()
    if not root.is_dir():
        raise _not_found(root, kind, "it is a file" if root.exists() else "it does not exist")
    if kind == "imagenet-c" or (kind is None and is_imagenet_c(root)):
        raise ValueError(f"{root} is ImageNet-C: open one corruption, by imagenet_c({str(root)!r}, NAME)")
    return ImageFolder(root, kind or ("folder" if _class_folders(root) else "flat"), **options)


def imagenet_c(root: str | os.PathLike, corruption: str, severity: int = 5, **options: Any) -> ImageFolder:
    """One corruption of ImageNet-C as published: root/<corruption>/<severity>/<synset>/*.JPEG.

    Or of a tree of that shape with classes of one's own, such as `mgtta corrupt` writes.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise _not_found(root, "imagenet-c", "it does not exist")
    if not (root / corruption).is_dir():
        found = [folder for folder in _folders(root) if _is_severities(root / folder)]
        raise unknown(f"corruption in {root}:", corruption, found)
    folder = root / corruption / str(severity)
    if not folder.is_dir():
        raise unknown(f"severity in {root / corruption}:", severity, _folders(root / corruption))
    synsets_there = any(SYNSET.fullmatch(name) for name in _folders(folder))
    return ImageFolder(folder, "imagenet" if synsets_there else "folder", **options)


def _folders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _class_folders(root: Path) -> list[str]:
    folders = _folders(root)
    return sorted(folders, key=int) if all(_is_number(f) for f in folders) else folders


def _image_files(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if is_image(e.name) and e.is_file())


def _check_tree(root: Path, folders: list[str]) -> None:
    """Images that lie anywhere but in the class folders would be left out without a word."""
    if folders and (loose := _image_files(root)):
        raise ValueError(
            f"{root} holds images ({loose[0]}, ...) beside the folder {folders[0]}: name a folder of images alone, or "
            "of class folders alone"
        )
    for folder in folders:
        if (deeper := _folders(root / folder)) and not _image_files(root / folder):
            raise ValueError(
                f"{root / folder} holds no images but the folder {deeper[0]}: name a folder whose own folders hold them"
            )


def _labels(folders: list[str], kind: str, root: Path) -> tuple[Mapping[str, int], list[int] | None]:
    """The label of each class folder, and which of the 1000 classes they are if not all."""
    if kind == "folder" and not all(SYNSET.fullmatch(f) and f in synsets() for f in folders):
        return {f: i for i, f in enumerate(folders)}, None
    index = {str(i): i for i in range(1000)} if kind == "imagenet-v2" else synsets()
    stranger = next((f for f in folders if f not in index), None)
    if stranger is not None:
        raise _not_found(root, kind, f"it holds the folder {stranger}, none of ImageNet's 1000 classes")
    if len(folders) == len(index) or kind not in ("folder", *SUBSETS):
        return {f: index[f] for f in folders}, None
    scored = sorted(index[f] for f in folders)
    return {f: scored.index(index[f]) for f in folders}, scored


@cache
def synsets() -> dict[str, int]:
    """ImageNet's 1000 synsets -> the class index of each."""
    from mgtta._lib.timm import timm

    return {name: i for i, name in enumerate(timm.data.ImageNetInfo().label_names())}


def _names(label_of: Mapping[str, int]) -> list[str] | None:
    """The folders in the order of their labels, where no label is left out."""
    names = sorted(label_of, key=lambda f: label_of[f])
    return names if max(label_of.values(), default=-1) == len(names) - 1 else None


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _is_severities(folder: Path) -> bool:
    found = _folders(folder)
    return bool(found) and set(found) <= set("12345")


def is_imagenet_c(root: Path) -> bool:
    folders = _folders(root)
    return bool(folders) and _is_severities(root / folders[0]) and not _image_files(root / folders[0])


def _not_found(root: Path, kind: str | None, found: str) -> FileNotFoundError:
    sought = f"{kind}, {KINDS[kind]}" if kind else "a folder of images, a folder of class folders, or a .tar"
    return FileNotFoundError(f"no images at {root}: {found}; looked for {sought}")
