"""Smaller steps while a domain stays.

Learning rate and pull fall together. So the parameters stay around the same place, where step and pull are equal, and
follow the noise of single batches less.
"""

from torch import Tensor

from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.adaptation.step import Pass

LEAST_STEP = 0.1  # of the learning rate and the pull, however long a domain stays


class Calming(ObjectiveMethod):
    """A method that counts its updates in a domain, and makes smaller ones after the first."""

    age: Tensor

    def become_calm_after(self, updates: float) -> None:
        """Let steps become smaller after so many updates in a domain, as 1 / their number; inf: never."""
        self.calm = updates
        like = next(iter(self.adapted.values()))
        self.register_buffer("age", like.detach().new_zeros(()))  # updates in the present domain

    def step_share(self) -> Tensor:
        return (self.calm / (self.age + 1)).clamp(LEAST_STEP, 1.0)

    def learned(self, seen: Pass, made: Tensor | bool = True) -> None:
        self.age += made

    def domain_began(self) -> None:
        _ = self.updates  # a GPU may still be learning
        self.age.zero_()
