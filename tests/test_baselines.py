"""Each baseline against a slow transcription of its paper's equations, and its mechanism on and off."""

import copy
import gc
import math
import warnings

import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, images, vit
from torch import nn
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta
from mgtta._lib.timm import timm
from mgtta.data.patterns import Patterns
from mgtta.methods._augment import mask_low_frequencies, random_view
from mgtta.methods._descent import Descent
from mgtta.methods._reliable import redundancy_for
from mgtta.methods._sam import SAM
from mgtta.methods.deyo import random_orders, shuffle_patches
from mgtta.methods.registry import recipes
from mgtta.methods.roid import prior_corrected, soft_likelihood_ratio
from mgtta.models.norms import early_norm_parameters, norm_layers

NAMES = ("eta", "eata", "sar", "deyo", "cotta", "spa", "roid")


def create(name, model, **settings):
    """mgtta.create, with Fisher information for EATA."""
    if name == "eata" and "fisher" not in settings:
        model = mgtta.load_model(model) if not isinstance(model, mgtta.Classifier) else model
        dtype = next(model.parameters()).dtype
        size = settings.pop("size", 32)
        settings["fisher"] = mgtta.fisher_information(model, images(4, seed=9)[:, :, :size, :size].to(dtype))
    settings.pop("size", None)
    return mgtta.create(name, model, **settings)


def unsure_vit(scale=40.0):
    """float64; entropies on both sides of 0.62 ln C, and predictions that hang on where things are."""
    net = vit(3).double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1 and "token" not in name and "pos" not in name:
                p.mul_(6.0 if "head" not in name else scale)
        net.pos_embed.mul_(5.0)
    return mgtta.load_model(net)


def close(a, b):
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def cross(target, row):
    """-sum p log q."""
    return -sum(a * math.log(b) for a, b in zip(probabilities(target), probabilities(row), strict=True) if a > 0)


def mean(values):
    return sum(values) / len(values)


def cosine(a, b):
    return sum(u * v for u, v in zip(a, b, strict=True)) / math.sqrt(sum(u * u for u in a) * sum(v * v for v in b))


def params_of(method):
    return {name: p.detach().clone() for name, p in method.adapted.items()}


def moved(method, before):
    return any(not torch.equal(p, before[name]) for name, p in method.adapted.items())


# EATA


def slow_eata(rows, m, margin, eps):
    """Eqs. 2-6: the loss of a batch, and the kept probabilities."""
    E0 = margin * math.log(len(rows[0]))
    terms, kept = [], []
    for row in rows:
        p = probabilities(row)
        if H(row) < E0 and (m is None or cosine(p, m) < eps):  # Eqs. 3, 5
            terms.append(math.exp(E0 - H(row)) * H(row))
            kept.append(p)
    return (mean(terms) if terms else None), kept


def test_eta_over_three_batches_against_its_equations():
    method = mgtta.create("eta", unsure_vit(), margin=0.65, redundancy=0.97)
    m, sizes = None, set()
    for t in range(3):
        x = images(16, seed=t).double()
        expected, kept = slow_eata(method.model(x).tolist(), m, 0.65, 0.97)
        sizes.add(len(kept))
        close(method.loss(x)[1].detach(), expected)
        method(x)
        average = [mean(column) for column in zip(*kept, strict=True)]
        m = average if m is None else [0.9 * a + 0.1 * b for a, b in zip(m, average, strict=True)]  # Eq. 4
        close(method.probs, m)
    assert 0 < min(sizes) < 16  # the filters have worked


def test_eta_learns_nothing_new_from_what_it_knows():
    x = images(8)
    for redundancy, updates in ((0.05, 1), (1.1, 3)):  # 1.1: no cosine is above it, the filter is off
        method = mgtta.create("eta", confident_vit(), margin=1.1, redundancy=redundancy)
        for _ in range(3):
            method(x[:1])
        assert (method.updates, method.skipped) == (updates, 0)


@pytest.mark.parametrize(("classes", "eps"), [(10, 0.4), (1000, 0.05), (100, math.sqrt(0.4 * 0.05))])
def test_eta_redundancy_follows_the_number_of_classes(classes, eps):
    assert redundancy_for(classes) == pytest.approx(eps)


def test_eta_learns_from_few_classes_at_its_default_redundancy():
    """Predictions of one class each, over 10 classes: the cosine with their mean is 0.32, above ImageNet's 0.05."""
    logits = 50 * torch.eye(CLASSES)
    for redundancy, kept in ((None, CLASSES), (0.05, 0)):
        method = mgtta.create("eta", vit(), redundancy=redundancy)
        method.probs = torch.full((CLASSES,), 1 / CLASSES)
        assert int(method.kept(logits).sum()) == kept
    assert CLASSES == 10


