"""Threads, processes and determinism: methods keep to themselves, and the same input gives the same bits."""

import math
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import confident_vit, images
from test_methods import make
from torch.utils.data import DataLoader

import mgtta
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import _Loaded, corrupted, stream

ROOT = Path(__file__).parent.parent


def test_methods_in_their_own_threads_do_not_disturb_each_other():
    """One method for each stream: two threads with a method each give what each gives alone."""
    model = mgtta.load_model(confident_vit())
    streams = [[images(4, seed=10 * i + t) for t in range(6)] for i in range(3)]

    def run(batches):
        method = mgtta.create("tent", model, guard=True)
        return [method(x) for x in batches]

    alone = [run(batches) for batches in streams]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, streams))
    for expected, found in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


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

    model = mgtta.load_model("glyphs_vit")
    method = mgtta.create("tent", model, guard=True, gather=0)
    found = soak.soak(method, mgtta.create("noadapt", model), 24, 2, images=2, samples=4)
    assert found["drift"] == 0.0
    assert found["updates"] == 24
    assert math.isfinite(found["memory"]["growth"])
    assert "| memory, MiB |" in soak.page({**found, "command": "", "method": "tent", "model": "glyphs_vit"})
