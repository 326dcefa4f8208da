"""The table of other networks, made from records."""

import json
from pathlib import Path

import pytest

from mgtta.bench.store import Store


@pytest.fixture
def others(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import others

    return others


def record(kind, method, top1, seed=0, domain="fog", **settings):
    return {
        "experiment": "streams",
        "kind": kind,
        "method": method,
        "domain": domain,
        "seed": seed,
        "settings": settings,
        "top1": top1,
        "images": 10,
    }


@pytest.fixture
def folder(tmp_path):
    streams = [
        record("continual", "noadapt", 20.0),
        record("continual", "noadapt", 22.0, domain="snow"),
        record("continual", "mgtta_plus", 40.0, seed=0),
        record("continual", "mgtta_plus", 42.0, seed=1),
        record("one", "roid", 30.0),
    ]
    pacs = [
        {**record(None, "noadapt", 60.0, domain="art"), "experiment": "pacs"},
        {**record(None, "noadapt", 90.0, domain="art", guard=True), "experiment": "pacs"},
        {**record(None, "noadapt", 50.0, domain="art"), "experiment": "pacs-labels"},
    ]
    folder = tmp_path / "records"
    store = Store(folder)
    for i, one in enumerate(pacs):
        store.add(str(i), [one])
    (folder / "streams.jsonl").write_text("".join(json.dumps(one) + "\n" for one in streams))
    return folder


def test_the_table_has_means_over_domains_and_seeds_without_the_guard(others, folder):
    found = others.columns({"resnet50": folder, "cifar10": None, "pacs": folder})
    lines = others.measured(found).splitlines()
    assert (
        lines[0] == "| top-1, % | ResNet-50, never reset | ResNet-50, single images | PACS, art | PACS, art by class |"
    )
    assert lines[3] == "| noadapt | 21.0 |  | **60.0** | **50.0** |"
    assert lines[2] == "| mgtta+ | **41.0 ± 1.4** |  |  |  |"
    assert others.measured(found, 0).splitlines()[2:] == [lines[3]]
    assert list(others.short(found)) == ["ResNet-50, never reset", "PACS, art", "PACS, art by class"]


def test_the_learned_optimizer_stands_beside_adam_on_the_orders_that_both_have(others, folder):
    with open(folder / "streams.jsonl", "a") as file:
        file.write(json.dumps(record("continual", "plus_adam", 43.5, seed=1)) + "\n")
    lines = others.optimizers(others.columns({"resnet50": folder, "cifar10": None, "pacs": folder})).splitlines()
    assert lines[-3] == "| top-1, % | mgtta+ | plus_adam | ahead by | mgtta | eq7_adam | ahead by |"
    assert lines[-1] == "| ResNet-50, never reset | 42.0 | 43.5 | -1.5 |  |  |  |"
    assert others.optimizers(others.columns({"resnet50": None, "cifar10": None, "pacs": folder})) == ""


def test_published_errors_stand_beside_as_accuracy_with_their_footing(others, folder):
    text = others.beside(others.columns({"resnet50": folder, "cifar10": None, "pacs": None}))
    assert "| noadapt | 21.0 | 18.0 |" in text
    assert "| tent |  | 37.4 |" in text
    assert "torchvision's ResNet-50 on 5,000 images" in text
    assert others.beside(others.columns({"resnet50": None, "cifar10": None, "pacs": folder})) == ""


def test_the_page_is_written(others, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["others.py", "--resnet50", str(folder), "--out", str(tmp_path)])
    others.main()
    page = (tmp_path / "others.md").read_text()
    assert page.startswith("# Other networks")
    assert "never reset: ResNet-50, batches of 64, 10 images of each domain, orders of a method: 1 to 2" in page
    assert "single images: ResNet-50, batches of 1, 10 images of each domain, orders of a method: 1" in page
    assert "noadapt" in capsys.readouterr().out
