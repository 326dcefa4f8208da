"""The fast path predicts and learns as float32 does, up to what it rounds."""

import copy

import pytest
import torch
from conftest import CLASSES, NETS, images, vit
from fast_path import CHOOSING, FOLLOWING, NAMES, batches, close, followed, make
from torch import nn

import mgtta
from mgtta._lib.timm import timm
from mgtta.data.embedded import EMBEDDED
from mgtta.data.streams import corrupted, stream
from mgtta.fast.bf16 import depthwise, is_depthwise


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_close_to_float32(name, net, low_memory):
    exact, quick = (
        make(name, NETS[net](), precision=p, **more) for p, more in (("fp32", {}), ("bf16", {"low_memory": low_memory}))
    )
    assert (exact.precision, quick.precision) == ("fp32", "bf16")
    for x in batches():
        expected, found = exact(x), quick(x)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
    assert (quick.updates, quick.skipped) == (exact.updates, exact.skipped)
    assert all(p.dtype == torch.float32 for p in quick.adapted.values())
    assert quick.model.fingerprint() != exact.model.fingerprint()
    assert quick.fingerprint == exact.fingerprint  # states and statistics are the source model's


@pytest.mark.parametrize("name", FOLLOWING)
def test_running_means_follow_as_in_float32(name):
    """Of the images that a filter keeps, and not of batches that are not finite or that teach nothing."""
    open_filters = {"margin": 0.9, "redundancy": 0.999} if name in CHOOSING else {"gather": 3}
    exact, quick = (make(name, lr=1e-4, precision=p, **open_filters) for p in ("fp32", "bf16"))
    bad = images(8)
    bad[0, 0, 0, 0] = float("nan")
    for x in [*batches(3), bad, *batches(3, size=5), *images(4).split(1)]:
        expected, found = exact(x), quick(x)
        if x is not bad:
            assert close(found, expected)
    assert (quick.updates, quick.skipped) == (exact.updates, exact.skipped)
    for key, value in followed(quick).items():
        torch.testing.assert_close(value, followed(exact)[key], atol=0.05, rtol=0.05)
        assert value.any()


@pytest.mark.parametrize("name", CHOOSING)
def test_a_batch_that_teaches_nothing_is_neither_an_update_nor_skipped(name):
    method = make(name, vit())  # random weights: every entropy is near ln C
    before = method.state_dict()["params"]
    for x in batches(2):
        method(x)
    assert (method.updates, method.skipped) == (0, 0)
    assert all(torch.equal(t, before[key]) for key, t in method.state_dict()["params"].items())
    assert not method.probs.any()


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_8_bits(name, low_memory):
    method, rounded = (make(name, precision=p, low_memory=low_memory) for p in ("bf16", "fp8"))
    assert rounded.precision == copy.deepcopy(rounded).precision == "fp8"
    x, *more = batches()
    assert torch.equal(rounded(x), method(x))  # the way there is the same
    for x in more:
        found, expected = rounded(x), method(x)
        assert (found - expected).norm() < 0.03 * expected.norm()
    a, b = (
        torch.cat([p.flatten() for p in m.state_dict()["params"].values()] or [torch.ones(1)])
        for m in (rounded, method)
    )
    assert torch.equal(a, b) == (name == "noadapt")


@pytest.mark.parametrize("name", EMBEDDED)
def test_on_embedded_images_it_predicts_what_float32_does(name):
    model, source = mgtta.load_model(name), mgtta.load_source(name)
    found = []
    for kind in ("fp32", "bf16"):
        method = mgtta.create("mgtta", model, source=source, lr=5e-3, precision=kind)
        found.append([method(b.x) for b in stream(corrupted(EMBEDDED[name](96), ["fog"]), batch_size=32)])
    agree = torch.cat([a.argmax(1) == b.argmax(1) for a, b in zip(*found, strict=True)])
    assert agree.float().mean() > 0.95


@pytest.mark.parametrize("name", ["tent", "eq7_adam", "mgtta"])
def test_states_go_from_one_precision_to_the_other(name):
    exact, quick = make(name, precision="fp32"), make(name)
    for x in batches(3):
        exact(x)
    quick.load_state_dict(exact.state_dict())
    x = images(8, seed=50)
    torch.testing.assert_close(quick(x), exact(x), atol=0.1, rtol=0.05)
    exact.load_state_dict(quick.state_dict())
    assert exact.updates == quick.updates == 4
    states = [m.optimizer.state_dict()["state"].get(0, {}) for m in (exact, quick)]
    assert states[0].keys() == states[1].keys()


@pytest.mark.parametrize("conv_mlp", [False, True])
def test_convnexts_take_vectors_into_their_neighbours(conv_mlp):
    """The scale of an MLP's output into its weights, and the bias of a convolution into the norm that follows."""
    torch.manual_seed(0)
    net = timm.models.convnext.ConvNeXt(
        depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), num_classes=CLASSES, conv_mlp=conv_mlp
    )
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(("gamma", "conv_dw.bias")):
                p.uniform_(-1, 1)
    method = make("tent", net)
    exact = make("tent", net, precision="fp32")
    for x in batches():
        assert close(method(x), exact(x))
    own = [block for stage in method.engine.network.model.net.stages for block in stage.blocks]
    assert all(block.conv_dw.bias is None for block in own)
    assert all((block.gamma is None) != conv_mlp for block in own)
    theirs = [block for stage in method.model.net.stages for block in stage.blocks]
    assert all(block.gamma is not None and block.conv_dw.bias is not None for block in theirs)
    exported = dict(method.export().named_parameters())
    for name, value in net.named_parameters():
        if name.endswith(("fc2.weight", "conv_dw.bias")):
            assert torch.equal(exported[name], value)


@pytest.mark.parametrize(("kernel", "bias"), [(3, True), (7, False), ((1, 5), True)])
def test_depthwise_convolutions_have_the_gradient_of_autograd(kernel, bias):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, kernel, padding="same", groups=4, bias=bias).double().requires_grad_(False)
    layer.padding = tuple(k // 2 for k in layer.kernel_size)
    assert is_depthwise(layer)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(x)
    expected = layer(x)
    found = depthwise(layer, x, layer.weight.flip(2, 3))
    assert torch.equal(found, expected)
    for a, b in zip(torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, x, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("more", [{"stride": 2}, {"padding": 0}, {"dilation": 2}, {"groups": 2}, {"kernel_size": 4}])
def test_other_convolutions_are_not_depthwise(more):
    layer = nn.Conv2d(4, **{"out_channels": 4, "kernel_size": 3, "padding": 1, "groups": 4, **more})
    assert not is_depthwise(layer.requires_grad_(False))


class Standardised(nn.Conv2d):
    """Does something else with its weights than a plain convolution."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


def test_convolutions_with_a_forward_function_of_their_own_are_not_depthwise():
    settings = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 1, "groups": 4}
    assert not is_depthwise(Standardised(**settings).requires_grad_(False))
    layer = nn.Conv2d(**settings).requires_grad_(False)
    assert is_depthwise(layer)
    layer.forward = lambda x: x
    assert not is_depthwise(layer)
