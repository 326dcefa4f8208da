"""Generators that bench trains: once each, judged by labelled images."""

import dataclasses
import threading

from small_bench import FEW, SMALL, TINY

import mgtta
from mgtta.bench import protocol
from mgtta.bench import resources as lab
from mgtta.bench.cells import Setup
from mgtta.bench.resources import Lab
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS


def test_a_generator_is_trained_once_even_when_several_ask(tmp_path, monkeypatch):
    train, trained = lab.meta_train, []

    def counting(*args, **kwargs):
        trained.append(kwargs)
        return train(*args, **kwargs)

    monkeypatch.setattr(lab, "meta_train", counting)
    labs = [Lab(SMALL, tmp_path) for _ in range(2)]
    paths = []
    threads = [threading.Thread(target=lambda lab=lab: paths.append(lab.trained(TINY))) for lab in labs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trained) == 1
    assert len(set(paths)) == 1
    generator = mgtta.load_generator(paths[0])
    assert generator.about["training"]["images"] == 4
    assert generator.about["training"]["validated by"] == "accuracy at lr 0.001"
    assert generator.hidden_size == 2
    assert {p.suffix for p in paths[0].parent.iterdir()} == {".safetensors", ".lock"}
    assert labs[0].trained(dataclasses.replace(TINY, seed=1)) != paths[0]


def test_a_generator_in_training_is_judged_by_labels_that_are_the_models(tmp_path, tree):
    [*batches] = Lab(SMALL, tmp_path)._judges(TINY)
    assert [batch.domain for batch in batches] == list(VALIDATION_CORRUPTIONS)
    assert {len(batch.x) for batch in batches} == {TINY.judges}
    few = tmp_path / "few" / "pictures"
    few.mkdir(parents=True)
    for path in tree.rglob("*.JPEG"):
        (few / path.name).write_bytes(path.read_bytes())
    assert Lab(Setup(data=str(tree), validation=str(few.parent)), tmp_path)._judges(TINY) is None  # all of one class
    assert Lab(Setup(data=str(tree), validation=str(few)), tmp_path)._judges(TINY) is None  # without labels


def test_generator_train_trains_mgttas_own(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "Training", lambda: TINY)
    setup = dataclasses.replace(SMALL, generator="train")
    cells = [dataclasses.replace(FEW[0], method=m) for m in ("mgtta", "tent")]
    mine, tent = run_cells(cells, setup, Store(tmp_path))
    assert mine["protocol"]["generator"] == "trained on 4 images: gml of hidden size 2, 2 steps, seed 0"
    assert mine["protocol"]["training_images"] == 4
    assert tent["protocol"]["generator"] is None
