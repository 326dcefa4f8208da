"""RDumb: ETA that starts again."""

import math

import pytest
import torch
from baselines import moved, params_of, unsure_vit
from conftest import images, vit

import mgtta
from mgtta.methods._descent import Descent
from mgtta.methods.eta import ETA
from mgtta.methods.rdumb import MARGIN


def test_rdumb_is_eta_that_starts_again():
    model = unsure_vit()
    settings = {"margin": 0.65, "redundancy": 0.97}
    method = mgtta.create("rdumb", model, every=3, lr=1e-2, **settings)
    for start in (0, 3, 6):
        eta = ETA(model, Descent(1e-2).factory(), **settings)
        before = params_of(eta)
        for t in range(start, start + 3):
            x = images(16, seed=t).double()
            assert torch.equal(method(x), eta(x))
        assert moved(eta, before)
    assert method.restarts == 2
    method.reset()
    assert (method.restarts, method.batches) == (0, 0)


def test_rdumb_counts_batches_that_teach_nothing_too():
    method = mgtta.create("rdumb", vit(), margin=0.0, every=2)
    for t in range(5):
        method(images(4, seed=t))
    assert (method.updates, method.restarts) == (0, 2)
    assert pytest.approx(math.log(1000) / 2 - 1) == MARGIN * math.log(1000)  # E_0 of the authors' code
    with pytest.raises(ValueError, match="every"):
        mgtta.create("rdumb", vit(), every=0)
