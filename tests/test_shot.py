"""SHOT against its equation, and the diversity of its predictions."""

import math

from baselines import close, mean, params_of, unsure_vit
from conftest import confident_vit, images
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta


def slow_shot(rows):
    average = [mean(column) for column in zip(*map(probabilities, rows), strict=True)]
    return mean([H(row) for row in rows]) + sum(p * math.log(p) for p in average)


def test_shot_against_its_equation():
    method = mgtta.create("shot", unsure_vit())
    x = images(16).double()
    close(method.loss(x)[1].detach(), slow_shot(method.model(x).tolist()))


def test_shot_keeps_predictions_diverse():
    model = mgtta.load_model(confident_vit())
    x = images(32)
    diversity = {}
    for name in ("tent", "shot"):
        method = mgtta.create(name, model, lr=0.02)
        for _ in range(30):
            method(x)
        average = method.predict(x).softmax(1).mean(0)
        diversity[name] = -(average * average.clamp(min=1e-30).log()).sum()
    assert diversity["tent"] < diversity["shot"]


def test_shot_learns_nothing_from_one_image():
    method = mgtta.create("shot", unsure_vit(), lr=1.0)
    start = params_of(method)
    method(images(1).double())
    for name, p in method.adapted.items():
        close(p.detach(), start[name])
