"""Images that look alike in BatchNorm layers."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import convnet, images
from torch import nn

import mgtta
from mgtta._lib.timm import timm
from mgtta.adaptation.wrapper import innermost
from mgtta.models.alike import FADING, RIDGE, LookAlikes, Looks, LooksOfClean

BARE = {"recentre": 0.0, "mirror": False, "class_mix": False, "lr": 0.0}


def clean(n: int = 64) -> torch.Tensor:
    return images(n, seed=9)


def noisy(x: torch.Tensor) -> torch.Tensor:
    return (x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)


def looks_by_hand(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Logarithms of the deviations of what the network's first BatchNorm layer is given, in float64."""
    taken = []
    layer = next(module for module in net.modules() if isinstance(module, nn.BatchNorm2d))
    handle = layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].double()))
    net(x)
    handle.remove()
    return (taken[0].var((2, 3), correction=0) + 1e-3 * layer.running_var).log() / 2


def test_weights_are_those_of_the_formula():
    model = mgtta.load_model(convnet("batch"))
    source = mgtta.source_statistics(model, clean())
    x = images(6)
    S = torch.cov(looks_by_hand(model, clean()).T)
    S += RIDGE * S.diagonal().diag()
    looks = looks_by_hand(model, x)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for i in range(6):
        for j in range(6):
            apart = looks[i] - looks[j]
            expected[i, j] = (-(apart @ torch.linalg.inv(S) @ apart) / len(S) / FADING).exp()
    expected /= expected.sum(1, keepdim=True)
    method = mgtta.create("mgtta+", model, source=source, alike=True, source_share=0.3, **BARE)
    method(x.repeat(3, 1, 1, 1))
    found = innermost(method).model.alikes.weight
    torch.testing.assert_close(3 * found[:6, :6].double(), expected, atol=1e-4, rtol=1e-3)


def test_kinds_of_shift_count_little_for_one_another():
    model = mgtta.load_model(convnet("batch"))
    source = mgtta.source_statistics(model, clean())
    x = torch.cat([images(16), noisy(images(16, seed=5))])
    method = mgtta.create("mgtta+", model, source=source, alike=True, **BARE)
    method(x)
    weight = innermost(method).model.alikes.weight
    assert weight.shape == (32, 32)
    torch.testing.assert_close(weight.sum(1), torch.ones(32))
    own = torch.block_diag(torch.ones(16, 16), torch.ones(16, 16))
    assert float((weight * own).sum(1).mean()) > 0.8


def test_alike_changes_predictions_and_says_what_it_lacks():
    model = mgtta.load_model(convnet("batch"))
    source = mgtta.source_statistics(model, clean())
    x = images(20)
    alike = mgtta.create("mgtta+", model, source=source, alike=True, **BARE)
    plain = mgtta.create("mgtta+", model, source=source, **BARE)
    assert not torch.allclose(alike(x), plain(x))
    assert innermost(plain).model.alikes is None
    with pytest.raises(ValueError, match="make them again with"):
        mgtta.create("mgtta+", model, source=replace(source, looks=None), alike=True, **BARE)
    with pytest.raises(ValueError, match="needs a source_share above 0"):
        mgtta.create("mgtta+", model, source=source, alike=True, source_share=0.0, **BARE)
    with pytest.raises(TypeError, match="alike must be True or False, not 'false'"):
        mgtta.create("mgtta+", model, source=source, alike="false", **BARE)


def test_looks_are_of_the_layer_that_comes_first_and_are_kept_in_files(tmp_path):
    class Backwards(nn.Module):
        """Its first layer has the last name."""

        def __init__(self):
            super().__init__()
            self.last = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.head = nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.last(self.first(x)))

    model = mgtta.load_model(Backwards())
    source = mgtta.source_statistics(model, clean())
    assert source.looks.layer == "first.1"
    mgtta.save_source(source, tmp_path / "source.safetensors")
    again = mgtta.load_source(tmp_path / "source.safetensors")
    assert again.looks.layer == "first.1"
    assert torch.equal(again.looks.root, source.looks.root)
    method = mgtta.create("mgtta+", model, source=again, alike=True, source_share=0.3, guard=True, recall=0)
    for batch in images(64).split(32):
        assert method(batch).isfinite().all()
    assert method.reference.unlearned.alikes is not None


