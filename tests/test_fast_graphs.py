"""What graphs and compilers need: buffers that stay, one piece each, and a memory of what was compiled."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from conftest import CLASSES, images
from fast_path import FOLLOWING, close, make

from mgtta._lib.timm import timm
from mgtta.adaptation.wrapper import innermost
from mgtta.fast import engine as fast
from mgtta.fast.captured import kept_if_broken
from mgtta.fast.remembered import is_remembered, remember


def test_a_graph_finds_buffers_that_a_reset_or_a_load_has_replaced():
    method = make("mgtta_plus", gather=0, recall=0)
    engine = method.engine
    memory = method.neighbours
    method(images(8))
    engine._hold_buffers(images(8))  # as a capture does
    held = memory.values
    state = method.state_dict()
    method.reset()
    assert memory.values is not held
    expected = memory.values.clone()
    engine._follow_buffers()
    assert memory.values is held
    assert torch.equal(held, expected)
    method.load_state_dict(state)
    engine._follow_buffers()
    assert memory.values is held
    assert torch.equal(held, state["buffers"]["neighbours.values"])
    method.reset()
    engine._hold_buffers(images(8))  # another capture, after a reset
    assert memory.values is held
    assert torch.equal(held, expected)


def test_a_graph_finds_buffers_that_get_their_size_from_a_batch():
    method = make("eta", margin=1.1, redundancy=1.1)
    method(images(8))
    method.reset()
    method.engine._hold_buffers(images(8))
    held = method.probs
    assert held.shape == (CLASSES,)
    assert not held.any()
    method(images(8))
    assert held.any()
    method.reset()
    method.engine._follow_buffers()
    assert method.probs is held
    assert not held.any()


def test_what_was_compiled_before_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert not is_remembered("a step")
    remember("a step")
    assert is_remembered("a step")
    assert not is_remembered("another")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/nowhere")
    remember("a step")  # where nothing can be written, nothing is noted
    assert not is_remembered("a step")


def test_a_graph_that_failed_is_never_freed():
    class Graph:
        pass

    sound, broken = Graph(), Graph()
    left = [weakref.ref(sound), weakref.ref(broken)]
    with kept_if_broken(sound):
        pass
    with pytest.raises(RuntimeError, match="capture"), kept_if_broken(broken):
        raise RuntimeError("capture")
    del sound, broken
    gc.collect()
    assert [ref() is None for ref in left] == [True, False]


@pytest.mark.filterwarnings("ignore")  # torch's, about itself
@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    ("name", "precision"), [("mgtta", "bf16"), ("mgtta", "fp8"), *((name, "bf16") for name in FOLLOWING)]
)
def test_it_compiles_in_one_piece_each(name, low_memory, precision):
    """By torch's tracer, without a compiler, which would take long: no graph breaks."""
    compiled = {}

    def how(function):
        return compiled.setdefault(function, torch.compile(function, dynamic=False, backend="eager", fullgraph=True))

    method, x = innermost(make(name, precision=precision, low_memory=low_memory)), images(8)
    twin = copy.deepcopy(method)
    expected = [method(x) for _ in range(2)]
    twin.engine._lay_out(x)
    twin.engine.flat.take_in()
    for logits in expected:
        found = twin.engine._step(fast.Part(True, True, False, False), x, how)
        torch.testing.assert_close(found.logits, logits, atol=1e-2, rtol=1e-2)


@pytest.mark.filterwarnings("ignore")  # torch's, about itself
@pytest.mark.parametrize(("name", "net"), [("tent", "resnet10t"), ("tent", "convnext_atto"), ("mgtta+", "resnet10t")])
def test_other_networks_compile_in_one_piece(name, net):
    """By torch's tracer, as above; with the stream's statistics of BatchNorm layers."""
    torch._dynamo.reset()  # it traces a function a few times at most
    torch.manual_seed(0)
    bare = {"gather": 0, "recall": 0} if name == "mgtta+" else {}
    method = make(name, timm.create_model(net, num_classes=CLASSES), **bare)
    method(images(8))
    twin = copy.deepcopy(method)
    expected = method(images(8, seed=1))
    x = images(8, seed=1)
    twin.engine._lay_out(x)
    twin.engine.flat.take_in()
    compiled = partial(torch.compile, dynamic=False, backend="eager", fullgraph=True)
    found = twin.engine._step(fast.Part(True, twin.engine.answers, True, False), x, compiled)
    assert close(found.logits, expected)
    theirs = dict(method.named_buffers())
    for name, value in twin.named_buffers():
        torch.testing.assert_close(value, theirs[name], atol=0.01, rtol=0.01)
    exported = method.export()
    assert all(not getattr(vars(module).get("forward"), "is_mgtta_hook", False) for module in exported.modules())
    assert exported(x).isfinite().all()
