"""mgtta corrupt: the tree it writes, going on after a stop, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mgtta.data import export
from mgtta.data.corruptions import corrupt
from mgtta.data.export import corrupt_folder

JOBS = {"corruptions": ["gaussian_noise", "pixelate"], "severities": [1, 5], "size": 32, "progress": False}


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(5):
        path = tmp_path / "in" / f"class{i % 2}" / f"image{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (50 + i, 64, 3), dtype=np.uint8)).save(path)
    return tmp_path / "in"


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.JPEG"))}


def test_corrupt_folder_writes_the_layout_of_imagenet_c(images, tmp_path):
    result = corrupt_folder(images, tmp_path / "out", **JOBS)
    files = _files(tmp_path / "out")
    assert (result.written, result.present, result.unreadable) == (20, 0, [])
    assert len(files) == 20
    assert "pixelate/5/class1/image3.JPEG" in files
    with Image.open(tmp_path / "out/gaussian_noise/1/class0/image0.JPEG") as image:
        assert (image.format, image.size) == ("JPEG", (32, 32))
    assert json.loads((tmp_path / "out" / export.SETTINGS).read_text())["frost"] == "generated (6 textures)"


def test_corrupt_folder_writes_the_pixels_of_corrupt(images, tmp_path):
    corrupt_folder(images, tmp_path / "out", **JOBS)
    paths = sorted(images.rglob("*.png"), key=lambda path: path.relative_to(images).as_posix())
    pixels = torch.from_numpy(export._pixels(paths[3], 32)).permute(2, 0, 1)[None]
    y = corrupt(pixels, "pixelate", 1, index=torch.tensor([3]))[0].permute(1, 2, 0).numpy()
    Image.fromarray(y).save(tmp_path / "expected.jpg", quality=85, optimize=True)
    written = tmp_path / "out/pixelate/1" / paths[3].relative_to(images).with_suffix(".JPEG")
    assert written.read_bytes() == (tmp_path / "expected.jpg").read_bytes()


def test_corrupt_folder_resumes_after_an_interrupt(images, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    corrupt_folder(images, whole, **JOBS)

    out, replace, left = tmp_path / "out", export.os.replace, [8]

    def stop(a, b):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        replace(a, b)

    monkeypatch.setattr(export.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        corrupt_folder(images, out, batch_size=2, **JOBS)
    monkeypatch.undo()
    assert len(_files(out)) == 7  # and the settings
    result = corrupt_folder(images, out, batch_size=3, **JOBS)  # another batch size: the same pixels
    assert result.written + result.present == 20
    assert result.present == 7
    assert _files(out) == _files(whole)
    assert not list(out.rglob("*.part"))
    assert corrupt_folder(images, out, **JOBS).present == 20


def test_corrupt_folder_keeps_the_sizes_of_a_flat_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name, size in (("a.png", (40, 50)), ("b.jpg", (33, 70)), ("small.png", (20, 20))):
        Image.new("RGB", size, (10, 200, 90)).save(tmp_path / "in" / name)
    result = corrupt_folder(
        tmp_path / "in", tmp_path / "out", corruptions=["contrast"], severities=[3], size=None, progress=False
    )
    with Image.open(tmp_path / "out/contrast/3/b.JPEG") as image:
        assert image.size == (33, 70)
    assert [path.name for path, _ in result.unreadable] == ["small.png"]


def test_unreadable_images_are_named_and_counted(images, tmp_path, monkeypatch):
    (images / "class0" / "text.jpg").write_text("not an image")
    whole = (images / "class0" / "image0.png").read_bytes()
    (images / "class0" / "cut.png").write_bytes(whole[: len(whole) // 2])
    Image.new("L", (200, 200)).save(images / "class1" / "bomb.png")
    Image.new("RGB", (40, 40)).save(images / "class1" / "tiff.png", "TIFF")
    monkeypatch.setattr("mgtta.data.images.MAX_PIXELS", 30_000)
    result = corrupt_folder(images, tmp_path / "out", **JOBS)
    reasons = {path.name: reason for path, reason in result.unreadable}
    assert sorted(reasons) == ["bomb.png", "cut.png", "text.jpg", "tiff.png"]
    assert reasons["tiff.png"].startswith("not an image of a format that is read (JPEG, PNG")
    assert reasons["bomb.png"].startswith("claims 200 x 200 pixels")
    assert result.written == 20
    assert "4 unreadable" in str(result)
    assert "text.jpg" in str(result)


def test_tiff_files_are_left_out_with_a_warning(tmp_path):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "in" / "a.tif")
    with pytest.raises(
        FileNotFoundError, match=r"no images under .*left out 1 image file\(s\) of other formats \(a\.tif"
    ):
        corrupt_folder(tmp_path / "in", tmp_path / "out", **JOBS)
    Image.new("RGB", (40, 40)).save(tmp_path / "in" / "b.png")
    with pytest.warns(UserWarning, match=r"left out 1 image file\(s\) of other formats \(a\.tif"):
        result = corrupt_folder(tmp_path / "in", tmp_path / "out", **JOBS)
    assert result.written == 4


def test_corrupt_folder_rejects_a_tree_of_other_settings(images, tmp_path):
    corrupt_folder(images, tmp_path / "out", **JOBS)
    with pytest.raises(ValueError, match=r"other settings .seed 0, now 1.: use another folder"):
        corrupt_folder(images, tmp_path / "out", seed=1, **JOBS)
    Image.new("RGB", (40, 40)).save(images / "class0" / "another.png")
    with pytest.raises(ValueError, match=r"other settings .images 5, now 6"):
        corrupt_folder(images, tmp_path / "out", **JOBS)


def test_corrupt_folder_rejects_invalid_arguments(images, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="unknown corruption 'fogg'; choose from: gaussian_noise"):
        corrupt_folder(images, out, corruptions=["fogg"])
    with pytest.raises(ValueError, match="unknown severity 0"):
        corrupt_folder(images, out, severities=[0])
    with pytest.raises(FileNotFoundError, match="name a folder of images"):
        corrupt_folder(tmp_path / "nowhere", out)
    with pytest.raises(ValueError, match="lies inside"):
        corrupt_folder(images, images / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no images under"):
        corrupt_folder(tmp_path / "empty", out)
    assert not out.exists()
    Image.new("RGB", (40, 40)).save(images / "class0" / "image0.jpg")
    with pytest.raises(ValueError, match="would both become"):
        corrupt_folder(images, out, **JOBS)


def test_corrupt_folder_does_not_follow_links_out_of_the_tree(images, tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (out / "pixelate").mkdir(parents=True)
    (out / "pixelate" / "1").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link out of"):
        corrupt_folder(images, out, **JOBS)
    assert not list(elsewhere.iterdir())


def test_corrupt_folder_shows_a_progress_bar(images, tmp_path, capsys):
    corrupt_folder(images, tmp_path / "out", corruptions=["contrast"], severities=[1], size=32)
    assert "corrupting" in capsys.readouterr().out
