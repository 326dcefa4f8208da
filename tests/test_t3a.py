"""T3A against a slow transcription of its paper, in float64."""

import pytest
import torch
from conftest import CLASSES, convnet, images
from gradient_free import SUBSET, dot, model, unit
from torch import nn
from transcription import entropy

import mgtta


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
