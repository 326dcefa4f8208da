"""Forward and backward passes of a network as CUDA graphs, for methods whose steps depend on the values in a batch.

Such a method decides between two passes which images go through the network again. Each pass is a graph for as many
images as the batch has: fewer are filled up, and what was filled up gets no gradient. That is exact for networks in
which images do not depend on each other, so networks with BatchNorm layers are left as they are. The CPU launches one
graph in the place of a thousand kernels.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mgtta.fast.captured import capturing, clear_workspaces, kept_if_broken
from mgtta.models.norms import batch_norms

CAPTURE_BATCHES = 8  # of a shape, before its passes are captured
DEVICE = "cuda"  # a type of device that has graphs
WARM_UPS = 3  # runs before a capture


class GraphedPasses:
    """The passes of one network, which replay graphs while a block of `used` runs.

    Attributes:
        captures: False after a capture has failed: then the network runs as it is.
        at_once: True: capture what has been seen once.
    """

    def __init__(self, net: nn.Module, params: Sequence[nn.Parameter]):
        self.net = net
        self.params = list(params)
        self.captures = not batch_norms(net)
        self.at_once = False
        self.seen: Counter[_Kind] = Counter()
        self.passes: dict[_Kind, _Pass] = {}
        self.images = 0  # of the present batch
        self.learning = 0  # passes with gradients so far, in the present step

    @property
    def bytes(self) -> int:
        """What the graphs take of the GPU's memory, which torch does not count as allocated."""
        return sum(captured.bytes for captured in self.passes.values())

    @contextmanager
    def used(self, images: int) -> Iterator[None]:
        """Let the network run by graphs in this block, which is one step of a batch of so many images.

        What is frequent is captured at the start of a step, when no gradients are on their way.
        """
        if not self.captures or "forward" in vars(self.net):
            yield
            return
        self.images = images
        self.learning = 0
        own = self.net.forward
        least = 0 if self.at_once else CAPTURE_BATCHES
        for kind in [kind for kind, count in self.seen.items() if kind.images == images and count > least]:
            if kind not in self.passes and self.captures:
                self._capture(kind, own)
        self.net.forward = lambda *inputs: self._run(own, *inputs)
        try:
            yield
        finally:
            del self.net.forward

    def _run(self, own: Callable[..., Any], *inputs: Any) -> Any:
        """Run the network by a graph if there is one, or as it is."""
        x = inputs[0]
        fits = len(inputs) == 1 and isinstance(x, Tensor) and 0 < len(x) <= self.images
        if not fits or x.device.type != DEVICE or x.requires_grad:
            return own(*inputs)
        learns = torch.is_grad_enabled()
        kind = _Kind(self.images, x.shape[1:], x.dtype, self.learning if learns else None)
        self.learning += learns
        self.seen[kind] += 1
        if kind in self.passes:
            return self.passes[kind](x)
        return own(x)

    def _capture(self, kind: "_Kind", own: Callable[..., Any]) -> None:
        x = torch.zeros(kind.images, *kind.shape, dtype=kind.dtype, device=self.params[0].device)
        try:
            with torch.set_grad_enabled(kind.number is not None):
                self.passes[kind] = _Pass(own, x, self.params)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as it is, all works, only slower
            self.captures = False
            self.passes.clear()
            name = type(self.net).__name__
            told = f"a CUDA graph does not hold {name} ({type(error).__name__}: {error}): it runs without one"
            warnings.warn(told, stacklevel=2)


class _Kind(NamedTuple):
    """Passes that one graph serves."""

    images: int  # of the batch; fewer are filled up
    shape: torch.Size  # of an image
    dtype: torch.dtype
    number: int | None  # among the passes with gradients of a step; None: without gradients


class _Pass:
    """One forward pass as a CUDA graph, and its backward pass as another if gradients are enabled.

    Args:
        x: the images that the graph reads; others are copied to this place.

    Attributes:
        bytes: what both take of the GPU's memory at most, as torch counts what is allocated.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], x: Tensor, params: list[nn.Parameter]):
        self.x = x
        self.params = params
        self.forward = torch.cuda.CUDAGraph()
        self.backward = torch.cuda.CUDAGraph() if torch.is_grad_enabled() else None
        device = x.device
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside), capturing(device):
            for _ in range(WARM_UPS):
                self.y = run(x)
                self.grad = torch.zeros_like(self.y)
                self._gradients()
        torch.cuda.current_stream(device).wait_stream(beside)
        torch.cuda.synchronize(device)
        clear_workspaces()
        torch.cuda.reset_peak_memory_stats(device)
        allocated = torch.cuda.memory_allocated(device)
        graph = partial(torch.cuda.graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local")
        with kept_if_broken(self.forward), capturing(device), graph(self.forward):
            self.y = run(x)
        self.grads: list[Tensor | None] = []
        if self.backward is not None:
            pool = self.forward.pool()
            with kept_if_broken(self.forward, self.backward), capturing(device), graph(self.backward, pool=pool):
                self.grads = self._gradients()
        self.y = self.y.detach()
        clear_workspaces()
        self.bytes = torch.cuda.max_memory_allocated(device) - allocated
        torch.cuda.reset_peak_memory_stats(device)

    def _gradients(self) -> list[Tensor | None]:
        if self.backward is None:
            return []
        return list(torch.autograd.grad(self.y, self.params, self.grad, allow_unused=True))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the network's output for images x, at most as many as the graph has."""
        if self.backward is None:
            return self.replay(x)
        return _Replayed.apply(self, x, *self.params)

    def replay(self, x: Tensor) -> Tensor:
        self.x[: len(x)].copy_(x)
        self.x[len(x) :].zero_()
        self.forward.replay()
        return self.y[: len(x)].clone()

    def replay_backward(self, grad: Tensor) -> list[Tensor | None]:
        assert self.backward is not None
        self.grad[: len(grad)].copy_(grad)
        self.grad[len(grad) :].zero_()
        self.backward.replay()
        return [None if g is None else g.clone() for g in self.grads]


class _Replayed(torch.autograd.Function):
    """A captured pass, for autograd."""

    @staticmethod
    def forward(ctx: Any, captured: _Pass, x: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.captured = captured
        return captured.replay(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.captured.replay_backward(grads[0])
