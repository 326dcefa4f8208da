"""A guard against collapse: it watches a method without labels, and brings it back when adaptation does harm.

What it goes by is what the source model would have said. Now and then it asks the source about images of the batch at
hand. A prediction that the source was sure of, and that adaptation has changed, counts as lost; their share among all
the images asked about is an estimate, without labels, of the accuracy that adaptation costs. The more images the
source is unsure of, the more there is to win, and the more losses are tolerated for it.

When to ask: after every so many images, and earlier after a start or an alarm; when the parameters have moved; when
entropy or diversity of the predictions have left the range of the last good state; and at every batch as long as there
is doubt. Where a batch has hardly an image that the source is sure of (noise, a batch of one), anchors serve: images it
was sure of earlier.

Notation    q  the source's probabilities of an image, y = argmax q; y'  the method's prediction
            lost = q_y - q_y' where q_y >= sure, else 0, so 0 where the two agree
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mgtta.errors import unknown
from mgtta.losses import entropy
from mgtta.methods.base import Method
from mgtta.models import Classifier
from mgtta.params import batch_norms
from mgtta.taps import FirstPass

POLICIES = ("rollback", "slow", "source")
CLOSER = 4  # times as often as usual the source is asked after an alarm
FEW = 4  # sure images under which a batch says too little, and the anchors are asked
WINDOW = 128  # images that the estimate of what is lost looks back on
DEVIATIONS = 1.5  # standard errors by which that estimate must be above what is tolerated
FACTOR = 2.0  # by which entropy may rise or fall, and diversity fall, before the source is asked; and of doubt
BATCHWISE = 8  # times as much is tolerated where BatchNorm takes the batch's statistics, which changes much by itself,
MANY = 16  # in batches of at least so many images: the statistics of fewer are poor
ENOUGH = 64  # images after which the share of a class says something
EVENTS = 1000  # that are kept, the first ones: a run may last for ever
MEMORY = 0.5  # of the running entropy and diversity, for a batch of 64 images


@dataclass(frozen=True, eq=False)
class Guard:
    """Settings of a guard.

    Attributes:
        policy: what to do at the first alarm, the second, and so on; the last one stays. "rollback": back to the
            last state found good; "slow": that, and a lower learning rate; "source": the source model, which
            predicts without adapting for `rest` images (twice as long each time), and then adapts afresh.
        tolerance: the share of predictions that may be lost where the source is sure of all images; three times
            as many where it is sure of none; eight times that for nets with BatchNorm in batches of 16 and more,
            whose own statistics change many sure predictions, mostly for the better.
        sure: the source's confidence above which its prediction counts.
        every: images between two questions to the source, where nothing calls for one earlier.
        images: how many images of a batch the source is asked about.
        moved: the way of the parameters, relative to their length, after which the source is asked.
        anchors: how many to keep of the images that the source was sure of; or your own, clean ones.
        dominance: the share of the predictions that one class may have. Above it, and above five times what a class
            has on average, the same in the source's predictions, the stream comes class by class: a batch then says
            little of the domain, and the source model predicts, without adapting, for `pause` images.
        pause: see `dominance`.
        slower: factor on the learning rate.
        rest: images for which "source" predicts without adapting, the first time.
        calm: images without alarm after which `policy` begins anew, and the source is asked as rarely as before.
    """

    policy: Sequence[str] = ("slow", "slow", "source")
    tolerance: float = 0.01
    sure: float = 0.9
    every: int = 400
    images: int = 8
    moved: float = 0.05
    anchors: int | Tensor = 16
    dominance: float = 0.25
    pause: int = 512
    slower: float = 0.1
    rest: int = 4096
    calm: int = 8192

    def __post_init__(self) -> None:
        policy = (self.policy,) if isinstance(self.policy, str) else tuple(self.policy)
        object.__setattr__(self, "policy", policy)
        for name in policy:
            if name not in POLICIES:
                raise unknown("policy of a guard", name, POLICIES)
        count = len(self.anchors) if isinstance(self.anchors, Tensor) else self.anchors
        if not policy or min(self.every, self.images, self.pause, self.rest, self.calm, count + 1) < 1:
            raise ValueError("a guard needs a policy; every, images, pause, rest and calm are at least 1, anchors 0")
        if not (0 < self.tolerance < 1 and 0 < self.sure < 1 and 0 < self.slower < 1 and self.moved > 0):
            raise ValueError("tolerance, sure and slower lie between 0 and 1, and moved is above 0")
        if not self.dominance > 0:
            raise ValueError("dominance is above 0; 1 and more switch it off")


@dataclass
class Watch:
    """What a guard knows: all of it is saved and resumed with the method."""

    images: int = 0
    asked_at: int = 0  # images, when the source was last asked
    lost: float = 0.0  # sum over the images in the window
    unsure: float = 0.0  # images in the window that the source was not sure of
    weight: float = 0.0  # images in the window
    look: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # images, lost, unsure, of the look that lasts
    left: int = 0  # images still to ask about in it: a look takes as many batches as it needs
    doubt: bool = False  # whether the last look found more lost than it should
    entropy: float | None = None  # running means, in units of ln C
    probs: Tensor | None = None  # (C,), running mean of the predicted probabilities: its entropy is the diversity
    good: dict[str, float] = field(default_factory=dict)  # signals when the method was last found good
    there: dict[str, Tensor] | None = None  # the parameters when the source was last asked
    snapshot: dict[str, Any] | None = None  # the method's state when it was last found good; None: its start
    anchors: Tensor | None = None  # (K, 3, H, W) uint8
    anchor_probs: Tensor | None = None  # (K, C), the source's
    pace: float = 1.0  # of the learning rate
    step: int = 0  # alarms since all was calm
    alarm_at: int = 0
    rests: int = 0
    rest_until: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def share(self) -> float:
        lost, _, images = self.seen()
        return lost / images if images else 0.0

    def seen(self) -> tuple[float, float, float]:
        """Lost, unsure and all images of the window, with the look that lasts.

        Noise, of which the source is never sure, speaks neither for a method nor against it, and does not count.
        """
        images, lost, unsure = self.look
        if unsure == images:
            return self.lost, self.unsure, self.weight
        keep = min(1.0, max(WINDOW - images, 0) / self.weight) if self.weight else 0.0
        return keep * self.lost + lost, keep * self.unsure + unsure, keep * self.weight + images

    def end_look(self) -> None:
        self.lost, self.unsure, self.weight = self.seen()
        self.look = [0.0, 0.0, 0.0]

    def excess(self, tolerance: float) -> float:
        lost, unsure, images = self.seen()
        return excess(lost, unsure, images, tolerance) if images else 0.0

    def alarming(self, tolerance: float) -> bool:
        """Whether more is lost than tolerated, beyond chance."""
        lost, _, _ = self.seen()
        return lost > 0 and self.excess(tolerance) * (1 - DEVIATIONS / math.sqrt(lost)) > 1


def excess(lost: float, unsure: float, images: float, tolerance: float) -> float:
    """The share that is lost over the one that is tolerated, 1 where they are the same."""
    return lost / (images + 2 * unsure) / tolerance


class Guarded(Method):
    """A method under a guard; a method like any other.

    Attributes:
        method: what is guarded.
        events: what the guard did since the last reset, and why: dicts of plain values, the first 1,000.
    """

    def __init__(self, method: Method, guard: Guard):
        nn.Module.__init__(self)
        self.method, self.guard = method, guard
        self.optimizer, self.random, self.needs = method.optimizer, method.random, method.needs
        self._turn = method._turn
        method._remember_start()
        self.source = _source_model(method)
        self._batchwise = method.model._uses_batch_statistics and bool(batch_norms(method.model.net))
        self.tolerance = guard.tolerance
        self._scale = math.sqrt(sum(float(p.detach().square().sum()) for p in method.adapted.values())) or 1.0
        self.watch = self._fresh()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "method":
                raise
            return getattr(self.method, name)

    @property
    def events(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.watch.events

    @property
    def kind(self) -> str:
        return f"guarded {self.method.kind}"

    def forward(self, x: Tensor) -> Tensor:
        """The method's logits, or the source's where the guard finds that the method has gone wrong."""
        with self._turn, torch.inference_mode(False):
            watch = self.watch
            if watch.images < watch.rest_until:
                logits = self._ask(x)[0]
                watch.images += len(logits)
                return logits
            many = self._batchwise and len(x) >= MANY
            self.tolerance = self.guard.tolerance * (BATCHWISE if many else 1)
            due = self._due()
            before = self.method.state_dict() if due else None
            model = self.method.model
            with FirstPass(model.net, model._taps[-1:]) as first:
                logits = self.method(x)
            watch.images += len(logits)
            self._follow(logits)
            if (top := self._dominant(watch.probs)) is not None:
                asked = self._ask(x)[0]
                if self._dominant(asked.softmax(-1).mean(0)) == top:
                    self._pause()
                    return asked
            if due or self._strange():
                logits = self._judge(x, logits, first.found.get(model._taps[-1].name), before)
            return logits

    def predict(self, x: Tensor) -> Tensor:
        return self._ask(x)[0] if self.watch.images < self.watch.rest_until else self.method.predict(x)

    def reset(self) -> None:
        with self._turn:
            self.method.reset()
            self.watch = self._fresh()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        if args or kwargs:
            return nn.Module.state_dict(self, *args, **kwargs)
        with self._turn:
            watch = {name: getattr(self.watch, name) for name in vars(self.watch)}
            return {"kind": self.kind, "method": self.method.state_dict(), "guard": copy.deepcopy(watch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        if not isinstance(state, dict) or state.keys() != {"kind", "method", "guard"}:
            raise ValueError("this is not a state that a guarded method's state_dict gave")
        with self._turn:
            watch = _watch(state["guard"], {name: p.shape for name, p in self.method.adapted.items()})
            before = self.method.state_dict()
            if watch.snapshot is not None:
                self.method.load_state_dict(watch.snapshot)  # to find out whether it fits
            try:
                self.method.load_state_dict(state["method"])
            except ValueError:
                self.method.load_state_dict(before)
                raise
            self.watch = watch

    def _apply(self, fn: Any, recurse: bool = True) -> "Guarded":
        nn.Module._apply(self, fn, recurse)
        return self

    # --- the signals

    def _fresh(self) -> Watch:
        watch = Watch()
        if isinstance(self.guard.anchors, Tensor) and len(self.guard.anchors):
            watch.anchors = _as_bytes(self.guard.anchors)
            watch.anchor_probs = self._ask(watch.anchors)[0].softmax(-1).cpu()
        return watch

    @torch.no_grad()
    def _ask(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The source's logits (N, C), and its last layer's features (N, d)."""
        logits, features = self.source.features(x)
        return logits, features[-1]

    @torch.no_grad()
    def _follow(self, logits: Tensor) -> None:
        """Running entropy and mean of the predictions, weighed by images."""
        watch, logits = self.watch, logits[logits.isfinite().all(-1)]
        if not len(logits):
            return
        keep = MEMORY ** (len(logits) / 64)
        now = float(entropy(logits).mean()) / math.log(logits.shape[1])
        probs = logits.softmax(-1).mean(0).cpu()
        watch.entropy = now if watch.entropy is None else keep * watch.entropy + (1 - keep) * now
        watch.probs = probs if watch.probs is None else keep * watch.probs + (1 - keep) * probs

    def signals(self) -> dict[str, float]:
        """Entropy and diversity of the predictions, each in [0, 1]; the way from the source; the share lost."""
        watch, start = self.watch, self.method._start
        assert start is not None
        found = {"lost": watch.share, "distance": self._way(start["params"])}
        if watch.entropy is not None and watch.probs is not None:
            p = watch.probs
            found["entropy"] = watch.entropy
            found["diversity"] = float(-(p * p.clamp(min=1e-12).log()).sum()) / math.log(len(p))
        return found

    @torch.no_grad()
    def _way(self, since: dict[str, Tensor]) -> float:
        """How far the parameters are from these, relative to the length of the source's."""
        parts = [(p - since[name].to(p)).square().sum() for name, p in self.method.adapted.items()]
        return math.sqrt(float(torch.stack(parts).sum())) / self._scale if parts else 0.0

    def _due(self) -> bool:
        """Whether, before a batch is seen, the source should be asked about it."""
        watch, guard = self.watch, self.guard
        began = max(watch.alarm_at, watch.rest_until)
        soon = max(1, watch.asked_at - began)  # the way since a start doubles between two questions
        every = guard.every // CLOSER if self._wary() else guard.every
        if watch.images - max(watch.asked_at, began) >= min(every, soon) or watch.left or watch.doubt:
            return True
        if not self.method.updates:
            return False
        since = watch.there if watch.there is not None else self.method._start["params"]  # type: ignore[index]
        return self._way(since) > guard.moved

    def _wary(self) -> bool:
        """Whether the last alarm was not long ago: then the source is asked more often, and about whole batches."""
        return self.watch.step > 0 and self.watch.images - self.watch.alarm_at <= self.guard.calm

    def _strange(self) -> bool:
        """Whether entropy or diversity have left the range of the last good state."""
        now, good = self.signals(), self.watch.good
        if "entropy" not in good or "entropy" not in now:
            return False
        floor = 0.02  # an entropy of nearly nothing may double without a meaning
        ratio = (now["entropy"] + floor) / (good["entropy"] + floor)
        return not 1 / FACTOR <= ratio <= FACTOR or now["diversity"] < good["diversity"] / FACTOR

    def _dominant(self, probs: Tensor | None) -> int | None:
        """The class that has most of these mean probabilities (C,); none soon after a start or an alarm."""
        began = max(self.watch.alarm_at, self.watch.rest_until)
        if probs is None or self.watch.images - began < ENOUGH:
            return None
        share, top = probs.max(0)
        return int(top) if float(share) > max(self.guard.dominance, 5 / len(probs)) else None

    # --- the verdict

    @torch.no_grad()
    def _judge(self, x: Tensor, logits: Tensor, features: Tensor | None, before: dict[str, Any] | None) -> Tensor:
        """Ask the source about x, or some of it; on alarm act, and give the source's logits in the place of these."""
        watch, guard = self.watch, self.guard
        if not watch.left:
            watch.left = WINDOW // 2 if watch.doubt or self._wary() else guard.images
        some = x[: watch.left]
        asked, source_features = self._ask(some)
        lost, sure = _lost(asked, logits[: len(some)], guard.sure)
        watch.left -= len(some)
        seen = (len(lost), float(lost.sum()), float((~sure).sum()))
        watch.look = [a + b for a, b in zip(watch.look, seen, strict=True)]
        alarm = watch.alarming(self.tolerance)
        if not watch.left:
            alarm = self._end_look() or alarm
        found = self.signals()
        if features is not None and len(features) == len(x):
            gap = features[: len(some)].mean(0) - source_features.mean(0)
            found["features"] = float(gap.norm() / source_features.norm(dim=-1).mean())
        if alarm:
            self._act(found)
            return asked if len(asked) == len(x) else self._ask(x)[0]
        if not watch.left:
            watch.good = found
            if before is not None and watch.weight >= WINDOW / 2 and watch.excess(self.tolerance) <= 1:
                watch.snapshot = before
        self._keep_anchor(some, asked, sure)
        return logits

    def _end_look(self) -> bool:
        """Draw the conclusions of a look that is complete; True where the anchors raise an alarm."""
        watch = self.watch
        images, lost, unsure = watch.look
        watch.end_look()
        watch.asked_at = watch.images
        watch.there = {name: p.detach().clone() for name, p in self.method.adapted.items()}
        watch.doubt = excess(lost, unsure, images, self.tolerance) > FACTOR
        if images - unsure >= FEW or watch.anchors is None or watch.anchor_probs is None:
            return False
        return self._lost_of_anchors(watch.anchors, watch.anchor_probs) > self.tolerance

    def _lost_of_anchors(self, images: Tensor, probs: Tensor) -> float:
        """The share lost among the anchors, less the chance in it; the method's random numbers stay as they are."""
        random = None if self.random is None else self.random.get_state()
        logits = self.method.predict(images)
        if self.random is not None and random is not None:
            self.random.set_state(random)
        lost, _ = _lost(probs.log().to(logits), logits, self.guard.sure)
        share = float(lost.mean())
        return share - DEVIATIONS * math.sqrt(share / len(lost))

    def _keep_anchor(self, x: Tensor, asked: Tensor, sure: Tensor) -> None:
        """The first sure images become anchors, until there are enough."""
        most, watch = self.guard.anchors, self.watch
        if isinstance(most, Tensor) or not sure.any():
            return
        have = 0 if watch.anchors is None else len(watch.anchors)
        if have >= most or (watch.anchors is not None and watch.anchors.shape[1:] != x.shape[1:]):
            return
        images = _as_bytes(x[sure.to(x.device)][: most - have])
        probs = asked[sure][: most - have].softmax(-1).cpu()
        watch.anchors = images if watch.anchors is None else torch.cat([watch.anchors, images])
        watch.anchor_probs = probs if watch.anchor_probs is None else torch.cat([watch.anchor_probs, probs])

    def _act(self, found: dict[str, float]) -> None:
        watch, guard = self.watch, self.guard
        if watch.images - watch.alarm_at > guard.calm:
            watch.step = 0
        action = guard.policy[min(watch.step, len(guard.policy) - 1)]
        watch.step += 1
        watch.alarm_at = watch.images
        if action == "slow":
            watch.pace *= guard.slower
        if action == "source":
            watch.rest_until = watch.images + guard.rest * 2**watch.rests
            watch.rests += 1
            watch.snapshot = None
        self._restore()
        watch.snapshot = None  # what raises an alarm again was not good
        self._begin_anew(action, found)

    def _pause(self) -> None:
        found = self.signals()
        self._restore()
        self.watch.rest_until = self.watch.images + self.guard.pause
        self._begin_anew("pause", found)

    def _begin_anew(self, action: str, found: dict[str, float]) -> None:
        """Forget what was seen of the state that was left, and note why it was."""
        watch = self.watch
        watch.lost = watch.unsure = watch.weight = 0.0
        watch.look = [0.0, 0.0, 0.0]
        watch.doubt, watch.left = False, 0
        watch.there = watch.entropy = watch.probs = None
        watch.good = {}
        if len(watch.events) < EVENTS:
            watch.events.append({"image": watch.images, "action": action, "pace": watch.pace, **found})

    def _restore(self) -> None:
        """The last good state at the present pace; what was counted stays counted."""
        method, start = self.method, self.method._start
        assert start is not None
        counted = {name: getattr(method, name) for name in start["counters"]}
        method._load(start if self.watch.snapshot is None else self.watch.snapshot)
        for name, value in counted.items():
            setattr(method, name, value)
        if method.optimizer is not None:
            first = start["optimizer"]["param_groups"]
            for group, original in zip(method.optimizer.param_groups, first, strict=True):
                group["lr"] = original["lr"] * self.watch.pace


