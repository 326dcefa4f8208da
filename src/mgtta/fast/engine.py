"""The fast path: the frozen network in bfloat16, all that adapts in float32, and the whole step as one CUDA graph.

Nearly all weights of an adapting network are frozen. They are rounded to bfloat16 once and get no gradients; nothing is
kept for them. Norm layers compute in float32, and so do logits, the statistics of features and the optimizer with its
moments and memory: small updates are not rounded away.

On a GPU the network, the objective and the optimizer's step are compiled, and the whole step (images in, forward,
objective, backward, update, or none if something is not finite) is captured as a CUDA graph, one for each shape of
batch, and replayed. Compiling takes half a minute and saves some milliseconds a batch: so a shape runs uncompiled until
it has come `PATIENCE` times, or `warm_up` asks for it. Reset and load copy into the tensors that a graph holds, so the
graph stays.

With "fp8" gradients pass the MLPs of a plain ViT in 8 bits: see mgtta.fast.mlp. The forward pass is the same.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgtta._lib.names import spelled
from mgtta.adaptation.method import Method
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.adaptation.step import Pass
from mgtta.fast.bf16 import Hooked, lower
from mgtta.fast.flat import RULES, FlatStep
from mgtta.fast.vit import ViT
from mgtta.models.norms import norm_parameters

PATIENCE_BATCHES = 2000  # of a shape, before it is compiled: by then they have cost as much as compiling saves
KEPT_GRAPHS = 4  # the latest ones
RECOMPILES = 512  # that dynamo allows: all methods of a process share what is compiled
FLOAT8_IS_FOR = "that is for a plain ViT of timm's whose widths 16 divides, where 8-bit floats can be multiplied"
ATTENTION = [  # the first that works
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

How = Callable[[Callable[..., Any]], Callable[..., Any]]  # a function -> itself, or compiled


def fits(method: Method, precision: str) -> TypeGuard[ObjectiveMethod]:
    """Return True if the method takes the fast path: with "auto" it may, with "bf16" or "fp8" it must or is refused."""
    reason = refusal(method, precision)
    if precision == "auto":
        known = reason is None and method.max_seconds is None and ViT.fits(method.model)
        return known and _has_bfloat16(next(method.model.parameters()).device)
    if reason is not None:
        other = "fp32" if precision == "bf16" or refusal(method, "bf16") else "bf16"
        raise ValueError(
            f"precision={precision!r} is not for {spelled(method.name)}: {reason}; take precision={other!r}"
        )
    return True


def refusal(method: Method, precision: str) -> str | None:
    """Return what keeps a method from the fast path; None if nothing does."""
    if not isinstance(method, ObjectiveMethod) or any(
        getattr(type(method), name) is not getattr(ObjectiveMethod, name) for name in ("adapt", "loss", "look")
    ):
        return "what it does depends on the values in a batch, not only on its shape"
    if method.optimizer is not None and type(method.optimizer) not in RULES:
        return f"its optimizer is {type(method.optimizer).__name__}"
    if not {id(p) for p in method.adapted.values()} <= {id(p) for p in norm_parameters(method.model)}:
        return "it adapts parameters outside normalisation layers, which would be rounded"
    if next(method.model.parameters()).dtype != torch.float32:
        return "its model is not float32"
    if method.ranks.size > 1:
        return "ranks share its batches"
    if precision == "fp8" and not ViT.fits_float8(method.model):
        return FLOAT8_IS_FOR
    return None


def _has_bfloat16(device: torch.device) -> bool:
    """Return True for a GPU that computes in bfloat16; older ones emulate it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


