"""The plain step over frozen weights in bfloat16, for methods whose steps depend on the values in a batch.

Nothing is compiled: the step is `EagerEngine`'s, and norm layers, logits, gradients and the optimizer are float32, as
on the rest of the fast path. On a GPU the passes through the network are CUDA graphs (mgtta.fast.graphed).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import EagerEngine, Pass
from mgtta.fast.bf16 import lower
from mgtta.fast.graphed import DEVICE, GraphedPasses


class RoundedEngine(EagerEngine):
    """The engine that rounds the method's frozen weights to bfloat16 and runs its own step."""

    precision = "bf16"

    def __init__(self, method: Method):
        super().__init__(method)
        lower(method.model)
        self.graphs: GraphedPasses | None = None

    def step(self, x: Tensor, learn: bool, observe: bool, collect: bool) -> Pass:
        if not learn:
            return super().step(x, learn, observe, collect)
        with self._passes().used(len(x)):
            return super().step(x, learn, observe, collect)

    def warm_up(self, x: Tensor, learn: bool | None = None, observe: bool = True, collect: bool = True) -> None:
        """Capture the passes of a step that learns, on a GPU; a prediction runs as it is."""
        passes = self._passes()
        on_gpu = next(self.method.model.parameters()).device.type == DEVICE
        if learn is False or not on_gpu or not passes.captures:
            return
        passes.at_once = True
        try:
            for _ in range(2):  # to see what passes there are, and to capture them
                self.step(x, True, observe, collect=False)
        finally:
            passes.at_once = False

    @property
    def graph_bytes(self) -> int:  # type: ignore[override]
        return 0 if self.graphs is None else self.graphs.bytes

    def _passes(self) -> GraphedPasses:
        if self.graphs is None:
            self.graphs = GraphedPasses(self.method.model.net, list(self.method.adapted.values()))
        return self.graphs

    def moving(self, fn: Callable[[Tensor], Tensor]) -> None:
        check_dtypes(fn, self.precision)
        self.graphs = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "graphs": None}  # a copy captures for itself


def check_dtypes(fn: Callable[[Tensor], Tensor], precision: str) -> None:
    """Raise an error if `fn`, a move of tensors, changes their dtypes."""
    if any(fn(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in (torch.float32, torch.bfloat16)):
        raise TypeError(f"precision={precision!r} has its own dtypes: take precision='fp32' for others")
