"""Models and arithmetic for the tests of LAME, T3A, FOA and batch statistics."""

import math

import torch
from conftest import CLASSES, confident_vit, images

import mgtta

SUBSET = [1, 4, 6, 7]
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": CLASSES}


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
