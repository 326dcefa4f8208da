"""Threads, processes and determinism: turns are taken, workers work, and the same input gives the same bits."""

import copy
import math
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import confident_vit, images
from test_methods import make, same
from torch.utils.data import DataLoader

import mgtta
from mgtta.adaptation.method import GradientMethod
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import _Loaded, corrupted, stream

ROOT = Path(__file__).parent.parent


class Watched(GradientMethod):
    """Notes how many threads are inside at once."""

    def __init__(self, model):
        super().__init__(model, mgtta.norm_parameters, lambda params: torch.optim.SGD(params, lr=1e-2))
        self.inside = self.most = 0

    def loss(self, x):
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.002)  # lets the others run
        logits = self.model(x)
        self.inside -= 1
        return logits, logits.square().mean()


@pytest.mark.parametrize("guard", [False, True])
def test_threads_take_turns(model, guard):
    inner = Watched(model)
    method = mgtta.guarded(inner) if guard else inner
    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(method, images(2, seed=i)) for i in range(24)]
        states = [pool.submit(method.state_dict) for _ in range(4)]
        assert all(task.result().isfinite().all() for task in tasks)
    assert inner.most == 1
    assert inner.updates == 24
    assert all(state.result() for state in states)


def test_threads_give_what_some_order_gives():
    """Two batches by two threads: the state is that of one order or of the other, never a mixture."""
    model = mgtta.load_model(confident_vit())
    first, second = images(4, seed=1), images(4, seed=2)

    def after(*batches):
        method = mgtta.create("tent", model)
        for x in batches:
            method(x)
        return method.state_dict()["params"]

    method = mgtta.create("tent", model)
    threads = [threading.Thread(target=method, args=(x,)) for x in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = method.state_dict()["params"]
    assert same(found, after(first, second)) or same(found, after(second, first))


def test_copies_have_their_own_turn(model):
    method = mgtta.create("tent", model, guard=True)
    twin = copy.deepcopy(method)
    assert twin._turn is twin.method._turn is not method._turn
    with method._turn, ThreadPoolExecutor(1) as pool:
        assert pool.submit(twin, images(2)).result(timeout=20).shape == (2, 10)


@pytest.mark.parametrize("kind", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_either_kind_give_the_same_batches(kind):
    if kind not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {kind} here")
    plan = stream(corrupted(Glyphs(8), ["fog"]), batch_size=4)
    loaded = _Loaded(plan.domains, plan.plan, plan.seed)
    loader = DataLoader(loaded, batch_size=None, num_workers=1, multiprocessing_context=kind)
    for (batch, _, _), expected in zip(loader, plan, strict=True):
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.y, expected.y)


@pytest.mark.parametrize("name", ["mgtta", "eata", "cotta", "foa"])
def test_float32_is_deterministic(name):
    """Under torch's flag, and without it on the CPU, two runs are the same bit for bit."""
    before = torch.are_deterministic_algorithms_enabled()
    found = []
    try:
        for flag in (False, True, True):
            torch.use_deterministic_algorithms(flag)
            method = make(name, mgtta.load_model(confident_vit()), guard=True)
            found.append([method(images(4, seed=i)) for i in range(4)])
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_short_soak(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import soak

    model = mgtta.load_model("glyphs_plain")
    method = mgtta.create("tent", model, guard=True)
    found = soak.soak(method, mgtta.create("noadapt", model), 24, 2, images=2, samples=4)
    assert found["drift"] == 0.0
    assert found["updates"] == 24
    assert math.isfinite(found["memory"]["growth"])
    assert "| memory, MiB |" in soak.page({**found, "command": "", "method": "tent", "model": "glyphs_plain"})
