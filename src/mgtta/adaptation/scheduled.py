"""A schedule: learn at once after a shift, then more and more rarely while the stream stays the same.

A step of adaptation costs more than two forward passes, and most of what a new domain teaches is learned from its first
batches. So a scheduled method learns from the first `BURST` batches after a start or a shift. Then it rests for `REST`
batches, learns from one, rests for twice as many, and so on. The rest doubles unless the last one shows that learning
has made the predictions surer. While the method rests, the forward pass gives all that is needed to notice a shift: the
means of each layer's features, which leave the range that they have moved in so far.

Few steps must be large ones, and each is as noisy as its batch. So the method rests on the mean of the parameters since
the shift, after each update but the first `SKIP`, and continues from there.

The detector of shifts (shift.py) follows the means of the features of each batch, all layers one after another.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mgtta._lib.names import spelled
from mgtta.adaptation.method import Method
from mgtta.adaptation.objective import ObjectiveMethod
from mgtta.adaptation.shift import Arriving, ShiftDetector
from mgtta.adaptation.step import Pass
from mgtta.adaptation.wrapper import Wrapper, innermost
from mgtta.losses import entropy

SCHEDULES = ("always", "auto")
BURST = 5  # batches learned from after a start or a shift
REST = 32  # batches of the first rest
SKIP = 1  # updates after a shift that are still far from where it will rest
GAIN = 0.05  # part of the entropy by which a rest must fall short of the one before, to be worth another like it
MEAN_UPDATES = 16  # updates that the mean of the parameters looks back on


@torch.no_grad()
def summary(logits: Tensor, features: Sequence[Tensor]) -> Tensor:
    """Return the means over the batch of each layer's features, and of the entropy: (D + 1,)."""
    means = torch.cat([f.detach() for f in features], 1).mean(0)
    return torch.cat([means, entropy(logits.detach()).mean().unsqueeze(0)])


@dataclass
class Schedule:
    """What is known of the present domain; all of it is saved and reset with the method."""

    learned: int = 0  # batches, since the shift
    rest: int = field(default_factory=lambda: REST)  # batches without learning before the next with
    left: int = 0  # of them
    unsure: float = 0.0  # entropy of the predictions since the last learning: sum,
    batches: int = 0  # number of batches,
    before: float = 0.0  # and mean of the rest before
    shifts: int = 0
    mean: list[Tensor] | None = None  # of the parameters
    detector: ShiftDetector = field(default_factory=ShiftDetector)

    def __post_init__(self) -> None:
        self._arriving = Arriving()  # a summary, and the rest of what `note` was told

    @property
    def due(self) -> bool:
        """True if the next batch is to be learned from."""
        return self.left <= 0

    def note(self, summary: Tensor, learned: bool, n: int) -> None:
        """Follow a batch of n images, learned from or not.

        A summary on a GPU is read by `settle`, before the next batch: waiting here would leave the GPU idle.
        """
        if summary.is_cuda:
            self._arriving.send(summary, (learned, n))
        else:
            self._take(summary, learned, n)

    def settle(self) -> None:
        """Read what is still to come."""
        held = self._arriving.take()
        if held is not None:
            summary, (learned, n) = held
            self._take(summary, learned, n)

    def _take(self, summary: Tensor, learned: bool, n: int) -> None:
        values = summary.cpu().numpy()  # a GPU may be waiting, and for so little numpy is quicker than torch
        means = values[:-1]
        unsure = float(values[-1])
        distance = self.detector.distance(means, n)
        if not (math.isfinite(unsure) and math.isfinite(distance)):
            return
        if self.detector.shifted(distance):
            self._begin()
        elif learned:
            self.learned += 1
            if self.learned >= BURST:
                self._rest()
        else:
            self.detector.follow(means, n)
            self.unsure += unsure
            self.batches += 1
            self.left -= 1

    @torch.no_grad()
    def average(self, params: list[Tensor], last: bool = False) -> None:
        """Follow an update: take the parameters into their mean and, where a rest begins, put it in their place.

        Args:
            last: no update comes after this one.
        """
        count = min(self.learned - SKIP, MEAN_UPDATES)
        if count < 1:
            return
        if self.mean is None:
            self.mean = list(torch._foreach_mul(params, 1.0))  # copies, made all at once
        else:
            self.mean = [m.to(p) for m, p in zip(self.mean, params, strict=True)]
            torch._foreach_lerp_(self.mean, params, 1 / count)
        if self.left or last:
            torch._foreach_copy_(params, self.mean)

    def _begin(self) -> None:
        """A shift: learn from the next batches."""
        vars(self).update(vars(Schedule(shifts=self.shifts + 1)))

    def _rest(self) -> None:
        if self.batches:
            mean = self.unsure / self.batches
            if mean > (1 - GAIN) * self.before:
                self.rest *= 2
            self.before = mean
        self.unsure = 0.0
        self.batches = 0
        self.left = self.rest

    def state(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "detector"}
        return own | self.detector.state()

    @classmethod
    def loaded(cls, state: Any, params: Sequence[Tensor]) -> "Schedule":
        """Return the schedule of a state; `params` are those of which it holds a mean."""
        known = cls().state()
        if not isinstance(state, dict) or state.keys() != known.keys():
            raise ValueError("invalid schedule state: it has other entries")
        of_detector = ShiftDetector().state().keys()
        detector = ShiftDetector.loaded({name: state[name] for name in of_detector}, "schedule")
        own = {name: value for name, value in state.items() if name not in of_detector}
        numbers = [(value, known[name]) for name, value in own.items() if name != "mean"]
        sound = all(type(value) is type(usual) and 0 <= value < math.inf for value, usual in numbers)
        mean = state["mean"]
        if mean is not None:
            sound = sound and isinstance(mean, list | tuple) and all(isinstance(m, Tensor) for m in mean)
            sound = sound and [m.shape for m in mean] == [p.shape for p in params]
            sound = sound and all(bool(m.isfinite().all()) for m in mean)
        if not sound:
            raise ValueError("invalid schedule state: it has values that are out of range")
        return cls(**copy.deepcopy(own), detector=detector)


