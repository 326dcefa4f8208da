"""NEO against its algorithm, and where it re-centres the features."""

import copy
import dataclasses

import pytest
import torch
from baselines import close, unsure_vit
from conftest import confident_vit, convnet, images

import mgtta


def test_neo_against_its_algorithm():
    model = unsure_vit()
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    for settings, mu in (({}, 0.0), ({"source": source}, source.mean[-1]), ({"alpha": 0.1}, 0.0)):
        method = mgtta.create("neo", model, **settings)
        m = torch.zeros(weight.shape[1], dtype=torch.float64)
        seen = 0
        for t, n in enumerate((4, 2, 7)):
            x = images(n, seed=t).double()
            z = model.embed(x)[1].detach()
            seen += n
            share = settings.get("alpha", n / seen)
            m = (1 - share) * m + share * z.mean(0)
            close(method(x), (z - m + mu) @ weight.T + bias)
        close(method.predict(x), (z - m + mu) @ weight.T + bias)
        assert method.updates == 3
    with pytest.raises(ValueError, match="alpha"):
        mgtta.create("neo", model, alpha=0.0)


def test_neo_takes_a_common_shift_of_the_features_back():
    net = confident_vit()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.norm.bias.add_(torch.linspace(-1, 1, 16))
    one, two = mgtta.create("neo", net), mgtta.create("neo", other)
    for t in range(3):
        x = images(8, seed=t)
        assert (net(x) - other(x)).abs().max() > 1
        torch.testing.assert_close(one(x), two(x), atol=1e-4, rtol=1e-4)


def test_neo_and_foa_shift_re_centre_where_the_head_reads():
    """The head of this network does not read its last norm; older statistics know only that norm, and are refused."""
    model = mgtta.load_model(convnet("group"))
    source = mgtta.source_statistics(model, images(8))
    _, z = model.embed(images(4, seed=1))
    mu = model.embed(images(8))[1].mean(0)
    neo = mgtta.create("neo", model, source=source)
    torch.testing.assert_close(neo(images(4, seed=1)), model.head(z - z.mean(0) + mu).detach())
    shift = mgtta.create("foa_shift", model, source=source)
    shift(images(4, seed=1))
    torch.testing.assert_close(shift.predict(images(4, seed=1)), model.head(z - z.mean(0) + mu).detach())
    old = dataclasses.replace(source, head=None)
    two = dataclasses.replace(source, head_layer="")
    for name in ("neo", "foa_shift"):
        with pytest.raises(ValueError, match="takes other features"):
            mgtta.create(name, model, source=old)(images(2))
        with pytest.raises(ValueError, match="do not come from its last linear layer"):
            mgtta.create(name, model, source=two)
