"""What a recipe is: a method, its papers, what it needs, and its settings.

A recipe's settings are the keyword arguments of what is registered, and those of its `Descent`. Their defaults are the
set "authors": the settings of the method's own authors, for a ViT. A recipe may declare what differs for networks that
normalise by BatchNorm or GroupNorm (`resnets`), and in the set "mgtta", the settings in which the MGTTA paper ran the
method.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from torch import nn

from mgtta._lib.errors import unknown
from mgtta._lib.names import spelled
from mgtta.adaptation.method import Method
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.methods._declared import AUTHORS, GRADIENTS, MGTTA, SETS, Paper
from mgtta.methods._descent import Descent, linear_rate
from mgtta.models.norms import normalises_like_a_resnet


@dataclass(frozen=True)
class Recipe:
    """A registered method.

    Attributes:
        make: called with the model, the optimizer's factory if there is a descent, and settings.
        needs: what must be there besides the model and the images.
        descent: the optimizer and its learning rate; None for methods without gradients.
        code: whose settings the defaults are: the authors' public code.
        resnets: what the authors change for networks that normalise by BatchNorm or GroupNorm.
        mgtta: what the MGTTA paper changes; None if it does not run the method.
        tries: setting that decides the method -> the values that a sweep tries.
        rate_at: the authors' learning rate for a batch, from the one at 64 images and the batch's images.
        options: what `create` takes as pull, gather and recall where the caller does not say.
        passes: forward and backward passes of an image, at most; see `cost`.
        revision: counts changes by which the same settings gave other figures; see bench/cells.py.
        chosen: the set of settings whose defaults these are.
    """

    name: str
    make: Callable[..., Method]
    papers: tuple[Paper, ...]
    needs: tuple[str, ...]
    descent: Descent | None
    what: str  # one sentence on what it is
    more: str  # what else there is to say of it and of its settings
    code: str = ""
    resnets: Mapping[str, Any] = field(default_factory=dict)
    mgtta: Mapping[str, Any] | None = None
    tries: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    rate_at: Callable[[float, int], float] = linear_rate
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[int, int] | None = None
    revision: int = 0
    chosen: str = AUTHORS

    @property
    def settings(self) -> dict[str, Any]:
        """Setting -> default, for a ViT; REQUIRED for one that must be given."""
        parameters = inspect.signature(self.make).parameters.values()
        found = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        if self.descent is not None:
            found |= self.descent.settings()
        return {**found, **self._of_the_set()}

    def settings_for(self, net: nn.Module) -> dict[str, Any]:
        """Return the settings, by the kind of network where the authors differ."""
        return {**self.settings, **self._of_the_network(net)}

    def at(self, chosen: str) -> "Recipe":
        """Return the recipe at a set of settings, "authors" or "mgtta"."""
        if chosen not in SETS:
            raise unknown("set of settings", chosen, SETS)
        if chosen == MGTTA and self.mgtta is None:
            raise ValueError(
                f"the MGTTA paper does not run {spelled(self.base)}: its only set of settings is {AUTHORS!r}"
            )
        name = self.base if chosen == AUTHORS else f"{self.base}@{chosen}"
        return dataclasses.replace(self, chosen=chosen, name=name)

    @property
    def base(self) -> str:
        """The name without its set of settings."""
        return self.name.partition("@")[0]

    def _of_the_set(self) -> Mapping[str, Any]:
        return (self.mgtta or {}) if self.chosen == MGTTA else {}

    def _of_the_network(self, net: nn.Module) -> Mapping[str, Any]:
        if self.chosen == AUTHORS and normalises_like_a_resnet(net):
            return self.resnets
        return {}

    @property
    def method(self) -> type[Method]:
        """The class that is made."""
        return self.make if isinstance(self.make, type) else get_type_hints(self.make)["return"]

    @property
    def kind(self) -> str:
        """How it adapts: by gradients, by forward passes only, or each batch by itself."""
        if self.descent is not None:
            return "gradient"
        return "episodic" if GRADIENTS in self.needs else "forward only"

    @property
    def cost(self) -> tuple[int, int]:
        """Forward and backward passes of an image, at most; those of the network itself, with its views."""
        if self.passes is not None:
            return self.passes
        return (1, 1) if self.descent is not None else (1, 0)

    @property
    def works_with(self) -> dict[str, bool]:
        """Option of every method -> True if the recipe takes it, False if `create` or `export` refuses it by name."""
        pure = issubclass(self.method, ObjectiveMethod)
        learns = self.descent is not None
        return {
            "guard": True,
            "schedule": pure and learns,
            **dict.fromkeys(("pull", "gather", "recall", "params"), learns),
            "bf16": pure or self.method.may_be_rounded,
            "ranks": self.method.shares_batches,
            "resume": True,
            "export": not self.method.cannot_export,
        }

    def build(self, model: Any, given: dict[str, Any]) -> Method:
        """Return the method around a copy of the model, at these settings and the recipe's others."""
        settings = {**self._of_the_set(), **self._of_the_network(model), **given}
        if self.descent is None:
            return self.make(model, **settings)
        chosen = {key: value for key, value in settings.items() if key in self.descent.settings()}
        own = {key: value for key, value in settings.items() if key not in chosen}
        descent = Descent(**{**vars(self.descent), **chosen})
        return self.make(model, descent.factory(), **own)
