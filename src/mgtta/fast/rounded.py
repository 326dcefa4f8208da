"""The plain step over frozen weights in bfloat16, for methods whose steps depend on the values in a batch.

Nothing is compiled or captured: the step is `EagerEngine`'s, and norm layers, logits, gradients and the optimizer are
float32, as on the rest of the fast path.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import EagerEngine
from mgtta.fast.bf16 import lower


class RoundedEngine(EagerEngine):
    """The engine that rounds the method's frozen weights to bfloat16 and runs its own step."""

    precision = "bf16"

    def __init__(self, method: Method):
        super().__init__(method)
        lower(method.model)

    def moving(self, fn: Callable[[Tensor], Tensor]) -> None:
        check_dtypes(fn, self.precision)


def check_dtypes(fn: Callable[[Tensor], Tensor], precision: str) -> None:
    """Raise an error if `fn`, a move of tensors, changes their dtypes."""
    if any(fn(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in (torch.float32, torch.bfloat16)):
        raise TypeError(f"precision={precision!r} has its own dtypes: take precision='fp32' for others")
