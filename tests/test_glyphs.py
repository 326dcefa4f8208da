"""The rendered characters, and the script that trains on them."""

import argparse
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mgtta.data.glyphs import CLASSES, CONTRAST, FONTS, SIZE, TEST_SEED, Glyphs, drawing, render, stencil
from mgtta.models.loading import vision_transformer

LUMA = np.array([0.299, 0.587, 0.114])


@pytest.fixture(scope="module")
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    return Glyphs(600, seed=7).tensors()


def luma(image: np.ndarray) -> np.ndarray:
    return np.tensordot(LUMA, image, 1)


def test_classes_are_distinct_characters():
    assert len(CLASSES) == len(set(CLASSES)) == 30
    assert len(FONTS) == len(set(FONTS)) >= 16


def test_every_font_has_every_class():
    for font in FONTS:
        shapes = [np.asarray(stencil(font, c), dtype=float) / 255 for c in CLASSES]
        for shape in shapes:
            assert 0.03 < shape.mean() < 0.4
            assert not shape[[*range(12), *range(-12, 0)]].any()  # nothing is cut
        for a, b in combinations(shapes, 2):
            assert np.abs(a - b).sum() > 0.1 * min(a.sum(), b.sum())  # E and F come closest


def test_fonts_are_distinct():
    for a, b in combinations(FONTS, 2):
        assert any(stencil(a, c).tobytes() != stencil(b, c).tobytes() for c in CLASSES)


def test_an_image_depends_only_on_seed_and_index():
    forward = [render(i, seed=3) for i in range(20)]
    backward = [render(i, seed=3) for i in reversed(range(20))][::-1]
    for (a, x), (b, y) in zip(forward, backward, strict=True):
        assert x == y
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(render(0, seed=3)[0], render(0, seed=4)[0])
    assert not np.array_equal(render(0, seed=3)[0], render(1, seed=3)[0])
    assert np.array_equal(render(5)[0], render(5, seed=TEST_SEED)[0])


def test_other_processes_render_the_same_glyphs(sample, monkeypatch):
    monkeypatch.setattr("mgtta.data.rendered._CHUNK", 16)
    calls = []
    images, labels = Glyphs(40, seed=7).tensors(processes=2, progress=lambda *done: calls.append(done))
    assert torch.equal(images, sample[0][:40])
    assert torch.equal(labels, sample[1][:40])
    assert calls == [(16, 40), (32, 40), (40, 40)]


def test_glyphs_as_a_data_set():
    data = Glyphs(5, seed=2)
    assert len(data) == len(list(data)) == 5
    image, label = data[4]
    assert image.dtype == torch.uint8
    assert image.shape == (3, SIZE, SIZE)
    assert isinstance(label, int)
    assert data.labels.tolist() == [label for _, label in data]
    assert torch.equal(data.tensors()[0][4], image)
    assert data.classes == CLASSES
    assert len({data.name(i) for i in range(5)}) == 5
    for outside in (-1, 5):
        with pytest.raises(IndexError, match="of 5"):
            data[outside]
    with pytest.raises(ValueError, match="negative"):
        Glyphs(3, seed=-1)
    images, labels = Glyphs(0).tensors()
    assert images.shape == (0, 3, SIZE, SIZE)
    assert labels.shape == (0,)


def test_labels_are_balanced():
    n = 6000
    counts = Glyphs(n, seed=1).labels.bincount(minlength=len(CLASSES)).double()
    expected = n / len(CLASSES)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 29 + 4 * math.sqrt(2 * 29)


def test_glyph_stands_out_from_background():
    sides = []
    for index in range(400):
        rng, label = drawing.start(7, index)
        image, mask = drawing._compose(rng, CLASSES[label])
        assert mask.sum() > 20
        full = mask.max()  # thin strokes of small glyphs never cover a pixel whole
        inside, outside = luma(image)[mask > 0.9 * full], luma(image)[mask == 0]
        # medians: the few pixels of strokes aside
        gap = np.median(inside) - np.median(outside)
        assert abs(gap) > 0.9 * full * CONTRAST - 0.02, index
        sides.append(gap > 0)
    assert 0.4 < np.mean(sides) < 0.6  # light on dark as often as dark on light


def test_colours_keep_their_distance():
    rng = np.random.default_rng(0)
    colours = np.stack([drawing._colours(rng) for _ in range(2000)])
    assert colours.min() >= 0
    assert colours.max() <= 1 + 1e-6
    ink, ground, second, _ = (colours @ LUMA).T
    assert np.abs(ink - ground).min() > CONTRAST - 1e-5
    assert np.abs(ink - second).min() > CONTRAST - 1e-5
    assert ((ink > ground) == (ink > second)).all()


