"""The contract of methods on the fast path: reset, resume, budgets, bad batches, and when it waits."""

import copy
import pickle

import pytest
import torch
from conftest import CLASSES, images
from fast_path import FOLLOWING, NAMES, batches, make

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.data.streams import Batch
from mgtta.fast.flat import FlatStep


@pytest.mark.parametrize("name", [*NAMES, *FOLLOWING])
def test_reset_and_resume_are_bit_exact(name, tmp_path):
    method, xs = make(name), batches(6)
    start = copy.deepcopy(method.model.state_dict())
    straight = [method(x) for x in xs]
    method.reset()
    assert method.updates == method.skipped == 0
    assert all(torch.equal(t, start[key]) for key, t in method.model.state_dict().items())
    assert all(torch.equal(a, method(x)) for a, x in zip(straight[:3], xs[:3], strict=True))
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = make(name)
    other(images(8, seed=77))  # somewhere else entirely
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert other.updates == method.updates
    assert all(torch.equal(a, other(x)) for a, x in zip(straight[3:], xs[3:], strict=True))
    for twin in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert twin.updates == method.updates
        assert torch.equal(twin(xs[3]), straight[3])
    assert torch.equal(method(xs[3]), straight[3])  # which its copies have left alone


@pytest.mark.parametrize("name", ["tent", "mgtta", *FOLLOWING])
def test_nothing_waits_for_the_device_but_what_must(name, monkeypatch):
    waits = []
    settle = FlatStep.settle
    monkeypatch.setattr(FlatStep, "settle", lambda self: waits.append(1) or settle(self))
    method, (first, *more) = make(name), batches()
    method(first)
    waits.clear()  # of the start, which a reset comes back to
    for x in more:
        method(x)
    assert not waits
    assert method.updates == {"tent": 4, "mgtta": 4, "mgtta_plus": 2}.get(name, method.updates)
    assert len(waits) == 1


@pytest.mark.parametrize("reset", ["domain", "never"])
def test_evaluate_waits_for_the_device_once_a_domain(reset, monkeypatch):
    waits = []
    settle = FlatStep.settle
    monkeypatch.setattr(FlatStep, "settle", lambda self: waits.append(1) or settle(self))
    domains = zip(batches(5), ("fog", "fog", "fog", "snow", "snow"), strict=True)
    unlabelled = [Batch(x, None, domain, torch.arange(len(x))) for x, domain in domains]
    unlabelled[1].x[0, 0, 0, 0] = float("nan")
    waited = []  # as each batch was done
    records = mgtta.evaluate(make("mgtta"), unlabelled, reset, on_batch=lambda *_: waited.append(len(waits)))
    assert waited == [0, 0, 0, 1, 1]
    assert len(waits) == 2
    assert [(r.updates, r.skipped) for r in records] == [(2, 1), (2, 0)]


@pytest.mark.parametrize("name", ["tent", "mgtta"])
def test_a_bad_batch_is_predicted_skipped_and_counted(name):
    method = make(name)
    method(images(8))
    before = method.state_dict()
    x = images(8, seed=1)
    x[1, 0, 5, 5] = float("nan")
    assert method(x).shape == (8, CLASSES)
    assert (method.updates, method.skipped) == (1, 1)
    after = method.state_dict()
    assert all(torch.equal(t, before["params"][key]) for key, t in after["params"].items())
    for p, moments in before["optimizer"]["state"].items():
        assert all(torch.equal(t, after["optimizer"]["state"][p][key]) for key, t in moments.items())
    assert method(images(8, seed=2)).isfinite().all()
    assert (method.updates, method.skipped) == (2, 1)


def test_budgets_guards_and_images_that_do_not_fit():
    method = make("mgtta", max_updates=2)
    for x in batches(4):
        method(x)
    assert method.updates == 2
    guarded = make("mgtta", guard=True)
    for x in batches(3):
        assert guarded(x).isfinite().all()
    state = guarded.state_dict()
    expected = guarded(images(8, seed=9))
    guarded.load_state_dict(state)
    assert torch.equal(guarded(images(8, seed=9)), expected)
    for bad in (torch.rand(0, 3, 32, 32), torch.rand(2, 5, 32, 32), torch.rand(2, 3, 40, 40)):
        with pytest.raises(ValueError):
            method(bad)
        method.reset()
        with pytest.raises(ValueError):
            method(bad)
    assert method.updates == 0


def test_a_changed_learning_rate_counts():
    method = make("eq7_sgd", lr=0.0)
    start = method.state_dict()["params"]
    method(images(8))
    assert all(torch.equal(t, start[key]) for key, t in method.state_dict()["params"].items())
    method.optimizer.param_groups[0]["lr"] = 0.1
    method(images(8))
    assert not all(torch.equal(t, start[key]) for key, t in method.state_dict()["params"].items())


@pytest.mark.parametrize("name", ["tent", "mgtta"])
def test_a_falling_rate_falls_by_updates_on_the_device(name):
    """A reset, a skipped batch and a load count as they do in float32."""
    exact, quick = make(name, precision="fp32", lr=1e-3), make(name, lr=1e-3)
    bad = images(8)
    bad[0, 0, 0, 0] = float("nan")
    for method in (exact, quick):
        method.decay = 2.0
        for x in [*batches(2), bad, *batches(2)]:
            method(x)
    way = {}
    for method in (exact, quick):
        start = method.start["params"]
        way[method] = sum(float((p.detach() - start[key]).square().sum()) for key, p in method.adapted.items()) ** 0.5
    assert way[quick] == pytest.approx(way[exact], rel=0.05)
    assert float(quick.engine.flat.age) == quick.updates == 4
    quick.reset()
    quick(images(8))
    assert float(quick.engine.flat.age) == quick.updates == 1
    quick.engine.updates = 7
    quick(images(8))
    assert float(quick.engine.flat.age) == quick.updates == 8


def test_warm_up_leaves_no_trace():
    for precision in ("fp32", "bf16"):
        method, twin = make("mgtta", precision=precision), make("mgtta", precision=precision)
        method.warm_up(images(8, seed=5))
        assert method.updates == 0
        assert torch.equal(method(images(8)), twin(images(8)))
