"""Image data sets on disk or in WebDataset tars: numbered images with labels, decoded on access.

A label is a column of the scored logits. If only some of the model's classes are scored (ImageNet-R, -A, or with
`restrict`), `class_indices` lists them: pass it on as `load_model(..., classes=dataset.class_indices)`.
"""

import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mgtta._lib.errors import unknown
from mgtta.data.images import ImageError, crop, decode, is_image, is_other_image, left_out, warn_left_out
from mgtta.data.shards import expand, is_tar, split
from mgtta.data.shards import samples as read_samples

OnError = Literal["raise", "skip"]

# kind -> what its folder looks like, and where to download it
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
    "arrays": "one .npz: images, uint8 (N, H, W, 3); labels (N,) and names of classes if it has them",
    "cifar-c": "CORRUPTION.npy and labels.npy; CIFAR-10-C from zenodo.org/records/2535967, -100-C from 3555552",
}
SUBSETS = ("imagenet-r", "imagenet-a")  # only the classes that they hold are scored
SYNSET = re.compile(r"n\d{8}")


class ImageDataset(Dataset):
    """Images by number: `dataset[i]` is (uint8 (3, size, size), label); without labels, the label is -1.

    Attributes:
        labels: (N,) int64, or None.
        classes: the name of each class, or None if the set does not name them.
        class_indices: the model's classes that are scored, or None for all of them.
        on_error: what happens at an unreadable image, here or in a stream: "raise", or "skip" and count it.
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
        self.size = size
        self.crop_pct = crop_pct
        self.on_error = on_error
        self._skipped: dict[int, str] = {}

    def encoded(self, i: int) -> tuple[bytes | str, str]:
        """Return the encoded image or the path of its file, and what an error calls it."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        file, where = self.encoded(i)
        image = decode(file, name=where, size=self.size, crop_pct=self.crop_pct)
        label = -1 if self.labels is None else int(self.labels[i])
        return image, label

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for i in range(len(self)):
            try:
                yield self[i]
            except ImageError as error:
                self.skip(i, str(error))

    def name(self, i: int) -> str:
        """Return the name of image i for records and file names."""
        return self.names[i]

    def skip(self, i: int, reason: str) -> None:
        """Count image i as unreadable, or raise an ImageError if `on_error` is "raise"."""
        if self.on_error == "raise":
            raise ImageError(reason)
        self._skipped[i] = reason

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """The (name, reason) of each image that was found unreadable so far."""
        return [(self.name(i), reason) for i, reason in self._skipped.items()]


class ImageFolder(ImageDataset):
    """A folder of images without labels, or of one folder for each class."""

    def __init__(
        self,
        root: str | os.PathLike,
        kind: str = "folder",
        *,
        classes: Sequence[str] | None = None,
        restrict: bool = False,
        **options: Any,
    ):
        self.root = Path(root)
        if kind == "flat":
            names, others = _scan(self.root)
            super().__init__(names, classes=classes, **options)
        else:
            folders = _class_folders(self.root)
            index = _class_numbers(folders, kind, self.root, classes)
            names, others = _check_tree(self.root, folders)
            kept = None
            if restrict or (kind in SUBSETS and len(folders) < len(index)):
                kept = sorted(index[folder] for folder in folders)
                index = {folder: kept.index(index[folder]) for folder in folders}
            labels = [index[name.partition("/")[0]] for name in names]
            super().__init__(names, labels, classes=_names(index), class_indices=kept, **options)
        if not names:
            raise _not_found(self.root, kind, f"it holds no images{left_out(others)}")
        warn_left_out(others, self.root)

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
            raise ValueError(f"{bare.image.name} has no .cls beside it, but other images do: label all or none")
        self._places = [sample.image for sample in samples]
        super().__init__([sample.key for sample in samples], labels or None, **options)

    def encoded(self, i: int) -> tuple[bytes, str]:
        return self._places[i].read(), self._places[i].name