def test_eata_without_fisher_information_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"eata needs fisher=.*mgtta.fisher_information.*eta"):
        mgtta.create("eata", vit())
    with pytest.raises(ValueError, match="eata needs fisher"):
        mgtta.create("eata", vit(), fisher=None)


def test_eata_without_its_last_term_is_eta():
    model = unsure_vit()
    settings = {"margin": 0.65, "redundancy": 0.97}
    eta = mgtta.create("eta", model, **settings)
    eata = create("eata", model, fisher_weight=0.0, **settings)
    for t in range(3):
        x = images(16, seed=t).double()
        assert torch.equal(eta(x), eata(x))
    assert all(torch.equal(p, q) for p, q in zip(eta.adapted.values(), eata.adapted.values(), strict=True))


def test_fisher_against_the_squared_gradient_of_each_image():
    model = unsure_vit()
    x = images(6).double()
    fisher = mgtta.fisher_information(model, x, batch_size=1)
    twin = copy.deepcopy(model).requires_grad_(True)
    for name, value in fisher.values.items():
        total = 0
        for i in range(6):
            logits = twin(x[i : i + 1])
            loss = -logits.log_softmax(-1)[0, logits.argmax()]
            total = total + torch.autograd.grad(loss, twin.get_parameter(name))[0] ** 2
        close(value, total / 6)  # Eq. 9
    assert set(fisher.values) == {f"net.{n}.{w}" for n in norm_layers(model.net) for w in ("weight", "bias")}


def test_fisher_of_batches_stops_at_its_limit():
    model = mgtta.load_model(vit())
    x = images(20)
    one = mgtta.fisher_information(model, x, batch_size=4, max_images=10)
    other = mgtta.fisher_information(model, [(x[:7], None), x[7:]], batch_size=4, max_images=10)
    assert one.images == other.images == 10
    by_hand = mgtta.fisher_information(model, [x[:4], x[4:8], x[8:10]])
    assert all(torch.equal(value, by_hand.values[name]) for name, value in one.values.items())
    with pytest.raises(ValueError, match="no clean images"):
        mgtta.fisher_information(model, [])
    with pytest.raises(ValueError, match="finite"):
        mgtta.fisher_information(model, x * float("nan"))


def test_fisher_file_and_fingerprint(tmp_path, model):
    fisher = mgtta.fisher_information(model, images(8))
    mgtta.save_fisher(fisher, tmp_path / "f.safetensors")
    again = mgtta.load_fisher(tmp_path / "f.safetensors")
    assert (again.images, again.model, again.fingerprint) == (8, model.name, model.fingerprint())
    assert all(torch.equal(value, again.values[name]) for name, value in fisher.values.items())
    mgtta.create("eata", model, fisher=tmp_path / "f.safetensors")(images(4))
    with pytest.raises(ValueError, match="Fisher information of other weights"):
        mgtta.create("eata", vit(seed=1), fisher=fisher)
    mgtta.save_source(mgtta.source_statistics(model, images(8)), tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="not a file of mgtta fisher"):
        mgtta.load_fisher(tmp_path / "s.safetensors")


def test_eata_does_not_forget():
    """Eq. 7 by hand after some batches; and with it the model stays nearer to the source."""
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    ways = []
    for weight in (0.0, 1.0):
        method = mgtta.create("eata", model, fisher=fisher, fisher_weight=weight, margin=1.1, redundancy=1.1, lr=1e-3)
        start = params_of(method)
        for t in range(10):
            method(images(8, seed=t).double())
        way = {name: (p.detach() - start[name]).square() for name, p in method.adapted.items()}
        close(method.forgetting(), weight * sum((fisher.values[n] * w).sum() for n, w in way.items()))
        ways.append(sum((fisher.values[n] * w).sum() for n, w in way.items()))
    assert 0 < ways[1] < ways[0]


# SAR


def test_sam_against_its_equations():
    """Two parameters, one with a base of plain SGD: the gradient is taken at theta + rho g / ||g||."""
    a, b = (nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in ([1.0, -2.0], [0.5]))

    def loss():
        return (a**4).sum() + (a[0] * b).sum() ** 2

    def gradients(a, b):
        return [4 * a[0] ** 3 + 2 * a[0] * b**2, 4 * a[1] ** 3, 2 * a[0] ** 2 * b]

    optimizer = SAM([a, b], Descent(0.01, momentum=0.0).factory(), rho=0.05)

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    closure()
    optimizer.step(closure)
    theta = [1.0, -2.0, 0.5]
    g = gradients(theta[:2], theta[2])
    norm = math.sqrt(sum(v * v for v in g))
    e = [t + 0.05 * v / norm for t, v in zip(theta, g, strict=True)]  # Eq. 4
    expected = [t - 0.01 * v for t, v in zip(theta, gradients(e[:2], e[2]), strict=True)]  # Eq. 5
    close(torch.cat([a, b]).detach(), expected)


