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

from mgtta.learned.optimizer import MGG, PER_COORDINATE, generator_inputs

Rule = Callable[["FlatStep", Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]  # grad, state -> update, state


def _sgd(flat: "FlatStep", grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    update = flat.settings["momentum"] * state[0] + grad if state else grad
    return update, [update] if state else []


def _adam(flat: "FlatStep", grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    (a, b), t = flat.settings["betas"], flat.t + 1
    exp_avg, exp_avg_sq = a * state[0] + (1 - a) * grad, b * state[1] + (1 - b) * grad.square()
    denominator = (exp_avg_sq / (1 - b**t)).sqrt() + flat.settings["eps"]
    return exp_avg / (1 - a**t) / denominator, [exp_avg, exp_avg_sq]


def _mgg(flat: "FlatStep", grad: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    betas, eps = flat.settings["betas"], flat.settings["eps"]
    inputs, *moments = generator_inputs(grad, state[0], state[1], flat.t + 1, betas, eps)
    update, memory = flat.generator(inputs, state[2])
    return update, [*moments, memory]


RULES: dict[type[Optimizer], tuple[Rule, tuple[str, ...]]] = {  # and the names of the state of each coordinate
    SGD: (_sgd, ("momentum_buffer",)),
    Adam: (_adam, PER_COORDINATE[:2]),
    MGG: (_mgg, PER_COORDINATE),
}


class FlatStep:
    """The step of an optimizer, which keeps being the owner of settings and state.

    Args:
        params: those of its one group that get gradients, float32 and on one device.
        decay: the learning rate of an update after k others is lr / sqrt(1 + k / decay).
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[nn.Parameter], decay: float = math.inf):
        [self.settings] = optimizer.param_groups
        self.optimizer, self.params, self.sizes = optimizer, list(params), [p.numel() for p in params]
        self.rule, self.names = RULES[type(optimizer)]
        self.counted = type(optimizer) is not SGD  # whether the optimizer's state has a `step`
        if not self.counted and not self.settings["momentum"]:
            self.names = ()
        self.theta = torch.cat([p.detach().flatten() for p in params])  # (n,)
        for p, part in zip(params, self.theta.split(self.sizes), strict=True):
            p.data = part.view_as(p)
        like = self.theta
        generator: Any = getattr(optimizer, "generator", None)
        self.generator: Any = generator and generator.to(like)
        self.state = [  # (n,); the memory (n, width), as the generator likes it
            like.new_empty(generator.memory.width, len(like)).t() if name == "memory" else torch.empty_like(like)
            for name in self.names
        ]
        self.views = [  # of each parameter
            {name: part.view_as(p) if part.ndim == 1 else part for name, part in zip(self.names, parts, strict=True)}
            for p, *parts in zip(params, *(s.split(self.sizes) for s in self.state), strict=True)
        ]
        self.t, self.lr, self.age, self.decay = like.new_zeros(()), like.new_zeros(()), like.new_zeros(()), decay
        self.counts = torch.zeros(2, dtype=torch.int64, device=like.device)  # steps made, steps left out
        self._lr: float | None = None
        self._known: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step changes."""
        return [self.theta, *self.state, self.t, self.age, self.counts]

    @torch.no_grad()
    def take_in(self) -> None:
        """Whatever the optimizer's settings and state have become since, by a reset, a load or a guard."""
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
    def step(self, grads: Sequence[Tensor], sound: Tensor) -> None:
        """theta <- theta - lr * pace * update, where `sound` and all gradients are finite; a count alone where not."""
        grad = torch.cat([g.flatten() for g in grads])
        fine = sound & grad.isfinite().all()
        update, state = self.rule(self, grad, self.state)
        for old, new in zip(self.state, state, strict=True):
            old.copy_(torch.where(fine, new, old))
        pace = (1 + self.age / self.decay).rsqrt()
        self.theta.sub_(torch.where(fine, self.lr * pace * update, 0.0))
        self.t.add_(fine)
        self.age.add_(fine)
        self.counts.add_(torch.stack([fine, ~fine]))

    def settle(self) -> tuple[int, int]:
        """Steps made and left out since the last call, which the optimizer's state has then counted; waits."""
        made, left_out = self.counts.tolist()
        self.counts.zero_()
        for p in self.params if self.counted and made else ():
            self.optimizer.state[p]["step"] += made
        return made, left_out
