"""Models, settings and arithmetic for the tests of baselines against the equations of their papers."""

import math

import torch
from conftest import images, vit
from torch import nn
from transcription import softmax as probabilities

import mgtta
from mgtta._lib.timm import timm

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


def rate(method):
    return method.optimizer.param_groups[0]["lr"]


def nets():
    torch.manual_seed(0)
    block = timm.models.resnet.BasicBlock
    small = {"num_classes": 5, "channels": (4, 4, 8, 8), "stem_width": 4}
    return {
        "resnet": timm.models.ResNet(block, [1, 1, 1, 1], **small),
        "resnet_gn": timm.models.ResNet(block, [1, 1, 1, 1], **small, norm_layer=lambda c, **_: nn.GroupNorm(2, c)),
        "convnext": timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 4, 8, 8), num_classes=5),
    }


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
