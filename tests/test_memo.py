"""MEMO against its algorithm: each image on its own, and nothing is kept."""

import copy
import math

import pytest
import torch
from baselines import close, mean, unsure_vit
from conftest import confident_vit, convnet, images, vit
from transcription import softmax as probabilities

import mgtta
from mgtta.methods._augmix import augmix


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
