"""What every method is: a classifier that predicts, then adapts, on every call, and never sees a label."""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mgtta._lib.files import fingerprint
from mgtta._lib.ranks import ALONE, Alone
from mgtta.adaptation.scheduled import Schedule, summary
from mgtta.models.classifier import Classifier
from mgtta.models.features import FirstPass
from mgtta.models.norms import batch_norms

if TYPE_CHECKING:
    from mgtta.fast.engine import Fast  # with its compiler and kernels, for those alone who ask for it

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


class Turn:
    """A lock that every copy has afresh."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Turn":
        return memo.setdefault(id(self), Turn())

    def __reduce__(self) -> tuple[type["Turn"], tuple[()]]:
        return Turn, ()


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method's function that one thread enters at a time: others wait."""

    @wraps(function)
    def waiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return function(self, *args, **kwargs)

    return waiting


class Method(nn.Module):
    """Logits in, state carried along. It works on a copy of the model; yours stays as it is.

    A subclass writes `adapt`, declares what moves with `adapts`, and keeps further state in buffers of its own,
    in `optimizer` or in the extra state. Reset, save and resume follow from that.

    Attributes:
        updates: updates made since the last reset.
        skipped: batches that were predicted but not learned from, because something in them was not finite.
            A batch in which a method's filter leaves no image counts neither as an update nor as skipped.
        random: the method's own generator, on the CPU, where it draws any random numbers; see `seed`.
        max_updates, max_seconds: budgets; when one is spent the method only predicts.
        ranks: those who share every batch; see `join`.
        events: what a guard did, see mgtta.adaptation.guarded.
        fast: what takes the steps where they are not taken in float32; see `quicken` and mgtta.fast.engine.
        schedule: from which batches to learn; None: from all. See mgtta.adaptation.scheduled.

    Threads that share a method take turns: a call, a reset, a state saved or loaded is never mixed with another.
    """

    optimizer: Optimizer | None = None
    random: torch.Generator | None = None
    events: Sequence[dict[str, Any]] = ()
    needs: tuple[str, ...] = ()  # beside the model and the images, as `mgtta list` shows it
    ranks: Alone = ALONE
    shares_batches = False  # whether all that hangs on a whole batch is asked of `ranks`
    learns_from_all = False  # whether it learns from every batch, by `adapted` alone: what a schedule needs
    static_step = False  # whether a step does the same whatever is in a batch; each class says so for itself
    fast: "Fast | None" = None
    _schedule: Schedule | None = None

    def __init__(self, model: Classifier):
        super().__init__()
        self._turn = Turn()
        self.name = type(self).__name__  # `create` puts the recipe's here
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.fingerprint = model.fingerprint()
        self.adapted: dict[str, nn.Parameter] = {}
        self._updates = self._skipped = 0
        self.seconds = 0.0
        self.max_updates: int | None = None
        self.max_seconds: float | None = None
        self._start: dict[str, Any] | None = None

    def adapts(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Declare the parameters of self.model that adapt."""
        wanted = {id(p) for p in params}
        self.adapted = {name: p for name, p in self.model.named_parameters() if id(p) in wanted}
        for name, p in self.adapted.items():
            if p.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{name} is {p.dtype}, which rounds small updates away: adapt model.float()")
            p.requires_grad_()
        return list(self.adapted.values())

    def seed(self, seed: int) -> torch.Generator:
        """Start the method's own random numbers; its state is saved and reset with the rest."""
        self.random = torch.Generator().manual_seed(seed)
        return self.random

    def join(self, ranks: Alone) -> None:
        """Share every batch with other ranks: each gives its images, and all learn as one would from all of them."""
        if not self.shares_batches:
            raise ValueError(
                f"{self.name} looks at a batch as a whole, so it cannot share one with other ranks: run it in one "
                "process, or take a method that can, such as tent or mgtta"
            )
        if self.model._uses_batch_statistics and batch_norms(self.model.net):
            raise ValueError(
                f"{self.model.name} has BatchNorm layers, which normalise by the batch at hand, and a rank has a share "
                "of it alone: run it in one process, or take a model with LayerNorm or GroupNorm"
            )
        self.model.takes_empty = True
        self.ranks = ranks

    def quicken(self, low_memory: bool = False, precision: str = "bf16") -> None:
        """Take steps with the frozen weights in bfloat16 from now on: see mgtta.fast.engine."""
        from mgtta.fast.bf16 import lower
        from mgtta.fast.engine import Fast

        lower(self.model)
        self.fast = Fast(low_memory, precision)

    @property
    def precision(self) -> str:
        return "fp32" if self.fast is None else self.fast.precision

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

    @property
    def schedule(self) -> Schedule | None:
        self._settle()
        return self._schedule

    @in_turn
    def _settle(self) -> None:
        """Take in what a GPU has done since it was last asked: the fast path's counts, and what a schedule goes by."""
        if self._schedule is not None:
            self._schedule.settle()
        if self.fast is not None:
            made, left_out = self.fast.settle(self._updates)
            self._updates += made
            self._skipped += left_out

    @in_turn
    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, C) of x from before its update, detached; then the update."""
        self._remember_start()
        if self.spent:
            with torch.no_grad():
                return self.predict(x)
        began = time.perf_counter()
        with torch.inference_mode(False):
            if isinstance(x, Tensor) and x.is_inference():
                x = x.clone()
            schedule = self._schedule
            if schedule is not None:
                self._settle()  # what it goes by
            learns, before = schedule is None or schedule.due, self._updates
            with torch.set_grad_enabled(learns):
                logits, about = self._taken(x, learns)
            if schedule is not None and about is not None:
                schedule.note(about, learns, len(x))
                if learns and self.updates > before:
                    schedule.average(list(self.adapted.values()), last=self.spent)
        if logits.is_cuda and self.max_seconds is not None:
            torch.cuda.synchronize(logits.device)
        took = time.perf_counter() - began
        self.seconds += took if self.max_seconds is None else self.ranks.most(took)  # all stop at the same batch
        return logits

    def _taken(self, x: Tensor, learns: bool) -> tuple[Tensor, Tensor | None]:
        """The logits of x, learned from or not; and a summary for a schedule, where there is one."""
        if self.fast is not None:
            return self.fast.adapt(self, x) if learns else self.fast.predict(self, x)
        run = self.adapt if learns else self.predict
        if self._schedule is None:
            return run(x).detach(), None
        with FirstPass(self.model.net, self.model._taps) as first:
            logits = run(x).detach()
        return logits, summary(logits, self.model.in_order(first.found))

    def predict(self, x: Tensor) -> Tensor:
        """The logits of x as the method stands, without adapting."""
        return self.model(x) if self.fast is None else self.fast.predict(self, x)[0]

    @in_turn
    @torch.inference_mode(False)
    def warm_up(self, x: Tensor) -> None:
        """Make ready for batches of x's shape now, not when they have come for a while; it leaves no trace.

        On the fast path and a GPU it compiles for half a minute or so; elsewhere there is nothing to do.
        """
        if self.fast is not None:
            self._remember_start()
            before = self.state_dict()
            self.fast.predict(self, x, now=True)
            with torch.enable_grad():
                self.fast.adapt(self, x, now=True)
            self._load(before)

    def adapt(self, x: Tensor) -> Tensor:
        """The logits of x, after which the method has learned from x."""
        return self.predict(x)

    @property
    def spent(self) -> bool:
        """Whether a budget of updates or seconds is used up."""
        return (self.max_updates is not None and self.updates >= self.max_updates) or (
            self.max_seconds is not None and self.seconds >= self.max_seconds
        )

    @in_turn
    def reset(self) -> None:
        """Exactly the source model again, with fresh optimizer, memory and counters."""
        if self._start is not None:
            self._load(self._start)

    def get_extra_state(self) -> Any:
        """What is kept beside parameters, buffers and optimizer: plain values and tensors, nested."""
        return {} if self.random is None else {"random": self.random.get_state()}

    def set_extra_state(self, state: Any) -> None:
        if self.random is not None:
            self.random.set_state(state["random"].cpu())

    @property
    def kind(self) -> str:
        """What a state must share with the method that loads it: class, optimizer and generator."""
        return " with ".join([type(self).__name__, *_kinds(self.optimizer)])

    @in_turn
    @torch.inference_mode(False)
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All that adaptation has changed, as copies: parameters, buffers, optimizer, counters."""
        if args or kwargs:  # inside another module: torch's own
            return super().state_dict(*args, **kwargs)
        return copy.deepcopy(
            {
                "kind": self.kind,
                "model": self.fingerprint,
                "params": {name: p.detach() for name, p in self.adapted.items()},
                "buffers": self._own_buffers(),
                "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
                "counters": {"updates": self.updates, "skipped": self.skipped, "seconds": self.seconds},
                "extra": self.get_extra_state(),
                **({} if self.schedule is None else {"schedule": self.schedule.state()}),
            }
        )

    @in_turn
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken. A state that does not fit changes nothing."""
        self._remember_start()
        before = self.state_dict()
        if isinstance(state, dict) and state.keys() ^ before.keys() == {"schedule"}:
            raise ValueError("this state and the method differ in schedule: one has none")
        if not isinstance(state, dict) or state.keys() != before.keys():
            raise ValueError("this is not a state that a method's state_dict gave")
        for key in ("kind", "model"):
            if state[key] != before[key]:
                raise ValueError(f"this state belongs to another {key} ({state[key]}, not {before[key]})")
        try:
            self._load(state)
        except Exception as error:
            self._load(before)
            raise ValueError(f"this state does not fit {self.kind}: {error}") from error

    @torch.inference_mode(False)
    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        self._settle()
        if {n: p.shape for n, p in state["params"].items()} != {n: p.shape for n, p in self.adapted.items()}:
            raise ValueError("its parameters have other names or shapes")
        if not all(p.isfinite().all() for p in state["params"].values()):
            raise ValueError("its parameters are not finite")
        if state["buffers"].keys() != self._own_buffers().keys():
            raise ValueError("its buffers have other names")
        if self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            for p, moments in self.optimizer.state.items():
                if any(t.ndim and t.shape != p.shape and len(t) != p.numel() for t in moments.values()):
                    raise ValueError("its optimizer's tensors have other shapes")
        for name, value in state["params"].items():
            self.adapted[name].copy_(value)
        for name, value in state["buffers"].items():  # a buffer may have grown, as T3A's supports do
            owner = self.get_submodule(name.rpartition(".")[0])
            old = getattr(owner, name.rpartition(".")[2])
            setattr(owner, name.rpartition(".")[2], value.clone().to(old.device))
        for name in ("updates", "skipped", "seconds"):
            setattr(self, name, state["counters"][name])
        self.set_extra_state(copy.deepcopy(state["extra"]))
        if self.schedule is not None:
            self.schedule.load(copy.deepcopy(state["schedule"]), list(self.adapted.values()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Method":
        """Where the parameters go, `to` a device or dtype, the optimizer's moments and memory go along."""
        if self.fast is not None:
            if any(fn(torch.empty(0, dtype=d)).dtype != d for d in (torch.float32, torch.bfloat16)):
                raise TypeError(f"precision={self.precision!r} has its own dtypes: take precision='fp32' for others")
            self._settle()
            self.fast.forget()
        super()._apply(fn, recurse)
        for moments in self.optimizer.state.values() if self.optimizer is not None else ():
            for name, value in moments.items():
                if isinstance(value, Tensor) and value.ndim:
                    moments[name] = fn(value)
        return self

    def __getstate__(self) -> Any:
        self._settle()
        return super().__getstate__()

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: b for name, b in self.named_buffers() if not name.startswith("model.")}

    def train(self, mode: bool = True) -> "Method":
        """Nothing to switch: a method adapts on every call, and its dropout stays off."""
        self.training = mode
        return self

    def _remember_start(self) -> None:
        if self._start is None:
            self._start = self.state_dict()