def test_sam_puts_theta_back_and_says_what_is_wrong():
    p = nn.Parameter(torch.rand(3))
    before = p.detach().clone()
    optimizer = SAM([p], Descent(0.01, "adam").factory())
    with pytest.raises(ValueError, match="no parameter has a gradient"), optimizer.perturbed():
        pass
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="in between"), optimizer.perturbed():
        assert not torch.equal(p, before)
        raise RuntimeError("in between")
    assert torch.equal(p, before)
    with pytest.raises(ValueError, match="rho"):
        SAM([p], Descent(0.01, "adam").factory(), rho=-1)
    q = nn.Parameter(torch.rand(2))
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    assert [group["lr"] for group in optimizer.base.param_groups] == [0.01, 0.5]
    twin = copy.deepcopy(optimizer)
    assert twin.param_groups is twin.base.param_groups
    assert twin.state is twin.base.state


def slow_sar(model, x, params, margin, rho):
    """Eqs. 2, 4, 5: the second loss and its gradient."""
    rows = model(x)
    E0 = margin * math.log(rows.shape[1])
    first = [i for i, row in enumerate(rows.tolist()) if H(row) < E0]
    log_p = rows.log_softmax(-1)
    loss = -(log_p.exp() * log_p).sum(-1)[first].mean()
    g = torch.autograd.grad(loss, params)
    norm = math.sqrt(sum(v.square().sum().item() for v in g))
    with torch.no_grad():
        for p, v in zip(params, g, strict=True):
            p.add_(rho * v / norm)
    rows = model(x)
    second = [i for i in first if H(rows[i].tolist()) < E0]
    log_p = rows.log_softmax(-1)
    loss = -(log_p.exp() * log_p).sum(-1)[second].mean()
    return loss.item(), torch.autograd.grad(loss, params), first, second


def test_sar_against_its_equations():
    model = unsure_vit()
    x = images(32).double()
    method = mgtta.create("sar", model, margin=0.62, rho=0.3, lr=1e-2)  # so far that the filter changes
    twin = copy.deepcopy(method)
    start = params_of(method)
    loss, grads, first, second = slow_sar(twin.model, x, list(twin.adapted.values()), 0.62, 0.3)
    assert 0 < len(second) < len(first) < 32
    method(x)
    for (name, p), grad in zip(method.adapted.items(), grads, strict=True):
        close(p.detach(), start[name] - 1e-2 * grad)
    close(method.average, loss)
    method(images(32, seed=1).double())
    before = params_of(method)
    twin.load_state_dict(method.state_dict())
    average = method.average
    x = images(32, seed=2).double()
    loss = slow_sar(twin.model, x, list(twin.adapted.values()), 0.62, 0.3)[0]
    method(x)
    close(method.average, 0.9 * average + 0.1 * loss)
    assert moved(method, before)


def test_sar_recovers_when_the_second_loss_is_low():
    model = mgtta.load_model(confident_vit())  # its entropies are all but 0
    for recovery, times in ((0.0, 0), (math.log(CLASSES), 3)):
        method = mgtta.create("sar", model, margin=1.1, recovery=recovery)
        start = params_of(method)
        for t in range(3):
            method(images(8, seed=t))
        assert method.updates == 3
        assert method.recoveries == times
        assert moved(method, start) == (times == 0)
        if times:
            assert method.average is None
            assert not method.optimizer.state_dict()["state"]
        method.reset()
        assert method.recoveries == 0


def test_sar_leaves_the_last_quarter_alone():
    torch.manual_seed(0)

    def adapts(net):
        own = {id(p): name for name, p in net.named_parameters()}
        return {own[id(p)].rpartition(".")[0] for p in early_norm_parameters(net)}

    deep = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=8, depth=12, num_heads=1, num_classes=2)
    assert adapts(deep) == {f"blocks.{i}.norm{k}" for i in range(9) for k in (1, 2)}

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep

    assert adapts(Wrapped()) == {f"inner.blocks.{i}.norm{k}" for i in range(9) for k in (1, 2)}
    block = timm.models.resnet.BasicBlock
    resnet = timm.models.ResNet(block, [1, 1, 1, 1], num_classes=2, channels=(4, 4, 4, 4), stem_width=4)
    assert adapts(resnet) == {name for name in norm_layers(resnet) if not name.startswith("layer4")}
    convnext = timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 4, 4, 4), num_classes=2)
    assert adapts(convnext) == {n for n in norm_layers(convnext) if not n.startswith(("stages.3", "head", "norm"))}
    assert adapts(NETS["groupnorm"]()) == {"1"}
    assert adapts(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))) == {"0"}


