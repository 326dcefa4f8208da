"""SAM: sharpness-aware minimisation around any optimizer (Foret et al., ICLR 2021; SAR's Eqs. 3-5).

Notation    g  gradient at theta; e = rho * g / ||g||  the worst step within rho, to first order (Eq. 4)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT


class SAM(Optimizer):
    """The base optimizer, fed with the gradient at theta + e in place of theta's.

    With gradients at theta in `p.grad`, `step(closure)` does it all; the closure computes them again. Where the
    second gradient needs more care, take it inside `perturbed()` and then call `step()`.

    Args:
        base: makes the base optimizer from parameters, as `optimizer_factory` gives it. Its groups and
            state are this optimizer's, so `state_dict` is the base's.
        rho: how far the perturbed point lies from theta.
    """

    def __init__(self, params: ParamsT, base: Callable[[Any], Optimizer], rho: float = 0.05):
        if not rho >= 0:
            raise ValueError(f"rho must be at least 0, not {rho}")
        super().__init__(params, {"rho": rho})
        self.base = base(self.param_groups)
        self._share()

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """At theta + e; theta is back, bit for bit, when the block ends, however it ends."""
        moved = [(p, group["rho"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not moved:
            raise ValueError("no parameter has a gradient: compute the gradients at theta first")
        before = [p.detach().clone() for p, _ in moved]
        with torch.no_grad():
            norms = [n.to(moved[0][0].device) for n in torch._foreach_norm([p.grad for p, _ in moved])]
            norm = torch.stack(norms).norm()
            for p, rho in moved:
                p.add_(p.grad * (rho / (norm + 1e-12)).to(p.device))  # Eq. 4
        try:
            yield
        finally:
            with torch.no_grad():
                for (p, _), value in zip(moved, before, strict=True):
                    p.copy_(value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Args:
        closure: clears the gradients, computes the loss's at the perturbed point and returns the loss. Without it
            the present gradients are taken to be those of the perturbed point.
        """
        loss = None
        if closure is not None:
            with self.perturbed(), torch.enable_grad():
                loss = closure()  # Eq. 5
        self.base.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "base"):
            self.param_groups.pop()
            self.base.add_param_group(param_group)

    def _share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "base": self.base}
