"""More baselines against slow transcriptions of their papers' equations, and their mechanisms on and off."""

import copy
import dataclasses
import math

import pytest
import torch
from conftest import CLASSES, confident_vit, convnet, images, vit
from test_baselines import close, cosine, mean, moved, params_of, unsure_vit
from torch import nn
from transcription import entropy as H
from transcription import objective as eq_7
from transcription import softmax as probabilities

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.losses import entropy
from mgtta.methods._augmix import OPERATIONS, augmix, operate
from mgtta.methods._cstu import CSTU
from mgtta.methods._descent import Descent
from mgtta.methods._robust_bn import RobustStatistics
from mgtta.methods.come import opinion
from mgtta.methods.eta import ETA
from mgtta.methods.rdumb import MARGIN
from mgtta.methods.spa import SPA


def spread(column):
    """Mean and unbiased variance of a column of numbers."""
    mu = mean(column)
    return mu, sum((a - mu) ** 2 for a in column) / (len(column) - 1)


# ActMAD


def slow_actmad(features, source):
    total = 0.0
    for f, mu_s, sigma_s in zip(features, source.mean, source.std, strict=True):
        n, d = f.shape
        for j in range(d):
            column = f[:, j].tolist()
            total += abs(mean(column) - float(mu_s[j])) / d / 2
            if n > 1:
                total += abs(spread(column)[1] - float(sigma_s[j]) ** 2) / d / 2
    return total


@pytest.mark.parametrize("n", [8, 1])
def test_actmad_against_its_equation(n):
    model = unsure_vit()
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    x = images(n).double()
    logits, features = model.features(x)
    method = mgtta.create("actmad", model, source=source)
    close(method.loss(x)[1].detach(), slow_actmad(features, source))
    squared = mgtta.create("actmad", model, source=source, squared=True)
    without_entropy = eq_7(logits, features, source.mean, source.std, 0.4) - mean([H(row) for row in logits.tolist()])
    close(squared.loss(x)[1].detach(), without_entropy)


@pytest.mark.parametrize("squared", [False, True])
def test_actmad_brings_the_statistics_of_shifted_images_back(squared):
    model = mgtta.load_model(confident_vit())
    source = mgtta.source_statistics(model, images(64, seed=9))
    shifted = images(16) * 0.3
    before = slow_actmad(model.features(shifted)[1], source)
    method = mgtta.create("actmad", model, source=source, squared=squared)
    for _ in range(30):
        method(shifted)
    assert slow_actmad(method.model.features(shifted)[1], source) < 0.8 * before
    assert method.model.head.weight.equal(model.head.weight)


# NEO


def test_neo_against_its_algorithm():
    model = unsure_vit()
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    for settings, mu in (({}, 0.0), ({"source": source}, source.mean[-1]), ({"alpha": 0.1}, 0.0)):
        method = mgtta.create("neo", model, **settings)
        m = torch.zeros(weight.shape[1], dtype=torch.float64)
        seen = 0
        for t, n in enumerate((4, 2, 7)):
            x = images(n, seed=t).double()
            z = model.embed(x)[1].detach()
            seen += n
            share = settings.get("alpha", n / seen)
            m = (1 - share) * m + share * z.mean(0)
            close(method(x), (z - m + mu) @ weight.T + bias)
        close(method.predict(x), (z - m + mu) @ weight.T + bias)
        assert method.updates == 3
    with pytest.raises(ValueError, match="alpha"):
        mgtta.create("neo", model, alpha=0.0)


def test_neo_takes_a_common_shift_of_the_features_back():
    net = confident_vit()
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.norm.bias.add_(torch.linspace(-1, 1, 16))
    one, two = mgtta.create("neo", net), mgtta.create("neo", other)
    for t in range(3):
        x = images(8, seed=t)
        assert (net(x) - other(x)).abs().max() > 1
        torch.testing.assert_close(one(x), two(x), atol=1e-4, rtol=1e-4)


