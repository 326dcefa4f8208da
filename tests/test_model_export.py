"""Exported networks: the user's own module with adapted weights, and its way to other formats."""

import copy
import warnings

import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, convnet, images, vit
from torch import nn

import mgtta
from mgtta.fast.bf16 import lower
from mgtta.models.export import export_net
from mgtta.models.statistics import StreamStatistics

MEAN = [0.4, 0.5, 0.6]
STD = [0.2, 0.3, 0.4]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def normalised(x):
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def adapted_method(net, recipe="tent", **settings):
    """A method that has moved far enough for exports to differ from the source network."""
    method = mgtta.create(recipe, mgtta.load_model(net, mean=MEAN, std=STD), lr=0.05, **settings)
    for seed in range(3):
        method(images(8, seed))
    return method


def hooks(net):
    return [hook for m in net.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


@pytest.mark.parametrize("make", [confident_vit, lambda: convnet("group")], ids=["vit", "groupnorm"])
def test_export_predicts_as_the_method_does(make):
    net = make()
    method = adapted_method(net)
    exported = export_net(method.model)
    x = images(5, seed=9)
    torch.testing.assert_close(exported(normalised(x)), method.predict(x), **CLOSE)
    assert (exported(normalised(x)) - net.eval()(normalised(x))).abs().max() > 1e-3


@pytest.mark.parametrize("kind", NETS)
def test_an_exported_network_is_plain_and_a_copy(kind):
    net = NETS[kind]()
    method = adapted_method(net)
    exported = export_net(method.model)
    assert type(exported) is type(net)
    assert exported.state_dict().keys() == net.state_dict().keys()
    assert not hooks(exported)
    assert not any(module.training for module in exported.modules())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in exported.parameters())
    ours = {p.data_ptr() for p in method.parameters()}
    assert not ours & {p.data_ptr() for p in exported.parameters()}
    before = method.predict(images(4))
    with torch.no_grad():
        for p in exported.parameters():
            p.zero_()
    assert torch.equal(method.predict(images(4)), before)


def test_export_takes_adapted_weights_by_name():
    method = adapted_method(vit())
    names = {name: torch.full_like(p, 0.5) for name, p in method.adapted.items()}
    exported = export_net(method.model, names)
    own = dict(exported.named_parameters())
    assert all((own[name.removeprefix("net.")] == 0.5).all() for name in names)
    with pytest.raises(ValueError, match=r"no parameter 'norm\.weight'"):
        export_net(method.model, {"norm.weight": torch.ones(16)})
    with pytest.raises(ValueError, match=r"net\.norm\.weight is \(3,\), the model's is \(16,\)"):
        export_net(method.model, {"net.norm.weight": torch.ones(3)})


def test_hooks_of_the_user_stay_in_the_export():
    net = convnet("batch")
    net[0] = nn.utils.spectral_norm(net[0])
    method = adapted_method(net)
    exported = export_net(method.model)
    assert len(hooks(exported)) == len(hooks(net)) > 0
    assert exported(images(2)).isfinite().all()


def test_export_under_inference_mode_can_be_trained():
    method = adapted_method(vit())
    with torch.inference_mode():
        exported = export_net(method.model)
    exported(images(2)).sum().backward()
    assert exported.head.weight.grad is not None


# --- BatchNorm


def test_batchnorm_exports_with_the_statistics_of_the_stream():
    method = adapted_method(convnet("batch"))
    statistics = StreamStatistics(method.model.net)
    x = images(16, seed=5)
    with statistics.collect(method.model.net):
        expected = method.predict(x)
    exported = export_net(method.model, statistics=statistics)
    torch.testing.assert_close(exported(normalised(x)), expected, **CLOSE)
    torch.testing.assert_close(exported(normalised(x[:1])), expected[:1], **CLOSE)  # no batch needed
    assert all(type(m) is nn.BatchNorm2d and m.track_running_stats for m in (exported[1], exported[4]))
    source = export_net(method.model)  # without them: the source's running statistics
    assert torch.equal(source[1].running_mean, convnet("batch")[1].running_mean)
    assert (source(normalised(x)) - expected).abs().max() > 0.01
    assert not any(hook for layer in (method.model.net[1],) for hook in layer._forward_hooks.values())


def test_stream_statistics_are_those_of_all_images_of_a_short_stream():
    layer = nn.BatchNorm1d(3)
    statistics = StreamStatistics(layer).double()
    random = torch.Generator().manual_seed(0)
    x = torch.randn(13, 3, 5, generator=random, dtype=torch.float64) * 2 + 7
    for part in x.split([4, 2, 7]):
        statistics.update(0, part)
    assert statistics.images.tolist() == [13]
    torch.testing.assert_close(statistics.mean_0, x.mean((0, 2)))
    torch.testing.assert_close(statistics.var_0, x.var((0, 2), correction=0))


