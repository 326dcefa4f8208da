"""`mgtta tune`: what does best on corrupted copies of clean images is chosen, and the words say how sure that is."""

import dataclasses

import pytest
import torch
from conftest import convnet, images
from test_cli import options, run, write_images  # noqa: F401

import mgtta
from mgtta.cli.inputs import labelled_images
from mgtta.data.corruptions import corrupt
from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.methods.registry import recipe
from mgtta.running.tune import Candidate, Estimate, Tuning, default_candidates, ranked, tune


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_candidates_are_noadapt_and_each_method_at_each_pace(norm):
    net = convnet(norm)
    found = default_candidates(net, ["tent", "t3a", "noadapt"], [0.5, 2])
    lr = recipe("tent").settings_for(net)["lr"]
    assert [(c.method, c.settings.get("lr")) for c in found] == [
        ("noadapt", None),
        ("tent", 0.5 * lr),
        ("tent", 2 * lr),
        ("t3a", None),
    ]


SOURCE = Candidate("noadapt", accuracy=50.0, gains={"fog": 0.0, "snow": 0.0})
TENT = Candidate("tent", {"lr": 0.001}, 60.0, {"fog": 8.0, "snow": 12.0})
GAIN = Estimate(accuracy=56.0, source=50.0, noise=1.0, error=4.0)


def test_tuning_says_how_sure_it_is():
    clear = Tuning([TENT, SOURCE], GAIN)
    assert clear.sure
    assert "Take tent (lr=0.001): +10.0 points" in str(clear)
    assert "Estimated on your images: 50 % -> 56 %, off by 4 points or so." in str(clear)
    noisy = Tuning([TENT, SOURCE], dataclasses.replace(GAIN, noise=3.5))
    assert "it is a guess: the estimate on your images does not confirm it" in str(noisy)
    uneven = Tuning([dataclasses.replace(TENT, gains={"fog": -1.0, "snow": 12.0}), SOURCE], GAIN)
    assert not uneven.sure
    assert "it is a guess: it does not gain under every corruption (fog -1.0 points)" in str(uneven)
    assert "Do not adapt" in str(Tuning([SOURCE, TENT], GAIN))


def test_a_methods_own_rate_is_taken_unless_another_is_clearly_better():
    lr = recipe("tent").settings["lr"]
    gains = {"fog": 10.0}
    own = Candidate("tent", {"lr": lr}, 60.0, gains)
    fast = Candidate("tent", {"lr": 5 * lr}, 61.0, gains)
    still = (Candidate("noadapt", accuracy=50.0), {"fog": torch.tensor([1.0, 0.0] * 50)})
    right = {"fog": torch.tensor([1.0] * 60 + [0.0] * 40)}
    other = {"fog": torch.tensor([1.0] * 40 + [0.0] * 20 + [1.0] * 21 + [0.0] * 19)}  # 61 right, many of them others
    found = ranked([(fast, other), still, (own, right)])
    assert found == [own, fast, still[0]]
    assert f"{fast} is not clearly better" in str(Tuning(found, GAIN))
    default = Candidate("mgtta_plus", {"lr": recipe("mgtta+").settings["lr"]}, 59.0, gains)
    assert ranked([(fast, other), still, (own, right), (default, other)])[0] is default
    clear = {"fog": torch.tensor([1.0] * 75 + [0.0] * 25)}
    assert ranked([(dataclasses.replace(fast, accuracy=75.0), clear), still, (own, right)])[1] is own


def test_a_rate_that_destroys_the_model_is_not_chosen():
    model = mgtta.load_model("glyphs_vit")
    clean, labels = Glyphs(16, seed=41).tensors()
    x = corrupt(Glyphs(32, seed=42).tensors()[0], "gaussian_noise", 3)
    candidates = [Candidate("noadapt"), Candidate("tent", {"lr": 1e-3}), Candidate("tent", {"lr": 3.0})]
    told = []
    found = tune(model, x, clean, labels, candidates=candidates, batch_size=16, on_candidate=told.append)
    assert {c.method for c in told} == {"noadapt", "tent"}
    assert found.candidates[-1].settings == {"lr": 3.0}
    assert {c.accuracy for c in found.candidates} == {c.accuracy for c in told}
    assert found.candidates[1].accuracy >= found.candidates[2].accuracy
    assert torch.equal(model(x[:4]), mgtta.load_model("glyphs_vit")(x[:4]))


