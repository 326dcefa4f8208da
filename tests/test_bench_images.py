"""The images that bench reads: trees, tars, published sets, variants, and those that do not fit."""

import dataclasses
import tarfile

import pytest
import torch
from small_bench import FEW, SMALL, sweep_cells, write_tree

import mgtta
from mgtta.bench import resources as lab
from mgtta.bench.cells import Cell, Setup, Training
from mgtta.bench.resources import Lab
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.data.cache import Held, Room
from mgtta.data.datasets import open_dataset
from mgtta.data.glyphs import CLASSES, STAND_INS


def test_a_checkpoint_with_classes_of_its_own(tmp_path):
    tree = write_tree(tmp_path / "tree", lambda label: f"class{label % 3}")
    torch.save(mgtta.load_model("test_vit", pretrained=False, num_classes=3).net.state_dict(), tmp_path / "w.pth")
    setup = dataclasses.replace(SMALL, data=str(tree), model="test_vit", checkpoint=str(tmp_path / "w.pth"))
    cell = dataclasses.replace(FEW[0], method="noadapt")
    with pytest.raises(ValueError, match="num_classes"):
        run_cells([cell], setup, Store(tmp_path / "a"))
    [record, *_] = run_cells([cell], dataclasses.replace(setup, num_classes=3), Store(tmp_path / "a"))
    assert 0 <= record["top1"] <= 100
    with pytest.raises(ValueError, match=r"glyphs_vit has 30: .*--num-classes"):
        run_cells([cell], dataclasses.replace(setup, model="glyphs_vit", checkpoint=None), Store(tmp_path / "b"))


def test_images_without_labels_have_no_accuracy(tree, tmp_path):
    flat = write_tree(tmp_path / "flat", lambda label: ".")
    with pytest.raises(ValueError, match="images of --data have no labels"):
        run_cells(FEW[:1], dataclasses.replace(SMALL, data=str(flat)), Store(tmp_path / "a"))
    tries = sweep_cells([dataclasses.replace(FEW[0], method="tent")])
    with pytest.raises(ValueError, match="--validation, by which --sweep chooses, have no labels"):
        run_cells(tries, dataclasses.replace(SMALL, data=str(tree), validation=str(flat)), Store(tmp_path / "b"))
    assert not Store(tmp_path / "b").cells()


def test_image_trees_and_tars_are_decoded_once(tree, tmp_path, monkeypatch):
    for part in range(2):
        with tarfile.open(tmp_path / f"images-{part}.tar", "w") as tar:
            for path in sorted(tree.rglob("*.JPEG"))[part::2]:
                (tmp_path / "label").write_text(str(CLASSES.index(path.parent.name)))
                tar.add(path, f"{path.stem}.jpeg")
                tar.add(tmp_path / "label", f"{path.stem}.cls")
    decoded = []
    decode = mgtta.data.datasets.decode
    monkeypatch.setattr("mgtta.data.datasets.decode", lambda *a, **k: (decoded.append(1), decode(*a, **k))[1])
    cells = [Cell("corruptions", "noadapt", (c,), batch_size=4) for c in ("jpeg_compression", "fog")]
    found = {}
    for data in (str(tree), str(tmp_path / "images-{0..1}.tar")):
        decoded.clear()
        found[data] = run_cells(cells, Setup(data=data), Store(tmp_path / f"run{len(found)}"))
        assert len(decoded) == 12
        assert [r["images"] for r in found[data]] == [12, 12]
        assert {r["protocol"]["data"] for r in found[data]} == {data}
    trees, tars = found.values()
    assert sum(trees[0]["curve"]) == sum(tars[0]["curve"]) > 8


def test_published_imagenet_c_is_read_and_named_so(tmp_path):
    for name in ("fog", "contrast"):
        write_tree(tmp_path / "c" / name / "5", lambda label: f"{label:02}", n=4)
        for label in range(len(CLASSES)):
            (tmp_path / "c" / name / "5" / f"{label:02}").mkdir(exist_ok=True)
    lab = Lab(Setup(data=str(tmp_path / "c"), images=3), tmp_path)
    cell = Cell("corruptions", "noadapt", ("fog",), batch_size=2)
    [record] = lab.run(cell)
    assert record["protocol"]["corruptions"] == "as published"
    assert record["images"] == 3
    with pytest.raises(ValueError, match="contrast, fog"):
        lab.run(dataclasses.replace(cell, domains=("snow",)))


def test_synset_folders_of_another_model_are_refused(tmp_path):
    synsets = sorted(mgtta.data.datasets.synsets())
    tree = write_tree(tmp_path / "images", lambda label: synsets[label % 3], n=4)
    with pytest.raises(ValueError, match="the images have 1000 classes, glyphs_vit has 30"):
        Lab(Setup(data=str(tree)), tmp_path).run(FEW[0])
    (tmp_path / "classes.txt").write_text("\n".join([*synsets[:3], *(str(i) for i in range(27))]))
    lab = Lab(Setup(data=str(tree), classes=str(tmp_path / "classes.txt")), tmp_path)
    assert lab.images().labels.max() <= 2
    assert lab.model(lab.images()).num_classes == 30
    few = Lab(Setup(data=str(tree), classes=str(tmp_path / "classes.txt"), restrict=True), tmp_path)
    assert few.model(few.images()).num_classes == len(list(tree.iterdir()))


def test_variants_are_scored_in_their_own_classes(tmp_path):
    cells = [Cell("variants", "eq7_sgd", (n,), severity=0, data=n) for n in STAND_INS]
    lab = Lab(SMALL, tmp_path)
    few, sketched = (lab.run(cell)[0] for cell in cells)
    assert few["domain"] == "glyphs-inverted"
    assert few["protocol"]["corruptions"] is None
    assert lab.model(lab.images("test", "glyphs-inverted")).num_classes == 10
    assert lab.model(lab.images("test", "glyphs-sketch")).num_classes == 30
    assert sketched["images"] == 6


def test_missing_or_unfit_data_is_named(tmp_path, tree, monkeypatch):
    monkeypatch.setattr(lab, "IMAGES", 8)
    cell = dataclasses.replace(FEW[1], split="validation")
    with pytest.raises(ValueError, match="--validation"):
        Lab(Setup(data=str(tree)), tmp_path).run(cell)
    for name in (str(tree), f"{tree}/", str(tree / ".." / tree.name)):
        with pytest.raises(ValueError, match="are the test images"):
            Lab(Setup(data=str(tree), validation=name), tmp_path)
    (tree / "another").mkdir()
    with pytest.raises(ValueError, match="31 classes, glyphs_vit has 30"):
        Lab(Setup(data=str(tree)), tmp_path).run(FEW[0])
    with pytest.raises(ValueError, match="9 validation images, and there are 8"):
        Lab(SMALL, tmp_path).trained(Training(images=9))


def test_held_images_stay_within_their_room(tree):
    images = open_dataset(tree, size=48)
    held = Held(images, Room(2 * 3 * 48 * 48))
    first = held[0][0]
    assert held[0][0] is first
    assert held[1][0] is held[1][0]
    assert held[2][0] is not held[2][0]
    assert torch.equal(held[2][0], images[2][0])
    assert held.labels is images.labels
    assert len(held) == 12
