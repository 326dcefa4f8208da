"""CMF against the equations of its filter."""

import pytest
import torch
from baselines import close, params_of, unsure_vit
from conftest import images, vit

import mgtta


def test_cmf_against_its_filter():
    alpha, gamma, Q = 0.9, 0.7, 2.0
    method = mgtta.create("cmf", unsure_vit(), alpha=alpha, gamma=gamma, q=Q, lr=0.05)
    stepped = []
    update = method.engine.update

    def spied(grads):
        update(grads)
        stepped.append(params_of(method))

    method.engine.update = spied
    source = params_of(method)
    q = Q * sum(p.numel() for p in source.values()) / 38400
    hidden, v = dict(source), 0.0
    betas = []
    for t in range(6):
        method(images(8, seed=t).double())
        v = alpha**2 * v + q
        beta = max((1 - q) / (v + 1 - q), 0.89)
        v = beta * v
        betas.append(beta)
        for name, p in method.adapted.items():
            theta = stepped[-1][name]
            h = alpha * hidden[name] + (1 - alpha) * source[name]
            hidden[name] = beta * h + (1 - beta) * theta
            close(p.detach(), gamma * theta + (1 - gamma) * hidden[name])
        for h, expected in zip(method.hidden, hidden.values(), strict=True):
            close(h, expected)
    assert 0.89 < min(betas) < max(betas) < 0.9999
    assert method.variance == pytest.approx(v)


def test_cmf_with_no_noise_stays_at_the_source_and_with_much_follows_at_its_bound():
    still = mgtta.create("cmf", vit(), q=0.0, lr=0.1)
    quick = mgtta.create("cmf", vit(), q=20.0, lr=0.1)
    for t in range(4):
        still(images(4, seed=t))
        quick(images(4, seed=t))
    assert all(torch.equal(h, p) for h, p in zip(still.hidden, still.origin, strict=True))
    assert quick._beta() == 0.89
    assert not all(torch.equal(h, p) for h, p in zip(quick.hidden, quick.origin, strict=True))
    with pytest.raises(ValueError, match="below 1"):
        mgtta.create("cmf", vit(), q=1e4)
