import dataclasses
import json
import math
import pickle
import subprocess
import sys
import tarfile
import threading

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import mgtta
from mgtta._lib.profile import PARTS
from mgtta.adaptation.wrapper import innermost
from mgtta.bench import protocol, sweep
from mgtta.bench import resources as lab
from mgtta.bench import run as bench
from mgtta.bench.cells import Cell, Options, Setup, Training, digest
from mgtta.bench.executors.processes import Processes
from mgtta.bench.experiments import EXPERIMENTS, QUICK, experiment_cells, variant
from mgtta.bench.needs import methods_for, rate_at
from mgtta.bench.resources import Lab, Listener
from mgtta.bench.run import run_cells, run_experiments
from mgtta.bench.store import Store
from mgtta.bench.sweep import by_contender, rates, tuning
from mgtta.cli.app import app
from mgtta.cli.progress import Bars
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.datasets import open_dataset
from mgtta.data.glyphs import CLASSES, STAND_INS, Glyphs
from mgtta.evaluation.record import Record
from mgtta.fast.choice import fits
from mgtta.methods.registry import recipe, recipes
from mgtta.report.words import at_edge

SMALL = Setup(images=6)
FEW = [Cell("corruptions", m, (c,), batch_size=3) for c in ("contrast", "fog") for m in ("noadapt", "eq7_sgd")]
TINY = Training(images=4, hidden_size=2, steps=2, judges=4)
CLOCK = ("seconds", "predict_seconds", "adapt_seconds", "process_peak_memory", "protocol")


def without_timing(records):
    return [{key: value for key, value in record.items() if key not in CLOCK} for record in records]


@pytest.fixture
def counted(monkeypatch):
    """The cells that were really run."""
    run, ran = Lab.run, []
    monkeypatch.setattr(Lab, "run", lambda lab, cell: (ran.append(cell), run(lab, cell))[1])
    return ran


# --- records


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


def test_precision_tells_work_apart_where_it_makes_a_difference():
    cell, gpu = FEW[0], Setup(device="cuda")
    same = [Setup(), Setup(precision="auto"), Setup(profile=True), gpu]
    assert len({cell.key(setup) for setup in same}) == 1
    others = [Setup(precision="bf16"), dataclasses.replace(gpu, precision="auto"), Setup(tf32=True)]
    assert len({cell.key(setup) for setup in (same[0], *others)}) == 4


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


def test_what_a_cell_will_need_is_asked_for_before_the_first_runs(tmp_path, tree, counted):
    cells = [dataclasses.replace(FEW[0], method=m) for m in ("noadapt", "mgtta")]
    with pytest.raises(FileNotFoundError, match="unknown generator 'gone"):
        run_cells(cells, dataclasses.replace(SMALL, generator="gone.safetensors"), Store(tmp_path))
    with pytest.raises(FileNotFoundError, match="gone"):
        run_cells(cells, dataclasses.replace(SMALL, source="gone.safetensors"), Store(tmp_path))
    trained = dataclasses.replace(cells[1], training=TINY)
    with pytest.raises(ValueError, match=r"needed for mgtta \(corruptions\): name them with --validation"):
        run_cells([cells[0], trained], Setup(data=str(tree)), Store(tmp_path))
    assert not counted