def test_a_network_without_such_layers_has_no_looks():
    model = mgtta.load_model(convnet("group"))
    source = mgtta.source_statistics(model, clean())
    assert source.looks is None
    with pytest.raises(ValueError, match="nor do those of networks without such layers"):
        mgtta.create("mgtta+", model, source=source, alike=True, **BARE)


@pytest.mark.parametrize("running_var", [0.0, 1.0])
def test_a_dead_channel_tells_nothing(running_var):
    net = nn.Sequential(nn.BatchNorm2d(3))
    net[0].running_var.fill_(running_var)
    x = torch.randn(16, 3, 4, 4) * torch.rand(16, 3, 1, 1)
    x[:, 1] = 0
    looks = LooksOfClean(net, [net[0]])
    with looks.watching():
        net.eval()(x)
    root = looks.fitted(torch.float32).root
    assert root.isfinite().all()
    assert root[1].abs().max() < 1e-3 * root.abs().max()
    weight = LookAlikes(net, Looks("0", root)).seen_by(net[0], x)
    assert weight.isfinite().all()
    assert weight.diagonal().min() > 1 / 16


def test_images_that_all_look_the_same_give_no_looks():
    net = nn.Sequential(nn.BatchNorm2d(2))
    looks = LooksOfClean(net, [net[0]])
    with looks.watching():
        net(torch.zeros(8, 2, 4, 4))
    assert looks.fitted(torch.float32) is None


def test_looks_are_of_a_layer_that_can_blend():
    net = nn.Sequential(nn.BatchNorm2d(3, affine=False), *convnet("batch"))
    source = mgtta.source_statistics(mgtta.load_model(net), clean())
    assert not source.looks.layer.startswith("0")


def test_looks_move_with_the_statistics():
    looks = Looks("bn", torch.eye(2))
    assert looks.to(torch.zeros(1)) is looks
    assert looks.to(torch.zeros(1, dtype=torch.float64)).root.dtype == torch.float64


def test_alike_resets_and_resumes_exactly():
    model = mgtta.load_model(convnet("batch"))
    source = mgtta.source_statistics(model, clean())
    method = mgtta.create("mgtta+", model, source=source, alike=True)
    first, second = images(64).split(32)
    method(first)
    state = copy.deepcopy(method.state_dict())
    expected = method(second)
    method.reset()
    method(second)
    method.load_state_dict(state)
    assert torch.equal(method(second), expected)


def test_the_first_layer_finds_the_weights_and_the_others_take_them():
    net = convnet("batch")
    model = mgtta.load_model(net)
    looks = mgtta.source_statistics(model, clean()).looks
    layer = net.get_submodule(looks.layer)
    alikes = LookAlikes(net, looks)
    x = torch.randn(4, layer.num_features, 5, 5)
    assert alikes.seen_by(nn.BatchNorm2d(7), torch.zeros(4, 7, 3, 3)) is None  # the first layer comes first
    before = alikes.seen_by(layer, x)
    assert alikes.seen_by(nn.BatchNorm2d(7), torch.zeros(3, 7, 3, 3)) is None  # other images
    assert alikes.seen_by(nn.BatchNorm2d(7), torch.zeros(4, 7, 3, 3)) is before  # a later layer takes the same
    other = alikes.seen_by(layer, torch.randn(4, layer.num_features, 5, 5))
    assert not torch.equal(other, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_alike_on_a_gpu_is_that_on_a_cpu_also_captured():
    torch.manual_seed(0)
    model = mgtta.load_model(timm.create_model("resnet10t", num_classes=5))
    source = mgtta.source_statistics(model, clean())
    settings = {"source": source, "alike": True, "recall": 0, **BARE}
    slow = mgtta.create("mgtta+", model, **settings)
    quick = mgtta.create("mgtta+", copy.deepcopy(model).cuda(), precision="bf16", **settings)
    for seed in range(12):  # captured from the ninth batch of a shape on
        x = images(32, seed=seed)
        expected = slow(x)
        found = quick(x.cuda()).cpu()
        assert (found - expected).norm() < 0.05 * expected.norm()
