"""What stands around a method and changes one thing about it; everything else is passed on, name by name."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mgtta._lib.ranks import Alone
from mgtta.adaptation.method import Events, Method
from mgtta.adaptation.shift import is_count
from mgtta.adaptation.state import Saved, check_kind
from mgtta.adaptation.step import Engine, Pass
from mgtta.models.classifier import Classifier

EVENTS = 1000  # that are kept, the first ones: a run may last for ever


@dataclass
class Log:
    """What a wrapper has seen and done since the last reset. It stays if a guard takes back what was learned.

    Attributes:
        images: of the stream so far.
        events: dicts of plain values.
    """

    images: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, image: int, action: str, **more: Any) -> None:
        """Note what was done after so many images."""
        if len(self.events) < EVENTS:
            self.events.append({"image": image, "action": action, **more})

    def state(self) -> dict[str, Any]:
        """Return the log as plain values."""
        return copy.deepcopy(vars(self))

    @classmethod
    def loaded(cls, state: Any, what: str) -> "Log":
        """Return the log of a state; a ValueError says what is invalid.

        Args:
            what: the name of the state, for the error.
        """
        if not isinstance(state, dict) or state.keys() != vars(cls()).keys():
            raise ValueError(f"invalid {what} state: its log has other entries")
        events = state["events"]
        if not is_count(state["images"]) or not isinstance(events, list) or not all(map(_is_event, events)):
            raise ValueError(f"invalid {what} state: its images or events are out of range")
        return cls(**copy.deepcopy(state))


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and is_count(value.get("image")) and isinstance(value.get("action"), str)


class Wrapper(Saved):
    """A method around a method, with the same interface.

    A subclass writes `step`, and `own`, `load_own` and `begin` if it keeps state.

    Attributes:
        method: what is wrapped: a Method, or another wrapper.
        state_name: the key of the wrapper's own part of a state.
        log: images and events, if it counts them.
    """

    state_name = "own"
    method: "Method | Wrapper"

    def __init__(self, method: "Method | Wrapper"):
        super().__init__()
        self.method = method
        self.log = Log()
        method.remember_start()

    # --- what a wrapper writes

    def step(self, x: Tensor, learn: bool = True) -> Pass:
        return self.method.step(x, learn)

    def own(self) -> dict[str, Any]:
        """Return the wrapper's own state."""
        return {}

    def check_own(self, state: Any) -> Any:
        """Return what `load_own` takes, from what `own` gave; raise a ValueError if it does not fit."""
        return state

    def load_own(self, checked: Any) -> None:
        """Load the wrapper's own state."""

    def begin(self) -> None:
        """Forget the wrapper's own state."""

    def forget(self) -> None:
        """Forget what belongs to the domain that has ended: all, unless a wrapper says otherwise."""
        self.begin()

    # --- what is passed on

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (N, C) of x from before its update, detached; then update."""
        return self.step(x).logits

    def learn(self, x: Tensor, few: bool = False) -> Pass:
        """Make one update from images that `step` has answered without learning from them: the answer came first.

        Args:
            few: they came few at a time; see adaptation/gathered.py, where it makes a difference.
        """
        return self.method.learn(x, few)

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits of x as the method stands: no update, no counting, no graph."""
        return self.method.predict(x)

    def reset(self) -> None:
        """Go back to exactly the source model, with a new optimizer state, memory and counters."""
        self.method.reset()
        self.log = Log()
        self.begin()

    def warm_up(self, x: Tensor) -> None:
        self.method.warm_up(x)

    def export(self) -> nn.Module:
        return self.method.export()

    def pause(self) -> None:
        self.method.pause()

    def unpause(self) -> None:
        self.method.unpause()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Only predict within the block."""
        with self.method.frozen():
            yield

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def kind(self) -> str:
        return f"{type(self).__name__.lower()} {self.method.kind}"

    @property
    def model(self) -> Classifier:
        return self.method.model

    @property
    def adapted(self) -> dict[str, nn.Parameter]:
        return self.method.adapted

    @property
    def origin(self) -> nn.ParameterList:
        return self.method.origin

    @property
    def optimizer(self) -> Optimizer | None:
        return self.method.optimizer

    @property
    def random(self) -> torch.Generator | None:
        return self.method.random

    @property
    def ranks(self) -> Alone:
        return self.method.ranks

    @property
    def engine(self) -> Engine:
        return self.method.engine

    @property
    def precision(self) -> str:
        return self.method.precision

    @property
    def events(self) -> Events:
        return self.method.events

    @property
    def updates(self) -> int:
        return self.method.updates

    @property
    def skipped(self) -> int:
        return self.method.skipped

    @property
    def waiting(self) -> int:
        return self.method.waiting

    @property
    def spent(self) -> bool:
        return self.method.spent

    @property
    def learning(self) -> bool:
        """True if the next images are to be learned from."""
        return self.method.learning

    @property
    def paused(self) -> bool:
        return self.method.paused

    @property
    def max_updates(self) -> int | None:
        return self.method.max_updates

    @max_updates.setter
    def max_updates(self, value: int | None) -> None:
        self.method.max_updates = value

    @property
    def max_seconds(self) -> float | None:
        return self.method.max_seconds

    @max_seconds.setter
    def max_seconds(self, value: float | None) -> None:
        self.method.max_seconds = value

    @property
    def seconds(self) -> float:
        return self.method.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self.method.seconds = value

    # --- what is saved

    def snapshot(self) -> dict[str, Any]:
        return {"kind": self.kind, "method": self.method.snapshot(), self.state_name: self.own()}

    def restore(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or state.keys() != {"kind", "method", self.state_name}:
            check_kind(state, self.kind)
            raise ValueError(f"this is not a state that a {type(self).__name__.lower()} method's state_dict gave")
        checked = self.check_own(state[self.state_name])
        self.method.restore(state["method"])
        self.load_own(checked)

    def remember_start(self) -> None:
        self.method.remember_start()


Adapting = Method | Wrapper  # what `create` gives


Kind = TypeVar("Kind", bound=Wrapper)


def wrappers(method: Adapting) -> Iterator[Wrapper]:
    """Yield what stands around a method, from the outside to the inside."""
    while isinstance(method, Wrapper):
        yield method
        method = method.method


def find(method: Adapting, kind: type[Kind]) -> Kind | None:
    """Return the wrapper of this kind around a method; None if there is none."""
    return next((wrapper for wrapper in wrappers(method) if isinstance(wrapper, kind)), None)


def innermost(method: Adapting) -> Method:
    """Return the method inside all wrappers."""
    while isinstance(method, Wrapper):
        method = method.method
    return method


def source_model(method: Adapting) -> Classifier:
    """Return the model as it was before it adapted; weights that never change are shared with the method."""
    adapted = {id(p) for p in method.adapted.values()}
    shared: dict[int, Any] = {id(p): p for p in method.model.parameters() if id(p) not in adapted}
    shared[id(method.model.full_precision)] = method.model.full_precision
    source = copy.deepcopy(method.model, shared).requires_grad_(False).use_running_statistics()
    params = dict(source.named_parameters())
    with torch.no_grad():
        for name, value in zip(method.adapted, method.origin, strict=True):
            params[name].copy_(value)
    return source


def unlearned_model(method: Adapting) -> Classifier:
    """Return the source model, whose BatchNorm layers normalise by the batch as the method's do."""
    model = method.model
    return source_model(method).use_batch_statistics(model.source_share, model.own_share, model.looks)
