"""Small, real models and data for all tests: a tiny ViT and a tiny net of each other kind of norm layer."""

import os
import shutil

# Some CPUs advertise AMX instructions that the machine forbids: torch's bfloat16 layers then kill the process with
# "Illegal instruction". The limit must be set before torch is imported. Child processes inherit it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from small_bench import character_tree
from torch import nn

import mgtta
from mgtta._lib.timm import timm
from mgtta.adaptation import guarded

torch.set_num_threads(1)
CLASSES = 10


def vit(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=CLASSES
    )


def confident_vit(seed: int = 0) -> nn.Module:
    """Random weights large enough that images differ in features and predictions, so there is much to adapt."""
    net = vit(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1 and "token" not in name and "pos" not in name:
                p.mul_(8.0 if "head" not in name else 40.0)
    return net


def convnet(norm: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    make = {"batch": nn.BatchNorm2d, "group": lambda c: nn.GroupNorm(2, c)}[norm]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        make(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        make(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def images(n: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def random_pixels_count(request, monkeypatch):
    """Let a guard learn from random pixels, as the images of the tests are; tests of `content` are left out."""
    if "content" not in request.node.name:
        monkeypatch.setattr(guarded, "has_content", lambda x: torch.ones(len(x), dtype=torch.bool))


NETS = {
    "vit": vit,
    "batchnorm": lambda: convnet("batch"),
    "groupnorm": lambda: convnet("group"),
}


@pytest.fixture(params=NETS)
def any_model(request) -> mgtta.Classifier:
    return mgtta.load_model(NETS[request.param]())


@pytest.fixture
def model() -> mgtta.Classifier:
    return mgtta.load_model(vit())


@pytest.fixture
def source(model) -> mgtta.SourceStatistics:
    return mgtta.source_statistics(model, images(32, seed=99))


@pytest.fixture
def generator() -> mgtta.MetaGradientGenerator:
    return random_generator()


def random_generator(hidden_size: int = 8, memory: str = "gml", seed: int = 0) -> mgtta.MetaGradientGenerator:
    """Weights of order one, so that every term of the equations matters."""
    torch.manual_seed(seed)
    generator = mgtta.MetaGradientGenerator(hidden_size, memory)
    with torch.no_grad():
        for p in generator.parameters():
            p.add_(0.4 * torch.randn_like(p))
    return generator


@pytest.fixture
def tree(tmp_path):
    return character_tree(tmp_path / "tree")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium, if it is installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium here: the page was not looked at in a browser (install chromium, chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "no-first-run",
        "disable-dev-shm-usage",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield driver
    driver.quit()