def test_neo_and_foa_shift_re_centre_where_the_head_reads():
    """The head of this network does not read its last norm; older statistics know only that norm, and are refused."""
    model = mgtta.load_model(convnet("group"))
    source = mgtta.source_statistics(model, images(8))
    _, z = model.embed(images(4, seed=1))
    mu = model.embed(images(8))[1].mean(0)
    neo = mgtta.create("neo", model, source=source)
    torch.testing.assert_close(neo(images(4, seed=1)), model.head(z - z.mean(0) + mu).detach())
    shift = mgtta.create("foa_shift", model, source=source)
    shift(images(4, seed=1))
    torch.testing.assert_close(shift.predict(images(4, seed=1)), model.head(z - z.mean(0) + mu).detach())
    old = dataclasses.replace(source, head=None)
    two = dataclasses.replace(source, head_layer="")
    for name in ("neo", "foa_shift"):
        with pytest.raises(ValueError, match="takes other features"):
            mgtta.create(name, model, source=old)(images(2))
        with pytest.raises(ValueError, match="do not come from its last linear layer"):
            mgtta.create(name, model, source=two)


# RDumb


def test_rdumb_is_eta_that_starts_again():
    model = unsure_vit()
    settings = {"margin": 0.65, "redundancy": 0.97}
    method = mgtta.create("rdumb", model, every=3, lr=1e-2, **settings)
    for start in (0, 3, 6):
        eta = ETA(model, Descent(1e-2).factory(), **settings)
        before = params_of(eta)
        for t in range(start, start + 3):
            x = images(16, seed=t).double()
            assert torch.equal(method(x), eta(x))
        assert moved(eta, before)
    assert method.restarts == 2
    method.reset()
    assert (method.restarts, method.batches) == (0, 0)


def test_rdumb_counts_batches_that_teach_nothing_too():
    method = mgtta.create("rdumb", vit(), margin=0.0, every=2)
    for t in range(5):
        method(images(4, seed=t))
    assert (method.updates, method.restarts) == (0, 2)
    assert pytest.approx(math.log(1000) / 2 - 1) == MARGIN * math.log(1000)  # E_0 of the authors' code
    with pytest.raises(ValueError, match="every"):
        mgtta.create("rdumb", vit(), every=0)


# COME


def slow_come(row):
    """The entropy of (b_1, ..., b_C, u)."""
    C = len(row)
    S = sum(math.exp(a) for a in row) + C
    masses = [math.exp(a) / S for a in row] + [C / S]
    assert sum(masses) == pytest.approx(1)
    return -sum(p * math.log(p) for p in masses)


def test_come_against_its_equations():
    method = mgtta.create("tent_come", unsure_vit())
    x = images(16).double()
    close(method.loss(x)[1].detach(), mean([slow_come(row) for row in method.model(x).tolist()]))


def test_come_holds_the_norm_of_the_logits():
    logits = torch.randn(5, CLASSES, dtype=torch.float64, requires_grad=True)
    along = {}
    for name, value in (("come", entropy(opinion(logits))), ("softmax", entropy(logits))):
        (grad,) = torch.autograd.grad(value.sum(), logits)
        along[name] = (grad * logits).sum(1).abs().max()
    assert along["come"] < 1e-12 < 0.1 < along["softmax"]
    assert entropy(opinion(torch.zeros(1, CLASSES))).isfinite().all()  # logits without a direction


def test_eata_come_over_three_batches_against_its_equations():
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    method = mgtta.create("eata_come", model, fisher=fisher, margin=0.8, redundancy=0.97)
    E0 = 0.8 * math.log(CLASSES)
    m, sizes = None, set()
    for t in range(3):
        x = images(16, seed=t).double()
        terms, kept = [], []
        for row in method.model(x).tolist():
            p = probabilities(row)
            if slow_come(row) < E0 and (m is None or cosine(p, m) < 0.97):
                terms.append(math.exp(E0 - slow_come(row)) * slow_come(row))
                kept.append(p)
        sizes.add(len(kept))
        close(method.loss(x)[1].detach() - method.forgetting(), mean(terms))
        method(x)
        average = [mean(column) for column in zip(*kept, strict=True)]
        m = average if m is None else [0.9 * a + 0.1 * b for a, b in zip(m, average, strict=True)]
        close(method.probs, m)
    assert 0 < min(sizes) < 16