def test_finished_cells_are_not_run_again_and_a_stopped_run_goes_on(tmp_path, monkeypatch, counted):
    counting = Lab.run

    def stopping(lab, cell):
        if len(counted) == 2:
            raise KeyboardInterrupt
        return counting(lab, cell)

    monkeypatch.setattr(Lab, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_cells(FEW, SMALL, Store(tmp_path))
    assert len(Store(tmp_path).cells()) == 2
    monkeypatch.setattr(Lab, "run", counting)
    records = run_cells(FEW, SMALL, Store(tmp_path))
    assert counted == FEW
    assert run_cells(FEW, SMALL, Store(tmp_path)) == records
    assert counted == FEW


def test_work_that_several_experiments_ask_for_is_done_once_and_stored_for_each(tmp_path, counted):
    cell = dataclasses.replace(FEW[0], experiment="budgets", max_updates=1)
    cells = [FEW[0], cell, dataclasses.replace(cell, max_updates=2)]
    records = run_cells(cells, SMALL, Store(tmp_path))
    assert counted == FEW[:1]
    assert [(r["experiment"], r["max_updates"]) for r in records] == [
        ("corruptions", None),
        ("budgets", 1),
        ("budgets", 2),
    ]
    assert [r["remaining"] for r in records] == [None, 100 * records[0]["curve"][1] / 3, None]
    again = [dataclasses.replace(FEW[0], experiment="ablation", chosen_from=(1.0, 2.0))]
    [record] = run_cells(again, SMALL, Store(tmp_path))
    assert counted == FEW[:1]
    assert record["experiment"] == "ablation"
    assert record["protocol"]["chosen_from"] == [1.0, 2.0]
    assert record["top1"] == records[0]["top1"]
    assert len(Store(tmp_path).records()) == 4


def test_cells_that_share_a_stream_run_one_after_another(tmp_path, counted):
    cells = [FEW[0], FEW[2], FEW[1], FEW[3]]
    run_cells(cells, SMALL, Store(tmp_path))
    assert counted == FEW


def test_a_method_that_was_run_before_is_reset_and_not_made_again(tmp_path, monkeypatch):
    made = []
    create = lab.create
    monkeypatch.setattr(lab, "create", lambda name, *a, **k: (made.append(name), create(name, *a, **k))[1])
    methods = ["tent", "roid", "t3a", "mgtta_plus"]
    corrupted = [Cell("corruptions", m, (c,), batch_size=3) for m in methods for c in ("contrast", "fog")]
    long = [Cell("continual", "roid", ("contrast", "fog"), batch_size=3, reset="never", seed=seed) for seed in (0, 1)]
    cells = sorted([*corrupted, *long], key=lambda cell: cell.method)
    setup = dataclasses.replace(SMALL, cache=str(tmp_path / "cache"))
    together = Lab(setup, tmp_path)
    found = [record for cell in cells for record in together.run(cell)]
    assert made == sorted(methods)
    each = [record for cell in cells for record in Lab(setup, tmp_path).run(cell)]
    assert without_timing(found) == without_timing(each)


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


def test_keys_tell_work_apart():
    cell = FEW[1]
    same = [
        cell.key(SMALL),
        dataclasses.replace(cell, experiment="ablation", chosen_from=(1.0,)).key(SMALL),
        cell.key(dataclasses.replace(SMALL, device="cuda")),
    ]
    assert len(set(same)) == 1
    changes = [
        {"seed": 1},
        {"method": "tent"},
        {"batch_size": 4},
        {"settings": (("lr", 1.0),)},
        {"max_updates": 3},
        {"training": TINY},
        {"training": Training()},
        {"alone": True},
        {"data": "elsewhere"},
        {"max_seconds": 1.0},
    ]
    others = [dataclasses.replace(cell, **change).key(SMALL) for change in changes]
    timed = dataclasses.replace(cell, alone=True).key(dataclasses.replace(SMALL, device="cuda"))
    setups = [cell.key(Setup(images=7)), cell.key(Setup(model="resnet18"))]
    assert len({*others, same[0], timed, *setups}) == len(changes) + 4
    still = FEW[0]
    assert still.key(SMALL) == dataclasses.replace(still, max_updates=3).key(SMALL)


def test_fewer_images_are_the_same_work_whoever_limits_them():
    cell = Cell("corruptions", "tent", ("fog",))
    few = dataclasses.replace(cell, limit=64)
    named = Setup(data="images", images=256)
    assert (
        few.key(named) == few.key(dataclasses.replace(named, images=None)) == cell.key(Setup(data="images", images=64))
    )
    assert few.key(named) != cell.key(named)
    assert dataclasses.replace(cell, limit=512).key(named) == cell.key(named)
    assert few.key(Setup(images=256)) != cell.key(Setup(images=64))  # other characters are rendered


def test_keys_are_those_of_version_0_1():
    """So that a folder of records of that version counts as done."""
    trained = dataclasses.replace(FEW[1], training=TINY, settings=(("lr", 0.1),), max_seconds=2.0)
    gpu = Setup(model="m", checkpoint="c", data="d", device="cuda", precision="auto", tf32=True)
    found = [cell.key(setup) for cell in (FEW[0], trained) for setup in (SMALL, gpu)]
    assert found == ["de953f8d62ff0262", "29ae2030b55c9fc6", "483c8cf936952119", "2ad3f0468b9c05f5"]
    assert digest(trained) == "3425bc93113ebf7f"


# --- experiments


def test_experiments():
    options = Options(["noadapt", "mgtta"], seeds=2, variants=[("imagenet-r", "r"), ("imagenet-sketch", "s")])
    cells = {name: experiment_cells(name, options) for name in EXPERIMENTS}
    assert len(cells["corruptions"]) == 15 * 2 * 2
    assert {c.domains for c in cells["corruptions"]} == {(c,) for c in CORRUPTIONS}
    assert {c.method for c in cells["ablation"]} == {"mgtta", "mgtta_lstm", "eq7_sgd", "eq7_adam"}
    assert {c.domains[0] for c in cells["ablation"]} > {"imagenet-r", "imagenet-sketch", "fog"}
    assert all(c.mixed and len(c.domains) == 15 for c in cells["mixed"])
    assert {c.reset for c in cells["continual"]} == {"never"}
    assert {c.batch_size for c in cells["small-batch"]} == {2, 4}
    assert {dict(c.settings).get("lr") for c in cells["small-batch"] if c.method == "mgtta"} == {1e-4}
    assert {c.max_updates for c in cells["budgets"]} >= {None, 10, 20, 35, 50, 75, 100, 200}
    assert {c.max_seconds for c in cells["budgets"]} >= {None, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 90.0}
    assert {c.max_updates for c in cells["convergence"]} >= {0, 1, 50}
    assert {c.training.images for c in cells["samples"]} == {64, 128, 256, 1000}
    assert {c.training.hidden_size for c in cells["hidden-size"]} == {2, 4, 8, 16, 32, 64}
    assert all(c.alone for c in cells["runtime"])
    assert {c.max_updates for c in cells["runtime"] if c.method == "mgtta"} == {None, 20, 50, 100}
    assert [c.key(SMALL) for c in cells["memory"]] == [c.key(SMALL) for c in cells["runtime"]]
    for name in EXPERIMENTS:
        assert len(set(cells[name])) == len(cells[name])
    assert {c.experiment for c in cells["all"]} == EXPERIMENTS.keys() - {"all"}
    with pytest.raises(ValueError, match="corruptions, hidden-size"):
        experiment_cells("corruption", options)
    with pytest.raises(ValueError, match="mgta"):
        experiment_cells("corruptions", Options(["mgta"]))


def test_variants_have_lambda_and_images_of_their_own():
    found = experiment_cells("variants", Options(["tent", "mgtta"], variants=[variant("R=a"), variant("photos=b")]))
    assert [(c.domains[0], c.data, c.severity, dict(c.settings)) for c in found] == [
        ("imagenet-r", "a", 0, {}),
        ("imagenet-r", "a", 0, {"trade_off": 0.2}),
        ("photos", "b", 0, {}),
        ("photos", "b", 0, {}),
    ]
    with pytest.raises(ValueError, match="--variant imagenet-r=FOLDER"):
        experiment_cells("variants", Options(["tent"]))
    assert "variants" not in {c.experiment for c in experiment_cells("all", Options(["tent"]))}
    with pytest.raises(ValueError, match="NAME=IMAGES"):
        variant("imagenet-r")


def test_budgets_beyond_the_stream_are_left_out():
    found = experiment_cells("budgets", Options(["tent"], batches=12))
    assert max(c.max_updates for c in found if c.max_updates) == 10


def test_a_lstm_is_trained_beside_a_generator_that_is_not_shipped():
    def training(generator):
        cells = experiment_cells("ablation", Options(["mgtta"], generator=generator))
        return {c.training for c in cells if c.method == "mgtta_lstm"}

    assert training("imagenet") == {None}
    assert training("mine.safetensors") == {Training(memory="lstm")}


def test_every_experiment_runs_on_the_characters(tmp_path):
    """Everything but the two that start processes, and with hardly an image."""
    quick = {**QUICK, "corruptions": ("fog",), "seconds": (0.01,), "samples": (4,), "rates": (1.0,), "sizes": (2, 4)}
    options = Options(
        ["mgtta"], variants=[(n, n) for n in STAND_INS], batches=2, **{**quick, "batch_size": 3, "training": TINY}
    )
    cells = [cell for cell in experiment_cells("all", options) if not cell.alone]
    records = run_cells(cells, SMALL, Store(tmp_path))
    assert {r["experiment"] for r in records} == EXPERIMENTS.keys() - {"all", "runtime", "memory"}
    assert all(r["top1"] is not None for r in records)
    sizes = {r["protocol"]["hidden_size"] for r in records if r["experiment"] == "hidden-size"}
    assert sizes == {2, 4}
    [mixed] = [r for r in records if r["experiment"] == "mixed"]
    assert mixed["images"] == 6


def test_small_batches_have_the_rates_of_the_authors_rules():
    names = ["noadapt", "tent", "sar", "deyo", "deyo@mgtta", "mgtta", "eq7_adam"]
    cells = experiment_cells("small-batch", Options(names, corruptions=("fog",)))
    found = {(c.method, c.batch_size): dict(c.settings).get("lr") for c in cells}
    assert found["noadapt", 2] is None
    assert found["tent", 4] == found["sar", 4] == found["deyo", 4] == 6.25e-5
    assert found["deyo@mgtta", 4] == 3.125e-5
    assert found["mgtta", 2] == found["mgtta", 4] == 1e-4
    assert found["eq7_adam", 2] == 5e-4
    at_one = [rate_at(name, 1) for name in ("tent", "sar", "deyo", "mgtta")]
    assert at_one == [1.5625e-5, 3.125e-5, 3.125e-5, 1e-4]
    assert [rate_at(name, 64) for name in ("tent", "sar", "mgtta", "lame")] == [1e-3, 1e-3, 1e-3, None]


def test_methods_run_at_either_set_of_settings(tmp_path):
    cells = [Cell("corruptions", name, ("fog",), batch_size=3) for name in ("deyo", "deyo@mgtta")]
    authors, papers = run_cells(cells, SMALL, Store(tmp_path))
    assert (authors["method"], papers["method"]) == ("deyo", "deyo@mgtta")
    assert [rates(name)[3] for name in ("deyo", "deyo@mgtta")] == [1e-3, 5e-4]
    with pytest.raises(ValueError, match="valid: authors, mgtta"):
        experiment_cells("corruptions", Options(["deyo@paper"]))


def test_all_methods_are_those_that_the_network_can_run():
    transformer = set(methods_for(mgtta.load_model("test_vit", pretrained=False)))
    assert {"noadapt", "foa", "eata", "eata@mgtta", "deyo@mgtta", "cotta@mgtta"} <= transformer
    assert not {"bn", "rotta", "tent@mgtta"} & transformer  # both sets of TENT are the same
    convolutional = set(methods_for(mgtta.load_model("resnet18", pretrained=False)))
    assert convolutional - transformer == {"bn", "rotta"}
    assert transformer - convolutional == {"foa", "foa_interval"}
    assert convolutional | transformer >= recipes().keys()


def test_the_command_line_runs_all_methods_by_one_word(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_experiments", lambda names, options, *a, **k: asked.extend(options.methods) or [])
    words = [
        "bench",
        "corruptions",
        "--out",
        str(tmp_path),
        "--methods",
        "all",
        "--precision",
        "auto",
        "--device",
        "cpu",
    ]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert asked == methods_for(mgtta.load_model("glyphs_vit"))


def test_every_method_is_made_at_the_precision_auto(tmp_path, monkeypatch):
    """On a GPU that has bfloat16, "auto" takes the fast path where the recipe says that there is one."""
    monkeypatch.setattr("mgtta.fast.choice._has_bfloat16", lambda device: True)
    monkeypatch.setattr("mgtta.fast.choice.is_known", lambda model: True)
    lab = Lab(dataclasses.replace(SMALL, precision="auto"), tmp_path)
    lab.fisher = mgtta.fisher_information(lab.model(), [Glyphs(2).tensors()])
    for name in methods_for(lab.model()):
        method = lab._method(Cell("corruptions", name, ("fog",)), lab.images())
        while hasattr(method, "method"):
            method = method.method
        assert fits(method, "auto") == recipe(name).works_with["bf16"], name


def test_keys_tell_settings_apart_that_a_method_had_in_version_0_1():
    """What was deyo then is deyo@mgtta now; deyo is other work. Methods that did not change keep their keys."""
    cells = {name: Cell("corruptions", name, ("fog",)) for name in ("deyo", "deyo@mgtta", "tent", "tent@mgtta")}
    keys = {name: cell.key(SMALL) for name, cell in cells.items()}
    assert keys["deyo@mgtta"] == digest([dataclasses.replace(cells["deyo"], experiment=""), SMALL])
    assert keys["tent"] == digest([dataclasses.replace(cells["tent"], experiment=""), SMALL])
    assert len(set(keys.values())) == 4


# --- sweeps


def sweep_cells(cells):
    """Return what the sweeps of the cells try first."""
    return [cell for own in by_contender(cells) for cell in next(tuning(own), [])]


def swept(cells, run, limit=None):
    """Return the cells as their sweeps return them; `run` gives the records of cells."""
    found = {}
    for own in by_contender(cells):
        plan = tuning(own, limit)
        try:
            asked = next(plan)
            while True:
                asked = plan.send(run(asked))
        except StopIteration as end:
            found |= zip(own, end.value, strict=True)
    return [found[cell] for cell in cells]


def test_a_sweep_gives_every_contender_the_same_tries_on_the_validation_split():
    counts = {name: len(rates(name)) for name in recipes()}
    assert set(counts.values()) == {0, 7}
    options = Options(["noadapt", "tent", "mgtta"])
    cells = sweep_cells([*experiment_cells("corruptions", options), *experiment_cells("small-batch", options)])
    assert {c.split for c in cells} == {"validation"}
    assert {c.domains[0] for c in cells} == set(VALIDATION_CORRUPTIONS)
    tries = {
        (m, b): sum(c.method == m and c.batch_size == b for c in cells) for m in ("tent", "mgtta") for b in (2, 64)
    }
    assert set(tries.values()) == {4 * 7}
    assert not sweep_cells(experiment_cells("learning-rate", options))
    assert {c.training for c in sweep_cells(experiment_cells("samples", options))} > {Training(images=64)}
    both = [*experiment_cells("corruptions", options), *experiment_cells("learning-rate", options)]
    assert sweep_cells(both) == sweep_cells(experiment_cells("corruptions", options))


def test_a_sweep_may_have_fewer_images():
    cells = experiment_cells("corruptions", Options(["tent", "cotta"], limits=[("cotta", 32)]))
    run = Scored(nearness(1e-3))
    chosen = swept(cells, run, limit=64)
    assert {(cell.method, cell.limit) for cell in run.ran} == {("tent", 64), ("cotta", 32)}
    assert {(cell.method, cell.limit) for cell in chosen} == {("tent", None), ("cotta", 32)}


def test_the_best_mean_is_chosen_for_each_batch_size():
    cells = [Cell("small-batch", "tent", ("fog",), batch_size=size) for size in (2, 4)]
    best = {2: rates("tent")[1], 4: rates("tent")[5]}

    def run(tries):
        return [{"top1": 50.0 if dict(c.settings)["lr"] == best[c.batch_size] else 40.0} for c in tries]

    for cell in swept(cells, run):
        assert dict(cell.settings) == {"lr": best[cell.batch_size]}
        assert cell.chosen_from == tuple(rates("tent"))


@pytest.mark.parametrize("name", ["mixed", "continual"])
def test_rates_for_long_streams_are_tried_on_long_streams(name):
    cells = experiment_cells(name, Options(["noadapt", "tent"], seeds=2))
    tries = sweep_cells(cells)
    assert len(tries) == 7
    assert {(c.mixed, c.reset, len(c.domains)) for c in tries} == {(cells[0].mixed, cells[0].reset, 15)}
    assert set(tries[0].domains) == set(VALIDATION_CORRUPTIONS)
    best = rates("tent")[2]
    parts = 1 if name == "mixed" else 15

    def run(tries):
        return [{"top1": 50.0 if dict(c.settings)["lr"] == best else 40.0} for c in tries for _ in range(parts)]

    assert {dict(c.settings).get("lr") for c in swept(cells, run)} == {None, best}


def test_a_swept_experiment_says_what_it_chose_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "VALIDATION_CORRUPTIONS", ("saturate",))
    monkeypatch.setattr(sweep, "rates", lambda method, centre=None: [5e-4, 1e-3, 2e-3])
    options = Options(["tent"], corruptions=("fog", "contrast"))
    records = run_experiments(["corruptions"], options, Setup(images=2), Store(tmp_path), sweep=True)
    tried = [r for r in Store(tmp_path).records() if r["experiment"] == "sweep"]
    rates_tried = sorted({r["settings"]["lr"] for r in tried})
    assert {5e-4, 1e-3, 2e-3} <= set(rates_tried)  # and more where the grid grew
    assert [r["protocol"]["chosen_from"] for r in records] == [rates_tried] * 2
    assert {r["split"] for r in tried} == {"validation"}


class Scored:
    """Runs cells by a made-up accuracy of their settings, and counts them."""

    def __init__(self, score):
        self.score = score
        self.ran = []

    def __call__(self, cells):
        self.ran += cells
        return [{"top1": self.score(**dict(cell.settings))} for cell in cells for _ in cell.domains]


def nearness(peak):
    """Best at the peak, worse by the decade."""
    return lambda lr, **_: 50 - abs(math.log10(lr / peak))


@pytest.mark.parametrize(("peak", "growths"), [(1e-3, 0), (0.03, 1), (0.4, 3), (2e-6, 3)])
def test_a_sweep_grows_its_grid_until_the_best_rate_is_inside(peak, growths):
    run = Scored(nearness(peak))
    [cell] = swept([Cell("corruptions", "tent", ("fog",))], run)
    assert len(cell.chosen_from) == 7 + 2 * growths
    assert len(run.ran) == 4 * len(cell.chosen_from)
    chosen = dict(cell.settings)["lr"]
    assert min(cell.chosen_from) < chosen < max(cell.chosen_from)
    assert chosen == max(cell.chosen_from, key=lambda rate: nearness(peak)(rate))


def test_a_sweep_stops_growing_at_its_bound_and_its_rate_is_at_the_edge():
    run = Scored(lambda lr: lr)
    [cell] = swept([Cell("corruptions", "tent", ("fog",))], run)
    assert len(cell.chosen_from) == 7 + 2 * sweep.GROWTHS
    assert dict(cell.settings)["lr"] == max(cell.chosen_from) == pytest.approx(1e-2 * 5**4)
    assert at_edge(dataclasses.asdict(cell) | {"settings": dict(cell.settings)})


def test_a_sweep_where_all_rates_are_alike_does_not_grow():
    [cell] = swept([Cell("corruptions", "tent", ("fog",))], Scored(lambda lr: 10.0))
    assert dict(cell.settings)["lr"] == 1e-3
    assert len(cell.chosen_from) == 7


def test_a_sweep_tries_the_settings_that_decide_a_method():
    def score(lr, restore=None):
        return nearness(0.01)(lr) + {1e-4: 1.0, 1e-2: 2.0}.get(restore, 0.0)

    run = Scored(score)
    [cotta, tent] = swept([Cell("corruptions", m, ("fog",)) for m in ("cotta", "tent")], run)
    assert dict(cotta.settings) == {"lr": 0.01, "restore": 1e-2}
    assert dict(tent.settings).keys() == {"lr"}
    values = [dict(cell.settings)["restore"] for cell in run.ran if "restore" in dict(cell.settings)]
    assert sorted(set(values)) == [1e-4, 1e-2]  # the default is known from the rates
    assert {cell.split for cell in run.ran} == {"validation"}
    [worse] = swept([Cell("corruptions", "cotta", ("fog",))], Scored(lambda lr, restore=None: -bool(restore)))
    assert "restore" not in dict(worse.settings)


def test_a_sweep_at_a_small_batch_size_begins_at_the_rate_of_the_authors_rule():
    cells = experiment_cells("small-batch", Options(["tent"], corruptions=("fog",)))
    tried = {cell.batch_size: set() for cell in cells}
    for cell in sweep_cells(cells):
        tried[cell.batch_size].add(dict(cell.settings)["lr"])
    assert {size: sorted(rates)[3] for size, rates in tried.items()} == {2: 3.125e-5, 4: 6.25e-5}


# --- training


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


# --- data


def write_tree(root, folder_of, n=12):
    glyphs = Glyphs(n)
    for i in range(n):
        image, label = glyphs[i]
        path = root / folder_of(label) / f"{i:02}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, format="PNG")
    return root


def character_tree(root):
    """Write twelve images in a folder for each of the 30 characters, so that labels fit the embedded model."""
    write_tree(root, lambda label: CLASSES[label])
    for name in CLASSES:
        (root / name).mkdir(exist_ok=True)
    return root


@pytest.fixture
def tree(tmp_path):
    return character_tree(tmp_path / "tree")


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


# --- workers


def test_what_stays_in_this_process_is_not_sent_to_another(tmp_path):
    start = pickle.loads(pickle.dumps(bench._Start(SMALL, tmp_path, Listener(), group=None)))
    assert start.setup == SMALL
    assert start.folder == tmp_path
    assert start.watch is None


@pytest.mark.slow
def test_worker_processes_give_the_same_records(tmp_path):
    here = run_cells(FEW, SMALL, Store(tmp_path / "here"))
    there = run_cells(FEW, SMALL, Store(tmp_path / "there"), workers=2)
    assert without_timing(here) == without_timing(there)


def test_workers_train_the_generators_side_by_side_before_anyone_waits_for_one(tmp_path, monkeypatch):
    asked: list = []

    def here(executor, tasks, start):
        asked.extend(tasks.take() for _ in range(len(tasks)))
        return executor.run_in_turn(asked, start)

    monkeypatch.setattr(Processes, "run", here)
    sizes = [dataclasses.replace(TINY, hidden_size=d) for d in (2, 4)]
    cells = [Cell("hidden-size", "mgtta", (c,), batch_size=3, training=t) for c in ("fog", "contrast") for t in sizes]
    records = run_cells(cells, SMALL, Store(tmp_path), workers=2)
    assert asked == [*sizes, *cells]
    assert [r["protocol"]["hidden_size"] for r in records] == [2, 4, 2, 4]


def test_methods_with_fewer_images_have_noadapt_beside_them():
    limits = [("memo", 4), ("small-batch", 2)]
    options = Options(["noadapt", "tent", "memo"], corruptions=("fog",), limits=limits)
    found = [(cell.method, cell.limit) for cell in experiment_cells("corruptions", options)]
    assert found == [("noadapt", None), ("tent", None), ("memo", 4), ("noadapt", 4)]
    assert {cell.limit for cell in experiment_cells("small-batch", options)} == {2}
    pair = dataclasses.replace(options, limits=[("small-batch/memo", 2)])
    assert {cell.limit for cell in experiment_cells("corruptions", pair)} == {None}
    assert {(c.method, c.limit) for c in experiment_cells("small-batch", pair) if c.limit} == {
        ("memo", 2),
        ("noadapt", 2),
    }
    without = dataclasses.replace(options, limits=[("continual/memo", 0)])
    assert {cell.method for cell in experiment_cells("continual", without)} == {"noadapt", "tent"}
    assert "memo" in {cell.method for cell in experiment_cells("mixed", without)}
    with pytest.raises(ValueError, match="unknown experiment 'small'"):
        experiment_cells("corruptions", dataclasses.replace(options, limits=[("small/memo", 4)]))
    with pytest.raises(ValueError, match="unknown recipe 'memmo'"):
        experiment_cells("corruptions", dataclasses.replace(options, limits=[("memmo", 4)]))


def test_the_corruptions_are_the_users():
    options = Options(["tent"], corruptions=("fog", "snow"))
    assert [c.domains for c in experiment_cells("corruptions", options)] == [("fog",), ("snow",)]
    assert [c.domains for c in experiment_cells("mixed", options)] == [("fog", "snow")]
    with pytest.raises(ValueError, match="unknown corruption 'rain'"):
        experiment_cells("corruptions", Options(["tent"], corruptions=("rain",)))


@pytest.mark.slow
def test_what_is_measured_runs_alone(tmp_path):
    class Listening(Listener):
        def note(self, text):
            notes.append(text)

    notes: list[str] = []
    cells = [Cell("runtime", "eq7_sgd", ("fog", "contrast"), batch_size=3, alone=True)]
    cells += [dataclasses.replace(cells[0], experiment="memory")]
    records = run_cells(cells, SMALL, Store(tmp_path), watch=Listening())
    assert [r["experiment"] for r in records] == ["runtime"] * 2 + ["memory"] * 2
    assert [r["updates"] for r in records] == [2] * 4
    assert notes == ["eq7_sgd on 2 corruptions in a process of its own"]
    assert records[0]["process_peak_memory"] > 10**8


@pytest.mark.slow
def test_an_interrupt_leaves_a_store_to_go_on_from(tmp_path):
    """Ctrl-C of the whole process group, as a terminal sends it, while workers are busy."""
    code = """
import os, signal, sys
from mgtta.cli.progress import Lines
finish = Lines.cell
def cell(self, *arguments):
    finish(self, *arguments)
    os.killpg(0, signal.SIGINT)
Lines.cell = cell
sys.argv = ["mgtta", "bench", "corruptions", "--methods", "noadapt", "--images", "2", "--workers", "2", "--json",
            "--out", sys.argv[1], "--device", "cpu"]
from mgtta.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    main()
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    assert done.returncode == 130, done.stderr
    assert "the same command resumes" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(Store(tmp_path / "run").cells()) >= 1
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()][:2] == ["start", "record"]


def test_bars_time_the_batches_that_they_see_begin_and_end(monkeypatch):
    shown, clock = [], iter([10.0, 12.0, 20.0])
    monkeypatch.setattr("mgtta.cli.progress.time.perf_counter", lambda: next(clock))
    bars = Bars()
    monkeypatch.setattr(bars, "_show", lambda text, part: shown.append(text))
    cell = FEW[0]
    for sizes, top1 in (([3], 50.0), ([3, 4], 75.0)):
        bars.batch(cell, Record("noadapt", "contrast", sizes=sizes, top1=top1), 0.5)
    bars.batch(FEW[1], Record("eq7_sgd", "contrast", sizes=[3]), 0.5)
    assert shown == ["noadapt on contrast: 50.0 %", "noadapt on contrast: 75.0 %, 2 images/s", "eq7_sgd on contrast"]
