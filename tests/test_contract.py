"""What works with what: each recipe with each option either works or refuses by name, as the registry declares."""

import pytest
import torch
from conftest import CLASSES, images
from test_methods import RECIPES, make, stream, suitable
from torch import nn

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta._lib.ranks import Alone

CASES = [(name, option) for name, recipe in RECIPES.items() for option in recipe.works_with]
CREATED_WITH = {
    "guard": {"guard": True},
    "schedule": {"schedule": "auto"},
    "pull": {"pull": 0.1},
    "gather": {"gather": 6},
    "recall": {"recall": 2},
    "params": {"params": lambda net: mgtta.norm_parameters(net)[:2]},
    "bf16": {"precision": "bf16"},
}


def use(name, option, tmp_path):
    """Adapt with the option; raises where it is refused."""
    method = make(name, mgtta.load_model(suitable(name)), **CREATED_WITH.get(option, {}))
    if option == "ranks":
        method.join(Alone())
    first = [method(x) for x in stream(4)]
    assert all(logits.shape == (4, CLASSES) and logits.isfinite().all() for logits in first)
    if option == "export":
        exported = method.export()
        assert isinstance(exported, nn.Module)
        assert exported(images(4)).shape == (4, CLASSES)
    write_tree(tmp_path / "state", method.state_dict(), {})
    expected = method(images(4, seed=9))
    method.reset()
    assert all(torch.equal(method(x), logits) for x, logits in zip(stream(4), first, strict=True))
    method.load_state_dict(read_tree(tmp_path / "state")[0])
    assert torch.equal(method(images(4, seed=9)), expected)


@pytest.mark.parametrize(("name", "option"), CASES, ids=[f"{name}-{option}" for name, option in CASES])
def test_each_option_works_or_is_refused_by_name(name, option, tmp_path):
    if RECIPES[name].works_with[option]:
        use(name, option, tmp_path)
    else:
        with pytest.raises(ValueError, match=name):
            use(name, option, tmp_path)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.works_with["export"]])
def test_an_export_predicts_as_the_method_does(name, guard):
    method = make(name, mgtta.load_model(suitable(name)), guard=guard, **({"mirror": False} if "plus" in name else {}))
    for x in stream(4):
        method(x)
    exported = method.export()
    expected = method.predict(images(16))
    if name == "cotta":  # whose predictions average random views
        expected = method.method.teacher(images(16)) if guard else method.teacher(images(16))
    if "plus" in name:  # which re-centres each image by its neighbours; an export re-centres all by their mean
        inner = method.method if guard else method
        mean = inner.neighbours.mean(inner._mu) - inner.mix.now()
        expected = inner.look(images(16)).logits.detach() + inner._shift(mean)
    if name == "bn":
        assert (exported(images(16)) - expected).abs().max() < 0.5  # the stream's statistics, not the batch's
    else:
        torch.testing.assert_close(exported(images(16)), expected, atol=1e-4, rtol=1e-4)


def test_pull_draws_the_parameters_to_the_source(model):
    free, held = (mgtta.create("tent", model, lr=0.1, pull=pull) for pull in (None, 0.2))
    for x in stream(3):
        free(x)
        held(x)

    @torch.no_grad()
    def way(method):
        return sum(float((p - q).square().sum()) for p, q in zip(method.adapted.values(), method.origin, strict=True))

    assert 0 < way(held) < way(free)
    one = mgtta.create("tent", model, lr=0.1)
    two = mgtta.create("tent", model, lr=0.1, pull=0.25)
    one(images(4))
    two(images(4))
    for p, q, origin in zip(one.adapted.values(), two.adapted.values(), one.origin, strict=True):
        torch.testing.assert_close(q.detach(), p.detach() + 0.25 * (origin - p.detach()))
    with pytest.raises(ValueError, match="below 1"):
        mgtta.create("tent", model, pull=1.0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "mgg"])
def test_pull_on_the_fast_path_is_that_of_the_plain_step(model, optimizer):
    methods = [
        mgtta.create("tent", model, lr=0.01, optimizer=optimizer, pull=0.1, precision=p) for p in ("fp32", "bf16")
    ]
    for x in stream(4):
        for method in methods:
            method(x)
    exact, quick = methods
    way = torch.cat([(p - q).flatten() for p, q in zip(exact.adapted.values(), exact.origin, strict=True)])
    found = torch.cat([(p - q).flatten() for p, q in zip(quick.adapted.values(), quick.origin, strict=True)])
    assert float((found.norm() / way.norm()).detach()) == pytest.approx(1, rel=0.05)
