"""Residual blocks of timm's and torchvision's ResNets, whose BatchNorm layers add the shortcut and apply ReLU.

Such a layer takes two more arguments, `residual` and `relu`: see Hooked in mgtta.fast.bf16.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor, nn

from mgtta._lib.timm import timm, torchvision

RESNETS = (timm.models.resnet, torchvision.models.resnet)
BLOCKS = tuple(kind for module in RESNETS for kind in (module.BasicBlock, module.Bottleneck))
NETS = tuple(module.ResNet for module in RESNETS)
Pairs = list[tuple[nn.Module, nn.Module]]  # of a convolution and its norm layer


def fuse_residual_blocks(net: nn.Module, fusing: Collection[nn.Module]) -> None:
    """Let blocks hand shortcut and ReLU to their BatchNorm layers.

    Args:
        fusing: the layers that take them.
    """
    for module in net.modules():
        pairs = _pairs(module, fusing)
        if pairs is not None:
            module.forward = partial(_run_block, module, pairs)
    stem: Any = net
    if type(net) in NETS and _fuses(stem.bn1, fusing):
        act = _act(stem, "act1")
        if act is not None:
            stem.bn1.forward = partial(stem.bn1.forward, relu=True)
            act.forward = _unchanged


def _pairs(block: Any, fusing: Collection[nn.Module]) -> Pairs | None:
    """Return a block's convolutions and norm layers if nothing but ReLU and the shortcut come between them."""
    if type(block) not in BLOCKS or "forward" in vars(block):
        return None
    numbers = range(1, 4 if hasattr(block, "conv3") else 3)
    pairs = [(getattr(block, f"conv{i}"), getattr(block, f"bn{i}")) for i in numbers]
    others = [getattr(block, name, None) for name in ("drop_block", "aa", "se", "drop_path")]
    bare = all(other is None or isinstance(other, nn.Identity) for other in others)
    acts = all(_act(block, f"act{i}") is not None for i in numbers)
    if not (bare and acts and all(_fuses(norm, fusing) for _, norm in pairs)):
        return None
    return pairs


def _fuses(norm: nn.Module, fusing: Collection[nn.Module]) -> bool:
    """Return whether a norm layer may give more than its own output, which no hook but this library's sees."""
    own = all(getattr(hook, "is_mgtta_hook", False) for hook in norm._forward_hooks.values())
    return norm in fusing and own


def _act(module: Any, name: str) -> Any:
    """Return a module's ReLU, timm's by its name or torchvision's only one; None if it is not plain."""
    act: Any = getattr(module, name, None) or getattr(module, "relu", None)
    plain = type(act) is nn.ReLU and "forward" not in vars(act)
    if not plain or act._forward_hooks or act._forward_pre_hooks:
        return None
    return act


def _run_block(block: Any, pairs: Pairs, x: Tensor) -> Tensor:
    shortcut = x
    if block.downsample is not None:
        shortcut = block.downsample(x)
    *first, (convolution, norm) = pairs
    for own_convolution, own_norm in first:
        x = own_norm(own_convolution(x), relu=True)
    return norm(convolution(x), residual=shortcut, relu=True)


def _unchanged(x: Tensor) -> Tensor:
    return x
