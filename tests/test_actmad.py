"""ActMAD against its equation, and what it does to shifted images."""

import pytest
from baselines import close, mean, unsure_vit
from conftest import confident_vit, images
from torch import nn
from transcription import entropy as H
from transcription import objective as eq_7

import mgtta


def spread(column):
    """Mean and unbiased variance of a column of numbers."""
    mu = mean(column)
    return mu, sum((a - mu) ** 2 for a in column) / (len(column) - 1)


def slow_actmad(features, source):
    total = 0.0
    for f, mu_s, sigma_s in zip(features, source.mean, source.std, strict=True):
        n, d = f.shape
        for j in range(d):
            column = f[:, j].tolist()
            total += abs(mean(column) - float(mu_s[j])) / d / 2
            if n > 1:
                total += abs(spread(column)[1] - float(sigma_s[j]) ** 2) / d / 2
    return total


@pytest.mark.parametrize("n", [8, 1])
def test_actmad_against_its_equation(n):
    model = unsure_vit()
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    x = images(n).double()
    logits, features = model.features(x)
    method = mgtta.create("actmad", model, source=source)
    close(method.loss(x)[1].detach(), slow_actmad(features, source))
    squared = mgtta.create("actmad", model, source=source, squared=True)
    without_entropy = eq_7(logits, features, source.mean, source.std, 0.4) - mean([H(row) for row in logits.tolist()])
    close(squared.loss(x)[1].detach(), without_entropy)


@pytest.mark.parametrize("squared", [False, True])
def test_actmad_brings_the_statistics_of_shifted_images_back(squared):
    model = mgtta.load_model(confident_vit())
    source = mgtta.source_statistics(model, images(64, seed=9))
    shifted = images(16) * 0.3
    before = slow_actmad(model.features(shifted)[1], source)
    method = mgtta.create("actmad", model, source=source, squared=squared)
    for _ in range(30):
        method(shifted)
    assert slow_actmad(method.model.features(shifted)[1], source) < 0.8 * before
    assert method.model.head.weight.equal(model.head.weight)


def test_actmad_names_a_network_whose_features_nothing_changes():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = mgtta.load_model(nn.Sequential(*layers).eval())
    method = mgtta.create("actmad", model, source=mgtta.source_statistics(model, images(8)))
    with pytest.raises(ValueError, match="one normalisation layer: take another method"):
        method(images(8))
