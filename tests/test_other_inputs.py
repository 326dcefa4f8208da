"""Classifiers of vectors and sequences: every recipe adapts them, or refuses by name what it does only with images."""

import pytest
import torch
from conftest import random_generator
from torch import nn

import mgtta
from mgtta.methods.registry import BATCH_NORM, FISHER, SOURCE, TOKENS, recipes

CLASSES = 4
VECTOR = (12,)
SERIES = (5, 20)  # channels, length
TOKEN_ROWS = (9, 5)  # tokens, features
CHANGE_IMAGES = {"cmf", "cotta", "deyo", "memo", "roid", "rotta", "spa", "spa_eata", "spa_eta"}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False, norm=nn.LayerNorm(16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


def perceptron(norm):
    middle = [nn.Linear(32, 32), norm(32), nn.ReLU()]
    return nn.Sequential(nn.Linear(12, 32), norm(32), nn.ReLU(), *middle, nn.Linear(32, CLASSES))


def convolutions():
    blocks = [[nn.Conv1d(n, 16, 3), nn.BatchNorm1d(16), nn.ReLU()] for n in (5, 16)]
    return nn.Sequential(*blocks[0], *blocks[1], nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES))


NETS = {
    "vectors, BatchNorm1d": (lambda: perceptron(nn.BatchNorm1d), VECTOR),
    "vectors, LayerNorm": (lambda: perceptron(nn.LayerNorm), VECTOR),
    "series, BatchNorm1d": (convolutions, SERIES),
    "tokens, LayerNorm": (Encoder, TOKEN_ROWS),
}


@pytest.fixture(params=NETS)
def case(request):
    torch.manual_seed(0)
    make, shape = NETS[request.param]
    return mgtta.load_model(make()), shape


def batch(shape, n=8, seed=0):
    return 3 * torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def needs(name, model, shape):
    found = {}
    recipe = recipes()[name]
    if SOURCE in recipe.needs:
        found["source"] = mgtta.source_statistics(model, batch(shape, 32, seed=99))
    if FISHER in recipe.needs:
        found["fisher"] = mgtta.fisher_information(model, batch(shape, 32, seed=99))
    if "generator" in recipe.settings and name != "mgtta_lstm":
        found["generator"] = random_generator()
    return found


@pytest.mark.parametrize("name", [name for name, recipe in recipes().items() if TOKENS not in recipe.needs])
def test_a_recipe_adapts_or_refuses_by_name(name, case):
    model, shape = case
    if BATCH_NORM in recipes()[name].needs and not any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
        pytest.skip("it needs BatchNorm")
    method = mgtta.create(name, model, **needs(name, model, shape))
    if name in CHANGE_IMAGES:
        for call in (method, method.predict):
            with pytest.raises(ValueError, match=f"{name} makes views of images.*take another method"):
                call(batch(shape))
        return
    for t in range(2):
        logits = method(batch(shape, seed=t))
        assert logits.shape == (8, CLASSES)
        assert logits.isfinite().all()
    assert method.skipped == 0


def test_mgtta_plus_re_centres_without_mirror_images(case):
    model, shape = case
    settings = needs("mgtta_plus", model, shape)
    assert settings["source"].mirrored == 0
    method = mgtta.create("mgtta+", model, gather=0, recall=0, **settings)
    assert method.mirror is False
    method(batch(shape))
    assert method.neighbours.known.sum() == 8
    assert method.export()(batch(shape)).shape == (8, CLASSES)
    with pytest.raises(ValueError, match="mirror=True needs images"):
        mgtta.create("mgtta+", model, mirror=True, **settings)(batch(shape))


@pytest.mark.parametrize("option", [{"recall": 4}, {"guard": True}, {"schedule": "auto"}, {"gather": 16}])
def test_options_of_every_method_take_other_inputs(case, option):
    model, shape = case
    method = mgtta.create("tent", model, **option)
    for t in range(3):
        assert method(batch(shape, seed=t)).shape == (8, CLASSES)
    assert method.updates
