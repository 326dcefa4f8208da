"""The table of other networks, made from records."""

from pathlib import Path

import pytest

from mgtta.bench.store import Store


@pytest.fixture
def others(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import others

    return others


def record(experiment, method, top1, seed=0, domain="fog", **settings):
    protocol = {"model": "net", "weights": "0" * 16, "corruptions": None, "device": "cpu"}
    return {
        "experiment": experiment,
        "method": method,
        "domain": domain,
        "seed": seed,
        "settings": settings,
        "top1": top1,
        "images": 10,
        "batch_size": 64,
        "protocol": protocol,
    }


@pytest.fixture
def folder(tmp_path):
    records = [
        record("continual", "noadapt", 20.0),
        record("continual", "noadapt", 22.0, domain="snow"),
        record("continual", "roid", 40.0, seed=0),
        record("continual", "roid", 42.0, seed=1),
        record("pacs", "noadapt", 60.0, domain="art"),
        record("pacs", "noadapt", 90.0, domain="art", guard=True),
    ]
    store = Store(tmp_path / "records")
    for i, one in enumerate(records):
        store.add(str(i), [one])
    return tmp_path / "records"


def test_the_table_has_means_over_domains_and_seeds_without_the_guard(others, folder):
    found = others.columns({"resnet50": folder, "cifar10": None, "pacs": folder})
    lines = others.measured(found).splitlines()
    assert lines[0] == "| top-1, % | ResNet-50, never reset | PACS, art |"
    assert lines[2] == "| noadapt | 21.0 | **60.0** |"
    assert lines[3] == "| roid | **41.0 ± 1.4** |  |"


def test_published_errors_stand_beside_as_accuracy_with_their_footing(others, folder):
    text = others.beside(others.columns({"resnet50": folder, "cifar10": None, "pacs": None}))
    assert "| roid | 41.0 ± 1.4 | 45.5 |" in text
    assert "| tent |  | 37.4 |" in text
    assert "torchvision's ResNet-50 on 5,000 images" in text
    assert others.beside(others.columns({"resnet50": None, "cifar10": None, "pacs": folder})) == ""


def test_the_page_is_written(others, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["others.py", "--resnet50", str(folder), "--out", str(tmp_path)])
    others.main()
    page = (tmp_path / "others.md").read_text()
    assert page.startswith("# Other networks")
    assert "10 to 10 images per domain, batch 64" in page
    assert "noadapt" in capsys.readouterr().out
