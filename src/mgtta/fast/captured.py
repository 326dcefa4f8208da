"""A step as a CUDA graph, and the functions of a step as they are or compiled.

All methods of a process share what is compiled.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgtta.adaptation.step import Pass

RECOMPILES = 512  # that dynamo allows: all methods of a process share what is compiled
ATTENTION = [  # the first that works
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class GraphPlace(NamedTuple):
    """Where graphs of one engine are captured."""

    pool: Any
    stream: Any


class Captured:
    """A CUDA graph of what `run` does with the images in `x`, and where it leaves what it gives.

    Attributes:
        bytes: what `run` takes of the GPU's memory at most, as torch counts what is allocated.
        held: by how much the graphs' common pool has grown for it, gaps between tensors included.
    """

    def __init__(self, run: Callable[[], Pass], x: Tensor, place: GraphPlace, compiled: bool = False):
        self.x = x
        self.compiled = compiled
        self.graph = torch.cuda.CUDAGraph()
        before = torch.cuda.Stream(x.device)
        before.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(before), capturing(x.device):
            for _ in range(3):
                run()
        torch.cuda.current_stream(x.device).wait_stream(before)
        torch.cuda.synchronize(x.device)
        clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(x.device)
        allocated = torch.cuda.memory_allocated(x.device)
        held = torch.cuda.memory_reserved(x.device)
        graph = partial(torch.cuda.graph, stream=place.stream, capture_error_mode="thread_local")
        with kept_if_broken(self.graph), capturing(x.device), graph(self.graph, pool=place.pool):
            self.result = run()
        clear_workspaces()
        self.bytes = torch.cuda.max_memory_allocated(x.device) - allocated
        self.held = torch.cuda.memory_reserved(x.device) - held
        torch.cuda.reset_peak_memory_stats(x.device)

    def __call__(self, x: Tensor) -> Pass:
        """Replay the graph; the features are overwritten by the next call."""
        self.x.copy_(x, non_blocking=True)
        self.graph.replay()
        return Pass(self.result.logits.clone(), self.result.features)


@contextmanager
def kept_if_broken(*graphs: Any) -> Iterator[None]:
    """Never free graphs whose capture fails in this block: torch ends the process when one is freed."""
    try:
        yield
    except BaseException:
        for graph in graphs:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise


def clear_workspaces() -> None:
    """Give back what cuBLAS keeps for each stream, so that a graph's own lies among the graph's tensors, once."""
    torch._C._cuda_clearCublasWorkspaces()


# --- what is compiled


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without compiling it."""
    return function


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}  # shared, so that two methods of a kind compile once


def compiled_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled, the same for all methods of a process."""
    if function not in _COMPILED:
        _COMPILED[function] = partial(_within_limits, torch.compile(function, dynamic=False))
    return _COMPILED[function]


def _within_limits(compiled: Callable[..., Any], *args: Any) -> Any:
    """Call it under limits of our own, in every thread: the backward pass runs in another thread."""
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
        return compiled(*args)


def capturing(device: torch.device) -> ExitStack:
    """Return a block in which a step is prepared for a capture, compiled or captured."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # torch's, about itself
    stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    torch.backends.cudnn.benchmark = True  # the quickest convolutions are found before the capture
    stack.enter_context(on_device(device))
    return stack


def on_device(device: torch.device) -> ExitStack:
    """Make a GPU the current one, where Triton launches its kernels, with its quickest attention."""
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
    return stack
