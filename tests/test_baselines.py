"""What several baselines that learn by gradients do alike."""

import gc

import pytest
import torch
from baselines import NAMES, create, nets
from conftest import confident_vit, images, vit
from torch import nn

import mgtta


@pytest.mark.parametrize("name", ["eta", "eata", "sar", "deyo"])
def test_a_batch_that_the_filter_empties_is_neither_an_update_nor_skipped(name):
    method = create(name, vit())  # random weights: every entropy is near ln C
    before = method.state_dict()
    logits = method(images(4))
    after = method.state_dict()
    assert torch.equal(logits, method.model(images(4)))
    assert after["counters"] | {"seconds": 0} == before["counters"] | {"seconds": 0}
    assert after["counters"]["skipped"] == 0
    assert all(torch.equal(t, before["params"][n]) for n, t in after["params"].items())
    assert all(torch.equal(t, before["buffers"][n]) or not t.any() for n, t in after["buffers"].items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_batch_leaves_no_trace_in_averages(name, bad):
    method = create(name, confident_vit(), **({"augmentations": 1} if name == "cotta" else {}))
    method(images(4, seed=1))
    before = method.state_dict()
    x = images(4)
    x[1, 0, 5, 5] = bad
    logits = method(x)
    after = method.state_dict()
    assert logits[0].isfinite().all()  # one bad image does not spoil the others' predictions
    assert after["counters"]["skipped"] == 1
    assert after["counters"]["updates"] == before["counters"]["updates"]
    assert all(torch.equal(t, before["buffers"][n]) for n, t in after["buffers"].items())
    for n, t in after["extra"].get("teacher", {}).items():
        assert torch.equal(t, before["extra"]["teacher"][n])
    assert after["extra"].get("average") == before["extra"].get("average")


@pytest.mark.parametrize("net", ["resnet", "resnet_gn", "convnext"])
@pytest.mark.parametrize("name", NAMES)
def test_other_networks_and_bytes_and_a_class_subset(name, net):
    settings = {"cotta": {"augmentations": 1, "confidence": 1.0}, "sar": {"margin": 1.1}}.get(name, {})
    method = create(name, mgtta.load_model(nets()[net], classes=[0, 2, 3]), **settings)
    for n in (4, 1):
        logits = method((images(n) * 255).to(torch.uint8))
        assert logits.shape == (n, 3)
        assert logits.isfinite().all()
    assert method.skipped == 0


@pytest.mark.parametrize("name", ["eta", "eata", "sar", "deyo"])
def test_thresholds_count_the_scored_classes(name):
    """Entropies are near ln 2, far below 0.9 ln 10."""
    threshold = "entropy_threshold" if name == "deyo" else "margin"
    for value, updates in ((1.001, 1), (0.9, 0)):
        settings = {threshold: value, **({"plpd_threshold": -1.0} if name == "deyo" else {})}
        method = create(name, mgtta.load_model(vit(), classes=[1, 4]), **settings)
        method(images(4))
        assert method.updates == updates


@pytest.mark.parametrize("name", ["deyo", "cotta", "spa", "roid"])
def test_what_changes_images_needs_images(name):
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    settings = {"cotta": {"confidence": 1.0}, "deyo": {"entropy_threshold": 1.1}}.get(name, {})
    method = mgtta.create(name, net, **settings)
    with pytest.raises(ValueError, match=rf"{name} makes views of images, so it needs images \(N, channels, H, W\)"):
        method(torch.rand(4, 6))
    assert method.updates == 0


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_over_500_batches(name):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, 4), nn.GroupNorm(1, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    settings = {"cotta": {"confidence": 0.0}, "sar": {"margin": 1.1, "recovery": 0.0}, "eta": {"margin": 1.1}}
    settings["eata"] = {"margin": 1.1, "size": 8}
    settings["deyo"] = {"entropy_threshold": 1.1, "plpd_threshold": -1.0}
    method = create(name, net, **settings.get(name, {}))
    xs = [images(2, seed=t)[:, :, :8, :8] for t in range(7)]
    counts = []
    for t in range(500):
        method(xs[t % 7])
        if t in (20, 499):
            gc.collect()
            alive = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
            counts.append((len(alive), sum(o.numel() for o in alive)))
    assert counts[1][0] < counts[0][0] + 50
    assert counts[1][1] < counts[0][1] + 2000
