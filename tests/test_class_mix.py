"""Streams that bring one class after another: what features tell of classes, and what mgtta+ does with it."""

import dataclasses

import pytest
import torch
from conftest import NETS, images, random_generator, vit
from torch import Tensor

import mgtta
from mgtta._lib.ranks import ALONE
from mgtta.adaptation.wrapper import innermost
from mgtta.data.corruptions import corrupt
from mgtta.data.patterns import Patterns
from mgtta.methods import _class_mix
from mgtta.methods._class_mix import (
    EARLIER_IMAGES,
    LEARNED_SHARE,
    PRIOR_IMAGES,
    RECENT_IMAGES,
    USUAL_IMAGES,
    ClassMix,
)
from mgtta.models.class_map import STRENGTHS, ClassMap, fit_class_map

CLASSES = 4


def clean_images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return sure predictions of random classes, and features that follow the classes."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=random)
    p = (5 * torch.nn.functional.one_hot(y, CLASSES) + torch.randn(n, CLASSES, generator=random)).softmax(1)
    centres = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(9))
    return p, centres[y] + 0.3 * torch.randn(n, 6, generator=random)


def ridge(p: Tensor, f: Tensor, strength: float) -> Tensor:
    """Return B = P^T (P P^T + strength)^-1 F."""
    return p.T @ torch.linalg.solve(p @ p.T + strength * torch.eye(len(p), dtype=p.dtype), f)


def test_the_map_is_the_ridge_regression_that_misses_left_out_images_least():
    p, f = (t.double() for t in clean_images(40))
    found = fit_class_map(p, f)
    p0, f0 = p - p.mean(0), f - f.mean(0)
    unit = float((p0 @ p0.T).diagonal().mean())
    missed = {}
    for strength in STRENGTHS:
        total = 0.0
        for i in range(len(p)):  # fitted without image i, around the means of all
            others = torch.arange(len(p)) != i
            guess = p0[i] @ ridge(p0[others], f0[others], strength * unit)
            total += float(((f0[i] - guess).square() / f0.square().mean(0)).mean())
        missed[strength] = total
    best = min(missed, key=missed.get)
    torch.testing.assert_close(found.down @ found.up, ridge(p0, f0, best * unit), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.centre, p.mean(0))


def test_the_map_tells_the_mean_of_other_images_with_other_classes():
    p, f = clean_images(200)
    other_p, other_f = clean_images(200, seed=1)
    first = other_p.argmax(1) == 0
    guess = fit_class_map(p, f).features(other_p[first].mean(0) - p.mean(0))
    truth = other_f[first].mean(0) - f.mean(0)
    assert (guess - truth).norm() < 0.2 * truth.norm()


def test_the_map_is_weak_where_classes_tell_nothing():
    p, f = clean_images(60)
    unrelated = torch.randn(60, 6, generator=torch.Generator().manual_seed(3))
    of_one_class = torch.eye(CLASSES)[0] - p.mean(0)
    assert fit_class_map(p, unrelated).features(of_one_class).abs().max() < 0.1  # their standard deviation is 1
    assert fit_class_map(p, f).features(of_one_class).abs().max() > 0.5
    assert fit_class_map(torch.full((60, CLASSES), 0.25), f) is None  # predictions that are all alike


def test_statistics_with_a_map_are_saved_and_loaded(tmp_path):
    model = mgtta.load_model("patterns_vit")
    source = mgtta.source_statistics(model, Patterns(128).tensors()[0])
    mgtta.save_source(source, tmp_path / "source")
    loaded = mgtta.load_source(tmp_path / "source")
    assert loaded.by_class.up.shape[1] == sum(len(mean) for mean in (*loaded.mean, loaded.head))
    for a, b in zip(loaded.by_class, source.by_class, strict=True):
        assert torch.equal(a, b)
    mgtta.save_source(dataclasses.replace(source, by_class=None), tmp_path / "older")
    older = mgtta.load_source(tmp_path / "older")
    assert older.by_class is None
    assert innermost(mgtta.create("mgtta+", model, source=older)).mix is None


def mix_of(classes: int = 3) -> ClassMix:
    """Return a mix whose map gives the change of the probabilities itself, for a layer and for the head."""
    eye = torch.eye(classes)
    return ClassMix(ClassMap(torch.full((classes,), 1 / classes), eye, torch.cat([eye, eye], 1)), [classes, classes])


