"""FOA and its parts, the shift and the interval, against slow transcriptions of the paper, in float64."""

import math

import numpy as np
import pytest
import torch
from baselines import close, unsure_vit
from conftest import confident_vit, convnet, images, vit
from gradient_free import SUBSET, TINY, foa, model, numbers
from transcription import entropy

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta._lib.timm import timm
from mgtta.methods._evolution import Evolution


def forward(classifier, x, prompt):
    """Logits and the class tokens of Eq. 5, with prompts between class token and patches."""
    net = classifier.net
    tokens = net._pos_embed(net.patch_embed(x.double()))
    tokens = torch.cat([tokens[:, :1], prompt.expand(len(x), -1, -1), tokens[:, 1:]], 1)
    features = []
    for block, norm in zip(net.blocks, [*(b.norm1 for b in net.blocks[1:]), net.norm], strict=True):
        tokens = block(tokens)
        features.append(norm(tokens)[:, 0])
    logits = net.head(features[-1])
    return (logits if classifier.classes is None else logits[:, classifier.classes]), features


def slow_fitness(logits, features, source, trade_off):
    """Eq. 5, distances squared, discrepancy scaled by N / 64"""
    n = len(logits)
    total = 0.0
    for f, mu_s, sigma_s in zip(features, source.mean, source.std, strict=True):
        for column, m, s in zip(f.T.tolist(), mu_s.tolist(), sigma_s.tolist(), strict=True):
            mu = sum(column) / n
            total += (mu - m) ** 2
            if n > 1:
                total += (math.sqrt(sum((v - mu) ** 2 for v in column) / (n - 1)) - s) ** 2
    return sum(entropy(row) for row in logits.tolist()) + trade_off * n / 64 * total


@pytest.mark.parametrize(("n", "classes"), [(1, None), (6, None), (6, SUBSET)])
@torch.no_grad()
def test_foa_fitness_agrees_with_the_transcription(n, classes):
    classifier = model(classes)
    method = foa(classifier, trade_off=0.3)
    prompts, x = numbers(3, 2 * 16).unflatten(1, (2, 16)), images(n)
    fitness, logits, means = method.evaluate(x, prompts)  # three candidates in one pass
    for i, prompt in enumerate(prompts):
        expected, features = forward(classifier, x, prompt)
        torch.testing.assert_close(logits[i], expected)
        torch.testing.assert_close(means[i], features[-1].mean(0))
        assert fitness[i].item() == pytest.approx(slow_fitness(expected, features, method.source, 0.3), rel=1e-9)


@pytest.mark.parametrize("classes", [None, SUBSET])
@torch.no_grad()
def test_foa_agrees_with_the_transcription(classes):
    """Candidates, choice, carry-over and shift, over a stream: Eqs. 5 to 9."""
    classifier = model(classes)
    head = classifier.net.head
    index = slice(None) if classes is None else classes
    method, twin = foa(classifier), Evolution(2 * 16, 5, seed=0)
    best, mu = method.prompt, None
    for t in range(5):
        x = images(6, seed=t)
        candidates = [best, *torch.from_numpy(twin.ask()).unflatten(1, (2, 16))]
        found = [forward(classifier, x, p) for p in candidates]
        fitness = [slow_fitness(*f, method.source, 0.4) for f in found]
        twin.tell(best.flatten().numpy(), fitness)
        winner = fitness.index(min(fitness))
        best, e = candidates[winner], found[winner][1][-1]
        shifted = e if mu is None else e + method.source.mean[-1] - mu  # Eqs. 7, 8
        torch.testing.assert_close(method(x), head(shifted)[:, index])
        torch.testing.assert_close(method.prompt, best)
        now = torch.stack([features[-1].mean(0) for _, features in found]).mean(0)
        mu = now if mu is None else 0.9 * mu + 0.1 * now  # Eq. 9
        torch.testing.assert_close(method.mean, mu)
        assert t == 0 or not torch.allclose(head(shifted), head(e), atol=1e-2)  # the shift is no trifle


def test_foa_carries_the_previous_best_over():
    method = foa(model())
    for t in range(2):
        method(images(6, seed=t))
    best, told = method.prompt.clone(), []
    method.evolution.ask = lambda: np.full((5, 32), 1e4)  # samples that are no good
    method.evolution.tell = lambda extra, fitness: told.append((extra, fitness))
    x = images(6, seed=9)
    expected = method.predict(x)
    torch.testing.assert_close(method(x), expected)
    assert torch.equal(method.prompt, best)
    [(extra, fitness)] = told
    np.testing.assert_array_equal(extra, best.flatten().numpy())
    assert len(fitness) == 6
    assert fitness[0] == min(fitness) < min(fitness[1:])


def test_foa_learns():
    method, x = foa(model(), population=12), images(6)
    values = []
    for _ in range(25):
        method(x)
        values.append(method.evaluate(x, method.prompt[None])[0].item())
    assert values == sorted(values, reverse=True)  # the best is never lost
    assert values[-1] < values[0]