def test_eata_come_and_spa_eata_need_fisher_information():
    for name in ("eata_come", "spa_eata"):
        with pytest.raises(ValueError, match=f"{name} needs fisher"):
            mgtta.create(name, vit())


def torch_come(rows):
    """The entropy of opinions by its definition, the norm held."""
    norm = rows.norm(dim=1, keepdim=True)
    evidence = (rows / norm * norm.detach()).exp()
    S = evidence.sum(1, keepdim=True) + rows.shape[1]
    masses = torch.cat([evidence / S, rows.shape[1] / S], 1)
    return -(masses * masses.log()).sum(1)


def test_sar_come_against_its_equations():
    x = images(32).double()
    method = mgtta.create("sar_come", unsure_vit(), margin=0.64, rho=0.3, lr=1e-2)
    E0 = 0.64 * math.log(CLASSES)
    twin = copy.deepcopy(method)
    params = list(twin.adapted.values())
    start = params_of(method)
    E = torch_come(twin.model(x))
    first = (E < E0).nonzero().flatten()
    g = torch.autograd.grad(E[first].mean(), params)
    norm = torch.stack([v.square().sum() for v in g]).sum().sqrt()
    with torch.no_grad():
        for p, v in zip(params, g, strict=True):
            p.add_(0.3 * v / norm)
    again = torch_come(twin.model(x))[first]
    second = again[again < E0]
    assert 0 < len(second) < len(first) < 32
    grads = torch.autograd.grad(second.mean(), params)
    logits = method(x)
    assert logits.shape == (32, CLASSES)
    for (name, p), grad in zip(method.adapted.items(), grads, strict=True):
        close(p.detach(), start[name] - 1e-2 * grad)
    close(method.average, second.mean().item())


@pytest.mark.parametrize("name", ["eata", "sar"])
def test_come_does_not_learn_from_what_only_the_softmax_calls_sure(name):
    model = unsure_vit()
    x = images(16).double()
    logits = model(x).detach()
    surest = min(map(H, logits.tolist()))
    opinion = torch_come(logits).min().item()
    assert surest < opinion
    settings = {"margin": 0.999 * opinion / math.log(CLASSES)}
    if name == "eata":
        settings["fisher"] = mgtta.fisher_information(model, images(16, seed=9).double())
        settings["fisher_weight"] = 0.0
    updates = {}
    for method in (mgtta.create(name, model, **settings), mgtta.create(f"{name}_come", model, **settings)):
        method(x)
        updates[method.name] = method.updates
    assert updates == {name: 1, f"{name}_come": 0}


# SHOT


def slow_shot(rows):
    average = [mean(column) for column in zip(*map(probabilities, rows), strict=True)]
    return mean([H(row) for row in rows]) + sum(p * math.log(p) for p in average)


def test_shot_against_its_equation():
    method = mgtta.create("shot", unsure_vit())
    x = images(16).double()
    close(method.loss(x)[1].detach(), slow_shot(method.model(x).tolist()))


def test_shot_keeps_predictions_diverse():
    model = mgtta.load_model(confident_vit())
    x = images(32)
    diversity = {}
    for name in ("tent", "shot"):
        method = mgtta.create(name, model, lr=0.02)
        for _ in range(30):
            method(x)
        average = method.predict(x).softmax(1).mean(0)
        diversity[name] = -(average * average.clamp(min=1e-30).log()).sum()
    assert diversity["tent"] < diversity["shot"]


def test_shot_learns_nothing_from_one_image():
    method = mgtta.create("shot", unsure_vit(), lr=1.0)
    start = params_of(method)
    method(images(1).double())
    for name, p in method.adapted.items():
        close(p.detach(), start[name])


# MEMO


