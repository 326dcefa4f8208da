"""What a record holds, and which stored records do not count for a run."""

import dataclasses
import json

import pytest
from small_bench import FEW, SMALL

import mgtta
from mgtta._lib.profile import PARTS
from mgtta.adaptation.wrapper import innermost
from mgtta.bench import run as bench
from mgtta.bench.cells import Cell, Options, Setup
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.bench.sweep import rates


def test_records_hold_figures_and_protocol(tmp_path):
    records = run_cells(FEW, SMALL, Store(tmp_path))
    assert [(r["method"], r["domain"]) for r in records] == [
        ("noadapt", "contrast"),
        ("eq7_sgd", "contrast"),
        ("noadapt", "fog"),
        ("eq7_sgd", "fog"),
    ]
    for r in records:
        assert r["images"] == 6
        assert r["sizes"] == [3, 3]
        assert r["top1"] == pytest.approx(100 * sum(r["curve"]) / 6)
        assert 0 <= r["ece"] <= 100
        assert sum(row[0] for row in r["bins"]) == 6
        assert r["updates"] == (0 if r["method"] == "noadapt" else 2)
        assert r["seconds"] == pytest.approx(r["predict_seconds"] + r["adapt_seconds"])
        assert r["process_peak_memory"] > 10**7
        protocol = r["protocol"]
        assert protocol["mean"] == [0.5, 0.5, 0.5]
        assert protocol["corruptions"].startswith("mgtta, on the fly")
        assert protocol["images"] == 6
        assert {"weights", "data", "order", "reset", "seed", "versions", "command", "device"} <= protocol.keys()
        json.dumps(r)
    adapting = [r["adapt_seconds"] for r in records]
    assert adapting[0] < adapting[1]
    assert adapting[0] < records[0]["predict_seconds"]


@pytest.mark.parametrize(("model", "mirror"), [("glyphs_vit", False), ("patterns_vit", True)])
def test_source_statistics_decide_about_mirror_images_as_they_do_for_create(model, mirror, tmp_path):
    """A mirrored character is another one; a mirrored pattern is not."""
    setup = Setup(model, images=4)
    [record] = run_cells([Cell("corruptions", "mgtta_plus", ("fog",))], setup, Store(tmp_path))
    assert record["protocol"]["mirror"] is mirror
    source = mgtta.load_source(model)
    assert innermost(mgtta.create("mgtta+", mgtta.load_model(model), source=source)).mirror is mirror
    [asked] = run_cells(
        [Cell("corruptions", "mgtta_plus", ("fog",), settings=(("mirror", True),))], setup, Store(tmp_path)
    )
    assert asked["protocol"]["mirror"] is True


def test_records_say_their_precision_and_where_the_time_went(tmp_path):
    asked = dataclasses.replace(SMALL, precision="bf16", profile=True)
    records = run_cells(FEW[:2], asked, Store(tmp_path))
    assert {r["protocol"]["precision"] for r in records} == {"bf16"}
    for r in records:
        assert r["profile"].keys() == set(PARTS)
        assert r["profile"]["predicting"] > 0
        assert sum(r["profile"].values()) >= r["seconds"]
    assert sum(r["profile"]["loading"] for r in records) > 0
    exact = run_cells(FEW[1:2], dataclasses.replace(SMALL, profile=True), Store(tmp_path / "exact"))[0]
    assert exact["protocol"]["precision"] == "fp32"
    assert exact["profile"]["optimizer"] > 0
    assert "| optimizer |" in bench.time_table(records)
    assert bench.time_table([{}]) == ""
    with pytest.raises(ValueError, match="precision='bf16' is not for spa"):
        run_cells([Cell("corruptions", "spa", ("fog",))], asked, Store(tmp_path / "none"))


def test_records_of_other_weights_are_not_taken_for_these(tmp_path):
    run_cells(FEW[:1], SMALL, Store(tmp_path))
    path = Store(tmp_path).path
    [record] = Store(tmp_path).records()
    path.write_text(path.read_text().replace(record["protocol"]["weights"], "0123456789abcdef"))
    with pytest.raises(
        ValueError, match=r"glyphs_vit with other weights .0123456789abcdef, now .*: take another --out"
    ):
        run_cells(FEW, SMALL, Store(tmp_path))


def test_records_of_other_files_of_the_same_name_are_not_taken_for_these(tmp_path, tree, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = dataclasses.replace(FEW[1], method="mgtta")
    mgtta.save_generator(mgtta.load_generator("imagenet"), "mine.safetensors")
    setup = Setup(data=str(tree), generator="mine.safetensors", images=6)
    [record] = run_cells([cell], setup, Store("runs"))
    assert record["protocol"]["inputs"].keys() == {f"--data {tree}", "--generator mine.safetensors"}
    assert run_cells([cell], setup, Store("runs")) == [record]
    mgtta.save_generator(mgtta.load_generator("glyphs"), "mine.safetensors")
    with pytest.raises(ValueError, match=r"another --generator mine.safetensors, which has changed since"):
        run_cells([cell], setup, Store("runs"))
    images = sorted(tree.rglob("*.JPEG"))
    images[0].write_bytes(images[1].read_bytes())
    with pytest.raises(ValueError, match="another --data"):
        run_cells(FEW[:1], dataclasses.replace(setup, generator="imagenet"), Store("runs"))


def test_budgets_and_the_accuracy_of_what_remains(tmp_path):
    cells = [
        Cell("convergence", "eq7_sgd", ("fog",), batch_size=2, max_updates=1),
        Cell("budgets", "eq7_sgd", ("fog",), batch_size=2, max_seconds=0.0),
        Cell("budgets", "eq7_sgd", ("fog",), batch_size=2),
    ]
    one, none, all_ = run_cells(cells, SMALL, Store(tmp_path))
    assert [r["updates"] for r in (one, none, all_)] == [1, 0, 3]
    assert one["remaining"] == 100 * sum(one["curve"][1:]) / 4
    assert none["remaining"] == none["top1"]
    assert all_["remaining"] is None


def test_methods_run_at_either_set_of_settings(tmp_path):
    cells = [Cell("corruptions", name, ("fog",), batch_size=3) for name in ("deyo", "deyo@mgtta")]
    authors, papers = run_cells(cells, SMALL, Store(tmp_path))
    assert (authors["method"], papers["method"]) == ("deyo", "deyo@mgtta")
    assert [rates(name)[3] for name in ("deyo", "deyo@mgtta")] == [1e-3, 5e-4]
    with pytest.raises(ValueError, match="valid: authors, mgtta"):
        experiment_cells("corruptions", Options(["deyo@paper"]))