def test_running_means_by_hand():
    mix = mix_of()
    recent = usual = torch.full((3,), 1 / 3)
    known = float(PRIOR_IMAGES)
    for t in range(30):
        logits = 2 * torch.randn(50, 3, generator=torch.Generator().manual_seed(t))
        mean = logits.softmax(1).mean(0)
        [learned] = mix.of_batch(logits, ALONE)
        torch.testing.assert_close(learned, LEARNED_SHARE * (mean - usual), atol=1e-5, rtol=1e-4)
        known = min(known + 50, USUAL_IMAGES)
        usual = usual + 50 / known * (mean - usual)
        recent = recent + (1 - (1 - 1 / RECENT_IMAGES) ** 50) * (mean - recent)
        before = mix.recent.clone()
        torch.testing.assert_close(mix.of_stream(logits, ALONE, observe=False), recent - usual, atol=1e-5, rtol=1e-4)
        assert torch.equal(mix.recent, before)
        torch.testing.assert_close(mix.of_stream(logits, ALONE, observe=True), recent - usual, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(mix.now(), recent - usual, atol=1e-5, rtol=1e-4)
    mix.restart()
    assert mix.images == EARLIER_IMAGES


def test_a_domain_that_begins_early_does_not_make_the_prior_stronger():
    mix = mix_of()
    mix.of_stream(torch.randn(4, 3), ALONE, observe=True)
    mix.restart()
    assert mix.images == PRIOR_IMAGES + 4


def test_first_images_are_judged_beside_the_source():
    """One by one they are hardly more recent than usual; a first batch counts as unusual classes by its share."""
    mix = mix_of()
    for t in range(20):
        logits = torch.tensor([[3.0, 0.0, 0.0]]) + torch.randn(1, 3, generator=torch.Generator().manual_seed(t))
        assert mix.of_stream(logits, ALONE, observe=True).abs().max() < 0.03
    assert mix.recent[0] > 0.45  # a third at first
    mix = mix_of()
    first = torch.tensor([[9.0, 0.0, 0.0]]).expand(RECENT_IMAGES, 3)
    change = first.softmax(1)[0] - 1 / 3
    torch.testing.assert_close(mix.of_batch(first, ALONE)[0], LEARNED_SHARE * change, atol=1e-5, rtol=1e-4)
    usual = RECENT_IMAGES / (PRIOR_IMAGES + RECENT_IMAGES)
    recent = 1 - (1 - 1 / RECENT_IMAGES) ** RECENT_IMAGES
    moved = mix.of_stream(first, ALONE, observe=True)
    torch.testing.assert_close(moved, (recent - usual) * change, atol=1e-5, rtol=1e-4)


def test_broken_images_do_not_count():
    mix = mix_of()
    logits = torch.randn(4, 3)
    mix.of_stream(logits, ALONE, observe=True)
    before = mix.state_dict()
    broken = torch.full((4, 3), torch.nan)
    assert mix.of_batch(broken, ALONE)[0].abs().sum() == 0
    mix.of_stream(broken, ALONE, observe=True)
    for name, value in mix.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("net", [vit, NETS["batchnorm"]], ids=["vit", "batchnorm"])
def test_a_scored_subset_has_the_map_of_its_classes(net):
    own = net()
    source = mgtta.source_statistics(mgtta.load_model(own), images(32, seed=99))
    some = mgtta.load_model(own, classes=[1, 4, 5])
    found = _class_mix.class_mix_for(some, source, source.head)
    torch.testing.assert_close(found.usual.sum(), torch.tensor(1.0))
    assert torch.equal(found.by_class.down, source.by_class.down[[1, 4, 5]])
    method = mgtta.create("mgtta+", some, source=source, generator=random_generator())
    assert method(images(4)).isfinite().all()


def test_statistics_of_some_classes_serve_these_only(tmp_path):
    own = vit()
    some = mgtta.load_model(own, classes=[1, 4, 5])
    mgtta.save_source(mgtta.source_statistics(some, images(32, seed=99)), tmp_path / "source")
    source = mgtta.load_source(tmp_path / "source")
    assert source.classes == [1, 4, 5]
    assert torch.equal(_class_mix.class_mix_for(some, source, source.head).usual, source.by_class.centre)
    for classes in (None, [4, 1, 5], [1, 4]):
        assert _class_mix.class_mix_for(mgtta.load_model(own, classes=classes), source, source.head) is None


def test_a_batch_larger_than_the_memory_replaces_it():
    mix = mix_of()
    logits = 3 * torch.randn(2 * USUAL_IMAGES, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mix.of_stream(logits, ALONE, observe=True), torch.zeros(3))
    torch.testing.assert_close(mix.recent, logits.softmax(1).mean(0))


def accuracy(order: Tensor, x: Tensor, y: Tensor, **settings) -> float:
    method = mgtta.create("mgtta+", mgtta.load_model("patterns_vit"), source="patterns_vit", **settings)
    right = [(method(x[rows]).argmax(1) == y[rows]).float() for rows in order.split(32)]
    return 100 * float(torch.cat(right).mean())


def test_sorted_by_class_it_keeps_what_re_centring_would_take_away():
    """Rendered patterns under blur, one class after another, and in random order."""
    x, y = Patterns(768).tensors()
    x = corrupt(x, "gaussian_blur", severity=5)
    still = 100 * float((mgtta.load_model("patterns_vit")(x).argmax(1) == y).float().mean())
    in_turn = y.argsort(stable=True)
    with_mix = accuracy(in_turn, x, y)
    without = accuracy(in_turn, x, y, class_mix=False)
    assert with_mix > without + 10
    assert with_mix > still
    anyhow = torch.randperm(768, generator=torch.Generator().manual_seed(0))
    assert accuracy(anyhow, x, y) > accuracy(anyhow, x, y, class_mix=False) - 3


def test_a_new_domain_decides_anew_what_is_usual(monkeypatch):
    """Recall tells the method; then the next images decide."""
    x, _ = Patterns(192).tensors()
    method = mgtta.create("mgtta+", mgtta.load_model("patterns_vit"), source="patterns_vit")
    began = []
    inner = innermost(method)
    monkeypatch.setattr(inner.mix, "restart", lambda: began.append(float(inner.mix.images)))
    for name in ("contrast", "gaussian_noise"):
        for rows in torch.arange(192).split(32):
            method(corrupt(x[rows], name, severity=5))
    shifts = [event for event in method.events if event["action"] == "shift"]
    assert len(began) == len(shifts) == 1
