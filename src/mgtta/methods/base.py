"""What every method is: a classifier that predicts, then adapts, on every call, and never sees a label."""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mgtta.models import Classifier

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


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
    """

    optimizer: Optimizer | None = None
    random: torch.Generator | None = None
    needs: tuple[str, ...] = ()  # beside the model and the images, as `mgtta list` shows it

    def __init__(self, model: Classifier):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.fingerprint = model.fingerprint()
        self.adapted: dict[str, nn.Parameter] = {}
        self.updates = self.skipped = 0
        self.seconds = 0.0
        self.max_updates: int | None = None
        self.max_seconds: float | None = None
        self._start: dict[str, Any] | None = None

    def adapts(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Declare the parameters of self.model that adapt."""
        wanted = {id(p) for p in params}
        self.adapted = {name: p for name, p in self.model.named_parameters() if id(p) in wanted}
        for p in self.adapted.values():
            p.requires_grad_()
        return list(self.adapted.values())

    def seed(self, seed: int) -> torch.Generator:
        """Start the method's own random numbers; its state is saved and reset with the rest."""
        self.random = torch.Generator().manual_seed(seed)
        return self.random

    def forward(self, x: Tensor) -> Tensor:
        """The logits (N, C) of x from before its update, detached; then the update."""
        self._remember_start()
        if self.spent:
            with torch.no_grad():
                return self.predict(x)
        began = time.perf_counter()
        with torch.inference_mode(False), torch.enable_grad():
            if isinstance(x, Tensor) and x.is_inference():
                x = x.clone()
            logits = self.adapt(x).detach()
        if logits.is_cuda and self.max_seconds is not None:
            torch.cuda.synchronize(logits.device)
        self.seconds += time.perf_counter() - began
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """The logits of x as the method stands, without adapting."""
        return self.model(x)

    def adapt(self, x: Tensor) -> Tensor:
        """The logits of x, after which the method has learned from x."""
        return self.predict(x)

    @property
    def spent(self) -> bool:
        """Whether a budget of updates or seconds is used up."""
        return (self.max_updates is not None and self.updates >= self.max_updates) or (
            self.max_seconds is not None and self.seconds >= self.max_seconds
        )

    def reset(self) -> None:
        """Exactly the source model again, with fresh optimizer, memory and counters."""
        if self._start is not None:
            self.load_state_dict(self._start)

    def get_extra_state(self) -> Any:
        """What is kept beside parameters, buffers and optimizer: plain values and tensors, nested."""
        return {} if self.random is None else {"random": self.random.get_state()}

    def set_extra_state(self, state: Any) -> None:
        if self.random is not None:
            self.random.set_state(state["random"].cpu())

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """All that adaptation has changed, as copies: parameters, buffers, optimizer, counters."""
        return copy.deepcopy(
            {
                "method": type(self).__name__,
                "model": self.fingerprint,
                "params": {name: p.detach() for name, p in self.adapted.items()},
                "buffers": self._own_buffers(),
                "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
                "counters": {"updates": self.updates, "skipped": self.skipped, "seconds": self.seconds},
                "extra": self.get_extra_state(),
            }
        )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        """Go on exactly where `state_dict` was taken. A state that does not fit changes nothing."""
        self._remember_start()
        for key, own in (("method", type(self).__name__), ("model", self.fingerprint)):
            if state.get(key) != own:
                raise ValueError(f"this state belongs to another {key} ({state.get(key)}, not {own})")
        shapes = {name: p.shape for name, p in self.adapted.items()}
        fits = {name: p.shape for name, p in state["params"].items()} == shapes
        if not fits or state["buffers"].keys() != self._own_buffers().keys():
            raise ValueError("this state does not fit: its parameters or buffers have other names or shapes")
        if self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for name, value in state["params"].items():
            self.adapted[name].copy_(value)
        for name, value in state["buffers"].items():  # a buffer may have grown, as T3A's supports do
            owner = self.get_submodule(name.rpartition(".")[0])
            old = getattr(owner, name.rpartition(".")[2])
            setattr(owner, name.rpartition(".")[2], value.clone().to(old.device))
        for name, value in state["counters"].items():
            setattr(self, name, value)
        self.set_extra_state(copy.deepcopy(state["extra"]))

    def _own_buffers(self) -> dict[str, Tensor]:
        return {name: b for name, b in self.named_buffers() if not name.startswith("model.")}

    def train(self, mode: bool = True) -> "Method":
        """Nothing to switch: a method adapts on every call, and its dropout stays off."""
        self.training = mode
        return self

    def _remember_start(self) -> None:
        if self._start is None:
            self._start = self.state_dict()


class GradientMethod(Method):
    """A method that lowers an unsupervised loss with an optimizer; a subclass writes `loss`."""

    optimizer: Optimizer
    needs: tuple[str, ...] = ("gradients",)

    def __init__(
        self,
        model: Classifier,
        params: Callable[[nn.Module], Iterable[nn.Parameter]],
        optimizer: OptimizerFactory,
    ):
        super().__init__(model)
        self.model.use_batch_statistics()
        self.optimizer = optimizer(self.adapts(params(self.model)))

    def loss(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (N, C) and the scalar to lower; None where there is nothing to learn from."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def learned(self, logits: Tensor) -> None:
        """Called after an update, with the logits from before it: for averages that a method keeps."""

    def adapt(self, x: Tensor) -> Tensor:
        logits, loss = self.loss(x)
        if not logits.isfinite().all():
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
        grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.isfinite() else ()
        norms = torch._foreach_norm([g for g in grads if g is not None]) if grads else []
        return grads if norms and torch.stack(list(norms)).isfinite().all() else None

    def step(self, grads: Sequence[Tensor | None]) -> None:
        """One optimizer step along these gradients of the adapted parameters."""
        for p, grad in zip(self.adapted.values(), grads, strict=True):
            p.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1


def frozen(tensors: Iterable[Tensor]) -> nn.ParameterList:
    """Copies that move with a method from device to device, and that never change, so that no state has them."""
    return nn.ParameterList(nn.Parameter(t.detach().clone(), requires_grad=False) for t in tensors)