# DeYO


def test_deyo_against_its_equations():
    method = mgtta.create("deyo", unsure_vit(), margin=0.8, entropy_threshold=0.62, plpd_threshold=0.001)
    x = images(32).double()
    rows = method.model(x).tolist()
    log_C = math.log(CLASSES)
    kept = [i for i, row in enumerate(rows) if H(row) < 0.62 * log_C]
    shuffled = shuffle_patches(x[kept], 4, random_orders(len(x[kept]), 4, torch.Generator().manual_seed(0)))
    terms = []
    for i, other in zip(kept, method.model(shuffled).tolist(), strict=True):
        p, q = probabilities(rows[i]), probabilities(other)
        label = p.index(max(p))
        plpd = p[label] - q[label]
        if plpd > 0.001:
            weight = 1 / math.exp(H(rows[i]) - 0.8 * log_C) + 1 / math.exp(-plpd)
            terms.append(weight * H(rows[i]))
    assert 0 < len(terms) < len(kept) < 32
    close(method.loss(x)[1].detach(), mean(terms))


def test_deyo_only_learns_from_shape():
    """A model that pools its pixels sees no shape: shuffled patches change nothing, and PLPD is 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(1, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    for threshold, updates in ((0.2, 0), (-0.5, 1)):  # the filter on, and off
        method = mgtta.create("deyo", net, entropy_threshold=1.1, plpd_threshold=threshold)
        method(images(8))
        assert (method.updates, method.skipped) == (updates, 0)


@pytest.mark.parametrize("size", [(32, 32), (30, 33), (3, 5)])
def test_shuffled_patches(size):
    x = torch.rand(6, 3, *size, generator=torch.Generator().manual_seed(0))
    y = shuffle_patches(x, 4, random_orders(len(x), 4, torch.Generator().manual_seed(1)))
    assert y.shape == x.shape
    if size == (32, 32):
        cut = [t.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(6, 16, -1) for t in (x, y)]
        orders = []
        for i in range(6):
            order = [next(k for k in range(16) if torch.equal(cut[0][i, k], patch)) for patch in cut[1][i]]
            assert sorted(order) == list(range(16))
            orders.append(tuple(order))
        assert len(set(orders)) == 6  # each image has an order of its own


def test_deyo_leaves_the_last_quarter_alone_as_its_authors_do():
    torch.manual_seed(0)
    net = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=8, depth=12, num_heads=1, num_classes=2)
    early = {f"net.blocks.{i}.norm{k}.{w}" for i in range(9) for k in (1, 2) for w in ("weight", "bias")}
    assert set(mgtta.create("deyo", net).adapted) == early
    assert len(mgtta.create("deyo", net, settings="mgtta").adapted) == 2 * 25


def test_deyo_margins_of_both_sets_of_settings():
    """An image of entropy 0.4 ln C teaches at the authors' tau_Ent, and not at the MGTTA paper's."""
    authors, mgttas = (mgtta.create("deyo", vit(), settings=name) for name in ("authors", "mgtta"))
    assert (authors.entropy_threshold, mgttas.entropy_threshold) == (0.5, 0.3)
    assert (authors.margin, mgttas.margin) == (0.4, 0.4)
    assert (rate(authors), rate(mgttas)) == (1e-3, 5e-4)


# CoTTA


@pytest.mark.parametrize("symmetric", [True, False])
def test_cotta_against_its_equations(symmetric):
    model = unsure_vit()
    method = mgtta.create(
        "cotta", model, confidence=0.0, ema=0.9, restore=0.3, lr=0.1, momentum=0.0, symmetric=symmetric
    )
    theta0 = {name: p.detach().clone() for name, p in model.named_parameters()}
    method.teacher.net.head.bias.data += 1.0  # a teacher that differs, or Eq. 5 has no gradient
    teacher = {name: p.detach().clone() for name, p in method.teacher.named_parameters()}
    student = copy.deepcopy(model).requires_grad_(True)
    for t in range(2):
        x = images(8, seed=t).double()
        target = torch.func.functional_call(model, teacher, (x,))
        rows = student(x)
        expected = mean([cross(a, b) for a, b in zip(target.tolist(), rows.tolist(), strict=True)])
        if symmetric:
            back = mean([cross(b, a) for a, b in zip(target.tolist(), rows.tolist(), strict=True)])
            expected = (expected + back) / 2
        close(method.loss(x)[1].detach(), expected)  # Eqs. 1, 5
        p, q = target.detach().log_softmax(-1), rows.log_softmax(-1)
        loss = -(p.exp() * q).sum(-1).mean()
        if symmetric:
            loss = (loss - (q.exp() * p).sum(-1).mean()) / 2
        grads = torch.autograd.grad(loss, list(student.parameters()))
        random = torch.Generator().manual_seed(0)
        random.set_state(method.random.get_state())
        close(method(x), target.detach())  # the teacher's, from before the update
        random = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=random)))
        with torch.no_grad():
            for (name, p), grad in zip(student.named_parameters(), grads, strict=True):
                new = p - 0.1 * grad
                teacher[name] = 0.9 * teacher[name] + 0.1 * new  # Eq. 2
                M = (torch.rand(p.shape, generator=random) < 0.3).double()  # Eq. 7
                p.copy_(M * theta0[name] + (1 - M) * new)  # Eq. 8
                close(method.model.get_parameter(name).detach(), p.detach())
                close(method.teacher.get_parameter(name).detach(), teacher[name])


def test_cotta_needs_the_symmetric_loss_where_the_anchor_is_sure():
    """Eq. 5's gradient is the difference of two equal predictions."""
    for symmetric in (True, False):
        method = mgtta.create("cotta", unsure_vit(), confidence=0.0, restore=0.0, symmetric=symmetric)
        before = params_of(method)
        method(images(8).double())
        way = max((p.detach() - before[name]).abs().max().item() for name, p in method.adapted.items())
        assert way > 1e-5 if symmetric else way < 1e-12


