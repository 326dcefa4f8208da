"""MGTTA+: each piece against its definition, and what holds at its edges."""

import copy
import math

import pytest
import torch
from conftest import CLASSES, NETS, images, random_generator, vit

import mgtta
from mgtta.methods.mgtta_plus import MEMORY_IMAGES as MEMORY
from mgtta.methods.mgtta_plus import PRIOR_IMAGES as PRIOR


def make(model, **settings):
    source = mgtta.source_statistics(model, images(16, seed=99))
    return mgtta.create("mgtta+", model, source=source, generator=random_generator(), **settings)


@pytest.fixture
def model():
    return mgtta.load_model(vit())


def test_without_its_pieces_it_is_mgtta(model):
    source = mgtta.source_statistics(model, images(16, seed=99))
    plain = mgtta.create("mgtta", model, source=source, generator=random_generator(), lr=0.01, trade_off=0.8)
    same = make(model, lr=0.01, recentre=0.0, mirror=False, decay=math.inf)
    for t in range(3):
        torch.testing.assert_close(same(images(seed=t)), plain(images(seed=t)), rtol=0, atol=0)


def test_its_objective_is_of_both_views(model):
    method = make(model)
    x = images(6)
    _, value = method.loss(x)
    logits, features = model.features(torch.cat([x, x.flip(-1)]))
    source = method.source
    expected = mgtta.objective((logits[:6] + logits[6:]) / 2, features, source.mean, source.std, 0.8)
    torch.testing.assert_close(value, expected)


def test_re_centring_moves_the_features_mean_to_the_sources(model):
    """By hand: the head on features that were moved by the source's mean less the running one."""
    method = make(model, mirror=False)
    mu, running, seen = method.source.mean[-1], method.source.mean[-1], 0
    for t in range(3):
        x = images(5, seed=t)
        _, f = method.model.embed(x)
        rate = max(5 / (seen + PRIOR + 5), 5 / (MEMORY + 5))
        running, seen = running + rate * (f.detach().mean(0) - running), seen + 5
        expected = method.model.head(f + mu - running).detach()
        torch.testing.assert_close(method(x), expected, rtol=1e-4, atol=1e-5)


def test_a_scored_subset_of_classes_is_re_centred_alike():
    net = vit()
    some = [1, 4, 5]
    x = images(4)
    every = make(mgtta.load_model(net))(x)
    torch.testing.assert_close(make(mgtta.load_model(net, classes=some))(x), every[:, some])


def test_prediction_is_what_the_next_call_gives_and_leaves_no_trace(model):
    method = make(model)
    method(images(4))
    before = method.state_dict()
    with torch.no_grad():
        predicted = method.predict(images(4, seed=3))
    assert torch.equal(method.state_dict()["buffers"]["mean"], before["buffers"]["mean"])
    torch.testing.assert_close(method(images(4, seed=3)), predicted)


def test_one_image_hardly_moves_the_mean(model):
    method = make(model)
    method(images(1))
    assert method.images == 1
    shift = (method.mean - method.source.mean[-1]).norm()
    full = (make(model).model.embed(images(1))[1].mean(0) - method.source.mean[-1]).norm()
    assert shift < 2 * full / (PRIOR + 1)


def test_a_broken_batch_leaves_the_mean_as_it_was(model):
    method = make(model)
    method(images(4))
    mean = method.mean.clone()
    method(images(4) * math.nan)
    assert method.skipped == 1
    assert torch.equal(method.mean, mean)


def test_the_step_shrinks_and_the_rate_stays(model, monkeypatch):
    method = make(model, lr=0.1, decay=5.0)
    rates, step = [], method.optimizer.step

    def noted():
        rates.append(method.optimizer.param_groups[0]["lr"])
        step()

    monkeypatch.setattr(method.optimizer, "step", noted)
    for t in range(4):
        method(images(4, seed=t))
    torch.testing.assert_close(torch.tensor(rates), 0.1 / (1 + torch.arange(4.0) / 5).sqrt())
    assert method.optimizer.param_groups[0]["lr"] == 0.1


def test_what_cannot_be_is_told(model):
    with pytest.raises(ValueError, match="decay must be above 0"):
        make(model, decay=0)
    with pytest.raises(ValueError, match="recentre=0"):
        make(mgtta.load_model(NETS["batchnorm"]()))(images(4))
    assert make(mgtta.load_model(NETS["batchnorm"]()), recentre=0.0)(images(4)).shape == (4, CLASSES)


def test_the_papers_generator_has_its_name():
    paper, shipped = mgtta.load_generator("paper"), mgtta.load_generator("imagenet")
    assert sum(p.numel() for p in paper.parameters()) == 164
    assert all(torch.equal(a, b) for a, b in zip(paper.parameters(), shipped.parameters(), strict=True))


def test_the_running_mean_follows_every_batch_of_a_scheduled_stream(model):
    """A schedule rests from learning, not from looking."""
    method = make(model, schedule="auto", precision="fp32")
    for t in range(16):
        method(images(4, seed=t))
    assert method.updates < 16
    assert method.method.images == 64


def test_it_moves_with_its_source_statistics(model):
    """The statistics are of the model before it moved; the documented call works wherever the model is."""
    source = mgtta.source_statistics(model, images(16, seed=99))
    elsewhere = mgtta.create("mgtta+", copy.deepcopy(model).double(), source=source, generator=random_generator())
    here = mgtta.create("mgtta+", model, source=source, generator=random_generator())
    for t in range(3):
        expected = here(images(4, seed=t))
        torch.testing.assert_close(elsewhere(images(4, seed=t)).float(), expected, atol=1e-3, rtol=1e-3)
    here.double()
    assert here(images(4, seed=3)).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_statistics_on_the_cpu_serve_a_model_on_the_gpu(model, precision):
    source = mgtta.source_statistics(model, images(16, seed=99))
    settings = {"source": source, "generator": random_generator(), "precision": precision}
    method = mgtta.create("mgtta+", copy.deepcopy(model).to("cuda"), **settings)
    assert method(images(4)).is_cuda
    moved = mgtta.create("mgtta+", model, source=source, generator=random_generator())
    moved(images(4))
    moved.to("cuda")
    torch.testing.assert_close(moved(images(4, seed=1)), method(images(4, seed=1)), atol=5e-2, rtol=5e-2)
