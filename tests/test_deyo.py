"""DeYO against its equations, its filter by shape, and its settings."""

import math

import pytest
import torch
from baselines import close, mean, rate, unsure_vit
from conftest import CLASSES, images, vit
from torch import nn
from transcription import entropy as H
from transcription import softmax as probabilities

import mgtta
from mgtta._lib.timm import timm
from mgtta.methods.deyo import random_orders, shuffle_patches


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