def test_images_are_varied(sample):
    images = sample[0].double() / 255
    assert 0.35 < images.mean() < 0.65
    assert images.std() > 0.2
    assert images.std((1, 2, 3)).min() > 0.05  # none is blank
    means = images.mean((2, 3))
    assert means.std(0).min() > 0.15  # in colour and brightness
    assert len({image.numpy().tobytes() for image in sample[0]}) == len(images)


# -- benchmarks/train_glyphs.py


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import train_glyphs

    return train_glyphs


def test_augmentation(script, sample):
    x = sample[0][:200].float() / 255
    torch.manual_seed(0)
    torch.testing.assert_close(script.Augment.parse("0")(x), x, atol=1e-4, rtol=0)
    for name in script.asdict(script.Augment()):
        if name == "share":
            continue
        y = script.Augment.parse(f"0,{name}=0.5")(x)
        assert y.shape == x.shape
        assert y.min() >= 0
        assert y.max() <= 1
        changed = ((y - x).abs().amax((1, 2, 3)) > 1e-4).double().mean()
        assert 0.2 < changed < 0.95, name
    with pytest.raises(argparse.ArgumentTypeError, match="noise, blur"):
        script.Augment.parse("1,nosie=2")


def test_a_share_of_the_images_is_changed(script):
    torch.manual_seed(0)
    x = torch.full((4000, 3, 8, 8), 0.5)
    changed = (script.Augment.parse("0,noise=0.2,share=0.1")(x) != x).any((1, 2, 3))
    assert changed.double().mean() == pytest.approx(0.1, abs=0.02)
    assert script.Augment.parse("0.5").share == 0.5  # a factor is on strengths alone


def test_noise_has_the_given_strength(script):
    torch.manual_seed(0)
    x = torch.full((4000, 3, 8, 8), 0.5)
    std = (script.Augment.parse("0,noise=0.2")(x) - x).std((1, 2, 3))
    assert std.max() == pytest.approx(0.2, abs=0.02)
    assert (std == 0).double().mean() == pytest.approx(0.5, abs=0.05)


def test_train_glyphs_learns(script, sample):
    args = script.parse(["--out", "unused", "--quick", "--lr", "6e-3", "--steps", "100", "--batch", "32"])
    torch.manual_seed(0)
    model = script.timm.models.VisionTransformer(
        img_size=SIZE, patch_size=12, embed_dim=48, depth=2, num_heads=3, num_classes=30
    )
    images, labels = sample[0][:16], sample[1][:16]
    losses = script.train(model, images, labels, script.Augment.parse("0"), args)
    assert losses[-1] < 0.5 * losses[0]
    assert script.accuracy(model, images, labels) > 60


def test_train_glyphs_script_runs(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "CORRUPTIONS", ("gaussian_noise", "contrast"))  # two suffice to see it run
    monkeypatch.setattr(script, "VALIDATION_CORRUPTIONS", ("saturate",))
    words = ["--quick", "--device", "cpu", "--steps", "3", "--strength", "0.5", "1,noise=0.3"]
    trials = script.main(["--out", str(tmp_path), *words])
    assert list(trials) == ["0.5", "1,noise=0.3"]
    assert json.loads((tmp_path / "figures.json").read_text()) == trials
    assert capsys.readouterr().out.count("\n| ") == len(trials["0.5"]) + 2
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["figures.json", "glyphs-vit-0.5.safetensors", "glyphs-vit-1-noise0.3.safetensors"]

    with safe_open(tmp_path / files[2], "pt") as file:
        metadata = file.metadata()
    weights = load_file(tmp_path / files[2])
    assert {w.dtype for w in weights.values()} == {torch.float16}
    assert json.loads(metadata["augmentation"])["noise"] == 0.3
    assert "--strength 1,noise=0.3" in metadata["command"]
    assert str(tmp_path) not in str(metadata)
    model = vision_transformer(**json.loads(metadata["model"]))
    model.load_state_dict(weights)
    clean, labels = Glyphs(script.QUICK["test_images"]).tensors()
    assert script.accuracy(model, clean, labels) == trials["1,noise=0.3"]["clean"]


def test_a_plain_model_has_no_stem(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "CORRUPTIONS", ("contrast",))
    monkeypatch.setattr(script, "VALIDATION_CORRUPTIONS", ())
    script.main(["--quick", "--device", "cpu", "--steps", "2", "--plain", "--out", str(tmp_path), "--strength", "0"])
    with safe_open(tmp_path / "glyphs-plain-0.safetensors", "pt") as file:
        metadata = file.metadata()
    assert "--plain" in metadata["command"]
    model = vision_transformer(**json.loads(metadata["model"]))
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
    model.load_state_dict(load_file(tmp_path / "glyphs-plain-0.safetensors"))


def test_an_unknown_strength_is_rejected(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.parse(["--out", str(tmp_path), "--strength", "1", "1,nosie=2"])
    assert "nosie" in capsys.readouterr().err
