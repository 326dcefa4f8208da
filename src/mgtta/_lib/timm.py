"""The one place that imports timm and torchvision.

A torchvision built for CUDA beside a CPU build of torch cannot load its compiled operators, and then
`import torchvision`, and with it `import timm`, fails with "operator torchvision::nms does not exist".
mgtta does not use those operators, so it declares their schemas by hand and tries the import again.
"""

import sys

import torch

_library = None  # the declarations live as long as this object


def _declare_missing_operators() -> None:
    global _library
    for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        _library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    _declare_missing_operators()
    import torchvision

import timm  # noqa: E402
from torchvision.transforms import v2 as transforms  # noqa: E402

__all__ = ["timm", "torchvision", "transforms"]
