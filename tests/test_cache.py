"""Images that are decoded once and kept: the data set around them stays the same."""

import pytest
import torch
from test_datasets import SIZE, encode, pixels, tree

from mgtta.data.cache import Held, Room
from mgtta.data.datasets import open_dataset
from mgtta.data.glyphs import Glyphs
from mgtta.data.images import ImageError
from mgtta.data.streams import stream

PLENTY = 2**20  # bytes


@pytest.mark.parametrize("kind", ["imagenet-r", "glyphs", "bare"])
def test_a_held_data_set_has_the_attributes_of_the_one_it_holds(tmp_path, kind):
    if kind == "glyphs":
        dataset = Glyphs(3)
    elif kind == "bare":
        dataset = [(torch.zeros(3, 8, 8), -1)]
    else:
        dataset = open_dataset(tree(tmp_path, ["n01443537", "n01440764"]), kind=kind, size=SIZE)
    held = Held(dataset, Room(PLENTY))
    for name in ("labels", "classes", "class_indices", "size"):
        assert getattr(held, name) is getattr(dataset, name, None)
    assert held.name(0) == (dataset.name(0) if kind != "bare" else "0")
    assert held.skipped == []
    assert not hasattr(held, "root")


def test_a_held_data_set_skips_what_the_one_it_holds_skips(tmp_path):
    tree(tmp_path, ["."], n=3)
    (tmp_path / "1.png").write_bytes(encode(pixels(0))[:200])
    held = Held(open_dataset(tmp_path, size=SIZE, on_error="skip"), Room(PLENTY))
    for _ in range(2):
        assert [b.index.tolist() for b in stream(held, shuffle=False)] == [[0, 2]]
        assert [name for name, _ in held.skipped] == ["1.png"]
    with pytest.raises(ImageError, match=r"1\.png"):
        list(stream(Held(open_dataset(tmp_path, size=SIZE), Room(PLENTY))))
    with pytest.raises(ImageError, match="broken"):
        Held(Glyphs(1), Room(PLENTY)).skip(0, "broken")