class ImageArrays(ImageDataset):
    """Images in memory, or in a file that is mapped into it: (N, H, W, 3) uint8."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray | None = None, *, name: str = "the images", **options: Any
    ):
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
            raise ValueError(f"{name} must be uint8 (N, H, W, 3), not {images.dtype} {images.shape}")
        if labels is not None and (labels.shape != (len(images),) or labels.dtype.kind not in "iu"):
            raise ValueError(f"{name}: labels must be {len(images)} integers, not {labels.dtype} {labels.shape}")
        numbers = [str(i) for i in range(len(images))]
        super().__init__(numbers, None if labels is None else labels.tolist(), **options)
        self.images = images

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"image {i} of {len(self)}")
        image = torch.from_numpy(np.array(self.images[i])).permute(2, 0, 1)
        label = -1 if self.labels is None else int(self.labels[i])
        return crop(image, self.size, self.crop_pct).contiguous(), label


def open_dataset(
    path: str | os.PathLike | Sequence[str],
    *,
    kind: str | None = None,
    size: int = 224,
    crop_pct: float = 0.875,
    on_error: OnError = "raise",
    cache_dir: str | os.PathLike | None = None,
    part: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    restrict: bool = False,
) -> ImageDataset:
    """Return the data set at `path`; its kind is guessed from what is found there.

    A `.tar`, several of them by braces or globs (`val-{000..049}.tar`), or a URL is a WebDataset. A folder of
    folders has one class in each; ImageNet's synsets get ImageNet's order. A folder of images has no labels. A `.npz`
    holds the arrays `images` and, if it has them, `labels` and the names `classes`.

    Args:
        kind: one of KINDS. Give it if the guess is wrong, or for an error that says where to download the set.
        size, crop_pct: see `mgtta.data.images.decode`.
        on_error: "raise" at an unreadable image, or "skip" it and count it in `dataset.skipped`.
        cache_dir: where shards from URLs are kept.
        part: (rank, ranks): only this rank's shards, which may be none; the others are neither opened nor fetched.
            Every shard belongs to one rank.
        classes: names of the model's classes in its order. Each class folder has one of these names; by default the
            folders are the model's classes in the order of their names, or ImageNet's synsets.
        restrict: score only the classes that have a folder: `dataset.class_indices`. Labels are then positions in it.
    """
    if restrict and not _has_class_folders(path):
        raise ValueError(f"restrict=... is for class folders, and {path} has none")
    if kind is not None and kind not in KINDS:
        raise unknown("kind of data set", kind, KINDS)
    options = {"size": size, "crop_pct": crop_pct, "on_error": on_error}
    if kind == "tar" or not isinstance(path, str | os.PathLike) or is_tar(os.fspath(path)):
        return ImageTars(split(expand(path), part), cache_dir, classes=classes, **options)
    if part is not None:
        raise ValueError(f"only WebDataset shards are split over ranks, and {path} is not one")
    if kind == "arrays" or os.fspath(path).endswith(".npz"):
        return _arrays(Path(path).expanduser(), classes, options)
    root = Path(path).expanduser()
    if root.is_file():
        raise _not_found(root, kind, "it is a file")
    if not root.is_dir():
        raise _not_found(root, kind, "it does not exist")
    if kind == "imagenet-c" or (kind is None and is_imagenet_c(root)):
        raise ValueError(f"{root} is ImageNet-C: open one corruption, such as {str(root / 'fog' / '5')!r}")
    if kind == "cifar-c" or (kind is None and is_cifar_c(root)):
        raise ValueError(f"{root} is CIFAR-C: open one corruption with cifar_c({str(root)!r}, NAME)")
    guess = "folder" if _class_folders(root) else "flat"
    return ImageFolder(root, kind or guess, classes=classes, restrict=restrict, **options)


def imagenet_c(root: str | os.PathLike, corruption: str, severity: int = 5, **options: Any) -> ImageFolder:
    """Return one corruption of ImageNet-C as published: root/<corruption>/<severity>/<synset>/*.JPEG.

    A tree of the same layout with other classes is read too, such as `mgtta corrupt` writes.
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
    if any(SYNSET.fullmatch(name) for name in _folders(folder)):
        return ImageFolder(folder, "imagenet", **options)
    return ImageFolder(folder, "folder", **options)


def cifar_c(root: str | os.PathLike, corruption: str, severity: int = 5, **options: Any) -> ImageArrays:
    """Return one corruption of CIFAR-10-C or -100-C as published: the severities follow each other in its file."""
    root = Path(root).expanduser()
    if not is_cifar_c(root):
        raise _not_found(root, "cifar-c", "it has no labels.npy")
    if severity not in range(1, 6):
        raise unknown("severity", severity, "12345")
    file = root / f"{corruption}.npy"
    if not file.is_file():
        found = sorted(path.stem for path in root.glob("*.npy") if path.stem != "labels")
        raise unknown(f"corruption in {root}:", corruption, found)
    images = np.load(file, mmap_mode="r", allow_pickle=False)
    labels = np.load(root / "labels.npy", allow_pickle=False)
    if len(images) != len(labels) or len(images) % 5:
        raise ValueError(f"{file} has {len(images)} images, and labels.npy {len(labels)}: download both again")
    each = len(images) // 5
    rows = slice(each * (severity - 1), each * severity)
    return ImageArrays(images[rows], labels[rows], name=str(file), **options)


def is_cifar_c(root: Path) -> bool:
    """Return whether the folder has the layout of CIFAR-10-C: one array for each corruption, and labels."""
    return (root / "labels.npy").is_file()


def _arrays(path: Path, classes: Sequence[str] | None, options: dict[str, Any]) -> ImageArrays:
    """Return the data set in a .npz file."""
    if not path.is_file():
        raise _not_found(path, "arrays", "it does not exist")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in ("images", "labels", "classes") if name in file}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as a .npz of plain arrays ({error}): write it again") from error
    if "images" not in found:
        raise ValueError(f"{path} has no array named images: np.savez({path.name!r}, images=..., labels=...)")
    if classes is None and "classes" in found:
        classes = [str(name) for name in found["classes"]]
    return ImageArrays(found["images"], found.get("labels"), name=str(path), classes=classes, **options)


def _has_class_folders(path: str | os.PathLike | Sequence[str]) -> bool:
    if not isinstance(path, str | os.PathLike):
        return False  # a list of tars
    root = Path(path).expanduser()
    return root.is_dir() and bool(_class_folders(root))


def read_classes(file: str | os.PathLike) -> list[str]:
    """Return the names of classes in a text file: one on each line, in the order of the model's classes."""
    lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if len(names) < 2 or twice is not None:
        what = f"it has {twice} twice" if twice is not None else f"it has {len(names)}"
        raise ValueError(f"{file} must name each class once, one on a line, and at least two: {what}")
    return names


def _folders(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _class_folders(root: Path) -> list[str]:
    folders = _folders(root)
    if all(_is_number(f) for f in folders):
        return sorted(folders, key=int)
    return folders


class _Files(NamedTuple):
    images: list[str]
    others: list[str]  # image files of formats that are not read


def _scan(root: Path) -> _Files:
    """Return the names of a folder's image files."""
    with os.scandir(root) as entries:
        files = sorted(e.name for e in entries if (is_image(e.name) or is_other_image(e.name)) and e.is_file())
    return _Files([name for name in files if is_image(name)], [name for name in files if is_other_image(name)])


def _check_tree(root: Path, folders: list[str]) -> _Files:
    """Return the files of all class folders; raise an error if images lie anywhere else.

    Such images would be left out without a message.
    """
    loose = _scan(root)
    if folders and loose.images:
        raise ValueError(
            f"{root} holds images ({loose.images[0]}, ...) beside the folder {folders[0]}: name a folder that holds "
            "only images, or only class folders"
        )
    tree = _Files([], loose.others)
    for folder in folders:
        found = _scan(root / folder)
        if not found.images and not found.others and (deeper := _folders(root / folder)):
            raise ValueError(
                f"{root / folder} holds no images but the folder {deeper[0]}: name a folder whose own folders hold them"
            )
        tree.images.extend(f"{folder}/{name}" for name in found.images)
        tree.others.extend(f"{folder}/{name}" for name in found.others)
    return tree


def _class_numbers(folders: list[str], kind: str, root: Path, classes: Sequence[str] | None) -> Mapping[str, int]:
    """Return the number of each class in the model, for all classes that are known by name."""
    if classes is not None:
        index = {name: i for i, name in enumerate(classes)}
        stranger = next((f for f in folders if f not in index), None)
        if stranger is not None:
            raise ValueError(f"{root} holds the folder {stranger}, which is not one of the {len(index)} named classes")
        return index
    if kind == "folder" and not all(SYNSET.fullmatch(f) and f in synsets() for f in folders):
        return {f: i for i, f in enumerate(folders)}
    index = synsets()
    if kind == "imagenet-v2":
        index = {str(i): i for i in range(1000)}
    stranger = next((f for f in folders if f not in index), None)
    if stranger is not None:
        raise _not_found(root, kind, f"it holds the folder {stranger}, which is not one of ImageNet's 1000 classes")
    return index


@cache
def synsets() -> dict[str, int]:
    """Return the class index of each of ImageNet's 1000 synsets."""
    from mgtta._lib.timm import timm

    return {name: i for i, name in enumerate(timm.data.ImageNetInfo().label_names())}


def _names(index: Mapping[str, int]) -> list[str]:
    """Return the names of the classes in the order of their numbers."""
    return sorted(index, key=lambda name: index[name])


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def _is_severities(folder: Path) -> bool:
    found = _folders(folder)
    return bool(found) and set(found) <= set("12345")


def is_imagenet_c(root: Path) -> bool:
    """Return whether the folder has ImageNet-C's layout: corruptions, then severities, then classes."""
    folders = _folders(root)
    return bool(folders) and _is_severities(root / folders[0]) and not _scan(root / folders[0]).images


def _not_found(root: Path, kind: str | None, found: str) -> FileNotFoundError:
    sought = "a folder of images, a folder of class folders, or a .tar"
    if kind:
        sought = f"{kind}, {KINDS[kind]}"
    return FileNotFoundError(f"no images at {root}: {found}; looked for {sought}")
