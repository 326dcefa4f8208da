"""All parameters in one step: the same as the optimizer's own."""

import copy

import pytest
import torch
from conftest import random_generator

import mgtta
from mgtta.fast.flat import FlatStep


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.Adam(ps, lr=0.01),
        lambda ps: mgtta.MGG(ps, random_generator(), lr=0.01),
        lambda ps: mgtta.MGG(ps, random_generator(memory="lstm"), lr=0.01),
    ],
)
def test_flat_steps_are_the_optimizers_own(make_optimizer):
    torch.manual_seed(0)
    own, twins = ([torch.nn.Parameter(torch.linspace(0, 1, n)) for n in (3, 5)] for _ in range(2))
    plain_one, flat = make_optimizer(own), FlatStep(make_optimizer(twins), twins, twins)
    for t in range(4):
        grads = [torch.randn_like(p) for p in own]
        for p, grad in zip(own, grads, strict=True):
            p.grad = grad
        plain_one.step()
        flat.take_in()
        flat.step(grads, torch.tensor(True))
        flat.step([g * float("nan") for g in grads], torch.tensor(True))
        flat.step(grads, torch.tensor(False))
        if t == 1:  # a state that was saved and loaded
            flat.settle()
            flat.optimizer.load_state_dict(copy.deepcopy(flat.optimizer.state_dict()))
    assert flat.settle() == (2, 4)
    for a, b in zip(own, twins, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        for key, value in plain_one.state[a].items():
            if value is not None:
                torch.testing.assert_close(flat.optimizer.state[b][key], value, atol=1e-6, rtol=1e-4)


def test_an_update_that_is_not_finite_is_left_out():
    """Also if the gradients are: a broken moment must not reach the parameters, which it would never leave."""
    params = [torch.nn.Parameter(torch.ones(3))]
    flat = FlatStep(torch.optim.Adam(params, lr=0.01), params, params)
    flat.take_in()
    flat.step([torch.ones(3)], torch.tensor(True))
    before = params[0].clone()
    flat.state[1].fill_(float("nan"))
    assert not flat.step([torch.ones(3)], torch.tensor(True))
    torch.testing.assert_close(params[0], before)
    assert flat.settle() == (1, 1)
