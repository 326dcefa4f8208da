"""`mgtta tune`: the method with the highest estimate is chosen, and the words say how sure that is."""

import pytest
import torch
from conftest import images
from test_cli import options, run, write_glyphs  # noqa: F401

import mgtta
from mgtta.data.corruptions import corrupt
from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.methods.registry import recipe
from mgtta.running.tune import Candidate, Tuning, default_candidates, tune


def test_candidates_are_noadapt_and_each_method_at_each_pace():
    found = default_candidates(["tent", "t3a", "noadapt"], [0.5, 2])
    lr = recipe("tent").settings["lr"]
    assert [(c.method, c.settings.get("lr")) for c in found] == [
        ("noadapt", None),
        ("tent", 0.5 * lr),
        ("tent", 2 * lr),
        ("t3a", None),
    ]


def test_tuning_says_how_sure_it_is():
    source = Candidate("noadapt", {}, 50.0, 2.0, 0.0)
    clear = Tuning([Candidate("tent", {"lr": 0.001}, 60.0, 2.0, 1.0), source])
    assert clear.sure
    assert "Take tent (lr=0.001): +10.0 points" in str(clear)
    noisy = Tuning([Candidate("tent", {"lr": 0.001}, 60.0, 2.0, 6.0), source])
    assert not noisy.sure
    unclear = Tuning([Candidate("tent", {"lr": 0.001}, 51.0, 2.0, 0.1), source])
    assert not unclear.sure
    assert "it is a guess: +1.0 points" in str(unclear)
    assert "Do not adapt" in str(Tuning([source, Candidate("tent", {}, 40.0)]))


def test_a_rate_that_destroys_the_model_is_not_chosen():
    model = mgtta.load_model("glyphs_vit")
    clean, labels = Glyphs(16, seed=41).tensors()
    x = corrupt(Glyphs(32, seed=42).tensors()[0], "gaussian_noise", 3)
    candidates = [Candidate("noadapt"), Candidate("tent", {"lr": 1e-3}), Candidate("tent", {"lr": 3.0})]
    told = []
    found = tune(model, x, clean, labels, candidates=candidates, batch_size=16, on_candidate=told.append)
    assert {c.method for c in told} == {"noadapt", "tent"}
    assert found.candidates[-1].settings == {"lr": 3.0}
    assert [c.accuracy for c in found.candidates] == sorted([c.accuracy for c in told], reverse=True)
    assert torch.equal(model(x[:4]), mgtta.load_model("glyphs_vit")(x[:4]))


def test_tune_names_what_is_missing(model):
    with pytest.raises(ValueError, match="must include noadapt"):
        tune(model, images(16), images(16), candidates=[Candidate("tent")], batch_size=8)
    with pytest.raises(ValueError, match=r"mgtta needs source=\.\.\."):
        tune(model, images(16), images(16), candidates=[Candidate("mgtta")])


def test_the_tune_command_prints_the_choice(run, tmp_path):  # noqa: F811
    root = write_glyphs(tmp_path / "images", lambda i, label: CLASSES[label], n=16)
    words = options(model="glyphs_vit", clean=root, methods="tent", paces="1", images=8, batch_size=8, device="cpu")
    code, out, err = run("tune", root, *words, "--source", "glyphs_vit")
    assert code == 0, err
    assert "Estimated accuracy without labels:" in out
    assert "tent (lr=0.001)" in out
    assert "noadapt" in out
    code, _, err = run("tune", root, *words, "--source", "glyphs_vit", "--paces", "much")
    assert code == 2
    assert "--paces takes numbers" in err


def test_a_choice_from_few_images_is_a_guess():
    candidates = [Candidate("tent", {"lr": 1e-3}, 80.0, 2.0, 1.0), Candidate("noadapt", {}, 50.0, 2.0, 1.0)]
    assert Tuning(candidates, 256).sure
    few = Tuning(candidates, 20)
    assert not few.sure
    assert "20 images are too few" in str(few)