def test_foa_passes_may_be_large_or_small(monkeypatch):
    many, one = foa(model()), foa(model())
    for t in range(3):
        monkeypatch.setattr("mgtta.methods.foa.IMAGES", 64)
        a = many(images(3, seed=t))
        monkeypatch.setattr("mgtta.methods.foa.IMAGES", 1)
        torch.testing.assert_close(a, one(images(3, seed=t)))


def test_foa_is_as_if_a_bad_batch_had_never_been():
    method, twin = foa(model()), foa(model())
    for t in range(4):
        bad = images(4)
        bad[0, 0, 0, 0] = math.inf
        logits = method(bad)
        assert logits[1:].isfinite().all()
        assert torch.equal(method(images(4, seed=t)), twin(images(4, seed=t)))
    assert (method.updates, method.skipped) == (4, 4)


def test_foa_outlives_a_candidate_that_overflows():
    method = foa(mgtta.load_model(vit()))
    ask = method.evolution.ask
    method.evolution.ask = lambda: ask() * np.array([1, 1e38, 1, 1, 1])[:, None]
    method(images(4))
    assert method.updates == 1
    assert method.mean.isfinite().all()
    assert all(method(images(4, seed=t)).isfinite().all() for t in range(3))


def test_foa_seeds_and_the_global_generators():
    np.random.seed(0)
    torch.manual_seed(0)
    first = [foa(model(), seed=seed)(images(4)) for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    foa(model())(images(4))
    assert np.random.rand() == expected


def test_foa_without_a_budget_is_the_source_model_and_with_one_stays_where_it_was():
    classifier = model()
    assert torch.equal(foa(classifier, max_updates=0)(images(4)), classifier(images(4)))
    method = foa(classifier, max_updates=2)
    for t in range(4):
        method(images(4, seed=t))
    expected = forward(classifier, images(4), method.prompt)[1][-1] + method.source.mean[-1] - method.mean
    torch.testing.assert_close(method(images(4)), classifier.net.head(expected))


@pytest.mark.parametrize(
    ("make", "lacks"),
    [
        (lambda: convnet("batch"), "blocks"),
        (lambda: timm.models.VisionTransformer(**TINY, class_token=False, global_pool="avg"), "class token"),
        (lambda: timm.models.VisionTransformerDistilled(**TINY), "one linear head"),
    ],
)
def test_foa_says_what_it_needs(make, lacks):
    with pytest.raises(ValueError, match=f"VisionTransformer.*lacks.*{lacks}"):
        foa(mgtta.load_model(make()))


def test_foa_refuses_other_weights_and_empty_settings():
    classifier = model()
    source = mgtta.source_statistics(model(net=vit(seed=5)), images(8))
    with pytest.raises(ValueError, match="other weights"):
        mgtta.create("foa", classifier, source=source)
    with pytest.raises(ValueError, match="prompts must be"):
        foa(classifier, prompts=0)


def test_foa_shift_against_its_equations():
    model = unsure_vit()
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    method = mgtta.create("foa_shift", model, source=source)
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    m = None
    for t in range(3):
        x = images(4, seed=t).double()
        e = model.embed(x)[1].detach()
        d = torch.zeros(16) if m is None else source.mean[-1] - m  # Eq. 8
        close(method(x), (e + d) @ weight.T + bias)  # Eq. 7
        m = e.mean(0) if m is None else 0.9 * m + 0.1 * e.mean(0)  # Eq. 9
    close(method.mean, m)


def test_foa_interval_learns_as_foa_does_from_the_images_together(tmp_path):
    model = mgtta.load_model(confident_vit())
    source = mgtta.source_statistics(model, images(16, seed=9))
    settings = {"source": source, "prompts": 1, "population": 6}
    method = mgtta.create("foa_interval", model, interval=4, **settings)
    foa = mgtta.create("foa", model, **settings)
    x = images(8)
    torch.testing.assert_close(torch.cat([method(image[None]) for image in x[:4]]), model(x[:4]).detach())
    foa(x[:4])
    assert method.updates == 1
    assert method.waiting == 0
    assert torch.equal(method.prompt, foa.prompt)
    assert torch.equal(method.mean, foa.mean)
    expected = foa.predict(x[4:])
    torch.testing.assert_close(torch.cat([method(image[None]) for image in x[4:6]]), expected[:2])
    assert method.waiting == 2
    write_tree(tmp_path / "state", method.state_dict(), {})
    straight = [method(image[None]) for image in x[6:]] + [method(x[:1])]
    method.reset()
    assert method.waiting == 0
    method.load_state_dict(read_tree(tmp_path / "state")[0])
    assert method.waiting == 2
    again = [method(image[None]) for image in x[6:]] + [method(x[:1])]
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))
    with pytest.raises(ValueError, match="interval"):
        mgtta.create("foa_interval", model, interval=1, source=source)
