"""`mgtta list` and `mgtta doctor`: one page, without torch, with true costs."""

import json
import subprocess
import sys

import pytest
from conftest import confident_vit, convnet, images
from test_cli import run  # noqa: F401
from test_methods import OPEN, make

import mgtta
from mgtta._lib.names import spelled
from mgtta._lib.shipped import shipped
from mgtta.cli import health
from mgtta.cli.listing import CATALOGUE, SHIPPED, WIDEST, listed
from mgtta.methods.registry import recipes

MANY = ("augmentations", "frequency")  # settings that tests make small, and on which the cost depends
WIDTHS = ("", "methods", "generators", "models", "data")


def test_list_needs_no_torch():
    code = """
import sys
sys.argv = ["mgtta", "list"]
from mgtta.cli import main
try:
    main()
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mgtta+" in done.stdout


def test_list_is_one_page_with_a_line_for_each_method():
    lines = listed().splitlines()
    assert len(lines) < 60
    for name, recipe in recipes().items():
        [line] = [line for line in lines if line.split()[:1] == [spelled(name)]]
        assert recipe.kind in line


@pytest.mark.parametrize("what", WIDTHS)
def test_no_line_is_wider_than_a_terminal(what, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, listed(what).splitlines())) <= WIDEST


def test_list_of_one_kind_says_more(run):  # noqa: F811
    code, out, _ = run("list", "methods")
    assert code == 0
    for word in ("lr=0.00025", "deyo@mgtta:", "passes 34 + 1", "Fisher information"):
        assert word in out
    assert "hidden size 8" in run("list", "generators")[1]
    assert "glyphs_vit: comes with the package, for rendered characters" in run("list", "models")[1]
    assert set(SHIPPED) == set(shipped("models"))
    assert "imagenet-c" in run("list", "data")[1]
    code, _, err = run("list", "method")
    assert code == 2
    assert "valid: data, generators, methods, models" in err


@pytest.mark.parametrize("name", list(recipes()))
def test_the_cost_of_a_recipe_is_what_it_does(name):
    """Images that pass the network, forward and backward, for each image of the stream."""
    net = convnet("batch") if name in ("bn", "rotta") else confident_vit()
    model = mgtta.load_model(net)
    many = {key: recipes()[name].settings[key] for key in OPEN.get(name, {}) if key in MANY}
    method = make(name, model, **many)
    found = {"forward": 0, "backward": 0}

    def count_backward(gradient):
        found["backward"] += len(gradient)

    def count(_layer, _inputs, output):
        found["forward"] += len(output)
        if output.requires_grad:
            output.register_hook(count_backward)

    for module in method.modules():
        if isinstance(module, mgtta.Classifier):
            counted = module.net if name in ("bn", "rotta") else module.net.blocks[1].norm1
            counted.register_forward_hook(count)
    n = 64 if name == "rotta" else 4  # its update comes after 64 images
    for i in range(2):
        method(images(n, seed=i))
    forward, backward = recipes()[name].cost
    assert 0.4 * forward <= found["forward"] / (2 * n) <= forward + 0.5  # some look once more at the first batch
    assert 0.05 * backward <= found["backward"] / (2 * n) <= backward


def test_the_catalogue_is_plain():
    found = json.loads(CATALOGUE.read_text())
    assert [method["name"] for method in found["methods"]] == [spelled(name) for name in recipes()]


def test_doctor_reports_memory_bfloat16_and_a_step(run, monkeypatch):  # noqa: F811
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("doctor")
    assert code == 0
    for word in ("GiB free", "bfloat16 on the cpu", "works", "a step on cpu", "ms to predict and adapt"):
        assert word in out


def test_doctor_says_so_if_bfloat16_kills_a_process(monkeypatch):
    def killed():
        raise RuntimeError("was killed by SIGILL")

    monkeypatch.setattr("mgtta._lib.cpu.check_bfloat16", killed)
    [(what, found, remedy)] = health._bfloat16()
    assert "does not work" in found
    assert "--precision fp32" in remedy
    assert what == "bfloat16 on the cpu"
