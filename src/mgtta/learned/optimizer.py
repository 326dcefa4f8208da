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

BETAS = (0.9, 0.99)  # appendix B.1
EPS = 1e-8
PER_COORDINATE = ("exp_avg", "exp_avg_sq", "memory")  # names in a parameter's state, besides "step"


def generator_inputs(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int | Tensor, betas: tuple[float, float], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z = (m_hat, g) / (sqrt(v_hat) + eps), (n, 2), and the two new moments, (n,).

    As in the released system, bias correction uses the power t + 1 (2 at the first batch), and momentum comes
    before the gradient. The paper writes the other order; released weights need this one.
    """
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad.square()
    m_hat = exp_avg / (1 - betas[0] ** (step + 1))
    v_hat = exp_avg_sq / (1 - betas[1] ** (step + 1))
    denominator = v_hat.sqrt() + eps
    inputs = torch.stack([m_hat / denominator, grad / denominator], dim=1)
    return inputs, exp_avg, exp_avg_sq


class MGG(Optimizer):
    """theta <- theta - lr * generator(gradients): a learned optimizer with torch's interface.

    The generator is copied and frozen. `state[p]` has a parameter's moments, its memory (numel, memory width) and its
    step, so a run that loads a `state_dict` continues bit for bit.
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
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; invalid settings are refused."""
        settings = {**self.defaults, **param_group}
        lr = settings["lr"]
        betas = settings["betas"]
        eps = settings["eps"]
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
        """Update every parameter that has a gradient, and return what the closure gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for (step, _device, _dtype), params in self._ready(group).items():
                self._update(params, step, group)
        return loss

    def _ready(self, group: dict[str, Any]) -> dict[tuple, list[Tensor]]:
        """Return (step, device, dtype) -> the parameters with a gradient.

        There is one entry, unless parameters were added later or differ in device or dtype.
        """
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
        """Update these parameters, all at the same step, as one vector of n coordinates."""
        states = [self.state[p] for p in params]
        grad = torch.cat([p.grad.flatten() for p in params if p.grad is not None])  # (n,)
        exp_avg = torch.cat([state["exp_avg"].flatten() for state in states])  # (n,)
        exp_avg_sq = torch.cat([state["exp_avg_sq"].flatten() for state in states])  # (n,)
        memory = torch.cat([state["memory"] for state in states])  # (n, width)

        inputs, exp_avg, exp_avg_sq = generator_inputs(grad, exp_avg, exp_avg_sq, step, group["betas"], group["eps"])
        update, memory = self._generator_like(grad)(inputs, memory)

        for name, vector in zip(PER_COORDINATE, (exp_avg, exp_avg_sq, memory), strict=True):
            own = [state[name] for state in states]
            torch._foreach_copy_(own, _split_like(vector, own, params))
        torch._foreach_add_([state["step"] for state in states], 1)
        torch._foreach_sub_(params, _split_like(update, params, params), alpha=group["lr"])  # Eq. 2

    def _generator_like(self, grad: Tensor) -> MetaGradientGenerator:
        """Return the generator on the gradient's device and in its dtype."""
        weight = self.generator.o_proj.weight
        if (weight.device, weight.dtype) != (grad.device, grad.dtype):  # quicker than to call .to() at every step
            self.generator.to(grad.device, grad.dtype)
        return self.generator

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: a tensor that is a view does not take its whole storage along."""
        state = super().__getstate__()
        own = {p: {name: _compact(t) for name, t in values.items()} for p, values in self.state.items()}
        return {**state, "state": defaultdict(dict, own), "generator": self.generator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that MGG wrote; an invalid one is refused and changes nothing."""
        params = [p for group in self.param_groups for p in group["params"]]
        width = self.generator.memory.width
        for index, state in state_dict["state"].items():
            size = params[index].numel() if index < len(params) else -1
            if "memory" not in state or state["memory"].shape != (size, width) or state["exp_avg"].numel() != size:
                raise ValueError(
                    f"this state was not written by MGG with a {self.generator.memory_kind} generator of hidden size "
                    f"{self.generator.hidden_size} for these parameters: load it with the generator and the parameters "
                    "it was saved with"
                )
        if not all({"lr", "betas", "eps"} <= group.keys() for group in state_dict["param_groups"]):
            raise ValueError("this state was not written by MGG: its groups have other settings")
        super().load_state_dict(state_dict)


def _split_like(vector: Tensor, shapes: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Return each parameter's part of a vector over all coordinates, in the given tensors' shapes."""
    parts = vector.split([p.numel() for p in params])
    return [part.view_as(t) for part, t in zip(parts, shapes, strict=True)]


def _compact(value: Any) -> Any:
    """Return a tensor that owns all of its storage; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.untyped_storage().nbytes() == value.numel() * value.element_size():
        return value
    return value.clone(memory_format=torch.contiguous_format)
