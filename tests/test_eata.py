"""EATA: ETA with a last term against forgetting."""

import pytest
import torch
from baselines import close, create, params_of, unsure_vit
from conftest import images, vit

import mgtta


def test_eata_without_fisher_information_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"eata needs fisher=.*mgtta.fisher_information.*eta"):
        mgtta.create("eata", vit())
    with pytest.raises(ValueError, match="eata needs fisher"):
        mgtta.create("eata", vit(), fisher=None)


def test_eata_without_its_last_term_is_eta():
    model = unsure_vit()
    settings = {"margin": 0.65, "redundancy": 0.97}
    eta = mgtta.create("eta", model, **settings)
    eata = create("eata", model, fisher_weight=0.0, **settings)
    for t in range(3):
        x = images(16, seed=t).double()
        assert torch.equal(eta(x), eata(x))
    assert all(torch.equal(p, q) for p, q in zip(eta.adapted.values(), eata.adapted.values(), strict=True))


def test_eata_does_not_forget():
    """Eq. 7 by hand after some batches; and with it the model stays nearer to the source."""
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    ways = []
    for weight in (0.0, 1.0):
        method = mgtta.create("eata", model, fisher=fisher, fisher_weight=weight, margin=1.1, redundancy=1.1, lr=1e-3)
        start = params_of(method)
        for t in range(10):
            method(images(8, seed=t).double())
        way = {name: (p.detach() - start[name]).square() for name, p in method.adapted.items()}
        close(method.forgetting(), weight * sum((fisher.values[n] * w).sum() for n, w in way.items()))
        ways.append(sum((fisher.values[n] * w).sum() for n, w in way.items()))
    assert 0 < ways[1] < ways[0]