def test_copies_are_scored_by_the_labels_or_by_the_source_model_on_the_clean_images(model):
    clean = images(16)
    sample = images(8)
    tried = [Candidate("noadapt"), Candidate("tent", {"lr": 1e-3})]

    def accuracies(labels):
        found = tune(model, sample, clean, labels, candidates=tried, batch_size=64, corruptions=["fog", "snow"])
        return {c.method: c for c in found.candidates}

    labels = torch.arange(16) % model.num_classes
    still = mgtta.create("noadapt", model)
    right = [still(corrupt(clean, name, 5)).argmax(1) for name in ("fog", "snow")]
    by_labels = accuracies(labels)
    assert by_labels["noadapt"].accuracy == pytest.approx(
        50 * sum(float((found == labels).double().mean()) for found in right)
    )
    truth = model(clean).detach().double().softmax(1)
    without = accuracies(None)
    assert without["noadapt"].accuracy == pytest.approx(
        50 * sum(float(truth.gather(1, found[:, None]).mean()) for found in right)
    )
    assert without["noadapt"].gains == {"fog": 0.0, "snow": 0.0}
    method = mgtta.create("tent", model, lr=1e-3)
    adapted = torch.cat([method(part) for part in corrupt(clean, "fog", 5).split(4)]).argmax(1)  # four batches
    gain = float((adapted == labels).double().mean() - (right[0] == labels).double().mean())
    assert by_labels["tent"].gains["fog"] == pytest.approx(100 * gain)


def test_tune_names_what_is_missing(model):
    with pytest.raises(ValueError, match="must include noadapt"):
        tune(model, images(16), images(16), candidates=[Candidate("tent")], batch_size=8)
    with pytest.raises(ValueError, match="needs at least 16"):
        tune(model, images(16), images(8), candidates=[Candidate("noadapt")])
    with pytest.raises(ValueError, match=r"mgtta needs source=\.\.\."):
        tune(model, images(16), images(16), candidates=[Candidate("noadapt"), Candidate("mgtta")])


def test_the_tune_command_prints_the_choice(run, tmp_path):  # noqa: F811
    root = write_images(tmp_path / "images", lambda i, label: CLASSES[label], n=16)
    words = options(model="glyphs_vit", clean=root, methods="tent", paces="1", images=8, batch_size=8, device="cpu")
    code, out, err = run("tune", root, *words, "--source", "glyphs_vit")
    assert code == 0, err
    assert "Accuracy on corrupted copies of the clean images:" in out
    assert "Estimated on your images:" in out
    assert "tent (lr=0.001)" in out
    assert "noadapt" in out
    code, _, err = run("tune", root, *words, "--source", "glyphs_vit", "--paces", "much")
    assert code == 2
    assert "--paces takes numbers" in err


def test_a_choice_from_few_images_is_a_guess():
    candidates = [TENT, SOURCE]
    assert Tuning(candidates, GAIN, 256, 256).sure
    assert "20 images are too few" in str(Tuning(candidates, GAIN, 20, 256))
    assert "32 images are too few" in str(Tuning(candidates, GAIN, 256, 32))


class Renamed(Glyphs):
    """Characters whose folders are in another order than the model's classes."""

    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        return image, (label + 1) % len(CLASSES)


def test_labels_of_folders_in_another_order_are_not_used(capsys):
    model = mgtta.load_model("glyphs_vit")
    x, labels = labelled_images(Glyphs(32, seed=3), model)
    assert sorted(labels.tolist()) == sorted(Glyphs(32, seed=3).labels)
    assert capsys.readouterr().err == ""
    same, none = labelled_images(Renamed(32, seed=3), model)
    assert torch.equal(same, x)
    assert none is None
    assert "--classes FILE" in capsys.readouterr().err
