"""SAM, the sharpness-aware optimizer of SAR, against its equations."""

import copy
import math

import pytest
import torch
from baselines import close
from torch import nn

from mgtta.methods._descent import Descent
from mgtta.methods._sam import SAM


def test_sam_against_its_equations():
    """Two parameters, one with a base of plain SGD: the gradient is taken at theta + rho g / ||g||."""
    a, b = (nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in ([1.0, -2.0], [0.5]))

    def loss():
        return (a**4).sum() + (a[0] * b).sum() ** 2

    def gradients(a, b):
        return [4 * a[0] ** 3 + 2 * a[0] * b**2, 4 * a[1] ** 3, 2 * a[0] ** 2 * b]

    optimizer = SAM([a, b], Descent(0.01, momentum=0.0).factory(), rho=0.05)

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    closure()
    optimizer.step(closure)
    theta = [1.0, -2.0, 0.5]
    g = gradients(theta[:2], theta[2])
    norm = math.sqrt(sum(v * v for v in g))
    e = [t + 0.05 * v / norm for t, v in zip(theta, g, strict=True)]  # Eq. 4
    expected = [t - 0.01 * v for t, v in zip(theta, gradients(e[:2], e[2]), strict=True)]  # Eq. 5
    close(torch.cat([a, b]).detach(), expected)


def test_sam_puts_theta_back_and_says_what_is_wrong():
    p = nn.Parameter(torch.rand(3))
    before = p.detach().clone()
    optimizer = SAM([p], Descent(0.01, "adam").factory())
    with pytest.raises(ValueError, match="no parameter has a gradient"), optimizer.perturbed():
        pass
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="in between"), optimizer.perturbed():
        assert not torch.equal(p, before)
        raise RuntimeError("in between")
    assert torch.equal(p, before)
    with pytest.raises(ValueError, match="rho"):
        SAM([p], Descent(0.01, "adam").factory(), rho=-1)
    q = nn.Parameter(torch.rand(2))
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    assert [group["lr"] for group in optimizer.base.param_groups] == [0.01, 0.5]
    twin = copy.deepcopy(optimizer)
    assert twin.param_groups is twin.base.param_groups
    assert twin.state is twin.base.state
