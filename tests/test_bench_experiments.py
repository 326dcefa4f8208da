"""The cells of each experiment."""

import dataclasses

import pytest
from small_bench import SMALL, TINY

from mgtta.bench.cells import Options, Training
from mgtta.bench.experiments import EXPERIMENTS, QUICK, experiment_cells, variant
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.glyphs import STAND_INS


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
