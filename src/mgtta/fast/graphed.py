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
from typing import Any

import torch
from torch import Tensor, nn

from mgtta.fast.captured import capturing, clear_workspaces
from mgtta.models.norms import batch_norms

CAPTURE_BATCHES = 8  # of a shape, before its passes are captured
DEVICE = "cuda"  # a type of device that has graphs
WARM_UPS = 3  # runs before a capture


class GraphedPasses:
    """The passes of one network, captured while a block of `used` runs.

    Attributes:
        captures: False after a capture has failed: then the network runs as it is.
    """

    def __init__(self, net: nn.Module, params: Sequence[nn.Parameter]):
        self.net = net
        self.params = list(params)
        self.captures = not batch_norms(net)
        self.seen: Counter[Any] = Counter()
        self.passes: dict[Any, _Pass] = {}
        self.at_once = False  # True: capture a shape when it first comes
        self.images = 0  # of the present batch
        self.used_passes = 0  # with gradients, in the present step

    @property
    def bytes(self) -> int:
        """What the graphs take of the GPU's memory, which torch does not count as allocated."""
        return sum(captured.bytes for captured in self.passes.values())

    @contextmanager
    def used(self, images: int) -> Iterator[None]:
        """Let the network run by graphs in this block, which is one step of a batch of so many images."""
        if not self.captures or "forward" in vars(self.net):
            yield
            return
        self.images = images
        self.used_passes = 0
        own = self.net.forward
        self.net.forward = lambda *inputs: self._run(own, *inputs)
        try:
            yield
        finally:
            del self.net.forward

    def _run(self, own: Callable[..., Any], *inputs: Any) -> Any:
        """Run the network by a graph if its shape is frequent, or as it is."""
        x = inputs[0]
        fits = len(inputs) == 1 and isinstance(x, Tensor) and 0 < len(x) <= self.images
        if not fits or x.device.type != DEVICE or not self.captures or x.requires_grad:
            return own(*inputs)
        learns = torch.is_grad_enabled()
        number = self.used_passes if learns else None
        self.used_passes += learns
        key = (self.images, x.shape[1:], x.dtype, number)
        self.seen[key] += 1
        if key not in self.passes and (self.at_once or self.seen[key] > CAPTURE_BATCHES):
            self._capture(key, own, x)
        if key not in self.passes:
            return own(x)
        return self.passes[key](x)

    def _capture(self, key: Any, own: Callable[..., Any], x: Tensor) -> None:
        full = x.new_zeros(self.images, *x.shape[1:])
        full[: len(x)] = x
        try:
            self.passes[key] = _Pass(own, full, self.params)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as it is, all works, only slower
            self.captures = False
            self.passes.clear()
            name = type(self.net).__name__
            told = f"a CUDA graph does not hold {name} ({type(error).__name__}: {error}): it runs without one"
            warnings.warn(told, stacklevel=2)


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
        with capturing(device), graph(self.forward):
            self.y = run(x)
        self.grads: list[Tensor | None] = []
        if self.backward is not None:
            pool = self.forward.pool()
            with capturing(device), graph(self.backward, pool=pool):
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
