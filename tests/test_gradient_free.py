"""What several of the methods without gradients do alike: LAME, T3A, FOA and batch statistics."""

import gc

import pytest
import torch
from conftest import CLASSES, convnet, images
from gradient_free import SUBSET, TINY, foa
from torch import nn

import mgtta
from mgtta._lib.timm import timm

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
