"""The fast path: the frozen network in bfloat16, all that adapts in float32, and the whole step as one CUDA graph.

Nearly all weights of an adapting network are frozen. They are rounded to bfloat16 once and get no gradients; nothing is
kept for them. Norm layers compute in float32, and so do logits, the statistics of features and the optimizer with its
moments and memory: small updates are not rounded away.

On a GPU the network, the objective and the optimizer's step are compiled, and the whole step (images in, forward,
objective, backward, update, or none if something is not finite, answer, running means) is captured as a CUDA graph, one
for each shape of batch, and replayed. Capturing takes less than a second. Compiling takes half a minute and saves about
a millisecond a batch: so a shape runs uncompiled until it has come COMPILE_BATCHES times, unless `warm_up` asks for it
or torch has its compiled code on disk. Reset and load copy into the tensors that a graph holds, so the graph stays.

With "fp8" gradients pass the MLPs of a plain ViT in 8 bits: see mgtta.fast.mlp. The forward pass is the same.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.adaptation.state import own_buffers
from mgtta.adaptation.step import Pass
from mgtta.fast.answer import has_answer_kernels
from mgtta.fast.bf16 import Hooked, How, lower
from mgtta.fast.captured import Captured, GraphPlace, as_it_is, compiled_code, on_device
from mgtta.fast.flat import FlatStep, used_here
from mgtta.fast.remembered import is_remembered, remember
from mgtta.fast.rounded import check_dtypes
from mgtta.fast.vit import ViT

CAPTURE_BATCHES = 8  # of a shape, before it is captured, which takes less than a second
COMPILE_BATCHES = 20_000  # of a shape, before it is compiled: half a minute, to save about a millisecond a batch
KEPT_GRAPHS = 8  # the latest ones; they share one pool of memory
FLOAT8_IS_FOR = "that is for a plain ViT of timm's whose widths 16 divides, where 8-bit floats can be multiplied"


class FastEngine:
    """The engine that rounds the method's frozen weights to bfloat16 and, on a GPU, captures its step.

    A copy has the same counts and captures again.

    Args:
        low_memory: keep few activations, and compute the others again in the backward pass.
        precision: "bf16" or "fp8".
    """

    leaves_out = True

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
        self.captures = True
        self.by_modules = False  # run the network module by module, as its hooks and statistics stand; only predict
        self.by_image = False
        self.network: ViT | Hooked | None = None
        self.flat: FlatStep | None = None
        self.seen: Counter[Any] = Counter()
        self.graphs: dict[Any, Captured] = {}
        self.buffers: list[tuple[Any, str, Tensor]] = []  # owner, name, and the tensor that graphs hold
        self.inputs: dict[Any, Tensor] = {}  # shape and dtype -> where graphs read their images
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None  # on which graphs are captured: those of one pool share it
        self.beside: torch.cuda.Stream | None = None  # on which `apart` runs
        self.behind: torch.cuda.Event | None = None  # the end of what runs there
        self.pending = False  # True if the device has counts that are not read yet
        self.known_updates = -1  # as `flat` knows them

    def moving(self, fn: Callable[[Tensor], Tensor]) -> None:
        check_dtypes(fn, self.precision)
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
        self._catch_up()
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

    def step(self, x: Tensor, learn: bool, observe: bool, collect: bool, now: bool = False) -> Pass:
        """Do the step of `Engine`.

        Args:
            now: compile and capture at once, however rare the shape.
        """
        self._catch_up()
        method = self.method
        method.model.check(x)
        if self.by_modules:
            with torch.no_grad():
                seen = method.look(x)
                return Pass(method.answer(seen, observe), seen.features)
        learn = learn and method.optimizer is not None
        if learn:
            method.begin_step(x)
            self._lay_out(x)
            self._take_in()
            self.pending = True
        part = Part(learn, observe and self.answers, collect and method.statistics is not None, self.by_image)
        with torch.inference_mode(False), torch.set_grad_enabled(learn):
            return self._run(part, x, now)

    def predict(self, x: Tensor) -> Pass:
        return self.step(x, learn=False, observe=False, collect=False)

    def adapt(self, x: Tensor) -> Pass:
        return self.step(x, learn=True, observe=False, collect=False)

    def warm_up(self, x: Tensor, learn: bool | None = None, observe: bool = True, collect: bool = True) -> None:
        for kind in (False, True) if learn is None else (learn,):
            self.step(x, kind, observe, collect, now=True)

    @property
    def answers(self) -> bool:
        """True if the caller gets other logits than the network's."""
        return type(self.method).answer is not ObjectiveMethod.answer

    def _step(self, part: "Part", x: Tensor, how: How) -> Pass:
        seen = self._look(x, how, part.collect, part.by_image)
        if part.learn:
            self._learn(seen, how)
        seen = Pass(seen.logits.detach(), [f.detach() for f in seen.features])
        with torch.no_grad():
            if self.answers:
                return Pass(how(_answered)(self.method, *seen, part.observe), seen.features)
        return seen

    def _learn(self, seen: Pass, how: How) -> None:
        assert self.flat is not None
        loss = how(_objective)(self.method, *seen)
        grads = torch.autograd.grad(loss, self.flat.params)
        how(_update)(self.method, self.flat, grads, seen.logits.detach(), [f.detach() for f in seen.features], loss)

    def _look(self, x: Tensor, how: How, collect: bool = False, by_image: bool = False) -> Pass:
        network = self._net()
        network.collecting = collect
        network.by_image = by_image
        logits, features = network(x, how, self.method.views)
        return Pass(self.method.merge(logits), features)

    def _lay_out(self, x: Tensor) -> None:
        """Find the parameters that get gradients, once, and lay them out as one vector, where graphs will find them."""
        method = self.method
        if self.flat is not None or method.optimizer is None:
            return
        adapted = list(method.adapted.values())
        with on_device(self._device), torch.enable_grad():
            loss = method.objective(*self._look(x[:2], as_it_is))
            grads = torch.autograd.grad(loss, adapted, allow_unused=True)
        moved = [i for i, grad in enumerate(grads) if grad is not None]
        params = [adapted[i] for i in moved]
        origin = [method.origin[i] for i in moved]
        self.flat = FlatStep(method.optimizer, params, origin, method.decay, method.pull)

    def _take_in(self) -> None:
        """Follow whatever a reset, a load or a guard did to the optimizer and to the number of updates."""
        assert self.flat is not None
        self.flat.take_in()
        if self.known_updates != self._updates:
            self.known_updates = self._updates
            self.flat.age.fill_(self._updates)

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
                self.network = Hooked(model, self.low_memory, self.method.statistics, self.method.reads_features)
        return self.network

    # --- beside the caller's own work

    @contextmanager
    def apart(self, x: Tensor) -> Iterator[None]:
        """Let what is launched in the block run after all before it, and not before what the caller launches next.

        A GPU then gives the caller's last logits while it still learns. The next call of the engine waits for it.

        Args:
            x: the images that are used in the block.
        """
        device = self._device
        if device.type != "cuda":
            yield
            return
        if self.beside is None:
            self.beside = torch.cuda.Stream(device)
        self.beside.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self.beside):
                used_here(x)
                yield
        finally:
            self.behind = self.beside.record_event()

    def _catch_up(self) -> None:
        """Let the present stream wait for what runs apart."""
        if self.behind is not None:
            torch.cuda.current_stream(self._device).wait_event(self.behind)
            self.behind = None

    # --- compiling and capturing

    def _run(self, part: "Part", x: Tensor, now: bool) -> Pass:
        key = (part, x.shape, x.dtype)
        self.seen[key] += 1
        device = self._device
        if device.type == "cuda":
            self._prepare(key, x, now)
        captured = self._latest(key)
        if captured is None:
            with on_device(device):
                return self._step(part, x, as_it_is)
        self._follow_buffers()
        return captured(x)

    def replayed(self, function: Callable[[Tensor], Tensor], x: Tensor, now: bool = False) -> Tensor:
        self._catch_up()  # graphs share their memory: one at a time
        if not x.is_cuda or not self.captures:
            return function(x)
        key = (function.__name__, x.shape, x.dtype)
        self.seen[key] += 1
        captured = self._latest(key)
        if captured is None:
            if not now and self.seen[key] <= CAPTURE_BATCHES:
                return function(x)
            self._make_room()
            own = self._input(x)
            captured = Captured(lambda: Pass(function(own)), own, self._place())
            self.graphs[key] = captured
        return captured(x).logits

    def _latest(self, key: Any) -> Captured | None:
        """Return the graph of a key, which is then the last one to be dropped."""
        captured = self.graphs.pop(key, None)
        if captured is not None:
            self.graphs[key] = captured
        return captured

    def _make_room(self) -> None:
        """Drop the graphs that were not used for longest, if there are too many for another."""
        while len(self.graphs) >= KEPT_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        used = {id(captured.x) for captured in self.graphs.values()}
        self.inputs = {key: x for key, x in self.inputs.items() if id(x) in used}

    def _input(self, x: Tensor) -> Tensor:
        """Return where graphs for images like x read them: one place for all, with a copy of x."""
        key = (x.shape, x.dtype)
        if key not in self.inputs:
            self.inputs[key] = torch.empty_like(x, device=self._device, memory_format=torch.contiguous_format)
        return self.inputs[key].copy_(x)

    def _place(self) -> GraphPlace:
        """Return where graphs are captured: those of one pool share their memory and stream."""
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(self._device)
        return GraphPlace(self.pool, self.stream)

    def _prepare(self, key: Any, x: Tensor, now: bool) -> None:
        """Capture a step of this key, and compile it, as soon as each pays."""
        count = self.seen[key]
        compiled = self.compiles and (now or count > COMPILE_BATCHES)
        captured = self.graphs.get(key)
        if not self.captures or (captured is not None and (captured.compiled or not compiled)):
            return
        if not (now or compiled or count > CAPTURE_BATCHES):
            return
        compiled = compiled or (self.compiles and self._compiled_before(key))
        self.graphs.pop(key, None)
        self._lay_out(x)
        self._make_room()
        made = self._capture(key[0], self._input(x), compiled)
        if made is not None:
            self.graphs[key] = made
            if made.compiled:
                remember(self._described(key))

    def _compiled_before(self, key: Any) -> bool:
        """Return whether an earlier run has left compiled code for such a step on this machine."""
        return is_remembered(self._described(key))

    def _described(self, key: Any) -> str:
        model = self.method.model
        size = sum(p.numel() for p in model.parameters())
        gpu = torch.cuda.get_device_name(self._device)
        own = (type(self.method).__name__, type(self.method.optimizer).__name__, self.low_memory, self.precision)
        return repr((type(model.net).__name__, model.name, size, gpu, torch.__version__, own, key))

    def _capture(self, part: "Part", x: Tensor, compiled: bool) -> "Captured | None":
        """Return a captured step; None if it cannot be captured."""
        self._hold_buffers(x)
        changed = [held for _, _, held in self.buffers]
        if self.flat is not None:
            changed += self.flat.tensors
        before = [t.clone() for t in changed]
        place = self._place()
        run = partial(self._step, part, x)
        name = self.method.model.name
        try:
            if compiled:
                try:
                    return Captured(partial(run, compiled_code), x, place, compiled=True)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # a compiler fails in any way; without it all works, only slower
                    self.compiles = False
                    _warn(f"torch.compile does not manage {name}", error, "continues without it")
            try:
                return Captured(partial(run, as_it_is), x, place)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.captures = False
                _warn(f"a CUDA graph does not hold a step of {self.method.name} on {name}", error, "runs without one")
                return None
        finally:
            with torch.no_grad():
                for t, value in zip(changed, before, strict=True):
                    t.copy_(value)

    def _hold_buffers(self, x: Tensor) -> None:
        """Note where the method's own buffers are, which graphs will read and write."""
        self._follow_buffers()
        if not all(held.numel() for held in own_buffers(self.method).values()):  # they get their size from a batch
            with on_device(self._device), torch.no_grad():
                self.method.objective(*self._look(x[:2], as_it_is))
        self.buffers = []
        for name, held in own_buffers(self.method).items():
            path, _, attribute = name.rpartition(".")
            self.buffers.append((self.method.get_submodule(path), attribute, held))

    @torch.no_grad()
    def _follow_buffers(self) -> None:
        """Take in whatever a reset or a load has put in the place of the method's own buffers."""
        for owner, name, held in self.buffers:
            found = getattr(owner, name)
            if found is held:
                continue
            if found.numel():
                held.copy_(found)
                used_here(found)
            else:  # one that gets its size from the first batch
                held.zero_()
            setattr(owner, name, held)


def _warn(what: str, error: Exception, then: str) -> None:
    warnings.warn(f"{what} ({type(error).__name__}: {error}): the fast path {then}", stacklevel=2)


class Part(NamedTuple):
    """What a step does; each kind has graphs of its own. See Method.step."""

    learn: bool
    observe: bool
    collect: bool
    by_image: bool


# --- what is compiled, besides the network


def _objective(method: ObjectiveMethod, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
    return method.objective(logits, features)


def _update(
    method: ObjectiveMethod,
    flat: FlatStep,
    grads: tuple[Tensor, ...],
    logits: Tensor,
    features: Sequence[Tensor],
    loss: Tensor,
) -> None:
    sound = logits.isfinite().all() & loss.detach().isfinite()
    made = flat.step(grads, sound, method.teaches(logits))
    method.learned(Pass(logits, features), made)


def _answered(method: ObjectiveMethod, logits: Tensor, features: Sequence[Tensor], observe: bool) -> Tensor:
    found = None
    if has_answer_kernels(logits):
        found = method.quick_answer(Pass(logits, features), observe)
    return method.answer(Pass(logits, features), observe) if found is None else found
