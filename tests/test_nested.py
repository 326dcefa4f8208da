"""A method inside another module, as in a LightningModule: its state travels with the module's."""

import copy
import io
import pickle

import pytest
import torch
from conftest import images
from test_methods import make, same, stream, suitable
from torch import nn

import mgtta


class Outer(nn.Module):
    def __init__(self, method):
        super().__init__()
        self.method = method
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("wrapping", [{}, {"guard": True}])
@pytest.mark.parametrize("name", ["mgtta", "mgtta_plus", "eata", "t3a", "sar", "cotta", "foa"])
def test_state_dict_of_a_module_that_contains_a_method(name, wrapping):
    model = mgtta.load_model(suitable(name))
    straight = Outer(make(name, model, **wrapping))
    for x in stream(3):
        straight.method(x)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    file.seek(0)
    other = Outer(make(name, model, **wrapping))
    assert str(other.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    assert other.method.updates == straight.method.updates
    assert same(other.method.state_dict(), straight.method.state_dict())
    assert torch.equal(other.method(images(4, seed=9)), straight.method(images(4, seed=9)))
    other.method.reset()
    fresh = make(name, model, **wrapping)
    assert torch.equal(other.method(images(4)), fresh(images(4)))  # exactly the source model again


def test_a_state_that_does_not_fit_is_rejected_inside_a_module_too():
    outer = Outer(make("mgtta", mgtta.load_model(suitable("mgtta"))))
    state = copy.deepcopy(outer.state_dict())
    other = Outer(make("tent", mgtta.load_model(suitable("tent"))))
    with pytest.raises(RuntimeError, match="another kind"):
        other.load_state_dict(state)
    state.pop("method._adaptation")
    with pytest.raises(RuntimeError, match=r"Missing key.*method\._adaptation"):
        outer.load_state_dict(state)


def test_ddp_around_a_method_is_refused_by_name(monkeypatch):
    method = make("tent", mgtta.load_model(suitable("tent")))
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", object())
    with pytest.raises(TypeError, match="process_group"):
        method(images(4))


@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_half_precision_of_a_method_is_refused(dtype):
    method = make("tent", mgtta.load_model(suitable("tent")))
    with pytest.raises(TypeError, match="float32"):
        getattr(method, dtype)()
    assert method(images(4)).dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pickles_are_not_larger_than_what_they_hold(precision):
    """Moments and memory are views of large vectors on the way; none may take its whole storage along."""
    model = mgtta.load_model(suitable("mgtta"))
    method = make("mgtta", model, precision=precision)
    method(images(4))
    coordinates = sum(p.numel() for p in method.adapted.values())
    memory = 4 * coordinates * method.optimizer.generator.memory.width
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert len(pickle.dumps(method.state_dict())) < 1.5 * memory + 50_000
    assert len(pickle.dumps(method)) < 2 * weights + 3 * memory + 200_000
