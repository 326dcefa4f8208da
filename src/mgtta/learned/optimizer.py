"""MGG: a torch optimizer around a frozen Meta Gradient Generator (arXiv 2412.16901, Eq. 2, appendix B.1).

Notation    g  gradient; m, v  its first and second moments; t  counts batches from 1
"""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from mgtta.learned.generator import MetaGradientGenerator

BETAS, EPS = (0.9, 0.99), 1e-8  # appendix B.1
PER_COORDINATE = ("exp_avg", "exp_avg_sq", "memory")  # of a parameter's state


def generator_inputs(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int | Tensor, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """z = (m_hat, g) / (sqrt(v_hat) + eps), and the new moments; all of (n,), z of (n, 2).

    As in the released system, bias correction uses the power t + 1 (2 at the first batch), and momentum comes
    before the gradient, where the paper writes the other order: released weights need this one.
    """
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad.square()
    m_hat = exp_avg / (1 - betas[0] ** (step + 1))
    v_hat = exp_avg_sq / (1 - betas[1] ** (step + 1))
    denominator = v_hat.sqrt() + eps
    return torch.stack([m_hat / denominator, grad / denominator]).t(), exp_avg, exp_avg_sq


class MGG(Optimizer):
    """theta <- theta - lr * generator(gradients): a learned optimizer with torch's interface.

    The generator is copied and frozen. A parameter's moments, memory (its numel, memory width) and step are in
    `state[p]`, so `state_dict` carries all that is needed to go on bit for bit.
    """

    def __init__(
        self,
        params: ParamsT,
        generator: MetaGradientGenerator,
        lr: float = 1e-3,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
    ):
        if not isinstance(generator, MetaGradientGenerator):
            raise TypeError(
                f"generator must be a MetaGradientGenerator, not {type(generator).__name__}; "
                "mgtta.load_generator gives one from a name or a file"
            )
        self.generator = copy.deepcopy(generator).requires_grad_(False)
        self._laid_out: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        settings = {**self.defaults, **param_group}
        lr, betas, eps = settings["lr"], settings["betas"], settings["eps"]
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr must be finite and at least 0, not {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), not {betas}")
        if not eps > 0:
            raise ValueError(f"eps must be above 0, not {eps}")
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"MGG moves float32 or float64 parameters, not {p.dtype}, in which small updates are rounded "
                    "away: keep the parameters that adapt in float32"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for step, params in self._ready(group).items():
                self._update(params, step[0], group)
        return loss

    def _ready(self, group: dict[str, Any]) -> dict[tuple, list[Tensor]]:
        """(step, device, dtype) -> the parameters with a gradient; one entry unless parameters joined later."""
        ready = defaultdict(list)
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise TypeError("MGG takes dense gradients")
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)
                state["memory"] = self.generator.init_memory(p.numel()).to(p.device, p.dtype).contiguous()
            ready[int(state["step"]) + 1, p.device, p.dtype].append(p)
        return ready

    def _update(self, params: list[Tensor], step: int, group: dict[str, Any]) -> None:
        exp_avg, exp_avg_sq, memory = self._flat(params)
        grad = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        inputs, *moments = generator_inputs(grad, exp_avg, exp_avg_sq, step, group["betas"], group["eps"])
        update, written = self._generator_like(grad)(inputs, memory)
        for old, new in zip((exp_avg, exp_avg_sq, memory), (*moments, written), strict=True):
            old.copy_(new)
        parts = [part.view_as(p) for p, part in zip(params, update.split([p.numel() for p in params]), strict=True)]
        torch._foreach_sub_(params, parts, alpha=group["lr"])  # Eq. 2
        torch._foreach_add_([self.state[p]["step"] for p in params], 1)

    def _generator_like(self, grad: Tensor) -> MetaGradientGenerator:
        weight = self.generator.o_proj.weight
        if (weight.device, weight.dtype) != (grad.device, grad.dtype):  # to look costs a tenth of asking every weight
            self.generator.to(grad.device, grad.dtype)
        return self.generator

    def _flat(self, params: list[Tensor]) -> list[Tensor]:
        """The moments (n,) and the memory (n, width) of all these parameters, of which `state[p]` holds views.

        They are laid out anew whenever a state is no longer such a view: at first, and after loading or moving.
        """
        sizes = [p.numel() for p in params]
        states = [self.state[p] for p in params]
        flat, views = self._laid_out.get(id(params[0]), ([], []))
        found = [state[name] for state in states for name in PER_COORDINATE]
        if len(found) != len(views) or any(a is not b for a, b in zip(found, views, strict=True)):
            flat = [torch.cat([s[name].flatten() for s in states]) for name in PER_COORDINATE[:2]]
            flat.append(torch.cat([s["memory"].t() for s in states], 1).t())  # as the generator likes it
            for tensor, name in zip(flat, PER_COORDINATE, strict=True):
                for state, part in zip(states, tensor.split(sizes), strict=True):
                    state[name] = part.view_as(state[name])
            self._laid_out[id(params[0])] = flat, [state[name] for state in states for name in PER_COORDINATE]
        return flat

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "generator": self.generator, "_laid_out": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        width = self.generator.memory.width
        for index, state in state_dict["state"].items():
            size = params[index].numel() if index < len(params) else -1
            if "memory" not in state or state["memory"].shape != (size, width) or state["exp_avg"].numel() != size:
                raise ValueError(
                    f"this state was not written by MGG with a {self.generator.memory_kind} generator of hidden "
                    f"size {self.generator.hidden_size} for these parameters: load it with the ones it was saved with"
                )
        if not all({"lr", "betas", "eps"} <= group.keys() for group in state_dict["param_groups"]):
            raise ValueError("this state was not written by MGG: its groups have other settings")
        super().load_state_dict(state_dict)
