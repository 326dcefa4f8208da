"""The fast path: the frozen network in bfloat16, all that adapts in float32, and the whole step as one CUDA graph.

Nearly all weights of an adapting network are frozen. They are rounded to bfloat16 once and get no gradients; nothing is
kept for them. Norm layers compute in float32, and so do logits, the statistics of features and the optimizer with its
moments and memory: small updates are not rounded away.

On a GPU the network, the loss and the optimizer's step are compiled, and the whole of a step (images in, forward, loss,
backward, update, or none where something is not finite) is captured as a CUDA graph, one for each shape of batch, and
replayed. Compiling takes half a minute, and saves some milliseconds a batch: so a shape is run as it is until it has
come `PATIENCE` times, or `warm_up` asks for it. Reset and load copy into the tensors that a graph holds, so that it
stays.

With "fp8" gradients pass the MLPs of a plain ViT in 8 bits: see mgtta.fast.mlp. The way there is the same.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgtta.adaptation.scheduled import summary
from mgtta.fast.bf16 import Hooked
from mgtta.fast.flat import RULES, FlatStep
from mgtta.fast.vit import ViT

PATIENCE = 2000  # batches of a shape before it is compiled: by then they have cost as much as that saves
FLOAT8_IS_FOR = "that is for a plain ViT of timm's whose widths 16 divides, where 8-bit floats can be multiplied"
KEPT = 4  # graphs, the latest ones
RECOMPILES = 512  # that dynamo allows: all methods of a process share what is compiled
ATTENTION = [  # the first that can
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def takes(method: Any, precision: str) -> bool:
    """Whether the method, as it stands, is to take the fast path: with "auto" it may, with "bf16" or "fp8" it must."""
    reason = why_not(method, precision)
    if precision != "auto":
        if reason is not None:
            other = "fp32" if precision == "bf16" or why_not(method, "bf16") else "bf16"
            raise ValueError(f"precision={precision!r} is not for {method.name}: {reason}; take precision={other!r}")
        return True
    known = reason is None and method.max_seconds is None and ViT.fits(method.model)
    return known and _has_bfloat16(next(method.model.parameters()).device)


def _has_bfloat16(device: torch.device) -> bool:
    """Whether it is a GPU that computes in bfloat16; older ones emulate it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def why_not(method: Any, precision: str) -> str | None:
    """What keeps a method from the fast path; None where nothing does."""
    if not vars(type(method)).get("static_step"):
        return "what it does hangs on values of the batch, not on its shape alone"
    if method.optimizer is not None and type(method.optimizer) not in RULES:
        return f"its optimizer is {type(method.optimizer).__name__}"
    if next(method.model.parameters()).dtype != torch.float32:
        return "its model is not float32"
    if method.ranks.size > 1:
        return "ranks share its batches"
    return FLOAT8_IS_FOR if precision == "fp8" and not ViT.fits_float8(method.model) else None


