"""LAME, T3A, FOA and batch statistics against slow transcriptions of their papers, in float64."""

import copy
import gc
import math

import numpy as np
import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, convnet, images, vit
from torch import nn
from transcription import entropy, softmax

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta._lib.timm import timm
from mgtta.methods._evolution import Evolution
from mgtta.methods.bn import mixed
from mgtta.methods.lame import affinity, fixed_point

SUBSET = [1, 4, 6, 7]


def model(classes=None, net=None):
    """In float64, with features and predictions that differ from image to image."""
    return mgtta.load_model((net or confident_vit()).double(), classes=classes)


def foa(model, **settings):
    settings = {"prompts": 2, "population": 6} | settings
    return mgtta.create("foa", model, source=mgtta.source_statistics(model, images(16, seed=99)), **settings)


def numbers(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(row):
    norm = math.sqrt(sum(v * v for v in row))
    return [v / norm for v in row]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


# --- LAME ---


def lame_affinity(features, k):
    features, n = [unit(f) for f in features.tolist()], len(features)
    w = [[0.0] * n for _ in range(n)]
    for i in range(n):
        distance = {j: math.dist(features[i], features[j]) for j in range(n) if j != i}
        for j in sorted(distance, key=distance.get)[:k]:
            w[i][j] += 0.5
            w[j][i] += 0.5
    return w


def lame_step(q, w, z):
    """z_ik ~ q_ik exp(sum_j w_ij z_jk)"""
    n, c = len(q), len(q[0])
    pulls = [[sum(w[i][j] * z[j][k] for j in range(n)) for k in range(c)] for i in range(n)]
    return [softmax([math.log(q[i][k]) + pulls[i][k] for k in range(c)]) for i in range(n)]


def lame_objective(q, w, z):
    kl = sum(p * math.log(p / r) for zi, qi in zip(z, q, strict=True) for p, r in zip(zi, qi, strict=True))
    return kl - sum(w[i][j] * dot(z[i], z[j]) for i in range(len(z)) for j in range(i))


@pytest.mark.parametrize(("n", "classes"), [(1, None), (2, None), (4, SUBSET), (9, None)])
def test_lame_agrees_with_the_transcription(n, classes):
    classifier = model(classes)
    logits, features = classifier.embed(images(n))
    w = lame_affinity(features, 5)
    torch.testing.assert_close(affinity(features, 5), torch.tensor(w, dtype=torch.float64))
    z = q = [softmax(row) for row in logits.tolist()]
    for _ in range(100):
        z = lame_step(q, w, z)
    log_z = mgtta.create("lame", classifier)(images(n))
    torch.testing.assert_close(log_z.exp(), torch.tensor(z, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(log_z.exp().sum(1), torch.ones(n, dtype=torch.float64))


def test_lame_rests_at_a_fixed_point_that_lowers_its_objective():
    q = numbers(12, 5).softmax(-1)
    w = affinity(numbers(12, 3, seed=1), 5)
    z = fixed_point(q.log(), w, 100).exp()
    after_one = fixed_point(q.log(), w, 1).exp()

    def moves(z):
        return (torch.tensor(lame_step(q.tolist(), w.tolist(), z.tolist())) - z).abs().max()

    assert moves(z) < 1e-5 < 1e-2 < moves(after_one)
    values = [lame_objective(q.tolist(), w.tolist(), t.tolist()) for t in (q, after_one, z)]
    assert values == sorted(values, reverse=True)


def test_lame_lets_neighbours_outvote_one_and_no_neighbours_change_nothing():
    features = torch.cat([torch.ones(6, 4), -torch.ones(6, 4)]).double() + 0.1 * numbers(12, 4)
    logits = torch.tensor([[2.0, 0.0]] * 6 + [[0.0, 2.0]] * 6, dtype=torch.float64)
    logits[0] = torch.tensor([0.0, 0.5])  # one of the first six is called the other class
    log_q = logits.log_softmax(-1)
    assert fixed_point(log_q, affinity(features, 5), 100).argmax(-1).tolist() == [0] * 6 + [1] * 6
    torch.testing.assert_close(fixed_point(log_q, affinity(features, 0), 100), log_q)


def test_lame_spares_the_neighbours_of_a_bad_image():
    classifier, x = model(), images(6)
    x[2] = math.nan
    logits = mgtta.create("lame", classifier)(x)
    good = [0, 1, 3, 4, 5]
    torch.testing.assert_close(logits[good], classifier(x[good]).log_softmax(-1))


def test_lame_and_bn_out_of_budget_give_the_source_models_predictions():
    classifier = model()
    spent = mgtta.create("lame", classifier, max_updates=0)(images(6))
    assert torch.equal(spent, classifier(images(6)).log_softmax(-1))
    classifier = model(net=convnet("batch"))
    assert torch.equal(mgtta.create("bn", classifier, max_updates=0)(images(6)), classifier(images(6)))


# --- T3A ---


class SlowT3A:
    def __init__(self, weight, bias, most):
        self.most = most
        logits = [[dot(w, v) + b for w, b in zip(weight, bias, strict=True)] for v in weight]
        self.supports = [[(entropy(y), unit(w))] for y, w in zip(logits, weight, strict=True)]

    def __call__(self, logits, z):
        for y, features in zip(logits, z, strict=True):
            self.supports[y.index(max(y))].append((entropy(y), unit(features)))
        self.supports = [sorted(s, key=lambda pair: pair[0])[: self.most] for s in self.supports]
        centroids = [unit([sum(column) for column in zip(*(v for _, v in s), strict=True)]) for s in self.supports]
        return [[dot(features, c) for c in centroids] for features in z]


@pytest.mark.parametrize("classes", [None, SUBSET])
@pytest.mark.parametrize("most", [1, 3, 20])
def test_t3a_agrees_with_the_transcription(classes, most):
    classifier = model(classes)
    index = classes or list(range(CLASSES))
    slow = SlowT3A(classifier.head.weight[index].tolist(), classifier.head.bias[index].tolist(), most)
    method = mgtta.create("t3a", classifier, supports=most)
    for t in range(6):
        x = images(8, seed=t)
        expected = slow(*(t.tolist() for t in classifier.embed(x)))
        torch.testing.assert_close(method(x), torch.tensor(expected, dtype=torch.float64))
    assert method.supports.shape[0] == sum(len(s) for s in slow.supports)


def test_t3a_keeps_the_most_certain_of_all_it_has_seen():
    classifier = model()
    method, hoarder = mgtta.create("t3a", classifier, supports=3), mgtta.create("t3a", classifier, supports=10**3)
    for t in range(12):
        method(images(8, seed=t))
        hoarder(images(8, seed=t))
    assert len(hoarder.labels) == CLASSES + 12 * 8
    assert len(method.labels) < len(hoarder.labels)
    for k in range(CLASSES):
        everything = hoarder.entropies[hoarder.labels == k].sort().values
        torch.testing.assert_close(method.entropies[method.labels == k].sort().values, everything[:3])
    assert not torch.allclose(method.predict(images(8)), hoarder.predict(images(8)))


def test_t3a_starts_with_the_classifiers_rows_and_predicts_with_the_batch_among_its_supports():
    classifier, x = model(), images(8)
    rows = nn.functional.normalize(classifier.head.weight, dim=-1)
    z = classifier.embed(x)[1]
    method = mgtta.create("t3a", classifier)
    torch.testing.assert_close(method.predict(x), z @ rows.T)
    logits = method(x)
    assert not torch.allclose(logits, z @ rows.T)
    assert torch.equal(logits, method.predict(x))  # nothing happens between adding and predicting


# --- FOA ---


def forward(classifier, x, prompt):
    """Logits and the class tokens of Eq. 5, with prompts between class token and patches."""
    net = classifier.net
    tokens = net._pos_embed(net.patch_embed(x.double()))
    tokens = torch.cat([tokens[:, :1], prompt.expand(len(x), -1, -1), tokens[:, 1:]], 1)
    features = []
    for block, norm in zip(net.blocks, [*(b.norm1 for b in net.blocks[1:]), net.norm], strict=True):
        tokens = block(tokens)
        features.append(norm(tokens)[:, 0])
    logits = net.head(features[-1])
    return (logits if classifier.classes is None else logits[:, classifier.classes]), features


def slow_fitness(logits, features, source, trade_off):
    """Eq. 5, distances squared, discrepancy scaled by N / 64"""
    n = len(logits)
    total = 0.0
    for f, mu_s, sigma_s in zip(features, source.mean, source.std, strict=True):
        for column, m, s in zip(f.T.tolist(), mu_s.tolist(), sigma_s.tolist(), strict=True):
            mu = sum(column) / n
            total += (mu - m) ** 2
            if n > 1:
                total += (math.sqrt(sum((v - mu) ** 2 for v in column) / (n - 1)) - s) ** 2
    return sum(entropy(row) for row in logits.tolist()) + trade_off * n / 64 * total


@pytest.mark.parametrize(("n", "classes"), [(1, None), (6, None), (6, SUBSET)])
@torch.no_grad()
def test_foa_fitness_agrees_with_the_transcription(n, classes):
    classifier = model(classes)
    method = foa(classifier, trade_off=0.3)
    prompts, x = numbers(3, 2 * 16).unflatten(1, (2, 16)), images(n)
    fitness, logits, means = method.evaluate(x, prompts)  # three candidates in one pass
    for i, prompt in enumerate(prompts):
        expected, features = forward(classifier, x, prompt)
        torch.testing.assert_close(logits[i], expected)
        torch.testing.assert_close(means[i], features[-1].mean(0))
        assert fitness[i].item() == pytest.approx(slow_fitness(expected, features, method.source, 0.3), rel=1e-9)


@pytest.mark.parametrize("classes", [None, SUBSET])
@torch.no_grad()
def test_foa_agrees_with_the_transcription(classes):
    """Candidates, choice, carry-over and shift, over a stream: Eqs. 5 to 9."""
    classifier = model(classes)
    head = classifier.net.head
    index = slice(None) if classes is None else classes
    method, twin = foa(classifier), Evolution(2 * 16, 5, seed=0)
    best, mu = method.prompt, None
    for t in range(5):
        x = images(6, seed=t)
        candidates = [best, *torch.from_numpy(twin.ask()).unflatten(1, (2, 16))]
        found = [forward(classifier, x, p) for p in candidates]
        fitness = [slow_fitness(*f, method.source, 0.4) for f in found]
        twin.tell(best.flatten().numpy(), fitness)
        winner = fitness.index(min(fitness))
        best, e = candidates[winner], found[winner][1][-1]
        shifted = e if mu is None else e + method.source.mean[-1] - mu  # Eqs. 7, 8
        torch.testing.assert_close(method(x), head(shifted)[:, index])
        torch.testing.assert_close(method.prompt, best)
        now = torch.stack([features[-1].mean(0) for _, features in found]).mean(0)
        mu = now if mu is None else 0.9 * mu + 0.1 * now  # Eq. 9
        torch.testing.assert_close(method.mean, mu)
        assert t == 0 or not torch.allclose(head(shifted), head(e), atol=1e-2)  # the shift is no trifle


def test_foa_samples_by_eq_6():
    """p_k = m + tau C^(1/2) N(0, I), C's root by its eigenvectors, which are renewed every few generations."""
    evolution = Evolution(40, 7, seed=3)
    for t in range(30):
        random = copy.deepcopy(evolution._random)
        asked, es = evolution.ask(), evolution._es
        z = random.standard_normal((7, 40))
        np.testing.assert_allclose(asked, es.mean + es.sigma * (z * es.sm.D) @ es.sm.B.T, rtol=1e-12, atol=1e-12)
        if es.sm.last_update == es.sm.count_tell and t:
            np.testing.assert_allclose((es.sm.B * es.sm.D**2) @ es.sm.B.T, es.sm.C, atol=1e-12)
        evolution.tell(np.ones(40), [1600.0, *((asked - 2) ** 2 * np.arange(1, 41)).sum(1)])


def test_foa_carries_the_previous_best_over():
    method = foa(model())
    for t in range(2):
        method(images(6, seed=t))
    best, told = method.prompt.clone(), []
    method.evolution.ask = lambda: np.full((5, 32), 1e4)  # samples that are no good
    method.evolution.tell = lambda extra, fitness: told.append((extra, fitness))
    x = images(6, seed=9)
    expected = method.predict(x)
    torch.testing.assert_close(method(x), expected)
    assert torch.equal(method.prompt, best)
    [(extra, fitness)] = told
    np.testing.assert_array_equal(extra, best.flatten().numpy())
    assert len(fitness) == 6
    assert fitness[0] == min(fitness) < min(fitness[1:])


def test_foa_learns():
    method, x = foa(model(), population=12), images(6)
    values = []
    for _ in range(25):
        method(x)
        values.append(method.evaluate(x, method.prompt[None])[0].item())
    assert values == sorted(values, reverse=True)  # the best is never lost
    assert values[-1] < values[0]


def test_foa_passes_may_be_large_or_small(monkeypatch):
    many, one = foa(model()), foa(model())
    for t in range(3):
        monkeypatch.setattr("mgtta.methods.foa.IMAGES", 64)
        a = many(images(3, seed=t))
        monkeypatch.setattr("mgtta.methods.foa.IMAGES", 1)
        torch.testing.assert_close(a, one(images(3, seed=t)))


def test_foa_is_as_if_a_bad_batch_had_never_been():
    method, twin = foa(model()), foa(model())
    for t in range(4):
        bad = images(4)
        bad[0, 0, 0, 0] = math.inf
        logits = method(bad)
        assert logits[1:].isfinite().all()
        assert torch.equal(method(images(4, seed=t)), twin(images(4, seed=t)))
    assert (method.updates, method.skipped) == (4, 4)


def test_foa_outlives_a_candidate_that_overflows():
    method = foa(mgtta.load_model(vit()))
    ask = method.evolution.ask
    method.evolution.ask = lambda: ask() * np.array([1, 1e38, 1, 1, 1])[:, None]
    method(images(4))
    assert method.updates == 1
    assert method.mean.isfinite().all()
    assert all(method(images(4, seed=t)).isfinite().all() for t in range(3))


def test_foa_seeds_and_the_global_generators():
    np.random.seed(0)
    torch.manual_seed(0)
    first = [foa(model(), seed=seed)(images(4)) for seed in (0, 0, 1)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    np.random.seed(0)
    expected = np.random.rand()
    np.random.seed(0)
    foa(model())(images(4))
    assert np.random.rand() == expected


def test_foa_without_a_budget_is_the_source_model_and_with_one_stays_where_it_was():
    classifier = model()
    assert torch.equal(foa(classifier, max_updates=0)(images(4)), classifier(images(4)))
    method = foa(classifier, max_updates=2)
    for t in range(4):
        method(images(4, seed=t))
    expected = forward(classifier, images(4), method.prompt)[1][-1] + method.source.mean[-1] - method.mean
    torch.testing.assert_close(method(images(4)), classifier.net.head(expected))


@pytest.mark.parametrize(("dimension", "population"), [(8, 5), (320, 9)])
def test_evolution_resumes_bit_for_bit(dimension, population, tmp_path):
    def generation(evolution):
        asked = evolution.ask()
        extra = 0.1 * np.cos(np.arange(dimension))
        fitness = [float((weights * (v - 1) ** 2).sum()) for v in [extra, *asked]]
        evolution.tell(extra, fitness)
        return asked

    weights = np.linspace(1, 30, dimension)
    evolution, straight, lags = Evolution(dimension, population, seed=0), [], []
    for t in range(36):
        straight.append(generation(evolution))
        if t % 5 == 3:
            write_tree(tmp_path / str(t), evolution.state(), {})
            lags.append(evolution._es.sm.count_tell - evolution._es.sm.last_update)
            twin = copy.deepcopy(evolution)
    assert evolution._es.sm.count_eigen > 2
    assert dimension < 100 or len(set(lags)) > 2  # saved at several distances from the last decomposition of C
    for t in range(3, 36, 5):
        other = Evolution(dimension, population, seed=7)
        generation(other)  # somewhere else entirely
        other.load(read_tree(tmp_path / str(t))[0])
        for expected in straight[t + 1 :]:
            np.testing.assert_array_equal(generation(other), expected)
        assert other._es.sigma == evolution._es.sigma
    for expected in straight[34:]:
        np.testing.assert_array_equal(generation(twin), expected)


@pytest.mark.parametrize(
    ("make", "lacks"),
    [
        (lambda: convnet("batch"), "blocks"),
        (lambda: timm.models.VisionTransformer(**TINY, class_token=False, global_pool="avg"), "class token"),
        (lambda: timm.models.VisionTransformerDistilled(**TINY), "one linear head"),
    ],
)
def test_foa_says_what_it_needs(make, lacks):
    with pytest.raises(ValueError, match=f"VisionTransformer.*lacks.*{lacks}"):
        foa(mgtta.load_model(make()))


TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": CLASSES}


def test_foa_refuses_other_weights_and_empty_settings():
    classifier = model()
    source = mgtta.source_statistics(model(net=vit(seed=5)), images(8))
    with pytest.raises(ValueError, match="other weights"):
        mgtta.create("foa", classifier, source=source)
    with pytest.raises(ValueError, match="prompts must be"):
        foa(classifier, prompts=0)


# --- batch statistics ---


def slow_bn(net, x, prior):
    """Schneider's mixture in every BatchNorm layer, (h - mu) / sqrt(var + eps) gamma + beta."""
    h, n = x.double(), len(x)
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            channels = []
            for c, values in enumerate(h.transpose(0, 1)):  # (N, H, W)
                values = values.flatten().tolist()
                mu_t = sum(values) / len(values)
                var_t = sum((v - mu_t) ** 2 for v in values) / len(values)
                mu = prior / (prior + n) * layer.running_mean[c] + n / (prior + n) * mu_t
                var = prior / (prior + n) * layer.running_var[c] + n / (prior + n) * var_t
                scale = layer.weight[c] / (var + layer.eps).sqrt()
                channels.append((h[:, c] - mu) * scale + layer.bias[c])
            h = torch.stack(channels, 1)
        else:
            h = layer(h)
    return h


def lively(net):
    """Running statistics and affine parameters that are no ones and zeros."""
    torch.manual_seed(0)
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return net


@pytest.mark.parametrize("prior", [0, 3.5, 16])
@pytest.mark.parametrize("n", [1, 5])
@torch.no_grad()
def test_bn_agrees_with_the_transcription(n, prior):
    classifier = model(net=lively(convnet("batch")))
    before = copy.deepcopy(classifier.state_dict())
    method = mgtta.create("bn", classifier, prior=prior)
    torch.testing.assert_close(method(images(n)), slow_bn(classifier.net, images(n), prior))
    assert all(torch.equal(t, before[name]) for name, t in method.model.state_dict().items())


def test_bn_between_the_batch_alone_and_the_source_alone():
    classifier = model(net=lively(convnet("batch")))
    batch = copy.deepcopy(classifier).use_batch_statistics()(images(6))
    torch.testing.assert_close(mgtta.create("bn", classifier)(images(6)), batch)
    torch.testing.assert_close(mgtta.create("bn", classifier, prior=1e15)(images(6)), classifier(images(6)))
    assert not torch.allclose(batch, classifier(images(6)), atol=1e-2)


def test_bn_with_one_value_a_channel():
    mean, var, h = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([[5.0, 6.0]])
    assert mixed(h, mean, var, 0.0, 1) == (mean, var)
    torch.testing.assert_close(mixed(h, mean, var, 3.0, 1), (torch.tensor([2.0, 3.0]), torch.tensor([2.25, 3.0])))


def test_bn_gives_the_other_images_of_a_bad_batch_the_source_statistics():
    classifier, x = model(net=lively(convnet("batch"))), images(5)
    x[0] = math.nan
    method = mgtta.create("bn", classifier)
    torch.testing.assert_close(method(x)[1:], classifier(x)[1:])
    assert (method.updates, method.skipped) == (0, 1)


def test_bn_puts_the_running_statistics_back_when_the_model_fails():
    method = mgtta.create("bn", model(net=lively(convnet("batch"))))
    before = copy.deepcopy(method.model.state_dict())
    with pytest.raises(ValueError, match="refuses images"):
        method(torch.rand(2, 3, 2, 2))  # too small for the second convolution
    assert all(torch.equal(t, before[name]) for name, t in method.model.state_dict().items())


def test_bn_needs_batchnorm():
    for name in ("vit", "groupnorm"):
        with pytest.raises(ValueError, match="no BatchNorm"):
            mgtta.create("bn", NETS[name]())
    with pytest.raises(ValueError, match="prior"):
        mgtta.create("bn", NETS["batchnorm"](), prior=-1)


# --- all of them ---

OTHERS = {
    "convnext": lambda: timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=CLASSES),
    "resnet": lambda: timm.models.ResNet(
        timm.models.resnet.BasicBlock, (1, 1, 1, 1), channels=(8, 8, 16, 16), num_classes=CLASSES
    ),
    "activated": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), timm.layers.BatchNormAct2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", ["lame", "t3a", "bn"])
def test_other_models(name, kind):
    if (name, kind) == ("bn", "convnext"):
        return
    for classes in (None, SUBSET):
        method = mgtta.create(name, mgtta.load_model(OTHERS[kind](), classes=classes))
        for t in range(3):
            logits = method(images(4, seed=t))
            assert logits.shape == (4, len(classes or range(CLASSES)))
            assert logits.isfinite().all()
        assert method.updates == 3


@pytest.mark.parametrize("name", ["lame", "t3a"])
def test_a_model_without_a_linear_head_is_refused(name):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match="no linear head"):
        mgtta.create(name, net)


def test_t3a_refuses_a_last_linear_layer_that_is_not_the_head():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate = convnet("batch"), nn.Linear(CLASSES, 1)

        def forward(self, x):
            logits = self.body(x)
            return logits * self.gate(logits).sigmoid()

    with pytest.raises(ValueError, match="get_classifier"):
        mgtta.create("t3a", Gated())(images(2))


@pytest.mark.parametrize("name", ["lame", "t3a", "foa", "bn"])
def test_memory_does_not_grow_over_500_batches(name):
    classifier = mgtta.load_model(convnet("batch") if name == "bn" else timm.models.VisionTransformer(**TINY))
    settings = {"supports": 2} if name == "t3a" else {}
    method = foa(classifier, prompts=1, population=5) if name == "foa" else mgtta.create(name, classifier, **settings)

    def size(node):
        if isinstance(node, dict):
            return sum(map(size, node.values()))
        return node.numel() if isinstance(node, torch.Tensor) else 1

    sizes, objects = [], []
    for t in range(500):
        method(images(2, seed=t % 50))
        if t in (299, 499):
            gc.collect()
            sizes.append(size(method.state_dict()))
            objects.append(len(gc.get_objects()))
    assert method.updates == 500
    assert sizes[0] == sizes[1]
    assert objects[1] - objects[0] < 100
    assert name != "t3a" or len(method.supports) <= 2 * CLASSES
