"""BatchNorm by a blend of batch and source statistics."""

import copy
from functools import partial

import pytest
import torch
from conftest import convnet, images
from torch import nn

import mgtta
from mgtta._lib.timm import timm
from mgtta.adaptation.gathered import come_few
from mgtta.adaptation.normalising import BY_IMAGE_RATE
from mgtta.adaptation.wrapper import innermost
from mgtta.models.blended import SINGLE_SHARE, blended_norm, can_blend, single_norm
from mgtta.models.statistics import use_batch_statistics, use_running_statistics


def layer_of(channels: int = 3) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(channels).double()
    for tensor in (layer.weight.data, layer.bias.data, layer.running_mean):
        tensor.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    return layer


def by_hand(
    x: torch.Tensor, layer: nn.BatchNorm2d, share: float, own_share: float = 0.0, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The formula, left to autograd; with an own_share or weights of images (n, n) image by image."""
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    if own_share or weights is not None:
        blends = []
        for i, image in enumerate(x):
            own_var, own_mean = torch.var_mean(image, (1, 2), correction=0)
            if weights is not None:
                each = weights[i][:, None, None, None] / x[0, 0].numel()
                mean = (each * x).sum((0, 2, 3))
                var = (each * (x - mean[:, None, None]).square()).sum((0, 2, 3))
            blend = (1 - share - own_share) * mean + share * layer.running_mean + own_share * own_mean
            spread = (1 - share - own_share) * var + share * layer.running_var + own_share * own_var
            scale = layer.weight / (spread + layer.eps).sqrt()
            blends.append((image - blend[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None])
        return torch.stack(blends)
    mean = (1 - share) * mean + share * layer.running_mean
    var = (1 - share) * var + share * layer.running_var
    scale = layer.weight / (var + layer.eps).sqrt()
    return (x - mean[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None]


@pytest.mark.parametrize(("share", "own_share"), [(0.0, 0.0), (0.2, 0.0), (1.0, 0.0), (0.6, 0.1), (0.9, 0.1)])
def test_blended_norm_and_its_gradients_are_those_of_the_formula(share, own_share):
    layer = layer_of()
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    found = blended_norm(x, layer, share, own_share)
    expected = by_hand(x, layer, share, own_share)
    torch.testing.assert_close(found.y, expected)
    wanted = (x, layer.weight, layer.bias)
    torch.testing.assert_close(
        torch.autograd.grad((found.y * weight).sum(), wanted), torch.autograd.grad((expected * weight).sum(), wanted)
    )
    torch.testing.assert_close(found.mean, x.detach().mean((0, 2, 3)))
    torch.testing.assert_close(found.var, x.detach().var((0, 2, 3), correction=0))


class Weighing:
    """Look-alikes whose weights are given."""

    def __init__(self, weights: torch.Tensor):
        self.weights = weights

    def seen_by(self, _layer: nn.Module, _x: torch.Tensor) -> torch.Tensor:
        return self.weights


@pytest.mark.parametrize(("share", "own_share"), [(0.0, 0.0), (0.3, 0.0), (0.5, 0.03)])
def test_images_that_look_alike_count_more_in_the_norm_and_its_gradients(share, own_share):
    layer = layer_of()
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    weights = torch.randn(4, 4, dtype=torch.float64).softmax(1)
    found = blended_norm(x, layer, share, own_share, Weighing(weights))
    expected = by_hand(x, layer, share, own_share, weights)
    torch.testing.assert_close(found.y, expected)
    wanted = (x, layer.weight, layer.bias)
    torch.testing.assert_close(
        torch.autograd.grad((found.y * weight).sum(), wanted), torch.autograd.grad((expected * weight).sum(), wanted)
    )
    torch.testing.assert_close(found.mean, x.detach().mean((0, 2, 3)))  # of the stream: all count the same
    torch.testing.assert_close(found.var, x.detach().var((0, 2, 3), correction=0))
    equal = blended_norm(x, layer, share, own_share, Weighing(torch.full((4, 4), 0.25, dtype=torch.float64)))
    torch.testing.assert_close(equal.y, blended_norm(x, layer, share, own_share).y)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own_share", [0.0, 0.1])
def test_blended_norm_on_a_gpu_is_that_on_a_cpu(memory_format, dtype, own_share):
    layer = layer_of(8).float()
    x = torch.randn(16, 8, 7, 7).to(dtype).requires_grad_()
    weight = torch.randn(16, 8, 7, 7).to(dtype)
    y = blended_norm(x, layer, 0.2, own_share).y
    expected = [y.detach(), *torch.autograd.grad((y * weight).sum(), (x, layer.weight, layer.bias))]
    layer = layer.cuda()
    own = x.detach().cuda().to(memory_format=memory_format).requires_grad_()
    y = blended_norm(own, layer, 0.2, own_share).y
    found = [y.detach(), *torch.autograd.grad((y * weight.cuda()).sum(), (own, layer.weight, layer.bias))]
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=tolerance, rtol=tolerance)


def test_share_0_is_the_batch_and_share_1_the_source():
    net = convnet("batch").eval()
    x = images(8)
    by_source = net(x)
    use_batch_statistics(net)
    for layer in net.modules():
        layer.training = isinstance(layer, nn.BatchNorm2d)
    by_batch = net(x)
    assert not torch.allclose(by_source, by_batch)
    use_batch_statistics(net, 1.0)
    torch.testing.assert_close(net(x), by_source)
    use_batch_statistics(net, 0.0)
    torch.testing.assert_close(net(x), by_batch)
    use_batch_statistics(net, 0.3)
    twin = copy.deepcopy(net)
    torch.testing.assert_close(twin(x), net(x))
    use_running_statistics(net.eval())
    assert torch.equal(net(x), by_source)
    assert not any("forward" in vars(module) for module in net.modules())


def test_layers_of_timm_keep_their_activation():
    layer = timm.layers.BatchNormAct2d(3)
    plain = nn.BatchNorm2d(3)
    net = nn.Sequential(layer, nn.Flatten())
    use_batch_statistics(net, 0.25)
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(layer(x), blended_norm(x, plain, 0.25).y.relu())


def test_a_forward_of_the_users_own_is_left_alone():
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x
    assert not can_blend(layer)
    assert not can_blend(nn.BatchNorm2d(3, affine=False))
    assert not can_blend(nn.BatchNorm2d(3, track_running_stats=False))
    assert can_blend(nn.BatchNorm2d(3))


def plus(**settings):
    model = mgtta.load_model(convnet("batch"))
    source = mgtta.source_statistics(model, images(32, seed=9))
    return model, mgtta.create("mgtta+", model, source=source, recall=0, **settings)


def test_mgtta_plus_blends_in_batches_guard_and_export():
    x = images(32)
    model, method = plus(lr=0.0, recentre=0.0, mirror=False, class_mix=False)
    expected = copy.deepcopy(model).use_batch_statistics(0.3)(x)
    torch.testing.assert_close(method(x), expected)
    net = method.export()
    stream = innermost(method).statistics
    running = dict(model.net.named_buffers())
    for i, name in enumerate(stream.layers):
        own = net.get_submodule(name)
        blend = 0.7 * stream.get_buffer(f"mean_{i}") + 0.3 * running[f"{name}.running_mean"]
        torch.testing.assert_close(own.running_mean, blend)
    _, guarded = plus(guard=True)
    assert guarded.reference.unlearned.source_share == 0.3


class Doubled(nn.BatchNorm2d):
    """A layer with a forward function of its own, which is not blended."""

    def forward(self, x):
        return 2 * super().forward(x)


class Doubling(timm.layers.BatchNormAct2d):
    """The same, of timm's kind."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_with_a_forward_of_their_own_keep_it_and_export_what_they_normalise_by():
    assert not can_blend(Doubled(3))
    assert not can_blend(Doubling(3))
    net = convnet("batch")
    net[1] = Doubled(8)
    model = mgtta.load_model(net)
    source = mgtta.source_statistics(model, images(32, seed=9))
    bare = {"lr": 0.0, "recentre": 0.0, "mirror": False, "class_mix": False, "recall": 0}
    method = mgtta.create("mgtta+", model, source=source, **bare)
    x = images(32)
    torch.testing.assert_close(method(x), mgtta.load_model(method.export())(x))


@pytest.mark.parametrize("shares", [{}, {"source_share": 0.6, "own_share": 0.1}, {"alike": True}])
@pytest.mark.parametrize("low_memory", [False, True])
def test_the_fast_path_blends_alike(low_memory, shares):
    torch.manual_seed(0)
    model = mgtta.load_model(timm.create_model("resnet10t", num_classes=5))
    source = mgtta.source_statistics(model, images(16, seed=9))
    settings = {"source": source, "recall": 0, "lr": 1e-3, "mirror": False, **shares}
    exact = mgtta.create("mgtta+", model, precision="fp32", **settings)
    quick = mgtta.create("mgtta+", model, precision="bf16", low_memory=low_memory, **settings)
    for seed in range(3):
        expected = exact(images(16, seed=seed))
        found = quick(images(16, seed=seed))
        assert (found - expected).norm() < 0.05 * expected.norm()
    theirs = dict(innermost(exact).statistics.named_buffers())
    for name, value in innermost(quick).statistics.named_buffers():
        torch.testing.assert_close(value, theirs[name], atol=0.02, rtol=0.05)


def test_single_norm_is_the_formula_for_each_image():
    layer = layer_of()
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    for image, found in zip(x, single_norm(x, layer), strict=True):
        for c in range(3):
            mean = (1 - SINGLE_SHARE) * layer.running_mean[c] + SINGLE_SHARE * image[c].mean()
            var = (1 - SINGLE_SHARE) * layer.running_var[c] + SINGLE_SHARE * image[c].var(correction=0)
            expected = (image[c] - mean) / (var + layer.eps).sqrt() * layer.weight[c] + layer.bias[c]
            torch.testing.assert_close(found[c], expected)


def test_an_image_that_is_not_finite_leaves_single_images_beside_it_alone():
    layer = layer_of()
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    expected = single_norm(x, layer)
    x[0] = float("nan")
    found = single_norm(x, layer)
    assert found[0].isnan().all()
    torch.testing.assert_close(found[1:], expected[1:])


def one_by_one(model):
    """A copy of the model whose BatchNorm layers normalise each image by the source's statistics and its own."""
    return set_one_by_one(copy.deepcopy(model))


def set_one_by_one(model):
    for layer in model.net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = partial(single_norm, layer=layer)
    return model


BARE = {"recentre": 0.0, "mirror": False, "class_mix": False}


def test_single_images_are_normalised_by_source_and_themselves():
    model, method = plus(lr=0.0, **BARE)
    x = images(33)
    method(x[:32])  # whose statistics change nothing
    expected = one_by_one(model)(x[32:])
    torch.testing.assert_close(method.predict(x[32:]), expected)
    torch.testing.assert_close(method(x[32:]), expected)
    assert not torch.allclose(method(x[32:]), model(x[32:]))
    large = innermost(method).model(x[:32])
    assert torch.equal(method.predict(x[:32]), large)  # by its own statistics, as before


def test_gathered_images_are_learned_from_as_they_were_predicted():
    """An update is that of a network which normalises image by image, at a part of the learning rate."""
    model, method = plus(lr=1e-2, **BARE)
    _, twin = plus(lr=1e-2 * BY_IMAGE_RATE, gather=0, **BARE)
    set_one_by_one(innermost(twin).model)
    x = images(16)
    for one in x.split(1):
        method(one)
    twin(x)
    assert method.updates == twin.updates == 1
    moved = dict(innermost(twin).adapted)
    for name, value in innermost(method).adapted.items():
        torch.testing.assert_close(value, moved[name])
    assert not torch.equal(method.predict(x[:1]), one_by_one(model)(x[:1]))
    assert [group["lr"] for group in innermost(method).optimizer.param_groups] == [1e-2]
    assert not innermost(method).engine.by_image
    assert not innermost(method).statistics.images.any()


def moved_by(*calls, **settings):
    """Return the parameters after calls of a new method, each (images, few) for `learn` or images for a step."""
    _, method = plus(**BARE, **settings)
    for call in calls:
        if isinstance(call, tuple):
            method.learn(*call)
        else:
            method(call)
    assert method.updates == 1
    return torch.cat([value.flatten() for value in innermost(method).adapted.values()]).detach()


def test_images_that_were_only_predicted_are_learned_from_as_they_came():
    """As the service does: it predicts, and learns later, by `learn`."""
    x = images(16)
    gathered = moved_by(*x.split(1))
    torch.testing.assert_close(moved_by((x, True)), gathered)
    torch.testing.assert_close(moved_by((x,)), moved_by(x))  # as a batch
    assert not torch.allclose(moved_by((x,)), gathered)


def test_most_images_decide_how_all_are_learned_from():
    x = images(33)
    torch.testing.assert_close(moved_by(x[:1], x[1:]), moved_by((x, False)))
    torch.testing.assert_close(moved_by(*x[:17].split(1), gather=17), moved_by((x[:17], True), gather=17))
    assert come_few([x[:1], x[1:17]]) is False
    assert come_few([x[:15], x[15:30]]) is True


def test_networks_without_batchnorm_learn_from_single_images_at_the_whole_rate():
    model = mgtta.load_model(convnet("group"))
    source = mgtta.source_statistics(model, images(32, seed=9))
    method, twin = (mgtta.create("mgtta+", model, source=source, recall=0, mirror=False) for _ in range(2))
    x = images(16)
    for one in x.split(1):
        method(one)
    twin(x)
    for a, b in zip(method.adapted.values(), twin.adapted.values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("size", "gather"), [(1, 16), (8, 8), (12, 24), (32, 16), (32, 64)])
def test_warm_up_prepares_for_the_steps_that_come(size, gather):
    torch.manual_seed(0)
    model = mgtta.load_model(timm.create_model("resnet10t", num_classes=5))
    source = mgtta.source_statistics(model, images(16, seed=9))
    method = mgtta.create("mgtta+", model, source=source, recall=0, precision="bf16", gather=gather)
    method.warm_up(images(size))
    engine = innermost(method).engine
    warmed = set(engine.seen)
    engine.seen.clear()
    for _ in range(-(-gather // size)):
        method(images(size))
    assert method.updates == 1
    assert set(engine.seen) <= warmed


@pytest.mark.parametrize("n", [3, 32])
def test_a_guard_asks_the_source_under_the_statistics_of_the_method(n):
    """So that nothing but what was learned makes a difference; at first nothing was."""
    _, method = plus(**BARE, guard=True)
    x = images(n)
    asked = method.reference.ask(x, torch.arange(n))
    torch.testing.assert_close(asked.judge, method.method.predict(x))


def test_an_export_after_single_images_has_the_statistics_of_the_source():
    model, method = plus()
    for one in images(20).split(1):
        method(one)
    assert method.updates == 1
    running = dict(model.net.named_buffers())
    exported = dict(method.export().named_buffers())
    assert exported.keys() == running.keys()
    assert all(torch.equal(value, running[name]) for name, value in exported.items())


def test_with_a_layer_that_is_not_blended_single_images_have_its_source_statistics():
    net = convnet("batch")
    net[1] = Doubled(8)
    model = mgtta.load_model(net)
    source = mgtta.source_statistics(model, images(32, seed=9))
    method = mgtta.create("mgtta+", model, source=source, recall=0, lr=0.0, **BARE)
    expected = copy.deepcopy(model)
    expected.net[4].forward = partial(single_norm, layer=expected.net[4])
    for one in images(16).split(1):
        torch.testing.assert_close(method(one), expected(one))
    assert not innermost(method).statistics.images.any()


@pytest.mark.parametrize("name", ["resnet10t", "test_efficientnet"])
@pytest.mark.parametrize("low_memory", [False, True])
def test_the_fast_path_normalises_single_images_alike(name, low_memory):
    torch.manual_seed(0)
    model = mgtta.load_model(timm.create_model(name, num_classes=5))
    source = mgtta.source_statistics(model, images(16, seed=9))
    settings = {"source": source, "recall": 0, "lr": 1e-2, "mirror": False}
    exact = mgtta.create("mgtta+", model, precision="fp32", **settings)
    quick = mgtta.create("mgtta+", model, precision="bf16", low_memory=low_memory, **settings)
    for one in images(34).split(1):
        assert _apart(quick(one), exact(one)) < 0.15
    assert quick.updates == exact.updates == 2
    x = images(15)
    assert _apart(quick.predict(x), exact.predict(x)) < 0.1
    assert _apart(quick.method.predict(x), exact.predict(x)) > 0.5  # by the statistics of these images


def _apart(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_vectors_have_no_statistics_of_their_own():
    net = nn.Sequential(nn.BatchNorm1d(3))
    use_batch_statistics(net, 0.3)
    x = torch.randn(1, 3)
    torch.testing.assert_close(net.eval()(x), nn.BatchNorm1d(3).eval()(x))
    x = torch.randn(8, 3)
    torch.testing.assert_close(blended_norm(x, net[0], 0.3, 0.1).y, blended_norm(x, net[0], 0.3).y)


def test_an_own_share_leaves_out_what_other_images_do():
    """With nothing of the batch, an image is predicted alike whatever comes with it, and the guard asks alike."""
    _, method = plus(lr=0.0, source_share=0.9, own_share=0.1, **BARE)
    x = images(32)
    torch.testing.assert_close(method(x)[:16], method(x[:16]))
    _, mixing = plus(lr=0.0, source_share=0.6, own_share=0.1, **BARE)
    assert not torch.allclose(mixing(x)[:16], mixing(x[:16]))
    _, guarded = plus(source_share=0.6, own_share=0.1, guard=True)
    assert guarded.reference.unlearned.own_share == 0.1


def test_an_export_gives_the_share_of_images_to_the_stream():
    model, method = plus(lr=0.0, source_share=0.6, own_share=0.1, **BARE)
    method(images(32))
    net = method.export()
    stream = innermost(method).statistics
    running = dict(model.net.named_buffers())
    for i, name in enumerate(stream.layers):
        blend = 0.4 * stream.get_buffer(f"mean_{i}") + 0.6 * running[f"{name}.running_mean"]
        torch.testing.assert_close(net.get_submodule(name).running_mean, blend)


def test_moments_of_images_keep_their_digits():
    layer = layer_of().float()
    layer.running_mean.fill_(100.0)
    torch.manual_seed(0)
    x = 100 + 0.1 * torch.randn(4, 3, 16, 16)
    found = blended_norm(x, layer, 0.1, 0.5).y
    torch.testing.assert_close(found, by_hand(x.double(), layer, 0.1, 0.5).float(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.6, 0.5), "own_share is a share of what source_share leaves: from 0 to 0.4, not 0.5"),
        ((0.6, -0.1), "own_share is a share of what source_share leaves"),
        ((0.6, float("nan")), "own_share is a share of what source_share leaves"),
        ((0.0, 0.1), "own_share needs a source_share"),
    ],
)
def test_an_own_share_that_does_not_fit_is_refused(shares, message):
    with pytest.raises(ValueError, match=message):
        plus(source_share=shares[0], own_share=shares[1])


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="source_share is a share of the statistics: from 0 to 1"):
        plus(source_share=share)
