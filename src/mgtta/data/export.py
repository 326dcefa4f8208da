"""Writes a corrupted copy of an image tree in the layout of ImageNet-C: `mgtta corrupt IN OUT`."""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mgtta._lib.bars import progress_bar

from .corruptions import CORRUPTIONS, SEVERITIES, VALIDATION_CORRUPTIONS, corrupt, frost_source
from .images import EXTENSIONS, MAX_PIXELS, ImageError, is_image, is_other_image, left_out, read_image, warn_left_out
from .shards import Place, expand, is_tar, samples

ImageFile = Path | Place  # a file, or a member of a tar
SETTINGS = "corruptions.json"
JPEG_QUALITY = 85  # the quality of the published files


@dataclass
class Export:
    """The outcome of an export: files written, files already there, images that could not be read."""

    written: int = 0
    present: int = 0
    unreadable: list[tuple[Path, str]] = field(default_factory=list)  # (path, reason)

    def __str__(self) -> str:
        lines = [f"{self.written} written, {self.present} already there, {len(self.unreadable)} unreadable"]
        return "\n".join([*lines, *(f"unreadable: {path} ({reason})" for path, reason in self.unreadable)])


@dataclass(frozen=True)
class Settings:
    """The settings that decide the pixels of a tree; kept beside the images, so that a tree never mixes two."""

    seed: int
    size: int | None
    frost: str
    images: int
    names: int  # a checksum: an image's place in the list decides its randomness


def corrupt_folder(
    src: str | Path,
    dst: str | Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    size: int | None = 224,
    frost_textures: str | Path | None = None,
    device: str = "cpu",
    batch_size: int = 32,
    progress: bool = True,
) -> Export:
    """Write dst/<corruption>/<severity>/<class folder>/<name>.JPEG for each image under src.

    Files that are already there are kept, so a run that was stopped resumes. Images that cannot be read (see
    `mgtta.data.images`) are left out and named in the result.

    Args:
        src: a folder of images, or of class folders; or WebDataset tars, whose class folders have the labels' numbers.
        size: as for ImageNet-C, the shorter side is resized to 256/224 of this and the centre is cropped.
            None keeps each image's own size.
        frost_textures: a folder of images for frost; by default textures are generated.
    """
    dst = Path(dst)
    _check(corruptions, severities, batch_size)
    found = _found(os.fspath(src), dst)
    images = [image for image, _ in found]
    names = [name for _, name in found]
    _check_names(images, names)
    checksum = zlib.crc32("\n".join(name.as_posix() for name in names).encode())
    _keep_settings(dst, Settings(seed, size, frost_source(frost_textures), len(images), checksum))

    result = Export()
    jobs = [(corruption, severity) for corruption in corruptions for severity in severities]
    with progress_bar(disable=not progress, console=None) as bar:
        task = bar.add_task("corrupting", total=len(images) * len(jobs))
        for start in range(0, len(images), batch_size):
            batch = range(start, min(start + batch_size, len(images)))
            missing = {job: {i for i in batch if not (dst / _folder(job) / names[i]).exists()} for job in jobs}
            wanted = sorted(set().union(*missing.values()))
            pixels = _read(images, wanted, size, result)
            for job, places in missing.items():
                for same_size in _by_size(pixels, places):
                    x = torch.from_numpy(np.stack([pixels[i] for i in same_size])).to(device)
                    index = torch.tensor(same_size)
                    y = corrupt(x.permute(0, 3, 1, 2), *job, index=index, seed=seed, frost_textures=frost_textures)
                    for i, image in zip(same_size, y.permute(0, 2, 3, 1).cpu().numpy(), strict=True):
                        _write(image, dst / _folder(job) / names[i], dst)
                        result.written += 1
                result.present += len(batch) - len(places)
                bar.advance(task, len(batch))
    return result


def _folder(job: tuple[str, int]) -> str:
    corruption, severity = job
    return f"{corruption}/{severity}"


def _check(corruptions: Sequence[str], severities: Sequence[int], batch_size: int) -> None:
    known = (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)
    if unknown := [name for name in corruptions if name not in known]:
        raise ValueError(f"unknown corruption {unknown[0]!r}; choose from: {', '.join(known)}")
    if unknown_severities := [s for s in severities if s not in SEVERITIES]:
        raise ValueError(f"unknown severity {unknown_severities[0]!r}; choose from: {', '.join(map(str, SEVERITIES))}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")


def _found(src: str, dst: Path) -> Sequence[tuple[ImageFile, Path]]:
    """Return the images and the names of their copies."""
    if is_tar(src):
        return _in_tars(src)
    return _in_folder(Path(src), dst)


