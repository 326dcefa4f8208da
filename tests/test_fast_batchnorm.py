"""ResNets on the fast path: BatchNorm layers that add the shortcut and apply ReLU."""

import copy
from unittest import mock

import pytest
import torch
from conftest import CLASSES, images
from fast_path import make
from torch import nn

from mgtta._lib.timm import timm, torchvision
from mgtta.fast import bf16
from mgtta.fast.batchnorm import Told, batch_norm, has_batch_norm_kernels
from mgtta.fast.residual import BLOCKS
from mgtta.models.blended import blended_norm

NETWORKS = {
    "basic": lambda: timm.create_model("resnet10t", num_classes=CLASSES),
    "bottleneck": lambda: timm.create_model("resnet14t", num_classes=CLASSES),
    "torchvision": lambda: torchvision.models.resnet18(num_classes=CLASSES),
}


def fused(method):
    modules = method.engine.network.model.net.modules()
    return sum(isinstance(module, BLOCKS) and "forward" in vars(module) for module in modules)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", ["tent", "mgtta+"])
def test_fused_blocks_are_the_plain_ones(name, network):
    torch.manual_seed(0)
    net = NETWORKS[network]()
    bare = {"gather": 0, "recall": 0} if name == "mgtta+" else {}
    plain, method = (make(name, copy.deepcopy(net), lr=1e-3, **bare) for _ in range(2))
    with mock.patch.object(bf16, "fuse_residual_blocks"):
        plain(images(8))
    method(images(8))
    for seed in (1, 2):
        torch.testing.assert_close(method(images(8, seed=seed)), plain(images(8, seed=seed)))
    assert fused(plain) == 0
    assert fused(method) == sum(isinstance(module, BLOCKS) for module in net.modules())
    for (_, found), (_, expected) in zip(method.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_other_blocks_stay_as_they_are():
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=CLASSES)
    net.layer1[0].act1 = nn.GELU()
    net.layer2[0].act2.register_forward_hook(lambda *_: None)
    net.layer3[0].se = nn.Conv2d(256, 256, 1)
    method = make("tent", net)
    assert method(images(8)).isfinite().all()
    assert fused(method) == 1


@pytest.mark.parametrize("network", NETWORKS)
def test_hooks_of_the_user_see_what_a_norm_layer_gives(network):
    """Not what comes of it after shortcut and ReLU; and the network gives what it gave without fusing."""
    torch.manual_seed(0)
    net = NETWORKS[network]()
    hooked = [name for name, module in net.named_modules() if name == "bn1" or name.endswith("0.bn1")]
    plain, method = (make("tent", copy.deepcopy(net), lr=1e-3) for _ in range(2))
    seen = {}
    for key, one in (("plain", plain), ("fused", method)):
        for name in hooked:
            layer = one.model.net.get_submodule(name)
            layer.register_forward_hook(lambda _, __, y, key=(key, name): seen.update({key: y.detach()}) or 2 * y)
    with mock.patch.object(bf16, "fuse_residual_blocks"):
        expected = plain(images(8))
    torch.testing.assert_close(method(images(8)), expected)
    for name in hooked:
        torch.testing.assert_close(seen["fused", name], seen["plain", name])
        assert (seen["fused", name] < 0).any()
    blocks = [name for name, module in net.named_modules() if isinstance(module, BLOCKS)]
    assert fused(method) == len(blocks) - len(hooked) + 1


def test_kernels_are_for_a_gpu():
    assert not has_batch_norm_kernels(torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))


def case(shape, relu, residual, dtype):
    random = torch.Generator().manual_seed(0)
    layer = nn.BatchNorm2d(shape[1])
    with torch.no_grad():
        for name, t in (*layer.named_parameters(), *layer.named_buffers()):
            if t.ndim:
                t.copy_(torch.rand(t.shape, generator=random) + (3 if name == "running_mean" else 0.5))
    x, grad, shortcut = (torch.randn(shape, generator=random).to(dtype) for _ in range(3))
    return layer.cuda(), (2 * x + 3).cuda(), grad.cuda(), shortcut.cuda() if residual else None


def exact(layer, x, grad, shortcut, share, relu):
    layer = copy.deepcopy(layer).double()
    inputs = [t.double().requires_grad_() for t in (x, shortcut) if t is not None]
    found = blended_norm(inputs[0], layer, share)
    y = found.y + inputs[1] if len(inputs) > 1 else found.y
    if relu:
        y = y.relu()
    return y, torch.autograd.grad(y, [*inputs, layer.weight, layer.bias], grad.double()), found.mean, found.var


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(4, 24, 9, 7), (16, 64, 56, 56), (3, 2048, 7, 7), (2, 16, 5, 1)])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_batch_norm_kernels_agree_with_the_plain_version(shape, share, residual, dtype, near):
    for relu in (False, True):
        layer, x, grad, shortcut = case(shape, relu, residual, dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        expected, grads, mean, var = exact(layer, x, grad, shortcut, share, relu)
        inputs = [t.requires_grad_() for t in (x, shortcut) if t is not None]
        told = Told(*(torch.full_like(layer.running_mean, float("nan")) for _ in range(2)))
        y = batch_norm(x, layer, share, shortcut, relu, told)
        found = torch.autograd.grad(y, [*inputs, layer.weight, layer.bias], grad)
        values = x.numel() // shape[1]
        expected = (expected, mean, var * values / (values - 1), *grads)
        for a, b in zip((y, told.mean, told.var, *found), expected, strict=True):
            assert (a.double() - b).norm() < near * b.norm()
        with torch.no_grad():
            assert torch.equal(batch_norm(x, layer, share, shortcut, relu, None), y)
