"""MGTTA+: each piece against its definition, and what holds at its edges."""

import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import CLASSES, NETS, convnet, images, random_generator, vit
from torch import nn

import mgtta
from mgtta._lib.ranks import ALONE
from mgtta.adaptation.wrapper import Wrapper, innermost
from mgtta.fast.vit import ViT
from mgtta.losses import fair_share
from mgtta.methods._mirror import ALIKE
from mgtta.methods._neighbours import ALIKE as NEIGHBOURS_ALIKE
from mgtta.methods._neighbours import FADING, MEMORY_IMAGES, PRIOR_IMAGES
from mgtta.methods.mgtta_plus import EARLY
from mgtta.models.head import HeadTap

BARE = {"pull": 0, "gather": 0, "recall": 0, "class_mix": False}


def make(model, mirror=True, **settings):
    """Return mgtta+ without its default options, so that each piece is seen by itself."""
    source = mgtta.source_statistics(model, images(16, seed=99))
    given = {**BARE, **settings}
    return mgtta.create("mgtta+", model, source=source, generator=random_generator(), mirror=mirror, **given)


@pytest.fixture
def model():
    return mgtta.load_model(vit())


def test_without_its_pieces_it_is_mgtta(model):
    source = mgtta.source_statistics(model, images(16, seed=99))
    plain = mgtta.create("mgtta", model, source=source, generator=random_generator(), lr=0.01, trade_off=0.8)
    same = make(model, lr=0.01, recentre=0.0, mirror=False, balance=False, decay=math.inf)
    for t in range(3):
        torch.testing.assert_close(same(images(seed=t)), plain(images(seed=t)), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mgtta+", "plus_adam", "plus_sgd"])
def test_it_has_pull_gather_and_recall_by_default(model, name):
    source = mgtta.source_statistics(model, images(16, seed=99))
    method = mgtta.create(name, model, source=source)
    assert method.most == 16
    assert method.method.images == 16
    assert innermost(method).pull == 0.05
    assert innermost(method).decay == math.inf
    bare = mgtta.create(name, model, source=source, **BARE)
    assert not isinstance(bare, Wrapper)
    assert bare.pull == 0


def test_its_objective_is_of_both_views(model):
    method = make(model)
    x = images(6)
    _, value = method.loss(x)
    logits, features = model.features(torch.cat([x, x.flip(-1)]))
    source = method.source
    merged = (logits[:6] + logits[6:]) / 2
    weight = fair_share(merged)
    expected = mgtta.objective(merged, features, source.mean, source.std, 0.8, weight=weight)
    torch.testing.assert_close(value, expected)


def test_a_class_that_takes_all_images_of_a_batch_teaches_little(model):
    """The gradient of the entropy of images of one class is that of one of them; others keep theirs."""
    logits = torch.zeros(8, 10)
    logits[:7, 3] = 2.0
    logits[7, 5] = 2.0
    weight = fair_share(logits)
    torch.testing.assert_close(weight, torch.tensor([1 / 7] * 7 + [1.0]))
    few = fair_share(torch.eye(2).repeat(4, 1))  # two classes, four images of each: all have their share
    torch.testing.assert_close(few, torch.ones(8))
    one = fair_share(torch.tensor([[1.0, 0.0]]).repeat(8, 1))  # two classes, all images of one
    torch.testing.assert_close(one, torch.full((8,), 0.5))


def by_hand(mu, known, keys):
    """Return the mean for each image: its neighbours among all known images, one pair at a time."""
    every = torch.cat([k for k, _ in known])
    std = every.std(0, correction=0) + 1e-6
    found = []
    for k in keys:
        total, weights = PRIOR_IMAGES * mu, float(PRIOR_IMAGES)
        for k_j, f_j in zip(every, torch.cat([f for _, f in known]), strict=True):
            beyond = max(float(((k - k_j) / std).square().mean()) - NEIGHBOURS_ALIKE, 0.0)
            weight = math.exp(-beyond / FADING)
            total, weights = total + weight * f_j, weights + weight
        found.append(total / weights)
    return torch.stack(found)


def test_re_centring_moves_the_features_of_neighbours_to_the_sources_mean(model):
    """By hand: the head on features that were moved by the source's mean less the neighbours'."""
    method = make(model, mirror=False)
    known = []
    for t in range(3):
        x = images(5, seed=t)
        _, features = method.model.features(x)
        keys, values = features[int(EARLY * len(features))].detach(), features[-1].detach()
        known.append((keys, values))
        mu = method.source.mean[-1]
        moved = values + mu - by_hand(mu, known, keys)
        torch.testing.assert_close(method(x), method.model.head(moved).detach(), rtol=1e-4, atol=1e-5)


def test_images_of_two_kinds_have_means_of_their_own(model):
    """A key far away counts for nothing, and the memory holds the last images only."""
    near = make(model).neighbours
    mu = torch.zeros(16)
    keys = torch.cat([torch.zeros(6, 16), torch.ones(6, 16)]) + 0.01 * torch.randn(12, 16)
    values = torch.cat([torch.full((6, 16), -1.0), torch.full((6, 16), 1.0)])
    means = near.means(keys, near.joined(keys, values, ALONE), mu)
    assert (means[:6] < -0.3).all()  # the source's mean counts for more than they do
    assert (means[6:] > 0.3).all()
    for _ in range(30):
        near.remember(near.joined(keys, values, ALONE))
    assert near.known.sum() == MEMORY_IMAGES
    torch.testing.assert_close(near.keys[-12:], keys)
    torch.testing.assert_close(near.mean(mu), near.values.sum(0) / (MEMORY_IMAGES + PRIOR_IMAGES))


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
    values = "neighbours.values"
    assert torch.equal(method.state_dict()["buffers"][values], before["buffers"][values])
    torch.testing.assert_close(method(images(4, seed=3)), predicted)


def test_a_broken_image_is_not_remembered(model):
    method = make(model)
    method(images(4))
    before = method.neighbours.mean(method.source.mean[-1])
    method(images(4) * math.nan)
    assert method.skipped == 1
    assert method.neighbours.known.sum() == 4
    torch.testing.assert_close(method.neighbours.mean(method.source.mean[-1]), before)


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


def test_networks_with_batchnorm_get_larger_steps():
    for net, rate in (("vit", 5e-3), ("batchnorm", 1e-2), ("groupnorm", 1e-2)):
        own = mgtta.load_model(NETS[net]())
        source = mgtta.source_statistics(own, images(16, seed=99))
        for recipe in ("mgtta+", "plus_adam"):
            method = mgtta.create(recipe, own, source=source)
            assert method.optimizer.param_groups[0]["lr"] == rate, net


def test_what_cannot_be_is_told(model):
    with pytest.raises(ValueError, match="decay must be above 0"):
        make(model, decay=0)
    with pytest.raises(ValueError, match=r'True, False or "auto", not \'yes\''):
        make(model, mirror="yes")
    with pytest.raises(ValueError, match=r"needs images .* give mirror=False"):
        make(model).views(torch.rand(4, 16))


# --- re-centring where the head reads


class TwoHeads(nn.Module):
    """Its logits are the mean of two linear heads, as in a distilled DeiT."""

    def __init__(self):
        super().__init__()
        self.body = convnet("group")[:-1]
        self.first = nn.Linear(16, CLASSES)
        self.second = nn.Linear(16, CLASSES)

    def forward(self, x):
        z = self.body(x)
        return (self.first(z) + self.second(z)) / 2


def convolution_as_head():
    return nn.Sequential(*convnet("group")[:-2], nn.Conv2d(16, CLASSES, 1), nn.Flatten())


def re_centred_by_hand(method, batches):
    """Yield the logits of a method with lr=0 and without mirror images, from the model's own embeddings."""
    layer = method.source.head_layer
    mu = method.source.head
    known = []
    for x in batches:
        logits, features = method.model.features(x, HeadTap(layer))
        keys, f = features[int(EARLY * (len(features) - 1))].detach(), features[-1].detach()
        known.append((keys, f))
        away = mu - by_hand(mu, known, keys)
        if layer == "":
            yield (logits + away).detach()
            continue
        head = method.model.net.get_submodule(layer)
        yield F.linear(f + away, head.weight.flatten(1), head.bias).detach()


def convolution_on_the_last_norm():
    return nn.Sequential(*convnet("group")[:-4], nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, CLASSES, 1), nn.Flatten())