def slow_marginal_entropy(rows):
    average = [mean(column) for column in zip(*map(probabilities, rows), strict=True)]
    return -sum(p * math.log(p) for p in average)


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"lr": 0.05, "optimizer": "sgd", "weight_decay": 0.0}, lambda p: torch.optim.SGD(p, lr=0.05)),
        (
            {"lr": 0.01, "optimizer": "adamw", "weight_decay": 0.1},
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_memo_against_its_algorithm(settings, optimizer):
    """Each image: views, marginal entropy, one step on all parameters, predict, the source again."""
    model = unsure_vit()
    method = mgtta.create("memo", model, augmentations=4, seed=3, **settings)
    x = images(3).double()
    found = method(x)
    random = torch.Generator().manual_seed(3)
    for i in range(3):
        twin = copy.deepcopy(model).requires_grad_(True)
        own = optimizer(twin.parameters())
        logits = twin(torch.stack([augmix(x[i], random) for _ in range(4)]))
        p = logits.softmax(1).mean(0)
        loss = -(p * p.log()).sum()
        close(loss.detach(), slow_marginal_entropy(logits.tolist()))
        loss.backward()
        own.step()
        close(found[i], twin(x[i : i + 1])[0].detach())
    assert (found - model(x)).abs().max() > 1e-3
    assert torch.equal(method.predict(x), model(x).detach())  # nothing is kept


def test_memo_is_episodic():
    """What came before an image does not matter: the same random numbers give the same logits."""
    method = mgtta.create("memo", confident_vit(), augmentations=2, lr=0.01)
    first = method(images(1))
    method(images(3, seed=1))
    method.random.manual_seed(0)
    assert torch.equal(method(images(1)), first)
    with pytest.raises(ValueError, match="unknown optimizer of memo 'adam'"):
        mgtta.create("memo", vit(), optimizer="adam")


def test_memo_mixes_batchnorm_statistics_of_one_image():
    net = convnet("batch")
    x = images(2)
    method = mgtta.create("memo", net, augmentations=2, lr=0.0)
    alone = mgtta.create("bn", net, prior=16)
    torch.testing.assert_close(method(x), torch.cat([alone(x[:1]), alone(x[1:])]))
    assert not torch.allclose(mgtta.create("memo", net, augmentations=2, lr=0.0, prior=0.0)(x), method(x))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 40, 60)])