class Scheduled(Wrapper):
    """A method that learns by a schedule.

    Attributes:
        schedule: what is known of the present domain.
    """

    state_name = "schedule"

    def __init__(self, method: Method | Wrapper):
        inner = innermost(method)
        if not isinstance(inner, ObjectiveMethod) or method.optimizer is None:
            name = spelled(method.name)
            raise ValueError(f"schedule='auto' is for methods with a pure objective, and {name} has none")
        super().__init__(method)
        inner.reads_features = True  # by which a shift is seen
        self._schedule = Schedule()

    @property
    def schedule(self) -> Schedule:
        self._schedule.settle()
        return self._schedule

    def step(self, x: Tensor, learn: bool = True) -> Pass:
        """Learn from x if a batch is due, else only predict it."""
        schedule = self.schedule
        if self.paused or self.spent or (schedule.due and not learn):  # what is due is learned from later, by `learn`
            return self.method.step(x, learn)
        learn = schedule.due
        before = self.updates if learn else 0
        seen = self.method.step(x, learn)
        if learn and self.method.waiting:  # x is kept, and learned from later, with other images
            return seen
        self._note(seen, learn, before)
        return seen

    @property
    def learning(self) -> bool:
        return self.method.learning and self.schedule.due

    def learn(self, x: Tensor, few: bool = False) -> Pass:
        if self.paused or self.spent:
            return self.method.learn(x, few)
        before = self.updates
        seen = self.method.learn(x, few)
        self._note(seen, True, before)
        return seen

    def _note(self, seen: Pass, learned: bool, before: int) -> None:
        """Follow a batch, learned from or not; `before`: the updates before it, if it was."""
        schedule = self.schedule
        schedule.note(summary(seen.logits, seen.features), learned, len(seen.logits))
        if learned and self.updates > before:
            schedule.settle()
            schedule.average(list(self.adapted.values()), last=self.spent)

    def own(self) -> dict[str, Any]:
        return copy.deepcopy(self.schedule.state())

    def check_own(self, state: Any) -> Schedule:
        return Schedule.loaded(state, list(self.adapted.values()))

    def load_own(self, checked: Schedule) -> None:
        self._schedule = checked

    def begin(self) -> None:
        self._schedule = Schedule()