class Fast:
    """How a method takes its steps. It holds nothing that belongs to the method's state; a copy begins afresh.

    Args:
        low_memory: keep few activations, and compute the others again on the way back.
        precision: "bf16" or "fp8".
    """

    def __init__(self, low_memory: bool = False, precision: str = "bf16"):
        self.low_memory, self.precision, self.compiles = low_memory, precision, True
        self.forget()

    def forget(self) -> None:
        """Begin afresh, after the method's tensors have moved elsewhere."""
        self.device: torch.device | None = None
        self.network: ViT | Hooked | None = None
        self.flat: FlatStep | None = None
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[Any, _Captured] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # that graphs are captured on: those of one pool share it
        self.pending, self.known = False, -1  # the updates that `flat` knows of

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fast":
        return memo.setdefault(id(self), Fast(self.low_memory, self.precision))

    def __reduce__(self) -> tuple[type["Fast"], tuple[bool, str]]:
        return Fast, (self.low_memory, self.precision)

    @property
    def graph_bytes(self) -> int:
        """What the graphs take of the GPU's memory, which torch does not count as allocated."""
        return max((captured.bytes for captured in self.graphs.values()), default=0)

    @property
    def graphs_hold(self) -> int:
        """What the graphs have reserved for good, gaps between tensors included."""
        return sum(captured.held for captured in self.graphs.values())

    def adapt(self, method: Any, x: Tensor, now: bool = False) -> tuple[Tensor, Tensor | None]:
        """The logits of x, after which the method has learned from x; and a summary for its schedule, if it has one.

        Args:
            now: compile and capture at once, however rare the shape.
        """
        if method.optimizer is None:
            return self.predict(method, x, now)
        method.model.check(x)
        self._lay_out(method, x)
        assert self.flat is not None
        self.flat.take_in()
        if method._updates != self.known:  # a reset, a load or a guard has set it
            self.known = method._updates
            self.flat.age.fill_(self.known)
        self.pending = True
        return self._run(self._adapt, method, x, now)

    def predict(self, method: Any, x: Tensor, now: bool = False) -> tuple[Tensor, Tensor | None]:
        """The logits of x as the method stands, and a summary for its schedule, if it has one."""
        method.model.check(x)
        with torch.inference_mode(False), torch.no_grad():
            return self._run(self._predict, method, x, now)

    def settle(self, updates: int) -> tuple[int, int]:
        """Updates and skipped batches since the last call, before which there were `updates`; waits for the device."""
        if not self.pending or self.flat is None:
            return 0, 0
        self.pending = False
        made, left_out = self.flat.settle()
        self.known = updates + made
        return made, left_out

    def _lay_out(self, method: Any, x: Tensor) -> None:
        """Find the parameters that get gradients, once, and lay them out as one vector, where graphs will find them."""
        if self.flat is not None or method.optimizer is None:
            return
        adapted = list(method.adapted.values())
        with _on(self._device(method)), torch.enable_grad():
            loss = method.criterion(*self._net(method)(x[:2], _as_it_is))
            grads = torch.autograd.grad(loss, adapted, allow_unused=True)
        learned = [p for p, g in zip(adapted, grads, strict=True) if g is not None]
        self.flat = FlatStep(method.optimizer, learned, method.decay)

    def _device(self, method: Any) -> torch.device:
        if self.device is None:
            self.device = next(method.model.parameters()).device
        return self.device

    def _net(self, method: Any) -> "ViT | Hooked":
        if self.network is None:
            float8 = self.precision == "fp8" and method.optimizer is not None
            if float8 and not ViT.fits_float8(method.model):  # it has moved to another device
                raise ValueError(f"precision='fp8' is not for {method.name} there: {FLOAT8_IS_FOR}")
            if ViT.fits(method.model):
                self.network = ViT(method.model, self.low_memory, float8)
            else:
                self.network = Hooked(method.model, self.low_memory)
        return self.network

    def _adapt(self, method: Any, x: Tensor, how: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        assert self.flat is not None
        logits, features = self._net(method)(x, how)
        loss = how(_criterion)(method, logits, features)
        how(_step)(self.flat, torch.autograd.grad(loss, self.flat.params), logits, loss)
        return logits.detach(), self._about(method, logits, features, how)

    def _predict(self, method: Any, x: Tensor, how: Callable[..., Any]) -> tuple[Tensor, Tensor | None]:
        logits, features = self._net(method)(x, how)
        return logits, self._about(method, logits, features, how)

    def _about(self, method: Any, logits: Tensor, features: list[Tensor], how: Callable[..., Any]) -> Tensor | None:
        return None if method._schedule is None else how(summary)(logits, features)

    def _run(self, run: Callable[..., Any], method: Any, x: Tensor, now: bool) -> tuple[Tensor, Tensor | None]:
        key, device = (run.__name__, x.shape, x.dtype), self._device(method)
        if key not in self.graphs:
            self.seen[key] += 1
            if device.type != "cuda" or not (now or self.seen[key] > PATIENCE):
                with _on(device):
                    return run(method, x, _as_it_is)
            self._lay_out(method, x)
            while len(self.graphs) >= KEPT:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = self._captured(run, method, x.to(device, copy=True))
        self.graphs[key] = captured = self.graphs.pop(key)  # the latest
        return captured(x)

    def _captured(self, run: Callable[..., Any], method: Any, x: Tensor) -> "_Captured":
        changed = [] if self.flat is None else self.flat.tensors
        before = [t.clone() for t in changed]
        self.pool, self.stream = self.pool or torch.cuda.graph_pool_handle(), self.stream or torch.cuda.Stream(x.device)
        try:
            if self.compiles:
                try:
                    return _Captured(partial(run, method, x, _compiled), x, self.pool, self.stream)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a compiler fails in any way; without it all works, only slower
                    self.compiles = False
                    warnings.warn(
                        f"torch.compile does not manage {method.model.name} ({type(error).__name__}: {error}): the "
                        "fast path goes on without it",
                        stacklevel=2,
                    )
            return _Captured(partial(run, method, x, _as_it_is), x, self.pool, self.stream)
        finally:
            with torch.no_grad():
                for t, value in zip(changed, before, strict=True):
                    t.copy_(value)


class _Captured:
    """A CUDA graph of what `run` does with the images in `x`, and where it leaves what it gives.

    Attributes:
        bytes: that `run` takes of the GPU's memory at most, as torch counts what is allocated.
        held: by which the graphs' common pool has grown for it, gaps between tensors included.
    """

    def __init__(self, run: Callable[[], Any], x: Tensor, pool: Any, stream: torch.cuda.Stream):
        self.x, self.graph = x, torch.cuda.CUDAGraph()
        before = torch.cuda.Stream(x.device)
        before.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(before), _compiling(x.device):
            for _ in range(3):
                run()
        torch.cuda.current_stream(x.device).wait_stream(before)
        torch.cuda.synchronize(x.device)
        _clear_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(x.device)
        allocated, held = torch.cuda.memory_allocated(x.device), torch.cuda.memory_reserved(x.device)
        with (
            _compiling(x.device),
            torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            self.logits, self.about = run()
        _clear_workspaces()
        self.bytes = torch.cuda.max_memory_allocated(x.device) - allocated
        self.held = torch.cuda.memory_reserved(x.device) - held
        torch.cuda.reset_peak_memory_stats(x.device)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.x.copy_(x, non_blocking=True)
        self.graph.replay()
        return self.logits.clone(), None if self.about is None else self.about.clone()


def _clear_workspaces() -> None:
    """Give back what cuBLAS keeps for each stream, so that a graph's own lies among the graph's tensors, once."""
    torch._C._cuda_clearCublasWorkspaces()


# --- what is compiled, beside the network


def _criterion(method: Any, logits: Tensor, features: list[Tensor]) -> Tensor:
    return method.criterion(logits, features)


def _step(flat: FlatStep, grads: tuple[Tensor, ...], logits: Tensor, loss: Tensor) -> None:
    flat.step(grads, logits.detach().isfinite().all() & loss.detach().isfinite())


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}  # shared, so that two methods of a kind compile once


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _COMPILED:
        _COMPILED[function] = partial(_within_limits, torch.compile(function, dynamic=False))
    return _COMPILED[function]


def _within_limits(compiled: Callable[..., Any], *args: Any) -> Any:
    """What it gives, under limits of our own in every thread: the way back is another than the way there."""
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
        return compiled(*args)


def _compiling(device: torch.device) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # torch's, about itself
    stack.enter_context(_on(device))
    return stack


def _on(device: torch.device) -> ExitStack:
    """A GPU as the current one, where Triton launches its kernels, and its quickest attention."""
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
    return stack
