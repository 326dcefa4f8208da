"""The rendered patterns, the model that comes with them, and the script that trains it."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import mgtta
from mgtta.data.embedded import images_for
from mgtta.data.glyphs import Glyphs
from mgtta.data.patterns import CLASSES, GAP, KINDS, Patterns, _colours, render
from mgtta.data.rendered import SIZE, TEST_SEED
from mgtta.data.streams import corrupted, stream


def test_a_pattern_depends_only_on_seed_and_index():
    first = [render(i, seed=3) for i in range(8)]
    again = [render(i, seed=3) for i in reversed(range(8))][::-1]
    for (a, x), (b, y) in zip(first, again, strict=True):
        assert x == y
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(render(0, seed=3)[0], render(0, seed=4)[0])
    assert np.array_equal(render(5)[0], render(5, seed=TEST_SEED)[0])


def test_patterns_as_a_data_set():
    data = Patterns(300, seed=2)
    image, label = data[7]
    assert image.shape == (3, SIZE, SIZE)
    assert image.dtype == torch.uint8
    assert data.labels[7] == label
    assert data.name(7) == "pattern-2-7"
    assert data.labels.bincount(minlength=len(CLASSES)).min() > 10
    images, labels = data.tensors()
    assert torch.equal(images[7], image)
    assert torch.equal(labels, data.labels)


def test_the_pattern_is_darker_than_its_ground():
    rng = np.random.default_rng(0)
    ground, dark = np.stack([_colours(rng) for _ in range(500)]).transpose(1, 0, 2) @ [0.299, 0.587, 0.114]
    assert (ground - dark).min() > GAP[0] - 1e-5
    assert ground.max() <= 0.95 + 1e-5


def test_every_kind_covers_a_part_of_the_image():
    v, u = np.mgrid[0:60:0.1, 0:60:0.1]
    for name, kind in KINDS.items():
        assert 0.05 < (kind(u - 30, v - 30) > 0).mean() < 0.75, name


def test_embedded_images_go_with_their_model():
    assert images_for("patterns_vit") is Patterns
    assert images_for("glyphs_vit") is images_for("resnet18") is Glyphs


def test_the_model_of_patterns_has_layer_norm_only():
    net = mgtta.load_model("patterns_vit").net
    assert not any(isinstance(module, _BatchNorm) for module in net.modules())
    assert sum(isinstance(module, nn.LayerNorm) for module in net.modules()) >= 9


def test_adaptation_gains_on_patterns():
    batches = list(stream(corrupted(Patterns(256), ["frost"]), batch_size=16))
    model = mgtta.load_model("patterns_vit")
    settings = {"source": "patterns_vit", "mirror": False, "decay": float("inf")}
    methods = mgtta.create("noadapt", model), mgtta.create("mgtta_plus", model, **settings)
    still, adapted = (mgtta.evaluate(method, batches)[0].top1 for method in methods)
    assert adapted > still + 4


def test_train_patterns_script_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import train_patterns

    monkeypatch.setattr(train_patterns, "CORRUPTIONS", ("contrast",))
    monkeypatch.setattr("train_glyphs.CORRUPTIONS", ("contrast",))
    figures = train_patterns.main(["--out", str(tmp_path), "--images", "128", "--test-images", "32"])
    assert set(figures) == {"mean", "worst", "clean", "contrast"}
    with safe_open(tmp_path / "models" / "patterns_vit.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["model"])["stem"]["norm"] == "layer"
    assert str(tmp_path) not in str(metadata)
    assert mgtta.load_source(tmp_path / "sources" / "patterns_vit.safetensors").images == 32