class FastEngine:
    """The engine that rounds the method's frozen weights to bfloat16 and, on a GPU, captures its step.

    A copy has the same counts and captures again.

    Args:
        low_memory: keep few activations, and compute the others again in the backward pass.
        precision: "bf16" or "fp8".
    """

    def __init__(self, method: ObjectiveMethod, low_memory: bool = False, precision: str = "bf16"):
        lower(method.model)
        self.method = method
        self.low_memory = low_memory
        self.precision = precision
        self._updates = 0
        self._skipped = 0
        self.forget()

    def forget(self) -> None:
        """Drop all that is bound to tensors which have moved elsewhere."""
        self.compiles = True
        self.network: ViT | Hooked | None = None
        self.flat: FlatStep | None = None
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[Any, Captured] = {}
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # on which graphs are captured: those of one pool share it
        self.pending = False  # True if the device has counts that are not read yet
        self.known_updates = -1  # as `flat` knows them

    def moving(self, fn: Callable[[Tensor], Tensor]) -> None:
        if any(fn(torch.empty(0, dtype=dtype)).dtype != dtype for dtype in (torch.float32, torch.bfloat16)):
            raise TypeError(f"precision={self.precision!r} has its own dtypes: take precision='fp32' for others")
        self._settle()
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        names = ("method", "low_memory", "precision", "_updates", "_skipped")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self.forget()

    # --- counts, which a GPU keeps until somebody asks

    @property
    def updates(self) -> int:
        self._settle()
        return self._updates

    @updates.setter
    def updates(self, value: int) -> None:
        self._settle()
        self._updates = value

    @property
    def skipped(self) -> int:
        self._settle()
        return self._skipped

    @skipped.setter
    def skipped(self, value: int) -> None:
        self._settle()
        self._skipped = value

    def _settle(self) -> None:
        if self.pending and self.flat is not None:
            self.pending = False
            made, left_out = self.flat.settle()
            self._updates += made
            self._skipped += left_out
            self.known_updates = self._updates

    @property
    def graph_bytes(self) -> int:
        """What the graphs take of the GPU's memory, which torch does not count as allocated."""
        return max((captured.bytes for captured in self.graphs.values()), default=0)

    @property
    def graphs_hold(self) -> int:
        """What the graphs have reserved for good, gaps between tensors included."""
        return sum(captured.held for captured in self.graphs.values())

    # --- the step

    def predict(self, x: Tensor, now: bool = False) -> Pass:
        self.method.model.check(x)
        with torch.inference_mode(False), torch.no_grad():
            return self._run(self._predict, x, now)

    def adapt(self, x: Tensor, now: bool = False) -> Pass:
        """Predict x, then make one update or count a skip.

        Args:
            now: compile and capture at once, however rare the shape.
        """
        if self.method.optimizer is None:
            return self.predict(x, now)
        self.method.model.check(x)
        self._lay_out(x)
        assert self.flat is not None
        self.flat.take_in()
        if self.known_updates != self._updates:  # a reset, a load or a guard has set it
            self.known_updates = self._updates
            self.flat.age.fill_(self._updates)
        self.pending = True
        return self._run(self._adapt, x, now)

    def warm_up(self, x: Tensor) -> None:
        self.predict(x, now=True)
        with torch.enable_grad():
            self.adapt(x, now=True)

    def _predict(self, x: Tensor, how: How) -> Pass:
        return self._look(x, how)

    def _adapt(self, x: Tensor, how: How) -> Pass:
        assert self.flat is not None
        seen = self._look(x, how)
        loss = how(_objective)(self.method, *seen)
        how(_step)(self.flat, torch.autograd.grad(loss, self.flat.params), seen.logits, loss)
        return Pass(seen.logits.detach(), [f.detach() for f in seen.features])

    def _look(self, x: Tensor, how: How) -> Pass:
        logits, features = self._net()(self.method.views(x), how)
        return Pass(self.method.merge(logits), features)

    def _lay_out(self, x: Tensor) -> None:
        """Find the parameters that get gradients, once, and lay them out as one vector, where graphs will find them."""
        method = self.method
        if self.flat is not None or method.optimizer is None:
            return
        adapted = list(method.adapted.values())
        with _on(self._device), torch.enable_grad():
            loss = method.objective(*self._look(x[:2], _as_it_is))
            grads = torch.autograd.grad(loss, adapted, allow_unused=True)
        moved = [i for i, grad in enumerate(grads) if grad is not None]
        params = [adapted[i] for i in moved]
        origin = [method.origin[i] for i in moved]
        self.flat = FlatStep(method.optimizer, params, origin, method.decay, method.pull)

    @property
    def _device(self) -> torch.device:
        return next(self.method.model.parameters()).device

    def _net(self) -> "ViT | Hooked":
        if self.network is None:
            model = self.method.model
            float8 = self.precision == "fp8" and self.method.optimizer is not None
            if float8 and not ViT.fits_float8(model):  # it has moved to another device
                raise ValueError(f"precision='fp8' is not for {self.method.name} there: {FLOAT8_IS_FOR}")
            if ViT.fits(model):
                self.network = ViT(model, self.low_memory, float8)
            else:
                self.network = Hooked(model, self.low_memory)
        return self.network

    # --- compiling and capturing

    def _run(self, run: Callable[[Tensor, How], Pass], x: Tensor, now: bool) -> Pass:
        key = (run.__name__, x.shape, x.dtype)
        if key not in self.graphs:
            device = self._device
            self.seen[key] += 1
            if device.type != "cuda" or not (now or self.seen[key] > PATIENCE_BATCHES):
                with _on(device):
                    return run(x, _as_it_is)
            self._lay_out(x)
            while len(self.graphs) >= KEPT_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            self.graphs[key] = self._capture(run, x.to(device, copy=True))
        self.graphs[key] = captured = self.graphs.pop(key)  # the latest
        return captured(x)

    def _capture(self, run: Callable[[Tensor, How], Pass], x: Tensor) -> "Captured":
        changed = [] if self.flat is None else self.flat.tensors
        before = [t.clone() for t in changed]
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(x.device)
        place = GraphPlace(self.pool, self.stream)
        try:
            if self.compiles:
                try:
                    return Captured(partial(run, x, _compiled), x, place)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a compiler fails in any way; without it all works, only slower
                    self.compiles = False
                    warnings.warn(
                        f"torch.compile does not manage {self.method.model.name} ({type(error).__name__}: {error}): "
                        "the fast path continues without it",
                        stacklevel=2,
                    )
            return Captured(partial(run, x, _as_it_is), x, place)
        finally:
            with torch.no_grad():
                for t, value in zip(changed, before, strict=True):
                    t.copy_(value)


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

    def __init__(self, run: Callable[[], Pass], x: Tensor, place: GraphPlace):
        self.x = x
        self.graph = torch.cuda.CUDAGraph()
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
        allocated = torch.cuda.memory_allocated(x.device)
        held = torch.cuda.memory_reserved(x.device)
        with (
            _compiling(x.device),
            torch.cuda.graph(self.graph, pool=place.pool, stream=place.stream, capture_error_mode="thread_local"),
        ):
            self.result = run()
        _clear_workspaces()
        self.bytes = torch.cuda.max_memory_allocated(x.device) - allocated
        self.held = torch.cuda.memory_reserved(x.device) - held
        torch.cuda.reset_peak_memory_stats(x.device)

    def __call__(self, x: Tensor) -> Pass:
        """Replay the graph; the features are overwritten by the next call."""
        self.x.copy_(x, non_blocking=True)
        self.graph.replay()
        return Pass(self.result.logits.clone(), self.result.features)


def _clear_workspaces() -> None:
    """Give back what cuBLAS keeps for each stream, so that a graph's own lies among the graph's tensors, once."""
    torch._C._cuda_clearCublasWorkspaces()


# --- what is compiled, besides the network


def _objective(method: ObjectiveMethod, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
    return method.objective(logits, features)


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
    """Call it under limits of our own, in every thread: the backward pass runs in another thread."""
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
        return compiled(*args)


def _compiling(device: torch.device) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # torch's, about itself
    stack.enter_context(_on(device))
    return stack


def _on(device: torch.device) -> ExitStack:
    """Make a GPU the current one, where Triton launches its kernels, with its quickest attention."""
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
    return stack
