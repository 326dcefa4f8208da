"""THE step: predict, then learn. Read this file first.

An engine runs the step of one method. `EagerEngine` is the step in plain PyTorch. `mgtta.fast.engine.FastEngine` is the
same step with frozen weights in bfloat16, captured on a GPU.

Shapes: N images, C classes, d_i features of layer i.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mgtta.models.statistics import image_by_image

if TYPE_CHECKING:
    from mgtta.adaptation.method import Method

Number = TypeVar("Number", float, Tensor)


class Pass(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # (N, C)
    features: Sequence[Tensor] = ()  # (N, d_i) of each layer i, for methods that look at them


class Engine(Protocol):
    """How a method predicts and learns, and how often it has learned."""

    precision: str
    leaves_out: bool  # True: an update that is not finite is left out and counted without a wait for the GPU
    by_modules: bool  # True: only predict, module by module, as the hooks and statistics in the network stand
    by_image: bool  # True: a network that blends statistics normalises image by image, as models/blended.py says
    updates: int  # since the last reset
    skipped: int  # batches that were predicted but not learned from, because something was not finite

    @property
    def graph_bytes(self) -> int:
        """GPU memory that torch does not count as allocated."""

    def step(self, x: Tensor, learn: bool, observe: bool, collect: bool) -> Pass:
        """Predict x, learn from it, and return the caller's logits, and the features. The arguments: Method.step."""

    def predict(self, x: Tensor) -> Pass:
        """Predict x as the method stands."""

    def adapt(self, x: Tensor) -> Pass:
        """Predict x, then make one update or count a skip."""

    def warm_up(self, x: Tensor, learn: bool | None = None, observe: bool = True, collect: bool = True) -> None:
        """Prepare for batches of this shape; may change the method's state. The arguments: Method.warm_up."""

    def replayed(self, function: Callable[[Tensor], Tensor], x: Tensor, now: bool = False) -> Tensor:
        """Return function(x), which depends only on x and on frozen weights; a GPU replays it.

        Args:
            now: prepare for it at once, however rare the shape.
        """

    def apart(self, x: Tensor) -> AbstractContextManager[None]:
        """Return a block that uses x, and for whose work on a GPU the caller does not wait."""

    def moving(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Prepare for `fn`, a move to a device or dtype, to be applied to all tensors of the method."""


class EagerEngine:
    """The step in plain PyTorch."""

    precision = "fp32"
    leaves_out = False
    by_modules = True
    graph_bytes = 0

    def __init__(self, method: "Method"):
        self.method = method
        self.by_image = False
        self.updates = 0
        self.skipped = 0

    def step(self, x: Tensor, learn: bool, observe: bool, collect: bool) -> Pass:
        method = self.method
        normalising = image_by_image(method.model.net) if self.by_image else nullcontext()
        with torch.set_grad_enabled(learn), _collecting(method, learn, collect), normalising:
            seen = method.adapt(x) if learn else self.predict(x)
        with torch.no_grad():
            seen = Pass(seen.logits.detach(), [f.detach() for f in seen.features])
            logits = method.answer(seen, observe)
        return Pass(logits, seen.features)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Pass:
        return self.method.look(x)

    def adapt(self, x: Tensor) -> Pass:
        if self.method.optimizer is None:
            return self.method.look(x)
        self.method.begin_step(x)
        seen, loss = self.method.loss(x)
        if not self.method.ranks.all(seen.logits.isfinite().all()):
            self.skipped += 1
        elif loss is not None and self.learn(loss):
            self.method.learned(seen)
        return seen

    def learn(self, loss: Tensor) -> bool:
        """Make one update along the gradient of the loss; return False, and count a skip, if it is not finite."""
        grads = self.gradients(loss)
        if grads is None:
            self.skipped += 1
            return False
        self.update(grads)
        return True

    def gradients(self, loss: Tensor, more: Sequence[Tensor] = ()) -> Sequence[Tensor | None] | None:
        """Return the gradient for every adapted parameter and for `more`; None if it is not finite."""
        wanted = [*self.method.adapted.values(), *more]
        own = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.isfinite() else ()
        grads = self.method.ranks.average(own)
        norms = torch._foreach_norm([g for g in grads if g is not None]) if grads else []
        return grads if norms and torch.stack(list(norms)).isfinite().all() else None

    def update(self, grads: Sequence[Tensor | None]) -> None:
        """Move the adapted parameters by one optimizer step, then pull them towards the source."""
        method = self.method
        optimizer = method.optimizer
        assert optimizer is not None
        params: list[Tensor] = list(method.adapted.values())
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        with scaled_rates(optimizer, pace(self.updates, method.decay)):
            optimizer.step()
        optimizer.zero_grad()
        if method.pull:
            with torch.no_grad():
                torch._foreach_lerp_(params, list(method.origin), method.pull)
        self.updates += 1

    def warm_up(self, x: Tensor, learn: bool | None = None, observe: bool = True, collect: bool = True) -> None:
        """Do nothing: there is nothing to compile."""

    def replayed(self, function: Callable[[Tensor], Tensor], x: Tensor, now: bool = False) -> Tensor:
        return function(x)

    def apart(self, x: Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def moving(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Do nothing: all tensors belong to the method."""


def pace(updates: Number, decay: float) -> Number:
    """Return the factor on the learning rate after so many updates: 1 / sqrt(1 + updates / decay)."""
    return (1 + updates / decay) ** -0.5


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the optimizer's learning rates by the factor, within the block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = factor * lr
    try:
        yield
    finally:
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr


def _collecting(method: "Method", learn: bool, collect: bool) -> AbstractContextManager[None]:
    """Return a block whose first forward pass goes into the stream's statistics, if there are any."""
    if method.statistics is None or not collect:
        return nullcontext()
    running = method.model if learn else method.predicting
    return method.statistics.collect(running.net)