def test_cotta_restores_a_share_of_the_weights():
    model = mgtta.load_model(vit().double())
    shares = []
    for restore in (0.0, 0.25, 1.0):
        method = mgtta.create("cotta", model, confidence=0.0, restore=restore)
        method(images(4).double())
        pairs = [(p, model.get_parameter(n)) for n, p in method.adapted.items() if p.ndim > 1 and "qkv" in n]
        same = torch.cat([(p == p_0).flatten() for p, p_0 in pairs])
        shares.append(same.double().mean().item())
    assert shares[0] < 0.02
    assert abs(shares[1] - 0.25) < 0.03
    assert shares[2] == 1.0


def test_cotta_averages_views_where_the_anchor_is_unsure():
    """Eqs. 3 and 4."""
    model = mgtta.load_model(vit())
    x = images(4)
    confidence = model(x).softmax(-1).amax(-1).mean().item()
    sure = mgtta.create("cotta", model, confidence=confidence - 1e-4, augmentations=3)
    assert torch.equal(sure(x), model(x))
    unsure = mgtta.create("cotta", model, confidence=confidence + 1e-4, augmentations=3, seed=5)
    random = torch.Generator().manual_seed(5)
    views = [model(random_view(x, random)) for _ in range(3)]
    torch.testing.assert_close(unsure(x), torch.stack(views).mean(0))
    with pytest.raises(ValueError, match="augmentations"):
        mgtta.create("cotta", model, augmentations=0)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_views_differ_stay_in_range_and_leave_torchs_random_numbers_alone(channels):
    x = torch.rand(2, channels, 24, 20)
    random = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    views = [random_view(x, random) for _ in range(4)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(v.shape == x.shape and v.min() >= 0 and v.max() <= 1 for v in views)
    assert not any(torch.equal(views[0], v) for v in views[1:])
    assert torch.equal(views[0], random_view(x, torch.Generator().manual_seed(0)))
    assert random_view(x.double(), random, noise=False).dtype == torch.float64


# SPA


def slow_spa(method, x):
    """KL(image || twin) over images that are surer than their twin, for both twins; no predictor."""
    random = torch.Generator().manual_seed(0)
    masked = 0.5 + mask_low_frequencies(x - 0.5, 0.2, 0.2, random)
    drawn = 0.5 + 0.5 * torch.randn(x.shape[1:], generator=random).double()
    noisy = torch.empty_like(x)
    for i in range(32):
        for j in range(32):
            strength = method.noise[0, 0, i * 14 // 32, j * 14 // 32].item() ** 2
            noisy[:, :, i, j] = (1 - strength) * x[:, :, i, j] + strength * drawn[:, i, j]
    total, kept = 0.0, []
    for twin in (masked, noisy.clamp(0, 1)):
        terms = []
        for a, b in zip(method.model(x).tolist(), method.model(twin).tolist(), strict=True):
            if max(probabilities(a)) > max(probabilities(b)):
                terms.append(cross(a, b) - H(a))
        total += mean(terms)
        kept.append(len(terms))
    return total, kept


def test_spa_against_its_equations():
    method = mgtta.create("spa", unsure_vit())
    method.noise = method.noise + 0.3 * torch.rand(method.noise.shape).double()
    x = images(16).double()
    expected, kept = slow_spa(method, x)
    assert all(0 < n < 16 for n in kept)
    close(method.loss(x)[1].detach(), expected)


def test_spa_predictor_stands_before_the_head_of_the_twin():
    method = mgtta.create("spa", unsure_vit())
    x = images(4).double()
    predictor = torch.rand(16, 16).double()
    _, features = method.model.embed(x)
    expected = features @ predictor.T @ method.model.head.weight.T + method.model.head.bias
    close(method.through_predictor(x, predictor).detach(), expected.detach())
    close(method.through_predictor(x, torch.eye(16).double()).detach(), method.model(x).detach())
    method(x)
    assert not torch.equal(method.predictor, torch.eye(16).double())


def test_spa_warns_of_no_image_that_it_made_itself():
    """A twin without some low frequencies lies outside [0, 1]; the caller's images do not."""
    model = mgtta.load_model("patterns_vit")
    method = mgtta.create("spa", model)
    x, _ = Patterns(16).tensors()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        method(x)
        method(x / 255)
    assert not told
    with pytest.warns(UserWarning, match="outside"):
        method(x / 255 * 4 - 2)


def test_spa_gate_keeps_out_images_that_are_less_sure_than_their_twin():
    method = mgtta.create("spa", vit())
    target = torch.tensor([[2.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    twin = torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    torch.testing.assert_close(
        method.consistency(target, twin).item(), cross([2.0, 0, 0], [0, 1.0, 0]) - H([2.0, 0, 0])
    )
    assert method.consistency(target[1:], twin[1:]) is None
    for closed in (True, False):
        method = mgtta.create("spa", vit())
        if closed:
            method.surer = lambda target, _twin: torch.zeros(len(target), dtype=torch.bool)
        method(images(4))
        assert (method.updates, method.skipped) == (0 if closed else 1, 0)


def test_spa_noise_climbs_and_keeps_its_mean():
    method = mgtta.create("spa", unsure_vit(), noise_ratio=0.4)
    up = torch.zeros(1, 1, 14, 14).double()
    up[0, 0, 3, 4] = 0.2
    method.deteriorate(None, up)
    close(method.noise.square().mean(), 0.4)
    assert method.noise[0, 0, 3, 4] > math.sqrt(0.4) > method.noise[0, 0, 0, 0]
    one = mgtta.create("spa", vit(), entropy_weight=0.1)
    two = mgtta.create("spa", vit())
    x = images(4)
    entropy = mean([H(row) for row in two.model(x).tolist()])
    torch.testing.assert_close(one.loss(x)[1] - two.loss(x)[1], torch.tensor(0.1 * entropy))


@pytest.mark.parametrize("size", [(32, 32), (15, 20), (1, 1)])
def test_low_frequencies_are_masked_in_pairs(size):
    x = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    height, width = size
    y = mask_low_frequencies(x, 0.5, 0.4, torch.Generator().manual_seed(1))
    before, after = torch.fft.fft2(x), torch.fft.fft2(y)
    r_h, r_w = (min(round(0.2 * n), (n - 1) // 2) for n in size)
    gone = 0
    for k in range(height):
        for j in range(width):
            low = min(k, height - k) <= r_h and min(j, width - j) <= r_w
            for a, b in zip(before[:, :, k, j].flatten(), after[:, :, k, j].flatten(), strict=True):
                kept = abs(a - b) < 1e-9
                assert kept or (low and abs(b) < 1e-9)
                gone += not kept
    total = 12 * min(2 * r_h + 1, height) * min(2 * r_w + 1, width)
    assert 0.25 < gone / total < 0.75
    close(mask_low_frequencies(x, 0.0, 0.4, torch.Generator()), x)


# ROID


def slow_weights(rows, p_bar, temperature):
    diverse = [1 - cosine(probabilities(row), p_bar) for row in rows]
    certain = [-H(row) for row in rows]
    diverse, certain = ([(v - min(vs)) / (max(vs) - min(vs)) for v in vs] for vs in (diverse, certain))
    return [0.0 if d < mean(diverse) else math.exp(d * c / temperature) for d, c in zip(diverse, certain, strict=True)]


def slow_ratio(row):
    total = 0.0
    for a in probabilities(row):
        a = min(a, 0.99)
        total -= a * math.log(a / (1 - a) + 1e-5)
    return total


def test_roid_against_its_equations():
    method = mgtta.create("roid", unsure_vit(), lr=0.1, momentum=0.0)
    p_bar = [1 / CLASSES] * CLASSES
    for t in range(2):
        x = images(8, seed=t).double()
        rows = method.model(x)
        w = slow_weights(rows.tolist(), p_bar, 1 / 3)
        kept = [i for i in range(8) if w[i] > 0]
        assert 0 < len(kept) < 8
        random = torch.Generator()
        random.set_state(method.random.get_state())
        views = method.model(random_view(x[kept], random, noise=False, padding="reflect")).tolist()
        total = 0.0
        for i, view in zip(kept, views, strict=True):
            row = rows[i].tolist()
            total += w[i] * (slow_ratio(row) + cross(row, view) / 2 + cross(view, row) / 2) / 8
        close(copy.deepcopy(method).loss(x)[1].detach(), total)
        logits = method(x)
        prior = [mean(column) for column in zip(*[probabilities(row) for row in rows.tolist()], strict=True)]
        gamma = max(1 / 8, 1 / CLASSES) / max(prior)
        for row, found in zip(rows.tolist(), logits.tolist(), strict=True):
            wanted = [a * (b + gamma) / (1 + gamma * CLASSES) for a, b in zip(row, prior, strict=True)]
            close(found, wanted)
        p_bar = [0.9 * a + 0.1 * b for a, b in zip(p_bar, prior, strict=True)]
        close(method.probs, p_bar)


def test_roid_prior_multiplies_the_logits():
    """As in every released version; the paper's text multiplies probabilities, which can choose another class."""
    logits = torch.tensor([[2.0, 1.9], [0.0, 3.0], [0.0, 3.0]], dtype=torch.float64)
    prior = logits.softmax(-1).mean(0)
    gamma = 0.5 / prior.max()
    close(prior_corrected(logits), logits * (prior + gamma) / (1 + 2 * gamma))
    sorted_by_class = prior_corrected(logits)
    assert sorted_by_class.argmax(-1).tolist() == [1, 1, 1]


def test_roid_steps_by_nesterov_momentum():
    """p <- p - lr (g + 0.9 v), v <- 0.9 v + g, over two steps with the weights' ensemble off."""
    method = mgtta.create("roid", unsure_vit(), lr=0.01, source_ema=1.0)
    velocity = {name: torch.zeros_like(p) for name, p in method.adapted.items()}
    for t in range(2):
        x = images(8, seed=t).double()
        before = params_of(method)
        grads = slow_gradients(method, x)
        method(x)
        for name, p in method.adapted.items():
            velocity[name] = 0.9 * velocity[name] + grads[name]
            close(p.detach(), before[name] - 0.01 * (grads[name] + 0.9 * velocity[name]))


def slow_gradients(method, x):
    """The gradient of the loss, from a copy of the method with its random numbers."""
    twin = copy.deepcopy(method)
    twin.loss(x)[1].backward()
    return {name: p.grad for name, p in twin.adapted.items()}


def test_views_are_padded_by_their_edge_or_by_reflection():
    """A view moved by up to 1/16 of the image shows what lies beyond the border."""
    x = images(2).double()
    edge, reflect = (
        random_view(x, torch.Generator().manual_seed(3), noise=False, padding=mode) for mode in ("edge", "reflect")
    )
    default = random_view(x, torch.Generator().manual_seed(3), noise=False)
    assert torch.equal(default, edge)
    assert not torch.equal(edge, reflect)
    close(edge[:, :, 12:20, 12:20], reflect[:, :, 12:20, 12:20])  # far from the border they are the same


def test_roid_ensembles_weights_with_the_source():
    model = mgtta.load_model(confident_vit())
    x = images(8)
    ways = {}
    for source_ema in (1.0, 0.99, 0.0):  # 1: the mechanism is off
        method = mgtta.create("roid", model, source_ema=source_ema)
        start = params_of(method)
        method(x)
        ways[source_ema] = torch.cat([(p.detach() - start[n]).flatten() for n, p in method.adapted.items()])
    assert ways[1.0].norm() > 0
    torch.testing.assert_close(ways[0.99], 0.99 * ways[1.0], rtol=1e-3, atol=1e-7)
    assert ways[0.0].norm() == 0


def test_roid_prior_and_ratio_at_the_edges():
    one = torch.tensor([[3.0, 1.0, 0.0]])
    assert prior_corrected(one).argmax() == 0
    sure = torch.tensor([[1e4, 0.0, 0.0]])
    assert soft_likelihood_ratio(sure).isfinite().all()
    bad = torch.tensor([[3.0, 1.0, 0.0], [float("nan"), 0.0, 0.0]])
    assert prior_corrected(bad)[0].isfinite().all()


# whose settings


def rate(method):
    return method.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("name", "authors", "on_resnets", "mgttas"),
    [
        ("tent", 1e-3, 2.5e-4, 1e-3),
        ("eta", 1e-3, 2.5e-4, None),
        ("eata", 1e-3, 2.5e-4, 2.5e-4),
        ("sar", 1e-3, 2.5e-4, 1e-3),
        ("deyo", 1e-3, 2.5e-4, 5e-4),
        ("cotta", 0.01, 0.01, 0.05),
        ("spa", 0.01, 2.5e-3, None),
        ("roid", 2.5e-4, 2.5e-4, None),
    ],
)
def test_learning_rates_are_the_authors_by_kind_of_network(name, authors, on_resnets, mgttas):
    assert rate(create(name, vit())) == authors
    assert rate(create(name, nets()["convnext"])) == authors
    for net in ("resnet", "resnet_gn"):
        assert rate(create(name, nets()[net])) == on_resnets
        assert rate(create(name, nets()[net], lr=0.5)) == 0.5
    if mgttas is None:
        with pytest.raises(ValueError, match=f"the MGTTA paper does not run {name}: its only set .* 'authors'"):
            create(name, vit(), settings="mgtta")
    else:
        assert rate(create(name, vit(), settings="mgtta")) == mgttas
        assert rate(create(name, nets()["resnet"], settings="mgtta")) == mgttas


def test_a_vit_whose_stem_has_batchnorm_has_the_settings_for_vits():
    assert rate(mgtta.create("tent", mgtta.load_model("glyphs_vit"))) == 1e-3


def test_other_settings_of_both_sets():
    eata = [create("eata", vit(), settings=name) for name in ("authors", "mgtta")]
    assert [(m.margin, m.redundancy) for m in eata] == [(0.4, None), (0.5, 0.05)]
    cotta = [mgtta.create("cotta", vit(), settings=name) for name in ("authors", "mgtta")]
    assert [m.restored for m in cotta] == [0.001, 0.01]
    assert [m.optimizer.param_groups[0]["nesterov"] for m in cotta] == [True, False]
    spa = mgtta.create("spa", nets()["resnet_gn"])
    assert (spa.predictor_lr, spa.mask_ratio, spa.noise_ratio) == (0.025, 0.1, 0.1)


def test_a_set_of_settings_by_name_or_beside_it():
    assert mgtta.create("deyo@mgtta", vit()).name == "deyo@mgtta"
    assert mgtta.create("deyo", vit(), settings="mgtta").name == "deyo@mgtta"
    assert mgtta.create("deyo@authors", vit()).name == mgtta.create("deyo", vit(), settings="authors").name == "deyo"
    assert rate(mgtta.create("deyo@mgtta", vit(), lr=0.1)) == 0.1
    with pytest.raises(ValueError, match=r"unknown set of settings 'paper'; valid: authors, mgtta"):
        mgtta.create("deyo", vit(), settings="paper")
    with pytest.raises(ValueError, match=r"unknown set of settings ''; valid: authors, mgtta"):
        mgtta.create("deyo@", vit())
    with pytest.raises(ValueError, match="leave one out"):
        mgtta.create("deyo@mgtta", vit(), settings="authors")


@pytest.mark.parametrize("name", [*NAMES, "tent", "lame", "t3a", "foa", "mgtta"])
def test_baselines_say_whose_code_they_follow(name):
    assert recipes()[name].code.startswith("github.com/")


# all of them


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


def nets():
    torch.manual_seed(0)
    block = timm.models.resnet.BasicBlock
    small = {"num_classes": 5, "channels": (4, 4, 8, 8), "stem_width": 4}
    return {
        "resnet": timm.models.ResNet(block, [1, 1, 1, 1], **small),
        "resnet_gn": timm.models.ResNet(block, [1, 1, 1, 1], **small, norm_layer=lambda c, **_: nn.GroupNorm(2, c)),
        "convnext": timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 4, 8, 8), num_classes=5),
    }


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
