"""SPA against its equations, alone and with ETA and EATA."""

import copy
import math
import warnings

import pytest
import torch
from baselines import close, cosine, cross, mean, unsure_vit
from conftest import CLASSES, images, vit
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta
from mgtta.data.patterns import Patterns
from mgtta.methods._augment import mask_low_frequencies
from mgtta.methods.spa import SPA


def slow_spa(method, x):
    """KL(image || twin) over images that are surer than their twin, for both twins; no predictor."""
    random = torch.Generator().manual_seed(0)
    masked = 0.5 + mask_low_frequencies(x - 0.5, 0.2, 0.2, random)
    drawn = 0.5 + 0.5 * torch.randn(x.shape[1:], generator=random).double()
    noisy = torch.empty_like(x)
    for i in range(32):
        for j in range(32):
            strength = method.noise[0, 0, i * 14 // 32, j * 14 // 32].item() ** 2
            noisy[:, :, i, j] = (1 - strength) * x[:, :, i, j] + strength * drawn[:, i, j]
    total, kept = 0.0, []
    for twin in (masked, noisy.clamp(0, 1)):
        terms = []
        for a, b in zip(method.model(x).tolist(), method.model(twin).tolist(), strict=True):
            if max(probabilities(a)) > max(probabilities(b)):
                terms.append(cross(a, b) - H(a))
        total += mean(terms)
        kept.append(len(terms))
    return total, kept


def test_spa_against_its_equations():
    method = mgtta.create("spa", unsure_vit())
    method.noise = method.noise + 0.3 * torch.rand(method.noise.shape).double()
    x = images(16).double()
    expected, kept = slow_spa(method, x)
    assert all(0 < n < 16 for n in kept)
    close(method.loss(x)[1].detach(), expected)


def test_spa_predictor_stands_before_the_head_of_the_twin():
    method = mgtta.create("spa", unsure_vit())
    x = images(4).double()
    predictor = torch.rand(16, 16).double()
    _, features = method.model.embed(x)
    expected = features @ predictor.T @ method.model.head.weight.T + method.model.head.bias
    close(method.through_predictor(x, predictor).detach(), expected.detach())
    close(method.through_predictor(x, torch.eye(16).double()).detach(), method.model(x).detach())
    method(x)
    assert not torch.equal(method.predictor, torch.eye(16).double())


def test_spa_warns_of_no_image_that_it_made_itself():
    """A twin without some low frequencies lies outside [0, 1]; the caller's images do not."""
    model = mgtta.load_model("patterns_vit")
    method = mgtta.create("spa", model)
    x, _ = Patterns(16).tensors()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        method(x)
        method(x / 255)
    assert not told
    with pytest.warns(UserWarning, match="outside"):
        method(x / 255 * 4 - 2)


def test_spa_gate_keeps_out_images_that_are_less_sure_than_their_twin():
    method = mgtta.create("spa", vit())
    target = torch.tensor([[2.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    twin = torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    torch.testing.assert_close(
        method.consistency(target, twin).item(), cross([2.0, 0, 0], [0, 1.0, 0]) - H([2.0, 0, 0])
    )
    assert method.consistency(target[1:], twin[1:]) is None
    for closed in (True, False):
        method = mgtta.create("spa", vit())
        if closed:
            method.surer = lambda target, _twin: torch.zeros(len(target), dtype=torch.bool)
        method(images(4))
        assert (method.updates, method.skipped) == (0 if closed else 1, 0)


def test_spa_noise_climbs_and_keeps_its_mean():
    method = mgtta.create("spa", unsure_vit(), noise_ratio=0.4)
    up = torch.zeros(1, 1, 14, 14).double()
    up[0, 0, 3, 4] = 0.2
    method.deteriorate(None, up)
    close(method.noise.square().mean(), 0.4)
    assert method.noise[0, 0, 3, 4] > math.sqrt(0.4) > method.noise[0, 0, 0, 0]
    one = mgtta.create("spa", vit(), entropy_weight=0.1)
    two = mgtta.create("spa", vit())
    x = images(4)
    entropy = mean([H(row) for row in two.model(x).tolist()])
    torch.testing.assert_close(one.loss(x)[1] - two.loss(x)[1], torch.tensor(0.1 * entropy))


def test_spa_eta_and_spa_eata_against_their_equations():
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    E0 = 0.65 * math.log(CLASSES)
    for name, own in (("spa_eta", {}), ("spa_eata", {"fisher": fisher, "fisher_weight": 50.0})):
        method = mgtta.create(name, model, margin=0.65, redundancy=0.97, lr=1e-3, **own)
        m, sizes = None, set()
        for t in range(3):
            x = images(16, seed=t).double()
            terms, kept = [], []
            for row in method.model(x).tolist():
                p = probabilities(row)
                if H(row) < E0 and (m is None or cosine(p, m) < 0.97):
                    terms.append(math.exp(E0 - H(row)) * H(row))
                    kept.append(p)
            sizes.add(len(kept))
            expected = mean(terms)
            if own:
                pairs = zip(method.adapted.items(), method.origin, strict=True)
                expected += 50 * sum((fisher.values[k] * (p - p_0) ** 2).sum().item() for (k, p), p_0 in pairs)
            twin = copy.deepcopy(method)
            consistency = SPA._loss(twin, x, twin.predictor, twin.noise)[1]
            both = copy.deepcopy(method).loss(x)[1]
            close((both - consistency).detach(), 0.1 * expected)
            method(x)
            average = [mean(column) for column in zip(*kept, strict=True)]
            m = average if m is None else [0.9 * a + 0.1 * b for a, b in zip(m, average, strict=True)]
            close(method.probs, m)
        assert 0 < min(sizes) < 16


def test_spa_eta_is_spa_where_no_image_is_reliable():
    found = {}
    for name, own in (("spa", {}), ("spa_eta", {"margin": 0.0}), ("spa_eta", {"margin": 0.65})):
        method = mgtta.create(name, unsure_vit(), lr=1e-3, **own)
        for t in range(3):
            method(images(8, seed=t).double())
        found[name, own.get("margin")] = torch.cat([p.detach().flatten() for p in method.adapted.values()])
    assert found["spa_eta", 0.0].equal(found["spa", None])
    assert not found["spa_eta", 0.65].equal(found["spa", None])


def test_spa_eata_does_not_forget():
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    ways = []
    for weight in (0.0, 100.0):
        method = mgtta.create("spa_eata", model, fisher=fisher, fisher_weight=weight, lr=1e-3)
        for t in range(10):
            method(images(8, seed=t).double())
        pairs = zip(method.adapted.items(), method.origin, strict=True)
        ways.append(sum((fisher.values[k] * (p - p_0) ** 2).sum().item() for (k, p), p_0 in pairs))
    assert 0 < ways[1] < ways[0]
