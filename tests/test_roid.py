"""ROID against its equations: weights, prior correction, momentum and the ensemble with the source."""

import copy
import math

import torch
from baselines import close, cosine, cross, mean, params_of, unsure_vit
from conftest import CLASSES, confident_vit, images
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta
from mgtta.methods._augment import random_view
from mgtta.methods.roid import prior_corrected, soft_likelihood_ratio


def slow_weights(rows, p_bar, temperature):
    diverse = [1 - cosine(probabilities(row), p_bar) for row in rows]
    certain = [-H(row) for row in rows]
    diverse, certain = ([(v - min(vs)) / (max(vs) - min(vs)) for v in vs] for vs in (diverse, certain))
    return [0.0 if d < mean(diverse) else math.exp(d * c / temperature) for d, c in zip(diverse, certain, strict=True)]


def slow_ratio(row):
    total = 0.0
    for a in probabilities(row):
        a = min(a, 0.99)
        total -= a * math.log(a / (1 - a) + 1e-5)
    return total


def test_roid_against_its_equations():
    method = mgtta.create("roid", unsure_vit(), lr=0.1, momentum=0.0)
    p_bar = [1 / CLASSES] * CLASSES
    for t in range(2):
        x = images(8, seed=t).double()
        rows = method.model(x)
        w = slow_weights(rows.tolist(), p_bar, 1 / 3)
        kept = [i for i in range(8) if w[i] > 0]
        assert 0 < len(kept) < 8
        random = torch.Generator()
        random.set_state(method.random.get_state())
        views = method.model(random_view(x[kept], random, noise=False, padding="reflect")).tolist()
        total = 0.0
        for i, view in zip(kept, views, strict=True):
            row = rows[i].tolist()
            total += w[i] * (slow_ratio(row) + cross(row, view) / 2 + cross(view, row) / 2) / 8
        close(copy.deepcopy(method).loss(x)[1].detach(), total)
        logits = method(x)
        prior = [mean(column) for column in zip(*[probabilities(row) for row in rows.tolist()], strict=True)]
        gamma = max(1 / 8, 1 / CLASSES) / max(prior)
        for row, found in zip(rows.tolist(), logits.tolist(), strict=True):
            wanted = [a * (b + gamma) / (1 + gamma * CLASSES) for a, b in zip(row, prior, strict=True)]
            close(found, wanted)
        p_bar = [0.9 * a + 0.1 * b for a, b in zip(p_bar, prior, strict=True)]
        close(method.probs, p_bar)


def test_roid_prior_multiplies_the_logits():
    """As in every released version; the paper's text multiplies probabilities, which can choose another class."""
    logits = torch.tensor([[2.0, 1.9], [0.0, 3.0], [0.0, 3.0]], dtype=torch.float64)
    prior = logits.softmax(-1).mean(0)
    gamma = 0.5 / prior.max()
    close(prior_corrected(logits), logits * (prior + gamma) / (1 + 2 * gamma))
    sorted_by_class = prior_corrected(logits)
    assert sorted_by_class.argmax(-1).tolist() == [1, 1, 1]


def test_roid_steps_by_nesterov_momentum():
    """p <- p - lr (g + 0.9 v), v <- 0.9 v + g, over two steps with the weights' ensemble off."""
    method = mgtta.create("roid", unsure_vit(), lr=0.01, source_ema=1.0)
    velocity = {name: torch.zeros_like(p) for name, p in method.adapted.items()}
    for t in range(2):
        x = images(8, seed=t).double()
        before = params_of(method)
        grads = slow_gradients(method, x)
        method(x)
        for name, p in method.adapted.items():
            velocity[name] = 0.9 * velocity[name] + grads[name]
            close(p.detach(), before[name] - 0.01 * (grads[name] + 0.9 * velocity[name]))


def slow_gradients(method, x):
    """The gradient of the loss, from a copy of the method with its random numbers."""
    twin = copy.deepcopy(method)
    twin.loss(x)[1].backward()
    return {name: p.grad for name, p in twin.adapted.items()}


def test_roid_ensembles_weights_with_the_source():
    model = mgtta.load_model(confident_vit())
    x = images(8)
    ways = {}
    for source_ema in (1.0, 0.99, 0.0):  # 1: the mechanism is off
        method = mgtta.create("roid", model, source_ema=source_ema)
        start = params_of(method)
        method(x)
        ways[source_ema] = torch.cat([(p.detach() - start[n]).flatten() for n, p in method.adapted.items()])
    assert ways[1.0].norm() > 0
    torch.testing.assert_close(ways[0.99], 0.99 * ways[1.0], rtol=1e-3, atol=1e-7)
    assert ways[0.0].norm() == 0


def test_roid_prior_and_ratio_at_the_edges():
    one = torch.tensor([[3.0, 1.0, 0.0]])
    assert prior_corrected(one).argmax() == 0
    sure = torch.tensor([[1e4, 0.0, 0.0]])
    assert soft_likelihood_ratio(sure).isfinite().all()
    bad = torch.tensor([[3.0, 1.0, 0.0], [float("nan"), 0.0, 0.0]])
    assert prior_corrected(bad)[0].isfinite().all()