def test_stream_statistics_follow_a_long_stream():
    statistics = StreamStatistics(nn.BatchNorm1d(2))
    random = torch.Generator().manual_seed(0)
    for shift in (0.0, 5.0):
        for _ in range(100):
            statistics.update(0, torch.randn(64, 2, generator=random) + shift)
    torch.testing.assert_close(statistics.mean_0, torch.full((2,), 5.0), atol=0.2, rtol=0)
    torch.testing.assert_close(statistics.var_0, torch.ones(2), atol=0.2, rtol=0)


def test_stream_statistics_leave_out_what_has_none():
    statistics = StreamStatistics(nn.BatchNorm1d(2))
    for x in (torch.ones(1, 2), torch.full((4, 2), float("nan")), torch.full((4, 2), float("inf")), torch.ones(0, 2)):
        statistics.update(0, x)
    assert statistics.images.tolist() == [0]
    assert statistics.mean_0.tolist() == [0, 0]
    assert statistics.var_0.tolist() == [1, 1]
    assert StreamStatistics(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))).layers == []


def test_stream_statistics_are_state_and_leave_no_hooks():
    net = convnet("batch")
    statistics = StreamStatistics(net)
    with statistics.collect(net):
        net(images(4))
    assert not hooks(net)
    twin = copy.deepcopy(statistics)
    kept = {name: t.clone() for name, t in statistics.state_dict().items()}
    with statistics.collect(net):
        net(images(4, seed=1))
    assert all(torch.equal(t, kept[name]) for name, t in twin.state_dict().items())
    statistics.load_state_dict(kept)
    assert torch.equal(statistics.mean_1, twin.mean_1)


def test_batch_statistics_can_be_switched_twice():
    model = mgtta.load_model(convnet("batch"))
    before = model(images(4))
    model.use_batch_statistics().use_batch_statistics()
    assert len(hooks(model.net)) == 2
    assert not torch.equal(model(images(4)), before)
    model.use_running_statistics()
    assert not hooks(model.net)
    assert torch.equal(model(images(4)), before)


# --- re-centred logits, scored classes, bfloat16


@pytest.mark.parametrize("bias", [True, False])
def test_a_shift_of_the_logits_goes_into_the_bias_of_the_head(bias):
    net = vit()
    if not bias:
        net.head = nn.Linear(16, CLASSES, bias=False)
    model = mgtta.load_model(net)
    shift = torch.linspace(-3, 3, CLASSES)
    exported = export_net(model, head_shift=shift)
    torch.testing.assert_close(exported(images(4)), model(images(4)) + shift, **CLOSE)
    assert (net.head.bias is None) is not bias
    with pytest.raises(ValueError, match=r"head_shift must be \(10,\), one value per class, not \(3,\)"):
        export_net(model, head_shift=shift[:3])


def test_an_export_has_all_classes_of_the_users_network():
    model = mgtta.load_model(vit(), classes=[7, 2, 5])
    exported = export_net(model)
    assert exported(images(4)).shape == (4, CLASSES)
    torch.testing.assert_close(exported(images(4))[:, [7, 2, 5]], model(images(4)))


@pytest.mark.parametrize("kind", NETS)
def test_weights_that_the_fast_path_rounded_are_exported_in_float32(kind):
    net = NETS[kind]()
    model = lower(copy.deepcopy(mgtta.load_model(net)))
    assert any(p.dtype == torch.bfloat16 for p in model.parameters())
    exported = export_net(copy.deepcopy(model))
    state = net.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in exported.state_dict().items())
    assert not hooks(exported)
    x = images(4)
    assert torch.equal(exported(x), net.eval()(x))


# --- other formats: docs/export.md


@pytest.fixture
def exported():
    return export_net(adapted_method(confident_vit()).model)


def test_export_to_torchscript(exported, tmp_path):
    x = images(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        torch.jit.trace(exported, x).save(str(tmp_path / "adapted.pt"))
        loaded = torch.jit.load(str(tmp_path / "adapted.pt"))
        torch.testing.assert_close(loaded(images(4, seed=1)), exported(images(4, seed=1)), **CLOSE)


def test_export_to_torch_export(exported, tmp_path):
    batch = torch.export.Dim("batch", min=1, max=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        program = torch.export.export(exported, (images(4),), dynamic_shapes=({0: batch},))
        torch.export.save(program, tmp_path / "adapted.pt2")
        loaded = torch.export.load(tmp_path / "adapted.pt2").module()
    for n in (1, 7):
        torch.testing.assert_close(loaded(images(n, seed=1)), exported(images(n, seed=1)), **CLOSE)


def test_export_to_onnx(exported, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        torch.onnx.export(exported, (images(4),), tmp_path / "adapted.onnx", dynamo=True)
    session = runtime.InferenceSession(tmp_path / "adapted.onnx")
    [name] = [given.name for given in session.get_inputs()]
    [found] = session.run(None, {name: images(4, seed=1).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), exported(images(4, seed=1)), atol=1e-4, rtol=1e-4)