def _in_tars(src: str) -> list[tuple[Place, Path]]:
    """Return the images of tars and their names: the label's number as a folder, if there is one, and the key."""
    found = []
    for sample in samples(expand(src)):
        folder = Path() if sample.label is None else Path(str(sample.label))
        found.append((sample.image, folder / f"{sample.key}.JPEG"))
    return found


def _in_folder(src: Path, dst: Path) -> list[tuple[Path, Path]]:
    """Return all images under src in a fixed order, and their names; links to folders are not followed."""
    if not src.is_dir():
        raise FileNotFoundError(
            f"no folder {str(src)!r}: name a folder of images, or of class folders with images, or a .tar"
        )
    if dst.resolve().is_relative_to(src.resolve()):
        raise ValueError(f"{str(dst)!r} lies inside {str(src)!r}: write to a folder outside the images")
    found = [Path(top, name) for top, _, files in os.walk(src) for name in files]
    images = [path for path in found if is_image(path.name)]
    others = sorted(path.name for path in found if is_other_image(path.name))
    if not images:
        raise FileNotFoundError(f"no images under {str(src)!r}; looked for {' '.join(EXTENSIONS)}{left_out(others)}")
    warn_left_out(others, src)
    images.sort(key=lambda path: path.relative_to(src).as_posix())
    return [(image, image.relative_to(src).with_suffix(".JPEG")) for image in images]


def _called(image: ImageFile) -> Path:
    """Return what messages call an image."""
    return Path(image.name) if isinstance(image, Place) else image


def _check_names(images: Sequence[ImageFile], names: Sequence[Path]) -> None:
    first: dict[Path, ImageFile] = {}
    for image, name in zip(images, names, strict=True):
        if first.setdefault(name, image) != image:
            both = f"{str(_called(first[name]))!r} and {str(_called(image))!r}"
            raise ValueError(f"{both} would both become {str(name)!r}: rename one")


def _keep_settings(dst: Path, settings: Settings) -> None:
    """Write the settings into dst, or raise an error if dst was written with others."""
    path = dst / SETTINGS
    now = asdict(settings)
    if path.exists():
        before = json.loads(path.read_text())
        if changed := [key for key in now if before.get(key) != now[key]]:
            what = ", ".join(f"{key} {before.get(key)!r}, now {now[key]!r}" for key in changed)
            raise ValueError(f"{str(dst)!r} was written with other settings ({what}): use another folder, or remove it")
        return
    dst.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(now, indent=2) + "\n")
    os.replace(part, path)


def _read(images: Sequence[ImageFile], places: list[int], size: int | None, result: Export) -> dict[int, np.ndarray]:
    """Return place -> pixels (H, W, 3) of the images that can be read; the others are noted in `result`."""
    pixels = {}
    for i in places:
        try:
            pixels[i] = _pixels(images[i], size)
        except ImageError as error:
            result.unreadable.append((_called(images[i]), error.reason))
    return pixels


def _pixels(file: ImageFile, size: int | None) -> np.ndarray:
    """Return the image at the given size, cropped, or at its own: (H, W, 3) uint8."""
    path = _called(file)
    pixels = read_image(file.read() if isinstance(file, Place) else file, name=str(path))
    h, w = pixels.shape[:2]
    if size is None:
        if min(h, w) < 32:
            reason = f"{w} x {h} pixels; at least 32 x 32 are needed"
            raise ImageError(f"cannot corrupt {path}: {reason}", reason)
        return pixels
    ratio = size * 256 / 224 / min(w, h)
    w = max(size, int(w * ratio))
    h = max(size, int(h * ratio))
    if w * h > MAX_PIXELS:  # an image that is one pixel wide grows to this
        reason = f"would be resized to {w} x {h} pixels"
        raise ImageError(f"cannot corrupt {path}: {reason}", reason)
    image = Image.fromarray(pixels).resize((w, h), Image.Resampling.BILINEAR)
    left = round((w - size) / 2)
    top = round((h - size) / 2)
    return np.array(image.crop((left, top, left + size, top + size)))


def _by_size(pixels: dict[int, np.ndarray], places: set[int]) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in sorted(places & pixels.keys()):
        groups.setdefault(pixels[i].shape, []).append(i)
    return list(groups.values())


def _write(image: np.ndarray, path: Path, root: Path) -> None:
    """Write the whole image or nothing: a stopped run leaves no half-written image under its name."""
    if not path.parent.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{str(path.parent)!r} is a link out of {str(root)!r}: remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    Image.fromarray(image).save(part, "JPEG", quality=JPEG_QUALITY, optimize=True)
    os.replace(part, path)