@pytest.mark.parametrize(
    ("net", "layer"),
    [
        (convolution_on_the_last_norm, "6"),
        (NETS["vit"], "head"),
        (NETS["batchnorm"], "8"),
        (NETS["groupnorm"], "8"),
        (TwoHeads, ""),
        (convolution_as_head, "7"),
    ],
    ids=["convolution on the last norm", "vit", "batchnorm", "groupnorm", "two heads", "convolution"],
)
def test_any_head_is_re_centred(net, layer):
    torch.manual_seed(0)
    model = mgtta.load_model(net())
    method = make(model, mirror=False, lr=0.0, trade_off=0.0)
    assert method.source.head_layer == layer
    batches = [images(5, seed=t) * 0.6 for t in range(3)]
    for x, expected in zip(batches, re_centred_by_hand(method, batches), strict=True):
        torch.testing.assert_close(method(x), expected, rtol=1e-4, atol=1e-5)
    assert method.updates == 3
    before = method.state_dict()
    expected = method(images(5, seed=7))
    method.reset()
    assert not method.neighbours.known.any()
    method.load_state_dict(before)
    assert torch.equal(method(images(5, seed=7)), expected)


@pytest.mark.parametrize(
    "net", [NETS["groupnorm"], TwoHeads, convolution_as_head], ids=["linear", "two heads", "convolution"]
)
def test_re_centring_by_features_is_re_centring_by_logits(net):
    """The head is linear, so its logits' mean moves as the features' mean does; on scored classes too."""
    torch.manual_seed(0)
    own = net()
    for classes in (None, [1, 4, 5]):
        method = make(mgtta.load_model(own, classes=classes), mirror=True, lr=0.0)
        clean = method.model(images(16, seed=99)).mean(0)
        x = images(8) * 0.6
        views = torch.cat([x, x.flip(-1)])
        logits = method.model(views)
        means = (logits[:8] + logits[8:]) / 2
        _, features = method.model.features(views)
        keys = features[int(EARLY * len(method.source.mean))].detach()
        keys = (keys[:8] + keys[8:]) / 2
        expected = means + clean - by_hand(clean, [(keys, means)], keys)
        torch.testing.assert_close(method(x), expected.detach(), rtol=1e-4, atol=1e-5)