def guarded(method: Method, guard: Guard | bool = True) -> Guarded:
    """The method under a guard, from its present settings and the source model on.

    Args:
        guard: settings; True for the default ones.
    """
    if isinstance(method, Guarded):
        raise ValueError("this method is guarded already")
    if not isinstance(guard, Guard | bool):
        raise TypeError(f"guard must be True, or mgtta.Guard(...), not {type(guard).__name__}")
    with torch.inference_mode(False):
        return Guarded(method, guard if isinstance(guard, Guard) else Guard())


def _source_model(method: Method) -> Classifier:
    """The model as it was before it adapted, sharing the weights that never change."""
    shared = {id(p): p for p in method.model.parameters() if not any(p is own for own in method.adapted.values())}
    source = copy.deepcopy(method.model, shared).requires_grad_(False).use_running_statistics()
    assert method._start is not None
    params = dict(source.named_parameters())
    with torch.no_grad():
        for name, value in method._start["params"].items():
            params[name].copy_(value)
    return source


def _watch(found: Any, shapes: dict[str, torch.Size]) -> Watch:
    """What a state says that a guard knew; refused where its entries have other names, types or shapes.

    Args:
        shapes: of the method's adapted parameters.
    """
    fresh = Watch()
    if not isinstance(found, dict) or found.keys() != vars(fresh).keys():
        raise ValueError("this state does not fit a guard: it has other entries")

    def numbers(values: Any) -> bool:
        return all(isinstance(value, float | int) for value in values)

    def tensors(value: Any) -> dict[str, Any]:
        return {name: getattr(t, "shape", None) for name, t in value.items()}

    checks: dict[str, Callable[[Any], bool]] = {
        "entropy": lambda value: value is None or isinstance(value, float),
        "probs": lambda value: value is None or (isinstance(value, Tensor) and value.ndim == 1),
        "anchors": lambda value: value is None or (isinstance(value, Tensor) and value.ndim == 4),
        "anchor_probs": lambda value: value is None or (isinstance(value, Tensor) and value.ndim == 2),
        "good": lambda value: isinstance(value, dict) and numbers(value.values()),
        "there": lambda value: value is None or (isinstance(value, dict) and tensors(value) == shapes),
        "snapshot": lambda value: value is None or isinstance(value, dict),
        "look": lambda value: isinstance(value, list) and len(value) == 3 and numbers(value),
        "events": lambda value: isinstance(value, list) and all(isinstance(event, dict) for event in value),
    }
    for name, value in vars(fresh).items():
        fits = checks[name](found[name]) if name in checks else type(found[name]) is type(value)
        if not fits:
            raise ValueError(f"this state does not fit a guard: its {name} is none")
    return Watch(**copy.deepcopy(found))


def _lost(asked: Tensor, logits: Tensor, sure: float) -> tuple[Tensor, Tensor]:
    """What each image has lost (N,), and of which the source is sure (N,); asked are its logits (N, C)."""
    q = asked.softmax(-1)
    best, _ = q.max(-1)
    found = q.gather(1, logits.nan_to_num().argmax(-1, keepdim=True))[:, 0]
    found = torch.where(logits.isfinite().all(-1), found, 0.0)
    certain = best >= sure  # never where the source's own logits are not finite
    return torch.where(certain, best - found, 0.0).cpu(), certain.cpu()


def _as_bytes(x: Tensor) -> Tensor:
    x = x.detach().cpu()
    return x.clone() if x.dtype == torch.uint8 else (x.float().clamp(0, 1) * 255).round().to(torch.uint8)