def test_augmix_draws_only_from_its_generator(shape):
    image = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    views = [augmix(image, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    assert all(view.shape == shape and view.min() >= 0 and view.max() <= 1 for view in views)
    eight_bits = (40 + image * 200).to(torch.uint8)
    changed = {
        name
        for name in OPERATIONS
        for seed in range(40)
        if not torch.equal(operate(eight_bits, name, torch.Generator().manual_seed(seed)), eight_bits)
    }
    assert changed == set(OPERATIONS)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        augmix(torch.rand(4, 8, 8), torch.Generator())


# FOA's parts


def test_foa_shift_against_its_equations():
    model = unsure_vit()
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    method = mgtta.create("foa_shift", model, source=source)
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    m = None
    for t in range(3):
        x = images(4, seed=t).double()
        e = model.embed(x)[1].detach()
        d = torch.zeros(16) if m is None else source.mean[-1] - m  # Eq. 8
        close(method(x), (e + d) @ weight.T + bias)  # Eq. 7
        m = e.mean(0) if m is None else 0.9 * m + 0.1 * e.mean(0)  # Eq. 9
    close(method.mean, m)


def test_foa_interval_learns_as_foa_does_from_the_images_together(tmp_path):
    model = mgtta.load_model(confident_vit())
    source = mgtta.source_statistics(model, images(16, seed=9))
    settings = {"source": source, "prompts": 1, "population": 6}
    method = mgtta.create("foa_interval", model, interval=4, **settings)
    foa = mgtta.create("foa", model, **settings)
    x = images(8)
    torch.testing.assert_close(torch.cat([method(image[None]) for image in x[:4]]), model(x[:4]).detach())
    foa(x[:4])
    assert method.updates == 1
    assert method.waiting == 0
    assert torch.equal(method.prompt, foa.prompt)
    assert torch.equal(method.mean, foa.mean)
    expected = foa.predict(x[4:])
    torch.testing.assert_close(torch.cat([method(image[None]) for image in x[4:6]]), expected[:2])
    assert method.waiting == 2
    write_tree(tmp_path / "state", method.state_dict(), {})
    straight = [method(image[None]) for image in x[6:]] + [method(x[:1])]
    method.reset()
    assert method.waiting == 0
    method.load_state_dict(read_tree(tmp_path / "state")[0])
    assert method.waiting == 2
    again = [method(image[None]) for image in x[6:]] + [method(x[:1])]
    assert all(torch.equal(a, b) for a, b in zip(straight, again, strict=True))
    with pytest.raises(ValueError, match="interval"):
        mgtta.create("foa_interval", model, interval=1, source=source)


# CMF


def test_cmf_against_its_filter():
    alpha, gamma, Q = 0.9, 0.7, 2.0
    method = mgtta.create("cmf", unsure_vit(), alpha=alpha, gamma=gamma, q=Q, lr=0.05)
    stepped = []
    update = method.engine.update

    def spied(grads):
        update(grads)
        stepped.append(params_of(method))

    method.engine.update = spied
    source = params_of(method)
    q = Q * sum(p.numel() for p in source.values()) / 38400
    hidden, v = dict(source), 0.0
    betas = []
    for t in range(6):
        method(images(8, seed=t).double())
        v = alpha**2 * v + q
        beta = max((1 - q) / (v + 1 - q), 0.89)
        v = beta * v
        betas.append(beta)
        for name, p in method.adapted.items():
            theta = stepped[-1][name]
            h = alpha * hidden[name] + (1 - alpha) * source[name]
            hidden[name] = beta * h + (1 - beta) * theta
            close(p.detach(), gamma * theta + (1 - gamma) * hidden[name])
        for h, expected in zip(method.hidden, hidden.values(), strict=True):
            close(h, expected)
    assert 0.89 < min(betas) < max(betas) < 0.9999
    assert method.variance == pytest.approx(v)


def test_cmf_with_no_noise_stays_at_the_source_and_with_much_follows_at_its_bound():
    still = mgtta.create("cmf", vit(), q=0.0, lr=0.1)
    quick = mgtta.create("cmf", vit(), q=20.0, lr=0.1)
    for t in range(4):
        still(images(4, seed=t))
        quick(images(4, seed=t))
    assert all(torch.equal(h, p) for h, p in zip(still.hidden, still.origin, strict=True))
    assert quick._beta() == 0.89
    assert not all(torch.equal(h, p) for h, p in zip(quick.hidden, quick.origin, strict=True))
    with pytest.raises(ValueError, match="below 1"):
        mgtta.create("cmf", vit(), q=1e4)


# RoTTA


class SlowCSTU:
    """The memory as lists of (label, entropy, age, number) for each class."""

    def __init__(self, capacity, n_classes):
        self.capacity = capacity
        self.classes = [[] for _ in range(n_classes)]

    def score(self, age, entropy):
        return 1 / (1 + math.exp(-age / self.capacity)) + entropy / math.log(len(self.classes))

    def add(self, number, label, entropy):
        if self.makes_room(label, self.score(0, entropy)):
            self.classes[label].append([number, entropy, 0])
        for item in (item for row in self.classes for item in row):
            item[2] += 1

    def makes_room(self, label, score):
        sizes = [len(row) for row in self.classes]
        rivals = [label]
        if sizes[label] < self.capacity / len(self.classes):
            if sum(sizes) < self.capacity:
                return True
            rivals = [c for c, size in enumerate(sizes) if size == max(sizes)]
        worst = None
        for c in rivals:
            for i, (_, uncertainty, age) in enumerate(self.classes[c]):
                score_of_it = self.score(age, uncertainty)
                if worst is None or score_of_it >= worst[0]:
                    worst = (score_of_it, c, i)
        if worst[0] > score:
            self.classes[worst[1]].pop(worst[2])
            return True
        return False


@pytest.mark.parametrize(("capacity", "n_classes"), [(8, 3), (4, 10)])
def test_cstu_against_a_slow_memory(capacity, n_classes):
    like = torch.zeros((), dtype=torch.float64)
    memory = CSTU(capacity, n_classes, 1.0, 1.0, like)
    slow = SlowCSTU(capacity, n_classes)
    random = torch.Generator().manual_seed(0)
    crowded = 0
    for t in range(200):
        label = torch.randint(n_classes, (), generator=random) if t % 3 else torch.tensor(0)
        value = torch.rand((), generator=random, dtype=torch.float64) * math.log(n_classes)
        memory.add(torch.full((1, 2, 2), float(t), dtype=torch.float64), label, value)
        slow.add(t, int(label), float(value))
        rows = zip(memory.images, memory.labels, memory.ages, strict=True)
        kept = sorted((int(i[0, 0, 0]), int(c), int(a)) for i, c, a in rows)
        assert kept == sorted((n, c, age) for c, row in enumerate(slow.classes) for n, _, age in row)
        crowded = max(crowded, int(memory.labels.bincount().max()))
    assert len(memory.labels) == capacity
    assert crowded <= max(1, math.ceil(capacity / n_classes))  # though every third image was of class 0


def test_robust_batchnorm_against_its_equations():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double().eval()
    layer = net[1]
    with torch.no_grad():
        layer.running_mean.uniform_(-1, 1)
        layer.running_var.uniform_(0.5, 2)
        layer.weight.uniform_(0.5, 2)
        layer.bias.uniform_(-1, 1)
    statistics = RobustStatistics(net)
    x = images(4).double()
    h = net[0](x).detach()
    mu = 0.95 * layer.running_mean + 0.05 * h.mean((0, 2, 3))
    var = 0.95 * layer.running_var + 0.05 * h.var((0, 2, 3), correction=0)

    def normalised(c):
        return (h[:, c] - mu[c]) / math.sqrt(var[c] + layer.eps) * layer.weight[c] + layer.bias[c]

    with statistics.normalising(net):
        close(
            net(x).detach(),
            torch.nn.functional.batch_norm(h, layer.running_mean, layer.running_var, *layer.parameters()).detach(),
        )
    for share in (0.05, 0.0):  # in an update, and then in a prediction
        with statistics.normalising(net, share):
            close(net(x).detach(), torch.stack([normalised(c) for c in range(4)], 1).detach())
        close(statistics.mean_0, mu)
        close(statistics.var_0, var)
    with pytest.raises(AssertionError):
        close(layer.running_mean, mu)  # the network's own have not moved


def test_rotta_against_its_update():
    method = mgtta.create(
        "rotta", convnet("batch").double(), capacity=8, frequency=6, nu=0.1, optimizer="sgd", momentum=0.0
    )
    x = images(6).double()
    before = params_of(method)
    twin = copy.deepcopy(method)
    close(method(x[:4]), mgtta.load_model(convnet("batch").double())(x[:4]).detach())
    assert (method.updates, moved(method, before)) == (0, False)
    method(x[4:])
    assert method.updates == 1
    twin.memory = copy.deepcopy(method.memory)
    grads = torch.autograd.grad(twin.memory_loss(), list(twin.adapted.values()))
    for (name, p), grad in zip(method.adapted.items(), grads, strict=True):
        close(p.detach(), before[name] - 1e-3 * grad)
        close(method.teacher.get_parameter(name), 0.9 * before[name] + 0.1 * p.detach())


def test_rotta_weighs_the_memory_by_age():
    method = mgtta.create("rotta", convnet("batch").double(), capacity=8, frequency=100)
    memory = method.memory
    for label, image in enumerate(images(5).double()):
        memory.add(image, torch.tensor(label), torch.tensor(0.5, dtype=torch.float64))
    assert memory.ages.tolist() == [5, 4, 3, 2, 1]
    seen = {}
    for i, network in (("teacher", method.teacher), ("student", method.model)):
        network.register_forward_hook(lambda _net, _inputs, logits, i=i: seen.__setitem__(i, logits.tolist()))
    loss = method.memory_loss()
    terms = []
    for age, target, row in zip(memory.ages.tolist(), seen["teacher"], seen["student"], strict=True):
        w = math.exp(-age / 8) / (1 + math.exp(-age / 8))
        cross = -sum(p * math.log(q) for p, q in zip(probabilities(target), probabilities(row), strict=True))
        terms.append(w * cross)
    close(loss.detach(), mean(terms))


def test_rotta_needs_batchnorm():
    with pytest.raises(ValueError, match="BatchNorm"):
        mgtta.create("rotta", vit())
    with pytest.raises(ValueError, match="frequency"):
        mgtta.create("rotta", convnet("batch"), frequency=0)


# SPA with ETA and EATA


def test_spa_eta_and_spa_eata_against_their_equations():
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    E0 = 0.65 * math.log(CLASSES)
    for name, own in (("spa_eta", {}), ("spa_eata", {"fisher": fisher, "fisher_weight": 50.0})):
        method = mgtta.create(name, model, margin=0.65, redundancy=0.97, lr=1e-3, **own)
        m, sizes = None, set()
        for t in range(3):
            x = images(16, seed=t).double()
            terms, kept = [], []
            for row in method.model(x).tolist():
                p = probabilities(row)
                if H(row) < E0 and (m is None or cosine(p, m) < 0.97):
                    terms.append(math.exp(E0 - H(row)) * H(row))
                    kept.append(p)
            sizes.add(len(kept))
            expected = mean(terms)
            if own:
                pairs = zip(method.adapted.items(), method.origin, strict=True)
                expected += 50 * sum((fisher.values[k] * (p - p_0) ** 2).sum().item() for (k, p), p_0 in pairs)
            twin = copy.deepcopy(method)
            consistency = SPA._loss(twin, x, twin.predictor, twin.noise)[1]
            both = copy.deepcopy(method).loss(x)[1]
            close((both - consistency).detach(), 0.1 * expected)
            method(x)
            average = [mean(column) for column in zip(*kept, strict=True)]
            m = average if m is None else [0.9 * a + 0.1 * b for a, b in zip(m, average, strict=True)]
            close(method.probs, m)
        assert 0 < min(sizes) < 16


def test_spa_eta_is_spa_where_no_image_is_reliable():
    found = {}
    for name, own in (("spa", {}), ("spa_eta", {"margin": 0.0}), ("spa_eta", {"margin": 0.65})):
        method = mgtta.create(name, unsure_vit(), lr=1e-3, **own)
        for t in range(3):
            method(images(8, seed=t).double())
        found[name, own.get("margin")] = torch.cat([p.detach().flatten() for p in method.adapted.values()])
    assert found["spa_eta", 0.0].equal(found["spa", None])
    assert not found["spa_eta", 0.65].equal(found["spa", None])


def test_spa_eata_does_not_forget():
    model = unsure_vit()
    fisher = mgtta.fisher_information(model, images(16, seed=9).double())
    ways = []
    for weight in (0.0, 100.0):
        method = mgtta.create("spa_eata", model, fisher=fisher, fisher_weight=weight, lr=1e-3)
        for t in range(10):
            method(images(8, seed=t).double())
        pairs = zip(method.adapted.items(), method.origin, strict=True)
        ways.append(sum((fisher.values[k] * (p - p_0) ** 2).sum().item() for (k, p), p_0 in pairs))
    assert 0 < ways[1] < ways[0]


def test_actmad_names_a_network_whose_features_nothing_changes():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = mgtta.load_model(nn.Sequential(*layers).eval())
    method = mgtta.create("actmad", model, source=mgtta.source_statistics(model, images(8)))
    with pytest.raises(ValueError, match="one normalisation layer: take another method"):
        method(images(8))
