"""The off switch: pause, unpause, frozen, predict; and budgets that change on the way."""

import copy

import pytest
import torch
from conftest import images
from test_methods import RECIPES, make, same, suitable

import mgtta


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_frozen_predicts_and_changes_nothing(name, guard):
    method = make(name, mgtta.load_model(suitable(name)), guard=guard)
    method(images(4))
    before = method.state_dict()
    expected = copy.deepcopy(method).predict(images(4, seed=1))
    with method.frozen():
        assert torch.equal(method(images(4, seed=1)), expected)
        assert method.paused
    if name != "cotta":  # whose prediction draws random views
        assert same(method.state_dict(), before)
    assert not method.paused
    updates = method.updates
    method(images(4, seed=2))
    assert method.updates == updates + bool(name != "noadapt")


def test_pause_and_unpause():
    method = make("tent", mgtta.load_model(suitable("tent")))
    method.pause()
    method(images(4))
    assert method.updates == 0
    with method.frozen():
        method(images(4))
    assert method.paused  # as it was before the block
    method.unpause()
    method(images(4))
    assert method.updates == 1


@pytest.mark.parametrize("name", RECIPES)
def test_predict_has_no_graph(name):
    method = make(name, mgtta.load_model(suitable(name)))
    assert not method.predict(images(4)).requires_grad
    method(images(4))
    assert not method.predict(images(4)).requires_grad


@pytest.mark.parametrize("wrapping", [{}, {"guard": True}, {"schedule": "auto"}, {"guard": True, "schedule": "auto"}])
def test_a_budget_that_is_set_later_is_kept(wrapping):
    method = make("tent", mgtta.load_model(suitable("tent")), **wrapping)
    method.max_updates = 2
    assert method.max_updates == 2
    for t in range(10):
        method(images(4, seed=t))
    assert method.updates == 2
    assert method.spent


def test_guard_none_is_no_guard():
    method = make("tent", mgtta.load_model(suitable("tent")), guard=None)
    assert not hasattr(method, "watch")
    with pytest.raises(TypeError, match="guard must be True"):
        make("tent", mgtta.load_model(suitable("tent")), guard="yes")
