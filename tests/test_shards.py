"""benchmarks/shards.py makes the tars of the measurements from a copy of ImageNet."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mgtta.data.datasets import open_dataset

SYNSETS = ("n01440764", "n01443537", "n15075141")  # classes 0, 1 and 999


@pytest.fixture
def shards(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import shards

    return shards


@pytest.fixture
def tree(tmp_path):
    """Six smooth images of 300 x 280 pixels, two of each class."""
    ramp = np.linspace(0, 1, 280)[:, None, None] * np.ones((280, 300, 3))
    for i in range(6):
        path = tmp_path / "val" / SYNSETS[i % 3] / f"ILSVRC2012_val_{i + 1:08d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((ramp * (100 + 30 * i)).astype(np.uint8)).save(path, quality=95)
    return tmp_path / "val"


def test_images_come_in_the_order_of_their_numbers_with_their_classes(shards, tree, tmp_path):
    shards.make(tree, tmp_path / "out", {"a.tar": [5, 1], "b.tar": [6]})
    data = open_dataset(str(tmp_path / "out" / "a.tar"))
    assert [Path(data.name(i)).stem for i in range(2)] == ["00000005", "00000001"]
    assert [label for _, label in data] == [1, 0]
    expected = open_dataset(str(tree), size=224, crop_pct=224 / 256)
    image = next(x for x, name in zip((x for x, _ in expected), expected.names, strict=True) if "00000005" in name)
    assert (data[0][0].float() - image.float()).abs().max() <= 4  # JPEG
    [(_, label)] = open_dataset(str(tmp_path / "out" / "b.tar"))
    assert label == 999


def test_missing_images_are_named_and_nothing_is_written(shards, tree, tmp_path):
    with pytest.raises(SystemExit, match=r"lacks 1 images, among them ILSVRC2012_val_00000009.JPEG"):
        shards.make(tree, tmp_path / "out", {"a.tar": [1], "b.tar": [9]})
    assert not (tmp_path / "out").exists()


def test_the_tars_of_the_measurements_share_no_image(shards):
    numbers = json.loads(shards.NUMBERS.read_text())
    assert [len(own) for own in numbers.values()] == [1000] * 3
    assert len({number for own in numbers.values() for number in own}) == 3000
    assert torch.tensor(list(numbers.values())).min() >= 1
