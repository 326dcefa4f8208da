"""Methods with steps of their own: over rounded weights, with captured passes."""

import pytest
import torch
from fast_path import ROUNDED, batches, close, make

from mgtta.fast import graphed
from mgtta.fast.rounded import RoundedEngine


@pytest.mark.parametrize("name", ROUNDED)
def test_steps_of_their_own_run_over_rounded_weights(name):
    settings = {"sar": {"margin": 1.1}, "sar_come": {"margin": 1.1}}.get(name, {})
    settings = {"deyo": {"entropy_threshold": 1.1, "plpd_threshold": -1.0}}.get(name, settings)
    exact, quick = (make(name, precision=p, lr=1e-4, **settings) for p in ("fp32", "bf16"))
    assert type(quick.engine) is RoundedEngine
    for x in batches(3):
        expected, found = exact(x), quick(x)
        assert found.dtype == torch.float32
        assert close(found, expected)
    assert (quick.updates, quick.skipped) == (exact.updates, exact.skipped)
    assert quick.updates == 3
    assert all(p.dtype == torch.float32 for p in quick.adapted.values())
    with pytest.raises(ValueError, match=f"low_memory .* {name}"):
        make(name, low_memory=True)
    with pytest.raises(ValueError, match=f"'fp8' is not for {name}.*take precision='bf16'"):
        make(name, precision="fp8")
    with pytest.raises(TypeError, match="precision='fp32'"):
        quick.double()


@pytest.mark.parametrize("name", ROUNDED)
def test_passes_are_filled_up_to_the_batch(name, monkeypatch):
    """With a stand-in for a graph that runs the network on so many images: the result is the same."""
    settings = {"deyo": {"entropy_threshold": 0.8, "plpd_threshold": -1.0}}.get(name, {})
    method, twin = (make(name, lr=1e-4, **settings) for _ in range(2))
    made = []

    class Filled:
        def __init__(self, run, x, params):
            made.append(len(x))
            self.run, self.x = run, x

        def __call__(self, x):
            return self.run(torch.cat([x, torch.zeros_like(self.x[len(x) :])]))[: len(x)]

    monkeypatch.setattr(graphed, "_Pass", Filled)
    monkeypatch.setattr(graphed, "CAPTURE_BATCHES", 1)
    expected = [twin(x) for x in batches(4)]
    monkeypatch.setattr(graphed, "DEVICE", "cpu")
    for x, logits in zip(batches(4), expected, strict=True):
        torch.testing.assert_close(method(x), logits, atol=1e-2, rtol=1e-2)
    assert made
    assert set(made) == {8}
    assert method.updates == twin.updates > 0
    assert "forward" not in vars(method.model.net)
