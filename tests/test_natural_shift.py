"""Streams over several data sets, and the benchmark of PACS that runs on them."""

import io
import tarfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from PIL import Image

from mgtta._lib.files import command
from mgtta.bench.cells import Cell, Setup
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.bench.sweep import by_contender, tuning
from mgtta.data.glyphs import Glyphs

IMAGES = 6  # of each style


@pytest.fixture
def pacs(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import pacs

    return pacs


@pytest.fixture
def styles(tmp_path):
    """Two tars of characters, as (name, path)."""
    found = []
    for seed, name in enumerate(("art", "cartoon")):
        path = tmp_path / f"{name}.tar"
        with tarfile.open(path, "w") as archive:
            for i, (x, y) in enumerate(Glyphs(IMAGES, seed)):
                png = io.BytesIO()
                Image.fromarray(x.permute(1, 2, 0).numpy()).save(png, "PNG")
                for suffix, content in (("png", png.getvalue()), ("cls", str(y).encode())):
                    member = tarfile.TarInfo(f"{i}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        found.append((name, str(path)))
    return tuple(found)


def test_a_stream_runs_over_several_data_sets(styles, tmp_path):
    setup = Setup(data=styles[0][1])
    names = tuple(name for name, _ in styles)
    common = {"severity": 0, "batch_size": 4, "sets": styles, "domains": names}
    cells = [
        Cell("pacs-mixed", "tent", mixed=True, **common),
        Cell("pacs-continual", "tent", reset="never", **common),
    ]
    mixed, first, second = run_cells(cells, setup, Store(tmp_path / "runs"))
    assert (mixed["domain"], mixed["images"], mixed["sizes"]) == ("mixed", 12, [4, 4, 4])
    assert [(r["domain"], r["images"], r["updates"]) for r in (first, second)] == [("art", 6, 2), ("cartoon", 6, 2)]
    assert first["sets"] == [list(pair) for pair in styles]
    assert first["protocol"]["corruptions"] is None
    assert set(first["protocol"]["inputs"]) >= {f"--variant {path}" for _, path in styles}


def test_changed_images_of_a_set_are_noticed(styles, tmp_path):
    setup = Setup(data=styles[0][1])
    cell = Cell("pacs", "noadapt", ("cartoon",), severity=0, sets=styles[1:])
    run_cells([cell], setup, Store(tmp_path / "runs"))
    with open(styles[1][1], "ab") as file:
        file.write(bytes(512))
    with pytest.raises(ValueError, match="has changed since"):
        run_cells([cell], setup, Store(tmp_path / "runs"))


def test_cells_of_pacs_cover_all_streams_with_and_without_guard(pacs):
    found = pacs.cells(Path("PACS"), ["noadapt", "tent"], seeds=2)
    assert len(found) == len(set(found)) == 2 * 2 * 6
    assert {cell.experiment for cell in found} == set(pacs.COLUMNS)
    assert {cell.by_class for cell in found if cell.experiment == "pacs-labels"} == {True}
    tries = [cell for own in by_contender(found) for cell in next(tuning(own), [])]
    assert {(cell.split, cell.mixed, cell.reset, cell.sets) for cell in tries} == {
        ("validation", False, "domain", ()),
        ("validation", True, "domain", ()),
        ("validation", False, "never", ()),
    }
    swept = [Cell("pacs", method, ("art",), settings=(("lr", lr),)) for method, lr in (("noadapt", 0.0), ("tent", 0.5))]
    at_one = pacs._at_one_rate(found, swept)
    assert {(cell.method, cell.settings) for cell in at_one} == {(cell.method, cell.settings) for cell in swept}
    watched = pacs.guarded(found[-1])
    assert dict(watched.settings) == {"guard": True}
    assert watched.key(Setup()) != found[-1].key(Setup())


def test_the_table_of_pacs_marks_what_falls_below_noadapt(pacs):
    def record(method, top1, seed, **settings):
        return {
            "method": method,
            "experiment": "pacs",
            "domain": "art",
            "seed": seed,
            "settings": settings,
            "top1": top1,
        }

    records = [record("noadapt", 50.0, seed) for seed in (0, 1)]
    records += [record("tent", 40.0 + seed, seed) for seed in (0, 1)]
    records += [record("tent", 50.0, seed, guard=True) for seed in (0, 1)]
    lines = pacs.page_table(records).splitlines()
    assert lines[2] == "| tent | 40.5 ± 0.7 ▼ / 50.0 ± 0.0 | 40.5 |"
    assert lines[3] == "| noadapt | 50.0 ± 0.0 | 50.0 |"
    only = pacs.page_table([record("tent", 40.0, 0)]).splitlines()
    assert only[2] == "| tent | 40.0 | 40.0 |"


def test_a_records_command_names_the_script_that_ran(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/pacs.py", "adapt"])
    assert command() == "python benchmarks/pacs.py adapt"
    monkeypatch.setattr("sys.argv", ["/somewhere/mgtta/__main__.py", "bench"])
    assert command() == "mgtta bench"


def test_fine_tuning_learns_the_classes(pacs):
    from conftest import vit

    import mgtta

    torch.manual_seed(0)
    x = torch.zeros(32, 3, 32, 32, dtype=torch.uint8)
    y = torch.arange(32) % 2
    x[y == 1] = 200
    model = mgtta.load_model(vit())
    pacs._fine_tune(model, x, y, Namespace(lr=3e-3, steps=20, batch=16))
    assert pacs.accuracy(model, x, y) == 100


def test_augmented_images_are_parts_of_the_image(pacs):
    torch.manual_seed(0)
    x = torch.randint(50, 200, (4, 3, 32, 32), dtype=torch.uint8)
    found = pacs.augmented(x)
    assert found.shape == x.shape
    assert found.min() >= 50 / 255
    assert found.max() <= 200 / 255
    assert not torch.equal(found[0], x[0] / 255)
