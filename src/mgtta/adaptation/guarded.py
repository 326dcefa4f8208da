"""A guard against collapse: it watches a method without labels, and brings it back if adaptation does harm.

The guard compares with the source model. Now and then it asks the source about images of the present batch. A
prediction of which the source was sure, and which adaptation has changed, counts as lost (see watch.py). The share of
lost predictions among all images asked about estimates, without labels, the accuracy that adaptation costs. The more
images the source is unsure of, the more there is to win, and the more losses are tolerated.

In networks with BatchNorm most methods normalise by the present batch. That alone changes many predictions, mostly for
the better. There the source is asked about whole batches and normalises as the method does, so that the two differ only
by what was learned. In very small batches such statistics are poor, and the source uses its own.

When the guard asks:
- never, except for such small batches, while the parameters have hardly moved;
- when they have moved twice as far as at the last question, or as far if entropy or diversity have changed;
- after a fixed number of images, and earlier after a start or an alarm;
- when one class has most of the predictions;
- at every batch while there is doubt.
If the source is sure of hardly any image in a batch (noise, a batch of one), anchors are asked about: images of which
it was sure earlier.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgtta._lib.errors import unknown
from mgtta.adaptation.method import Events, Method
from mgtta.adaptation.step import Pass
from mgtta.adaptation.watch import DEVIATIONS, WINDOW, Watch, excess, saved_watch, what_is_lost
from mgtta.adaptation.wrapper import Wrapper
from mgtta.models.classifier import Classifier
from mgtta.models.norms import batch_norms

POLICIES = ("rollback", "slow", "source")
MOVED = 0.05  # the way of the parameters, relative to their length, after which the source is asked at the latest
SLOWER = 0.1  # factor on the learning rate
PAUSE_IMAGES = 512  # for which the source predicts if the stream comes class by class
REST_IMAGES = 4096  # for which "source" predicts without adapting, the first time
CALM_IMAGES = 8192  # without alarm, a rest not counted, after which `policy` begins again
CLOSER = 4  # times as often as usual the source is asked after an alarm
FEW = 4  # sure images under which a batch says too little, and the anchors are asked
CLEAR = 0.25  # of the images asked about that the source must be sure of to clear a method
FACTOR = 2.0  # by which entropy may rise or fall, and diversity fall, before it is strange; and of doubt
FIRST = 0.04  # of MOVED: the way from a start at which the source is first asked; twice as far each time
STILL = 0.01  # of MOVED: a way of which nothing can come
MANY = 16  # images of a batch whose own statistics may serve BatchNorm
ENOUGH = 64  # images after which the share of a class says something
EVENTS = 1000  # that are kept, the first ones: a run may last for ever
KEPT_PER_64_IMAGES = 0.5  # of the running entropy and diversity, for a batch of 64 images


@dataclass(frozen=True, eq=False)
class Guard:
    """Settings of a guard.

    Attributes:
        policy: what to do at the first alarm, the second, and so on; the last one stays. "rollback": back to the
            last state found good; "slow": that, and a lower learning rate; "source": the source model, which
            predicts without adapting for a while (twice as long each time), and then adapts again from the start.
        tolerance: the share of predictions that may be lost where the source is sure of all images; three times
            as many where it is sure of none.
        sure: the source's confidence above which its prediction counts.
        every: images between two questions to the source, where nothing calls for one earlier; longer where whole
            batches are asked about, so that the cost is the same.
        images: how many images the source is asked about; whole batches where BatchNorm normalises by them.
        anchors: how many to keep of the images that the source was sure of; or your own, clean ones.
        dominance: the share of the predictions that one class may have. Above it, and above five times what a class
            has on average, where most predictions that the method and the source are sure of are that class, the
            stream comes class by class: a batch then says little of the domain, and the source model predicts,
            without adapting, for a while. Where the source says otherwise, that class counts as lost, be it
            sure or not.
    """

    policy: Sequence[str] = ("slow", "slow", "source")
    tolerance: float = 0.01
    sure: float = 0.9
    every: int = 1024
    images: int = 8
    anchors: int | Tensor = 16
    dominance: float = 0.25

    def __post_init__(self) -> None:
        policy = (self.policy,) if isinstance(self.policy, str) else tuple(self.policy)
        object.__setattr__(self, "policy", policy)
        for name in policy:
            if name not in POLICIES:
                raise unknown("policy of a guard", name, POLICIES)
        count = len(self.anchors) if isinstance(self.anchors, Tensor) else self.anchors
        if not policy or min(self.every, self.images, count + 1) < 1:
            raise ValueError("a guard needs a policy; every and images are at least 1, anchors 0")
        if not (0 < self.tolerance < 1 and 0 < self.sure < 1):
            raise ValueError("tolerance and sure lie between 0 and 1")
        if not self.dominance > 0:
            raise ValueError("dominance is above 0; 1 and more switch it off")


class Guarded(Wrapper):
    """A method under a guard; a method like any other.

    Attributes:
        watch: what the guard knows; saved and resumed with the method.
        events: what the guard did since the last reset, and why: dicts of plain values, the first 1,000; and what
            recall did.
    """

    state_name = "guard"

    def __init__(self, method: Method | Wrapper, guard: Guard):
        super().__init__(method)
        self.guard = guard
        self.source = _source_model(method)
        self.unlearned = _normalising_by_batches(self.source, method.model)
        self._scale = math.sqrt(sum(float(p.square().sum()) for p in method.origin)) or 1.0
        self._rates = [group["lr"] for group in method.optimizer.param_groups] if method.optimizer else []
        self.begin()

    @property
    def events(self) -> Events:
        inside = self.method.events
        if not inside:
            return self.watch.events
        return sorted([*inside, *self.watch.events], key=lambda event: event["image"])

    def begin(self) -> None:
        self.watch = Watch()
        if isinstance(self.guard.anchors, Tensor) and len(self.guard.anchors):
            self.watch.anchors = _as_bytes(self.guard.anchors)

    def step(self, x: Tensor, learn: bool = True) -> Pass:
        """Give the method's logits, or the source's if the guard finds that the method has gone wrong."""
        if self.paused:
            return Pass(self.predict(x))
        self.source.check(x)
        with torch.inference_mode(False):
            watch = self.watch
            if watch.images < watch.rest_until:
                logits = self._ask(self.source, x)
                watch.images += len(logits)
                return Pass(logits)
            due = self._due(len(x))
            after_rest = watch.rest_until > 0 and watch.probs is None
            before = self.method.snapshot() if due or after_rest else None
            seen = self.method.step(x, learn)
            watch.images += len(seen.logits)
            self._follow(seen.logits)
            top = self._dominant(self.guard.dominance)
            if top is not None and self._mostly(top, seen.logits):
                asked = self._ask(self.source, x)
                if self._mostly(top, asked):
                    self._pause(before)
                    return Pass(asked)
            if due and before is not None:
                return Pass(self._judge(x, seen.logits, before), seen.features)
            return seen

    def predict(self, x: Tensor) -> Tensor:
        if self.watch.images < self.watch.rest_until:
            return self._ask(self.source, x)
        return self.method.predict(x)

    def own(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self.watch))

    def check_own(self, state: Any) -> Watch:
        watch = saved_watch(state, {name: p.shape for name, p in self.adapted.items()})
        if watch.snapshot is not None:  # load it, to find out if it fits
            before = self.method.snapshot()
            self.method.restore(watch.snapshot)
            self.method.restore(before)
        return watch

    def load_own(self, checked: Watch) -> None:
        self.watch = checked

    # --- the signals

    @torch.no_grad()
    def _ask(self, model: Classifier, x: Tensor) -> Tensor:
        """Return the logits (N, C) of a model."""
        return model(x)

    def _reference(self, n: int) -> Classifier:
        """What the method would be in a batch of n images, had it not learned."""
        return self.source if self.unlearned is None or n < MANY else self.unlearned

    @torch.no_grad()
    def _follow(self, logits: Tensor) -> None:
        """Running entropy and mean of the predictions, weighed by images."""
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        found = torch.cat([p, -(p * log_p).sum(-1, keepdim=True)], 1).mean(0).cpu()  # (C + 1,), one wait for a device
        if not found.isfinite().all():
            logits = logits[logits.isfinite().all(-1)]
            return self._follow(logits) if len(logits) else None
        mean_entropy = float(found[-1]) / math.log(len(found) - 1)
        return self.watch.follow(found[:-1], mean_entropy, KEPT_PER_64_IMAGES ** (len(logits) / 64))

    def signals(self) -> dict[str, float]:
        """Entropy and diversity of the predictions, each in [0, 1]; the way from the source; the share lost."""
        watch = self.watch
        found = {"lost": watch.share, "distance": self._way(None)}
        if watch.entropy is not None:
            found |= {"entropy": watch.entropy, "diversity": watch.diversity()}
        return found

    @torch.no_grad()
    def _way(self, since: dict[str, Tensor] | None) -> float:
        """How far the parameters are from these, or from the source's, relative to the length of the source's."""
        adapted = self.adapted
        if not adapted:
            return 0.0
        there = list(self.origin) if since is None else [since[name].to(p) for name, p in adapted.items()]
        apart = torch._foreach_sub(list(adapted.values()), there)
        return float(torch.stack(torch._foreach_norm(apart)).norm()) / self._scale

    def _due(self, n: int) -> bool:
        """Whether, before a batch of n images is seen, the source should be asked about it."""
        watch, guard = self.watch, self.guard
        if watch.left or watch.doubt:
            return True
        way = self._way(watch.there)
        poor = self.unlearned is not None and n < MANY  # statistics, which do harm without any learning
        if way <= STILL * MOVED and self.method.adapted and not poor:
            return False
        soon = max(1, watch.asked_at - watch.began)  # the time since a start doubles between two questions
        every = guard.every // CLOSER if self._wary() else guard.every
        if not self._wary() and self._reference(n) is self.unlearned:
            every, soon = every * n // guard.images, soon * n // guard.images
        if watch.images - max(watch.asked_at, watch.began) >= min(every, soon):
            return True
        if watch.images - watch.asked_at >= ENOUGH and self._dominant(0.5) is not None:
            return True
        allowed = min(max(2 * watch.good.get("distance", 0.0), FIRST * MOVED), MOVED)
        if self._strange():
            allowed = allowed / 2 if watch.there is not None else 0.0
        return not way <= allowed

    def _wary(self) -> bool:
        """Whether the last alarm was not long ago: then the source is asked more often, and about whole batches."""
        return self.watch.step > 0 and self.watch.images - self.watch.began <= CALM_IMAGES

    def _strange(self) -> bool:
        """Whether entropy or diversity have left the range of the last good state."""
        watch = self.watch
        if watch.entropy is None or "entropy" not in watch.good:
            return False
        floor = 0.02  # an entropy of nearly nothing may double without a meaning
        ratio = (watch.entropy + floor) / (watch.good["entropy"] + floor)
        return not 1 / FACTOR <= ratio <= FACTOR or watch.diversity() < watch.good["diversity"] / FACTOR

    def _dominant(self, most: float) -> int | None:
        """The class that has more than this share of the predictions; none soon after a start or an alarm."""
        watch = self.watch
        if watch.probs is None or watch.images - watch.began < ENOUGH:
            return None
        share, top = watch.probs.max(0)
        return int(top) if float(share) > max(most, 5 / len(watch.probs)) else None

    def _mostly(self, top: int, logits: Tensor) -> bool:
        """Whether most of the predictions that are sure are this class, and a few are sure at all."""
        best, y = logits.softmax(-1).max(-1)
        y = y[best >= self.guard.sure]
        return len(y) >= FEW and 2 * int((y == top).sum()) > len(y)

    # --- the verdict

    @torch.no_grad()
    def _judge(self, x: Tensor, logits: Tensor, before: dict[str, Any]) -> Tensor:
        """Ask about x, or some of it; on alarm act, and give the source's logits instead of these."""
        watch = self.watch
        guard = self.guard
        reference = self._reference(len(x))
        if not watch.left:
            watch.left = WINDOW // 2 if watch.doubt or self._wary() else guard.images
        some = x if reference is self.unlearned else x[: watch.left]
        asked = self._ask(reference, some)
        lost, sure = what_is_lost(asked, logits[: len(some)], guard.sure, self._dominant(guard.dominance))
        watch.left = max(watch.left - len(some), 0)
        seen = (len(lost), float(lost.sum()), float((~sure).sum()))
        watch.look = [a + b for a, b in zip(watch.look, seen, strict=True)]
        alarm = watch.alarming(guard.tolerance)
        if not watch.left:
            alarm = self._end_look(before) or alarm
        found = self.signals()
        if alarm:
            self._act(found)
            return asked if reference is self.source and len(asked) == len(x) else self._ask(self.source, x)
        if not watch.left:
            watch.good = found
            if watch.weight >= WINDOW / 4 and watch.excess(guard.tolerance) <= 1:
                watch.snapshot = before
        self._keep_anchor(some, sure)
        return logits

    def _end_look(self, before: dict[str, Any]) -> bool:
        """Draw the conclusions of a look that is complete; True where the anchors raise an alarm."""
        watch, tolerance = self.watch, self.guard.tolerance
        images, lost, unsure = watch.look
        watch.end_look()
        watch.asked_at = watch.images
        watch.doubt = excess(lost, unsure, images, tolerance) > FACTOR
        way = self._way(watch.there)
        if images - unsure >= CLEAR * images or way > MOVED:
            watch.there = _params(before)  # or it stays, so that many small ways add up to one
        moved = way > FIRST * MOVED or not self.method.adapted
        if images - unsure >= FEW or watch.anchors is None or not moved:
            return False
        return self._lost_of_anchors(watch.anchors) > tolerance

    def _lost_of_anchors(self, images: Tensor) -> float:
        """The share lost among the anchors, less the chance in it; the method's random numbers stay as they are."""
        if self.unlearned is not None and len(images) < MANY:
            return 0.0
        random = None if self.random is None else self.random.get_state()
        logits = self.method.predict(images)
        if self.random is not None and random is not None:
            self.random.set_state(random)
        lost, _ = what_is_lost(self._ask(self._reference(len(images)), images), logits, self.guard.sure)
        share = float(lost.mean())
        return share - DEVIATIONS * math.sqrt(share / len(lost))

    def _keep_anchor(self, x: Tensor, sure: Tensor) -> None:
        """The first sure images become anchors, until there are enough."""
        most, watch = self.guard.anchors, self.watch
        if isinstance(most, Tensor) or not sure.any():
            return
        have = 0 if watch.anchors is None else len(watch.anchors)
        if have >= most or (watch.anchors is not None and watch.anchors.shape[1:] != x.shape[1:]):
            return
        images = _as_bytes(x[sure.to(x.device)][: most - have])
        watch.anchors = images if watch.anchors is None else torch.cat([watch.anchors, images])

    def _act(self, found: dict[str, float]) -> None:
        watch, guard = self.watch, self.guard
        if watch.images - watch.began > CALM_IMAGES:
            watch.step = 0
        action = guard.policy[min(watch.step, len(guard.policy) - 1)]
        watch.step += 1
        watch.alarm_at = watch.images
        if action == "slow":
            watch.pace *= SLOWER
        if action == "source":
            watch.rest_until = watch.images + REST_IMAGES * 2**watch.rests
            watch.rests += 1
            watch.snapshot = None
        self._restore(watch.snapshot)
        watch.snapshot = None  # what raises an alarm again was not good
        watch.forget()
        self._note(action, found)

    def _pause(self, before: dict[str, Any] | None) -> None:
        """Let the source predict for a while; what was learned stays, unless there is doubt about it.

        before: the method's state before this batch, where it is known: then the batch is not learned from.
        """
        watch, found = self.watch, self.signals()
        if watch.doubt:
            self._restore(watch.snapshot)
            watch.forget()
        elif before is not None:
            self._restore(before)
        watch.entropy = watch.probs = None
        watch.rest_until = watch.images + PAUSE_IMAGES
        self._note("pause", found)

    def _note(self, action: str, found: dict[str, float]) -> None:
        watch = self.watch
        if len(watch.events) < EVENTS:
            watch.events.append({"image": watch.images, "action": action, "pace": watch.pace, **found})

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Go back to this state, or to the start, at the present pace; what was counted stays counted."""
        counted = (self.updates, self.skipped, self.seconds)
        if state is None:
            self.method.reset()
        else:
            self.method.restore(state)
        self.engine.updates, self.engine.skipped, self.seconds = counted
        if self.optimizer is not None:
            for group, lr in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = lr * self.watch.pace


def guarded(method: Method | Wrapper, guard: Guard | bool = True) -> Guarded:
    """Return the method under a guard, from its present settings and the source model on.

    Args:
        guard: settings; True for the default ones.
    """
    if isinstance(method, Guarded):
        raise ValueError("this method is guarded already")
    if not isinstance(guard, Guard | bool):
        raise TypeError(f"guard must be True, or mgtta.Guard(...), not {type(guard).__name__}")
    with torch.inference_mode(False):
        return Guarded(method, guard if isinstance(guard, Guard) else Guard())


def _source_model(method: Method | Wrapper) -> Classifier:
    """Return the model as it was before it adapted; weights that never change are shared."""
    shared = {id(p): p for p in method.model.parameters() if not any(p is own for own in method.adapted.values())}
    source = copy.deepcopy(method.model, shared).requires_grad_(False).use_running_statistics()
    params = dict(source.named_parameters())
    with torch.no_grad():
        for name, value in zip(method.adapted, method.origin, strict=True):
            params[name].copy_(value)
    return source


def _normalising_by_batches(source: Classifier, adapting: Classifier) -> Classifier | None:
    """The source model with the batch's statistics in its BatchNorm layers; None where the adapting one has none."""
    if not adapting._uses_batch_statistics or not batch_norms(adapting.net):
        return None
    return copy.deepcopy(source, {id(p): p for p in source.parameters()}).use_batch_statistics()


def _params(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the parameters in a snapshot of a method, or of one in wrappers."""
    while "method" in state:
        state = state["method"]
    return state["params"]


def _as_bytes(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.clone() if x.dtype == torch.uint8 else (x.float().clamp(0, 1) * 255).round().to(torch.uint8)