def _kinds(optimizer: Any) -> Iterable[str]:
    """The names of an optimizer, of its generator and of the optimizer inside it."""
    if optimizer is not None:
        yield type(optimizer).__name__
        if hasattr(optimizer, "generator"):
            yield f"generator {fingerprint(optimizer.generator.state_dict())}"
        yield from _kinds(getattr(optimizer, "base", None))


class GradientMethod(Method):
    """A method that lowers an unsupervised loss with an optimizer; a subclass writes `loss`.

    decay: updates after which the learning rate has fallen to 0.7 of what it was; by default it never falls.
    """

    optimizer: Optimizer
    needs: tuple[str, ...] = ("gradients",)

    def __init__(
        self,
        model: Classifier,
        params: Callable[[nn.Module], Iterable[nn.Parameter]],
        optimizer: OptimizerFactory,
        decay: float = math.inf,
    ):
        super().__init__(model)
        self.model.use_batch_statistics()
        self.optimizer = optimizer(self.adapts(params(self.model)))
        self.decay = decay

    @property
    def pace(self) -> float:
        """What the next step's learning rate is multiplied by: 1 / sqrt(1 + updates / decay)."""
        return (1 + self.updates / self.decay) ** -0.5

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (N, C) and the scalar to lower; None where there is nothing to learn from."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def criterion(self, logits: Tensor, features: Sequence[Tensor]) -> Tensor:
        """The same scalar from logits and features, where the step is static: what the fast path lowers."""
        raise TypeError(f"{type(self).__name__} defines no criterion")

    def learned(self, logits: Tensor) -> None:
        """Called after an update, with the logits from before it: for averages that a method keeps."""

    def adapt(self, x: Tensor) -> Tensor:
        logits, loss = self.loss(x)
        if not self.ranks.all(logits.isfinite().all()):
            self.skipped += 1
        elif loss is not None and self.descend(loss):
            self.learned(logits.detach())
        return logits

    def descend(self, loss: Tensor) -> bool:
        """One optimizer step; none, and the batch counted as skipped, where loss or gradient is not finite."""
        grads = self.gradients(loss)
        if grads is None:
            self.skipped += 1
            return False
        self.step(grads)
        return True

    def gradients(self, loss: Tensor, more: Sequence[Tensor] = ()) -> Sequence[Tensor | None] | None:
        """The gradient for every adapted parameter and for `more`; None where it is not finite."""
        wanted = [*self.adapted.values(), *more]
        own = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.isfinite() else ()
        grads = self.ranks.average(own)
        norms = torch._foreach_norm([g for g in grads if g is not None]) if grads else []
        return grads if norms and torch.stack(list(norms)).isfinite().all() else None

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One optimizer step along these gradients of the adapted parameters."""
        for p, grad in zip(self.adapted.values(), grads, strict=True):
            p.grad = grad
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * self.pace
        self.optimizer.step()
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        self.optimizer.zero_grad()
        self.updates += 1


def frozen(tensors: Iterable[Tensor]) -> nn.ParameterList:
    """Copies that move with a method from device to device, and that never change, so that no state has them."""
    return nn.ParameterList(nn.Parameter(t.detach().clone(), requires_grad=False) for t in tensors)
