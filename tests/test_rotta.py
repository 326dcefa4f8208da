"""RoTTA against its equations: the memory, robust BatchNorm and the teacher."""

import copy
import math

import pytest
import torch
from baselines import close, mean, moved, params_of
from conftest import convnet, images, vit
from torch import nn
from transcription import softmax as probabilities

import mgtta
from mgtta.methods._cstu import CSTU
from mgtta.methods._robust_bn import RobustStatistics


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
