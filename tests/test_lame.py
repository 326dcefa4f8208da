"""LAME against a slow transcription of its paper, in float64."""

import math

import pytest
import torch
from conftest import convnet, images
from gradient_free import SUBSET, dot, model, numbers, unit
from transcription import softmax

import mgtta
from mgtta.methods.lame import affinity, fixed_point


def lame_affinity(features, k):
    features, n = [unit(f) for f in features.tolist()], len(features)
    w = [[0.0] * n for _ in range(n)]
    for i in range(n):
        distance = {j: math.dist(features[i], features[j]) for j in range(n) if j != i}
        for j in sorted(distance, key=distance.get)[:k]:
            w[i][j] += 0.5
            w[j][i] += 0.5
    return w


def lame_step(q, w, z):
    """z_ik ~ q_ik exp(sum_j w_ij z_jk)"""
    n, c = len(q), len(q[0])
    pulls = [[sum(w[i][j] * z[j][k] for j in range(n)) for k in range(c)] for i in range(n)]
    return [softmax([math.log(q[i][k]) + pulls[i][k] for k in range(c)]) for i in range(n)]


def lame_objective(q, w, z):
    kl = sum(p * math.log(p / r) for zi, qi in zip(z, q, strict=True) for p, r in zip(zi, qi, strict=True))
    return kl - sum(w[i][j] * dot(z[i], z[j]) for i in range(len(z)) for j in range(i))


@pytest.mark.parametrize(("n", "classes"), [(1, None), (2, None), (4, SUBSET), (9, None)])
def test_lame_agrees_with_the_transcription(n, classes):
    classifier = model(classes)
    logits, features = classifier.embed(images(n))
    w = lame_affinity(features, 5)
    torch.testing.assert_close(affinity(features, 5), torch.tensor(w, dtype=torch.float64))
    z = q = [softmax(row) for row in logits.tolist()]
    for _ in range(100):
        z = lame_step(q, w, z)
    log_z = mgtta.create("lame", classifier)(images(n))
    torch.testing.assert_close(log_z.exp(), torch.tensor(z, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(log_z.exp().sum(1), torch.ones(n, dtype=torch.float64))


def test_lame_rests_at_a_fixed_point_that_lowers_its_objective():
    q = numbers(12, 5).softmax(-1)
    w = affinity(numbers(12, 3, seed=1), 5)
    z = fixed_point(q.log(), w, 100).exp()
    after_one = fixed_point(q.log(), w, 1).exp()

    def moves(z):
        return (torch.tensor(lame_step(q.tolist(), w.tolist(), z.tolist())) - z).abs().max()

    assert moves(z) < 1e-5 < 1e-2 < moves(after_one)
    values = [lame_objective(q.tolist(), w.tolist(), t.tolist()) for t in (q, after_one, z)]
    assert values == sorted(values, reverse=True)


def test_lame_lets_neighbours_outvote_one_and_no_neighbours_change_nothing():
    features = torch.cat([torch.ones(6, 4), -torch.ones(6, 4)]).double() + 0.1 * numbers(12, 4)
    logits = torch.tensor([[2.0, 0.0]] * 6 + [[0.0, 2.0]] * 6, dtype=torch.float64)
    logits[0] = torch.tensor([0.0, 0.5])  # one of the first six is called the other class
    log_q = logits.log_softmax(-1)
    assert fixed_point(log_q, affinity(features, 5), 100).argmax(-1).tolist() == [0] * 6 + [1] * 6
    torch.testing.assert_close(fixed_point(log_q, affinity(features, 0), 100), log_q)


def test_lame_spares_the_neighbours_of_a_bad_image():
    classifier, x = model(), images(6)
    x[2] = math.nan
    logits = mgtta.create("lame", classifier)(x)
    good = [0, 1, 3, 4, 5]
    torch.testing.assert_close(logits[good], classifier(x[good]).log_softmax(-1))


def test_lame_and_bn_out_of_budget_give_the_source_models_predictions():
    classifier = model()
    spent = mgtta.create("lame", classifier, max_updates=0)(images(6))
    assert torch.equal(spent, classifier(images(6)).log_softmax(-1))
    classifier = model(net=convnet("batch"))
    assert torch.equal(mgtta.create("bn", classifier, max_updates=0)(images(6)), classifier(images(6)))
