"""SGD, Adam and MGG on all parameters as one vector, in a step that never waits for the device.

Parameters and `optimizer.state` hold views of vectors whose place never changes, so a CUDA graph may hold the step.
A step whose gradient is not finite leaves all of them as they were; what was done is counted on the device.

Shapes: n coordinates of all parameters together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from mgtta.adaptation.step import pace
from mgtta.fast.columns import generate
from mgtta.learned.optimizer import MGG, PER_COORDINATE, generator_inputs

Rule = Callable[["FlatStep", Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]  # grad, state -> update, state


def _sgd(flat: "FlatStep", grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    if not state:
        return grad, []
    momentum = flat.settings["momentum"]
    velocity = momentum * state[0] + grad
    if flat.settings["nesterov"]:
        return grad + momentum * velocity, [velocity]
    return velocity, [velocity]


def _adam(flat: "FlatStep", grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    beta1, beta2 = flat.settings["betas"]
    t = flat.t + 1
    exp_avg = beta1 * state[0] + (1 - beta1) * grad
    exp_avg_sq = beta2 * state[1] + (1 - beta2) * grad.square()
    denominator = (exp_avg_sq / (1 - beta2**t)).sqrt() + flat.settings["eps"]
    return exp_avg / (1 - beta1**t) / denominator, [exp_avg, exp_avg_sq]


def _mgg(flat: "FlatStep", grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    settings = flat.settings
    inputs, *moments = generator_inputs(grad, state[0], state[1], flat.t + 1, settings["betas"], settings["eps"])
    update, memory = generate(flat.generator, inputs, state[2])
    return update, [*moments, memory]


RULES: dict[type[Optimizer], tuple[Rule, tuple[str, ...]]] = {  # and the names of the state of each coordinate
    SGD: (_sgd, ("momentum_buffer",)),
    Adam: (_adam, PER_COORDINATE[:2]),
    MGG: (_mgg, PER_COORDINATE),
}


class FlatStep:
    """The step of an optimizer, which stays the owner of settings and state.

    Args:
        params: those of its one group that get gradients, float32 and on one device.
        origin: their values in the source model.
        decay, pull: as in mgtta.adaptation.method.Method.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[nn.Parameter],
        origin: Sequence[Tensor],
        decay: float = math.inf,
        pull: float = 0.0,
    ):
        [self.settings] = optimizer.param_groups
        self.optimizer = optimizer
        self.params = list(params)
        self.sizes = [p.numel() for p in params]
        self.rule, self.names = RULES[type(optimizer)]
        self.counted = type(optimizer) is not SGD  # True if the optimizer's state has a `step`
        if not self.counted and not self.settings["momentum"]:
            self.names = ()
        self.decay = decay
        self.pull = pull
        self.theta = torch.cat([p.detach().flatten() for p in params])  # (n,)
        self.origin = torch.cat([p.detach().flatten() for p in origin])  # (n,)
        for p, part in zip(params, self.theta.split(self.sizes), strict=True):
            used_here(p.data)
            p.data = part.view_as(p)
        self.generator = self._generator()
        self.state = [self._room(name) for name in self.names]
        self.views = [  # of each parameter
            {name: part.view_as(p) if part.ndim == 1 else part for name, part in zip(self.names, parts, strict=True)}
            for p, *parts in zip(params, *(s.split(self.sizes) for s in self.state), strict=True)
        ]
        self.t = self.theta.new_zeros(())
        self.lr = self.theta.new_zeros(())
        self.age = self.theta.new_zeros(())  # updates of the method
        self.counts = torch.zeros(2, dtype=torch.int64, device=self.theta.device)  # steps made, steps left out
        self._lr: float | None = None
        self._known: Any = None

    def _generator(self) -> Any:
        generator = getattr(self.optimizer, "generator", None)
        return None if generator is None else generator.to(self.theta)

    def _room(self, name: str) -> Tensor:
        """Return room for a state of each coordinate: (n,), or (n, width) for the memory, as the generator likes it."""
        if name != "memory":
            return torch.empty_like(self.theta)
        return self.theta.new_empty(self.generator.memory.width, len(self.theta)).t()

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [self.theta, *self.state, self.t, self.age, self.counts]

    @torch.no_grad()
    def take_in(self) -> None:
        """Follow whatever a reset, a load or a guard did to the optimizer's settings and state."""
        self.settings = self.optimizer.param_groups[0]
        if self.settings["lr"] != self._lr:
            self._lr = self.settings["lr"]
            self.lr.fill_(self._lr)
        if self.optimizer.state is self._known:  # loading puts another in its place
            return
        self._known = self.optimizer.state
        found = [self._known.get(p, {}) for p in self.params]
        self._start()
        for p, own, views in zip(self.params, found, self.views, strict=True):
            for name, view in views.items():
                if own.get(name) is not None:
                    view.copy_(own[name])
                    used_here(own[name])
            step = {"step": own.get("step", torch.zeros(()))} if self.counted else {}
            if self.names:
                self._known[p] = {**step, **views}
        if self.counted:
            self.t.fill_(float(self._known[self.params[0]]["step"]))

    def _start(self) -> None:
        for name, state in zip(self.names, self.state, strict=True):
            if name == "memory":
                state.copy_(self.generator.init_memory(len(state)))
            else:
                state.zero_()

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], sound: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Make one update if `sound`, finite like its gradients, and wanted; return whether it was made.

        What is not finite is counted as a skip.
        """
        grad = torch.cat([g.flatten() for g in grads])
        update, state = self.rule(self, grad, self.state)
        finite = sound & (grad.isfinite() & update.isfinite()).all()
        made = finite if wanted is None else finite & wanted
        for old, new in zip(self.state, state, strict=True):
            old.copy_(torch.where(made, new, old))
        rate = self.lr * pace(self.age, self.decay)
        self.theta.sub_(torch.where(made, rate * update, 0.0))
        if self.pull:
            self.theta.lerp_(self.origin, torch.where(made, self.pull, 0.0))
        self.t.add_(made)
        self.age.add_(made)
        self.counts.add_(torch.stack([made, ~finite]))
        return made

    def settle(self) -> tuple[int, int]:
        """Return the steps made and left out since the last call, and count them in the optimizer's state; waits."""
        made, left_out = self.counts.tolist()
        self.counts.zero_()
        for p in self.params if self.counted and made else ():
            self.optimizer.state[p]["step"] += made
        return made, left_out


def used_here(t: Tensor) -> None:
    """Keep the memory of a tensor that is freed soon until the present stream has used it.

    Else the stream that it was made on may write another tensor there, while this stream has still to read it.
    """
    if t.is_cuda:
        t.record_stream(torch.cuda.current_stream(t.device))
