"""Networks of the benchmarks that timm does not have; importing this file adds them to timm's names."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mgtta._lib.timm import timm

KERAS_MEAN = (123.68, 116.779, 103.939)  # of red, green, blue, 0 to 255
KERAS_EPS = 1e-3
CIFAR_PLANES = (16, 32, 64)


@timm.models.register_model
def keras_resnet50(pretrained: bool = False, num_classes: int = 1000, **_: Any) -> nn.Module:
    """Return ResNet-50 as Keras has it: timm's, with the strides on the first 1x1 convolutions (He et al., 2015).

    Its names are those of timm's resnet50. `benchmarks/weights.py resnet50` converts the weights.
    """
    _refuse(pretrained, "keras_resnet50", "python benchmarks/weights.py resnet50 writes them")
    norm = partial(nn.BatchNorm2d, eps=KERAS_EPS)
    net: Any = timm.create_model("resnet50", num_classes=num_classes, norm_layer=norm)
    for stage in (net.layer2, net.layer3, net.layer4):
        stage[0].conv1.stride = (2, 2)
        stage[0].conv2.stride = (1, 1)
    net.pretrained_cfg = {
        "architecture": "keras_resnet50",
        "mean": tuple(value / 255 for value in KERAS_MEAN),
        "std": (1 / 255, 1 / 255, 1 / 255),
        "input_size": (3, 224, 224),
        "crop_pct": 0.875,
        "first_conv": "conv1",
        "num_classes": num_classes,
    }
    return net


@timm.models.register_model
def cifar_resnet56(pretrained: bool = False, num_classes: int = 10, **_: Any) -> nn.Module:
    """Return the ResNet-56 for images of 32 pixels (He et al., 2015): three stages of nine blocks."""
    _refuse(pretrained, "cifar_resnet56", "name a file of its weights")
    return CifarResNet(blocks=9, num_classes=num_classes)


class CifarResNet(nn.Module):
    """A ResNet for images of 32 pixels, with 6 * blocks + 2 layers. Its shortcuts have no parameters.

    Images are normalised as for ImageNet.
    """

    def __init__(self, blocks: int, num_classes: int = 10):
        super().__init__()
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(3, CIFAR_PLANES[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(CIFAR_PLANES[0])
        self.layer1 = _stage(CIFAR_PLANES[0], CIFAR_PLANES[0], blocks)
        self.layer2 = _stage(CIFAR_PLANES[0], CIFAR_PLANES[1], blocks)
        self.layer3 = _stage(CIFAR_PLANES[1], CIFAR_PLANES[2], blocks)
        self.linear = nn.Linear(CIFAR_PLANES[2], num_classes)
        self.pretrained_cfg = {
            "architecture": f"cifar_resnet{6 * blocks + 2}",
            "mean": timm.data.IMAGENET_DEFAULT_MEAN,
            "std": timm.data.IMAGENET_DEFAULT_STD,
            "input_size": (3, 32, 32),
            "crop_pct": 1.0,
            "first_conv": "conv1",
            "num_classes": num_classes,
        }

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images (N, 3, H, W)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


class _Block(nn.Module):
    """Two 3x3 convolutions. A shortcut to more planes takes every second pixel and fills up with zeros."""

    def __init__(self, planes_in: int, planes: int):
        super().__init__()
        self.stride = planes // planes_in
        self.new_planes = planes - planes_in
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        before = self.new_planes // 2
        shortcut = x[:, :, :: self.stride, :: self.stride]
        padded = F.pad(shortcut, (0, 0, 0, 0, before, self.new_planes - before))
        return F.relu(y + padded)


def _stage(planes_in: int, planes: int, blocks: int) -> nn.Sequential:
    rest = [_Block(planes, planes) for _ in range(blocks - 1)]
    return nn.Sequential(_Block(planes_in, planes), *rest)


def _refuse(pretrained: bool, name: str, remedy: str) -> None:
    if pretrained:
        raise ValueError(f"{name} has no weights to download: {remedy}; give them as the checkpoint")
