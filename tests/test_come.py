"""COME against its equations, under TENT, EATA and SAR."""

import copy
import math

import pytest
import torch
from baselines import close, cosine, mean, params_of, unsure_vit
from conftest import CLASSES, images, vit
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta
from mgtta.losses import entropy
from mgtta.methods.come import opinion


def slow_come(row):
    """The entropy of (b_1, ..., b_C, u)."""
    C = len(row)
    S = sum(math.exp(a) for a in row) + C
    masses = [math.exp(a) / S for a in row] + [C / S]
    assert sum(masses) == pytest.approx(1)
    return -sum(p * math.log(p) for p in masses)


def test_come_against_its_equations():
    method = mgtta.create("tent_come", unsure_vit())
    x = images(16).double()
    close(method.loss(x)[1].detach(), mean([slow_come(row) for row in method.model(x).tolist()]))


def test_come_holds_the_norm_of_the_logits():
    logits = torch.randn(5, CLASSES, dtype=torch.float64, requires_grad=True)
    along = {}
    for name, value in (("come", entropy(opinion(logits))), ("softmax", entropy(logits))):
        (grad,) = torch.autograd.grad(value.sum(), logits)
        along[name] = (grad * logits).sum(1).abs().max()
    assert along["come"] < 1e-12 < 0.1 < along["softmax"]
    assert entropy(opinion(torch.zeros(1, CLASSES))).isfinite().all()  # logits without a direction


def test_eata_come_over_three_batches_against_its_equations():
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    method = mgtta.create("eata_come", model, fisher=fisher, margin=0.8, redundancy=0.97)
    E0 = 0.8 * math.log(CLASSES)
    m, sizes = None, set()
    for t in range(3):
        x = images(16, seed=t).double()
        terms, kept = [], []
        for row in method.model(x).tolist():
            p = probabilities(row)
            if slow_come(row) < E0 and (m is None or cosine(p, m) < 0.97):
                terms.append(math.exp(E0 - slow_come(row)) * slow_come(row))
                kept.append(p)
        sizes.add(len(kept))
        close(method.loss(x)[1].detach() - method.forgetting(), mean(terms))
        method(x)
        average = [mean(column) for column in zip(*kept, strict=True)]
        m = average if m is None else [0.9 * a + 0.1 * b for a, b in zip(m, average, strict=True)]
        close(method.probs, m)
    assert 0 < min(sizes) < 16


def test_eata_come_and_spa_eata_need_fisher_information():
    for name in ("eata_come", "spa_eata"):
        with pytest.raises(ValueError, match=f"{name} needs fisher"):
            mgtta.create(name, vit())


def torch_come(rows):
    """The entropy of opinions by its definition, the norm held."""
    norm = rows.norm(dim=1, keepdim=True)
    evidence = (rows / norm * norm.detach()).exp()
    S = evidence.sum(1, keepdim=True) + rows.shape[1]
    masses = torch.cat([evidence / S, rows.shape[1] / S], 1)
    return -(masses * masses.log()).sum(1)


def test_sar_come_against_its_equations():
    x = images(32).double()
    method = mgtta.create("sar_come", unsure_vit(), margin=0.64, rho=0.3, lr=1e-2)
    E0 = 0.64 * math.log(CLASSES)
    twin = copy.deepcopy(method)
    params = list(twin.adapted.values())
    start = params_of(method)
    E = torch_come(twin.model(x))
    first = (E < E0).nonzero().flatten()
    g = torch.autograd.grad(E[first].mean(), params)
    norm = torch.stack([v.square().sum() for v in g]).sum().sqrt()
    with torch.no_grad():
        for p, v in zip(params, g, strict=True):
            p.add_(0.3 * v / norm)
    again = torch_come(twin.model(x))[first]
    second = again[again < E0]
    assert 0 < len(second) < len(first) < 32
    grads = torch.autograd.grad(second.mean(), params)
    logits = method(x)
    assert logits.shape == (32, CLASSES)
    for (name, p), grad in zip(method.adapted.items(), grads, strict=True):
        close(p.detach(), start[name] - 1e-2 * grad)
    close(method.average, second.mean().item())


@pytest.mark.parametrize("name", ["eata", "sar"])
def test_come_does_not_learn_from_what_only_the_softmax_calls_sure(name):
    model = unsure_vit()
    x = images(16).double()
    logits = model(x).detach()
    surest = min(map(H, logits.tolist()))
    opinion = torch_come(logits).min().item()
    assert surest < opinion
    settings = {"margin": 0.999 * opinion / math.log(CLASSES)}
    if name == "eata":
        settings["fisher"] = mgtta.fisher_information(model, images(16, seed=9).double())
        settings["fisher_weight"] = 0.0
    updates = {}
    for method in (mgtta.create(name, model, **settings), mgtta.create(f"{name}_come", model, **settings)):
        method(x)
        updates[method.name] = method.updates
    assert updates == {name: 1, f"{name}_come": 0}