def test_a_head_behind_a_batchnorm_is_read_by_itself():
    """All features of this network are zero, so their means do not tell where the head reads."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    with torch.no_grad():
        net[0].weight.zero_()
        net[0].bias.zero_()
    source = mgtta.source_statistics(mgtta.load_model(net), images(8))
    assert torch.equal(source.head, source.mean[-1])
    assert source.head_reads_last_layer is False


def test_an_export_of_any_linear_head_has_the_shift():
    method = make(mgtta.load_model(NETS["groupnorm"]()), mirror=False)
    method(images(8) * 0.6)
    x = images(4, seed=3)
    _, f = method.model.embed(x)
    mu = method.source.head
    expected = method.model.head(f + mu - method.neighbours.mean(mu))
    torch.testing.assert_close(method.export()(x), expected)
    method = make(mgtta.load_model(convolution_as_head()), mirror=False)
    method(images(8) * 0.6)
    shift = method._shift(method.neighbours.mean(method.source.head))
    torch.testing.assert_close(method.export()(x), method.model(x) + shift)
    with pytest.raises(ValueError, match=r"TwoHeads has no layer whose bias takes the shift: give recentre=0"):
        make(mgtta.load_model(TwoHeads())).export()


def older(source):
    """The statistics as they were written before what the head reads was a part of them."""
    more = {"head": None, "head_layer": "", "head_reads_last_layer": None, "mirrored": None, "by_class": None}
    return dataclasses.replace(source, **more)


def test_older_statistics_re_centre_at_the_last_norm(model, tmp_path):
    """For a ViT whose head reads the last norm nothing changes, bit for bit; other heads ask for new statistics."""
    source = mgtta.source_statistics(model, images(16, seed=99))
    assert torch.equal(source.head, source.mean[-1])
    mgtta.save_source(older(source), tmp_path / "old")
    settings = {"generator": random_generator(), "mirror": True, "class_mix": False}
    new = mgtta.create("mgtta+", model, source=source, **settings)
    old = mgtta.create("mgtta+", model, source=tmp_path / "old", **settings)
    assert not new.model.reads_head
    for t in range(3):
        assert torch.equal(new(images(4, seed=t)), old(images(4, seed=t)))
    assert torch.equal(new.export().head.bias, old.export().head.bias)
    other = mgtta.load_model(NETS["batchnorm"]())
    source = older(mgtta.source_statistics(other, images(16, seed=99)))
    with pytest.raises(ValueError, match=r"mgtta\.source_statistics.*or give recentre=0"):
        mgtta.create("mgtta+", other, source=source, **settings)(images(4))
    plain = mgtta.create("mgtta+", other, source=source, recentre=0.0, **settings)
    assert plain(images(4)).shape == (4, CLASSES)


@pytest.mark.parametrize("net", [NETS["groupnorm"], TwoHeads], ids=["linear", "two heads"])
def test_the_fast_path_re_centres_any_head(net):
    torch.manual_seed(0)
    model = mgtta.load_model(net())
    exact, fast = (make(model, lr=0.01, precision=precision) for precision in ("fp32", "bf16"))
    for t in range(3):
        x = images(6, seed=t) * 0.6
        torch.testing.assert_close(fast(x), exact(x), atol=2e-2, rtol=2e-2)
    assert fast.neighbours.values.dtype == torch.float32
    torch.testing.assert_close(fast.neighbours.values, exact.neighbours.values, atol=3e-2, rtol=3e-2)


def test_the_plain_vit_of_the_fast_path_reads_no_other_head(model):
    assert ViT.fits(model)
    model.read_head("head")
    assert not ViT.fits(model)
    _, features = model.features(images(4))
    assert torch.equal(features[-1], features[-2])


# --- mirror="auto"


class LeftOrRight(nn.Module):
    """Predicts whether the left half of an image is brighter than the right half; `symmetric`: whether the whole is."""

    def __init__(self, symmetric):
        super().__init__()
        self.symmetric = symmetric
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(2))
            self.head.bias.zero_()

    def forward(self, x):
        left = x[..., :16].mean((1, 2, 3))
        right = x[..., 16:].mean((1, 2, 3))
        if self.symmetric:
            left, right = left + right, torch.full_like(left, 1.0)
        return self.head(self.norm(torch.stack([left, right], 1)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_mirror_auto_asks_the_source_about_mirrored_clean_images(symmetric):
    model = mgtta.load_model(LeftOrRight(symmetric))
    source = mgtta.source_statistics(model, images(16, seed=99))
    assert source.mirrored == float(symmetric)
    create = partial(mgtta.create, "mgtta+", model, generator=random_generator(), gather=0, recall=0)
    method = create(source=source)
    assert method.mirror is symmetric
    assert len(method.views(images(4))) == (8 if symmetric else 4)
    for mirror in (True, False):
        assert create(source=source, mirror=mirror).mirror is mirror
    assert create(source=older(source)).mirror is True  # as before the share was measured


def test_the_embedded_models_do_not_mirror_characters():
    source = mgtta.load_source("glyphs_vit")
    assert source.mirrored < ALIKE
    model = mgtta.load_model("glyphs_vit")
    assert mgtta.create("mgtta+", model, source=source, gather=0, recall=0).mirror is False


def test_the_papers_generator_has_its_name():
    paper, shipped = mgtta.load_generator("paper"), mgtta.load_generator("imagenet")
    assert sum(p.numel() for p in paper.parameters()) == 164
    assert all(torch.equal(a, b) for a, b in zip(paper.parameters(), shipped.parameters(), strict=True))


def test_every_batch_of_a_scheduled_stream_is_remembered(model):
    """A schedule rests from learning, not from looking."""
    method = make(model, schedule="auto", precision="fp32")
    for t in range(16):
        method(images(4, seed=t))
    assert method.updates < 16
    assert method.method.neighbours.known.sum() == 64


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
