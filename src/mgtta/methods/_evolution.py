"""CMA-ES by the `cma` package, with random numbers of our own and a state of tensors and plain values.

The package's object is large and full of diagnostics. What its future depends on, with the options set here, is
STATE and the random generator; the rest is built again. `tests/test_evolution.py` checks that, bit for bit.
"""

from operator import attrgetter
from typing import Any

import numpy as np
import torch


class Evolution:
    """Ask for candidates, tell their fitness (lower is better); the search starts at zero with step size 1."""

    STATE = (
        *("mean", "mean_old", "sigma", "pc", "countiter", "adapt_sigma.ps"),
        *("sm.C", "sm.B", "sm.D", "sm.last_update", "sm.count_tell", "sm.count_eigen"),
    )

    def __init__(self, dimension: int, population: int, seed: int):
        self.dimension, self.population, self.seed = dimension, population, seed
        self.restart()

    def restart(self) -> None:
        import cma  # a second to import, which users of other methods need not wait for
        from cma.sigma_adaptation import CMAAdaptSigmaCSA

        options = {
            "popsize": self.population,
            "randn": self._normal,
            "seed": np.nan,  # do not touch numpy's global generator
            "verbose": -9,
            # path length control, as cma had it for any dimension when FOA was written; newer ones switch at 300
            "AdaptSigma": CMAAdaptSigmaCSA,
            "CMA_mirrors": 0,
            "conditioncov_alleviate": 0,  # no change of coordinates under way
        }
        self._random = np.random.default_rng(self.seed)
        self._es = cma.CMAEvolutionStrategy(np.zeros(self.dimension), 1.0, options)
        self._es.timer = cma.utilities.utils.ElapsedWCTime()

    def ask(self) -> np.ndarray:
        """New candidates, (population, dimension)."""
        sampler = self._es.sm
        sampler.update_now()  # the eigenvectors of C, every few generations; sampling would do it, but leave B
        sampler.B = np.ascontiguousarray(sampler.B)  # in an order of memory that a saved state does not keep
        self._asked = self._es.ask()
        return np.stack(self._asked)

    def tell(self, extra: np.ndarray, fitness: list[float]) -> None:
        """The fitness of an extra candidate that was not asked for, then of those that were."""
        self._es.tell([extra, *self._asked], fitness)

    def state(self) -> dict[str, Any] | None:
        """None at the start, which needs no memory."""
        if not self._es.countiter:
            return None
        values = {name: attrgetter(name)(self._es) for name in self.STATE}
        random = self._random.bit_generator.state
        return {"random": random} | {name: _plain(value) for name, value in values.items()}

    def load(self, state: dict[str, Any] | None) -> None:
        self.restart()
        if state is None:
            return
        self._random.bit_generator.state = state["random"]
        for name in self.STATE:
            owner, _, attribute = name.rpartition(".")
            value = state[name].cpu().numpy().copy() if isinstance(state[name], torch.Tensor) else state[name]
            setattr(attrgetter(owner)(self._es) if owner else self._es, attribute, value)
        self._es._updateBDfromSM()

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Evolution":
        twin = Evolution(self.dimension, self.population, self.seed)
        twin.load(self.state())
        return twin

    def _normal(self, *shape: int) -> np.ndarray:
        return self._random.standard_normal(shape)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return float(value) if isinstance(value, float) else int(value)
