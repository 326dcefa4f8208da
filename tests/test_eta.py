"""ETA against its equations, and its filters on and off."""

import math

import pytest
import torch
from baselines import close, cosine, mean, unsure_vit
from conftest import CLASSES, confident_vit, images, vit
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta
from mgtta.methods._reliable import redundancy_for


def slow_eata(rows, m, margin, eps):
    """Eqs. 2-6: the loss of a batch, and the kept probabilities."""
    E0 = margin * math.log(len(rows[0]))
    terms, kept = [], []
    for row in rows:
        p = probabilities(row)
        if H(row) < E0 and (m is None or cosine(p, m) < eps):  # Eqs. 3, 5
            terms.append(math.exp(E0 - H(row)) * H(row))
            kept.append(p)
    return (mean(terms) if terms else None), kept


def test_eta_over_three_batches_against_its_equations():
    method = mgtta.create("eta", unsure_vit(), margin=0.65, redundancy=0.97)
    m, sizes = None, set()
    for t in range(3):
        x = images(16, seed=t).double()
        expected, kept = slow_eata(method.model(x).tolist(), m, 0.65, 0.97)
        sizes.add(len(kept))
        close(method.loss(x)[1].detach(), expected)
        method(x)
        average = [mean(column) for column in zip(*kept, strict=True)]
        m = average if m is None else [0.9 * a + 0.1 * b for a, b in zip(m, average, strict=True)]  # Eq. 4
        close(method.probs, m)
    assert 0 < min(sizes) < 16  # the filters have worked


def test_eta_learns_nothing_new_from_what_it_knows():
    x = images(8)
    for redundancy, updates in ((0.05, 1), (1.1, 3)):  # 1.1: no cosine is above it, the filter is off
        method = mgtta.create("eta", confident_vit(), margin=1.1, redundancy=redundancy)
        for _ in range(3):
            method(x[:1])
        assert (method.updates, method.skipped) == (updates, 0)


@pytest.mark.parametrize(("classes", "eps"), [(10, 0.4), (1000, 0.05), (100, math.sqrt(0.4 * 0.05))])
def test_eta_redundancy_follows_the_number_of_classes(classes, eps):
    assert redundancy_for(classes) == pytest.approx(eps)


def test_eta_learns_from_few_classes_at_its_default_redundancy():
    """Predictions of one class each, over 10 classes: the cosine with their mean is 0.32, above ImageNet's 0.05."""
    logits = 50 * torch.eye(CLASSES)
    for redundancy, kept in ((None, CLASSES), (0.05, 0)):
        method = mgtta.create("eta", vit(), redundancy=redundancy)
        method.probs = torch.full((CLASSES,), 1 / CLASSES)
        assert int(method.kept(logits).sum()) == kept
    assert CLASSES == 10
