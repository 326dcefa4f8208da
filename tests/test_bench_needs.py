"""What bench gives to a method: its rate at a batch size, a network that it can run on, a precision."""

import dataclasses

from small_bench import SMALL
from typer.testing import CliRunner

import mgtta
from mgtta.bench import run as bench
from mgtta.bench.cells import Cell, Options
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.needs import methods_for, rate_at
from mgtta.bench.resources import Lab
from mgtta.cli.app import app
from mgtta.data.glyphs import Glyphs
from mgtta.fast.choice import fits
from mgtta.methods.registry import recipe, recipes


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
