"""Recall: keep what was learned on a domain, and find it again when the domain returns.

What tells domains apart must not move with adaptation: the output of the network's first layer, which is frozen. The
summary of an image is the mean over all places of each channel, the logarithm of its standard deviation relative to
the average over channels, and that average, which is the image's contrast. Logarithms make noise visible in the
channels of fine patterns, where an image has little else; relative to their contrast, images of one domain are much
more alike. Each entry is divided by its standard deviation over the first images of the stream: all count alike.

A batch that lies far from the present domain raises an alarm (see shift.py). If it lies near a domain that was kept,
the state of the present domain is kept and that of the other one is loaded. If it is near none, the next batch must lie
on the same side; only then has the present domain ended. Otherwise both batches belong to the present domain, which is
wider than it seemed. So a mixed stream is one wide domain.

Shapes: n images, D channels of the first layer, S = 2D + 1 entries of a summary.
"""

import copy
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from mgtta._lib.errors import unknown as unknown_name
from mgtta._lib.names import spelled
from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.method import Events, Method
from mgtta.adaptation.shift import SHIFT, Arriving, ShiftDetector, is_count
from mgtta.adaptation.state import load
from mgtta.adaptation.step import Pass
from mgtta.adaptation.wrapper import Log, Wrapper, find, innermost, wrappers
from mgtta.models.checks import IMAGE_AXES

UNKNOWN = ("continue", "source")
NEAR = 3.0  # n |s - c|^2 / v below which a batch is of a domain that was kept
ALIKE = 0.5  # of their distance from the present domain, squared, within which two batches lie on the same side of it
LEAST_SPREAD = 1e-3  # of a domain, where 1 is that of unlike images: the same image again and again has none
LOOK_IMAGES = 32  # that are looked at together, at least: smaller batches are added up
MEASURED_IMAGES = 128  # that a GPU measures at a time, at most
SIDE_PIXELS = 112  # of the middle of an image, which is what is looked at
LEAST_VARIANCE = 1e-6  # of a channel over places, so that it has a logarithm
LEAST_SCALE = 0.1  # of the median scale of the entries of one kind

State = dict[str, Any]  # what `domain_state` gives


@dataclass
class Known:
    """A domain that ended: where it lies, and what was learned on it."""

    detector: ShiftDetector
    state: State


@dataclass
class Alarm:
    """A batch that seemed to be of another domain, and the state of the method after it."""

    summary: Tensor  # (S,)
    images: int
    state: State


@dataclass
class Domains:
    """What recall knows; all of it is saved and reset with the method."""

    count: int = 0  # of images in `total`
    total: Tensor | None = None  # (2S,), sums of the summaries and of their squares, before there are LOOK_IMAGES
    scale: Tensor | None = None  # (S,), by which summaries are divided
    present: ShiftDetector = field(default_factory=ShiftDetector)
    alarm: Alarm | None = None
    known: list[Known] = field(default_factory=list)  # the least recently used first


class Recalled(Wrapper):
    """A method that keeps the states of the last domains and finds them again.

    Attributes:
        most: how many domains are kept; the least recently used one goes first.
        unknown: what a new domain starts from: "continue", the present state; "source", the source model.
    """

    state_name = "recall"

    def __init__(self, method: Method | Wrapper, most: int, unknown: str = "continue"):
        name = spelled(method.name)
        if method.optimizer is None:
            raise ValueError(f"{name} learns no state by gradients that recall could keep: leave recall out")
        if method.ranks.size > 1:
            raise ValueError(f"recall judges by the images of its own rank: {name} cannot recall over ranks")
        if unknown not in UNKNOWN:
            raise unknown_name("start of an unknown domain", unknown, UNKNOWN)
        super().__init__(method)
        self.most = most
        self.unknown = unknown
        self._layer = first_frozen_layer(innermost(method))
        gathered = find(method, Gathered)
        self._gathered = 0 if gathered is None else gathered.images  # that are learned from together; fewer wait
        self.begin()

    @property
    def domains(self) -> Domains:
        """What is known of the present domain and of those before it."""
        self._settle()
        if self._held:
            self._measure_held()
            self._settle()
        return self._domains

    @property
    def events(self) -> Events:
        _ = self.domains  # judging the last batch may add one
        return sorted([*self.method.events, *self.log.events], key=lambda event: event["image"])

    @torch.inference_mode(False)
    def step(self, x: Tensor, learn: bool = True) -> Pass:
        """Judge the batch before this one, and do what the method does."""
        if self.paused or self.spent:
            return self.method.step(x, learn)
        self.model.check(x)
        self._settle()
        x = x.to(next(self.model.parameters()).device, non_blocking=True)  # once, for recall and for the method
        self._measure_unlike(x)
        if x.is_cuda and len(x) < self._gathered:
            seen = self.method.step(x, learn)  # first: the caller waits only for the prediction
            self._hold(x, apart=True)
            return seen
        self._hold(x)  # a GPU has measured it before it ends the step
        return self.method.step(x, learn)

    def predict(self, x: Tensor) -> Tensor:
        self._settle()
        return self.method.predict(x)

    def warm_up(self, x: Tensor) -> None:
        """Compile for batches of x's shape, and prepare for looking at them."""
        self.method.warm_up(x)
        together = math.ceil(LOOK_IMAGES / len(x))
        some = x.to(next(self.model.parameters()).device).repeat(together, *(1 for _ in x.shape[1:]))
        self.engine.replayed(self._sums, _middle(some), now=True)

    def begin(self) -> None:
        self._domains = Domains()
        self._arriving = Arriving()
        self._held: list[Tensor] = []  # images that a GPU has not measured yet: it takes as long for one as for many

    # --- looking at batches

    def _hold(self, x: Tensor, apart: bool = False) -> None:
        """Measure a batch; on a GPU, as soon as there are enough images for a look.

        Args:
            apart: the caller waits for a prediction that was launched before.
        """
        self.log.images += len(x)
        waiting = self._domains.count + sum(map(len, self._held)) + len(x)
        if x.is_cuda and waiting < LOOK_IMAGES:
            self._held.append(x.detach().clone())
            return
        self._held.append(x)
        self._measure_held(apart)

    def _measure_unlike(self, x: Tensor) -> None:
        """Measure and judge the held images if they differ from x in size or dtype."""
        if self._held and (self._held[0].shape[1:], self._held[0].dtype) != (x.shape[1:], x.dtype):
            self._measure_held()
            self._settle()

    def _measure_held(self, apart: bool = False) -> None:
        x = self._held[0]
        if len(self._held) > 1 or apart:  # a copy: the caller may soon write other images in the place of these
            x = torch.cat(self._held)
        self._held = []
        with self.engine.apart(x) if apart else nullcontext():
            sums = self.engine.replayed(self._sums, _middle(x))
            self._arriving.send(sums, (len(x), self.log.images))

    @torch.no_grad()
    def _sums(self, x: Tensor) -> Tensor:
        """Return the sums over images of the summaries and of their squares, (2S,), from the middle of images."""
        found = summaries(self._measure(x).double())
        return torch.cat([found.sum(0), found.square().sum(0)])

    @torch.no_grad()
    def _measure(self, x: Tensor) -> Tensor:
        """Return mean and variance over places of each channel of the first layer: (n, 2, D).

        The layer's filters are applied to images as they came. What normalises images, and the layer's bias, would add
        the same to every batch. A GPU takes few images at a time, which needs less memory.
        """
        if x.is_cuda and len(x) > MEASURED_IMAGES:
            return torch.cat([self._measure(part) for part in x.split(MEASURED_IMAGES)])
        unit = 1.0
        if x.dtype == torch.uint8:
            unit = 1 / 255
        layer = None
        if self._layer is not None:
            layer = self.model.net.get_submodule(self._layer)
        if isinstance(layer, nn.Conv2d) and _takes(layer, x):
            t = _filtered(x, layer, unit)
        else:
            t = x.float().reshape(*x.shape[:2], -1).transpose(1, 2) * unit  # the image's own channels
        var, mean = torch.var_mean(t, 1, correction=0)
        return torch.stack([mean, var], 1)

    def _settle(self) -> None:
        """Judge what was measured of the last batch, if there are enough images by now."""
        held = self._arriving.take()
        if held is None:
            return
        sums, (n, image) = held
        if not bool(sums.isfinite().all()):
            return
        domains = self._domains
        if domains.total is not None and domains.total.shape == sums.shape:
            sums = sums + domains.total
        domains.total = sums
        domains.count += n
        if domains.count >= LOOK_IMAGES:
            n = domains.count
            domains.count = 0
            domains.total = None
            self._judge(sums / n, n, image)

    def _judge(self, means: Tensor, n: int, image: int) -> None:
        """Judge a look of n images, the last of which is number `image` of the stream.

        Args:
            means: of the summaries and of their squares, (2S,).
        """
        domains = self._domains
        summary, squares = means.chunk(2)
        if domains.scale is None or domains.scale.shape != summary.shape:  # the first look, or another kind of image
            self._domains = Domains(scale=_scale(summary, squares))
            domains = self._domains
        assert domains.scale is not None
        s = (summary / domains.scale).numpy()
        if not _left(domains.present, domains.present.distance(s, n)):
            self._stay(s, n)
            return
        found = self._nearest(s, n)
        if found is not None:
            self._recall(found, s, n, image)
        elif domains.alarm is not None and _alike(domains, s):
            self._end(domains.alarm, s, n, image)
        else:
            self._stay(None, n)
            domains.alarm = Alarm(torch.from_numpy(s), n, self._state())

    def _stay(self, s: np.ndarray | None, n: int) -> None:
        """Take a look, and one that raised a false alarm before it, into the present domain."""
        domains = self._domains
        if domains.alarm is not None:
            domains.present.follow(domains.alarm.summary.numpy(), domains.alarm.images)
            domains.alarm = None
        if s is not None:
            domains.present.follow(s, n)

    def _nearest(self, s: np.ndarray, n: int) -> Known | None:
        """Return the nearest of the kept domains that a look may be of; None if it is of none."""
        found = None
        least = NEAR
        for known in self._domains.known:
            distance = known.detector.distance(s, n) / max(known.detector.spread, LEAST_SPREAD)
            if distance < least:
                found = known
                least = distance
        return found

    # --- the end of a domain

    def _recall(self, found: Known, s: np.ndarray, n: int, image: int) -> None:
        """Keep the state of the present domain, and load that of one which returns."""
        domains = self._domains
        ended = self._state() if domains.alarm is None else domains.alarm.state
        domains.known = [known for known in domains.known if known is not found]
        self._keep(ended)
        domains.present = found.detector
        domains.present.follow(s, n)
        self._load(found.state)
        self._note("recall", image)

    def _end(self, alarm: Alarm, s: np.ndarray, n: int, image: int) -> None:
        """Keep the state of the present domain, and begin another one with two looks."""
        domains = self._domains
        self._keep(alarm.state)
        domains.present = ShiftDetector()
        domains.present.follow(alarm.summary.numpy(), alarm.images)
        domains.present.follow(s, n)
        if self.unknown == "source":
            start = innermost(self).start
            assert start is not None
            self._load(start)
        innermost(self).domain_began()
        self._note("shift", image)

    def _keep(self, state: State) -> None:
        domains = self._domains
        domains.known.append(Known(domains.present, state))
        domains.known = domains.known[-self.most :]
        domains.alarm = None

    def _note(self, action: str, image: int) -> None:
        self.log.note(image, action, domains=len(self._domains.known))

    def _state(self) -> State:
        """Return what was learned: parameters, moments, memory and buffers, as copies; no counters."""
        taken = innermost(self).snapshot()
        return {name: value for name, value in taken.items() if name != "counters"}

    def _load(self, state: State) -> None:
        """Load what was learned; counters and the learning rate stay, and wrappers inside begin again."""
        method = innermost(self)
        now = method.snapshot()
        optimizer = {"state": state["optimizer"]["state"], "param_groups": now["optimizer"]["param_groups"]}
        load(method, {**state, "optimizer": optimizer, "counters": now["counters"]})
        for inside in wrappers(self.method):
            inside.forget()

    # --- what is saved

    def snapshot(self) -> dict[str, Any]:
        _ = self.domains  # judging the last batch may load another state
        return super().snapshot()

    def own(self) -> dict[str, Any]:
        domains = self.domains
        known = [{"detector": known.detector.state(), "state": known.state} for known in domains.known]
        alarm = None if domains.alarm is None else vars(domains.alarm)
        own = {**vars(domains), "present": domains.present.state(), "alarm": alarm, "known": known}
        return {**copy.deepcopy(own), **self.log.state()}

    def check_own(self, state: Any) -> tuple[Domains, Log]:
        names = vars(Log()).keys()
        if not isinstance(state, dict) or state.keys() != vars(Domains()).keys() | names:
            raise ValueError("invalid recall state: it has other entries")
        log = Log.loaded({name: state[name] for name in names}, "recall")
        state = {name: value for name, value in state.items() if name not in names}
        try:
            alarm = None if state["alarm"] is None else Alarm(**state["alarm"])
            present = ShiftDetector.loaded(state["present"], "recall")
            known = [Known(ShiftDetector.loaded(k["detector"], "recall"), k["state"]) for k in state["known"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"invalid recall state: {error}") from error
        found = Domains(**{**state, "present": present, "alarm": alarm, "known": known})
        _check(found, self.most)
        states = [k.state for k in known]
        if alarm is not None:
            states.append(alarm.state)
        self._check_states(states)
        return copy.deepcopy(found), log

    def _check_states(self, states: list[Any]) -> None:
        """Load each state, to find out if it fits, and then the present one again."""
        method = innermost(self)
        before = method.snapshot()
        for state in states:
            if not isinstance(state, dict):
                raise ValueError("invalid recall state: a domain has no state")
            method.restore({**state, "counters": before["counters"]})
            method.restore(before)

    def load_own(self, checked: tuple[Domains, Log]) -> None:
        self.begin()
        self._domains, self.log = checked


def first_frozen_layer(method: Method) -> str | None:
    """Return the name in the network of the first convolution, if it does not adapt; a patch embedding is one, too."""
    adapted = {id(p) for p in method.adapted.values()}
    for name, module in method.model.net.named_modules():
        if isinstance(module, nn.Conv2d):
            frozen = all(id(p) not in adapted for p in module.parameters())
            return name if frozen else None
    return None


def summaries(measured: Tensor) -> Tensor:
    """Return the summary of each image, (n, S), from mean and variance of its channels, (n, 2, D)."""
    mean, var = measured.unbind(1)
    log_std = 0.5 * (var + LEAST_VARIANCE).log()
    contrast = log_std.mean(1, keepdim=True)
    return torch.cat([mean, log_std - contrast, contrast], 1)


def _takes(layer: nn.Conv2d, x: Tensor) -> bool:
    """Return whether a convolution takes these images."""
    if x.ndim != 4 or x.shape[1] != layer.in_channels:
        return False
    reach = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return x.shape[2] >= reach[0] and x.shape[3] >= reach[1]


def _filtered(x: Tensor, layer: nn.Conv2d, unit: float) -> Tensor:
    """Return the layer's filters on images times `unit`, without its bias: (n, places, D)."""
    weight = layer.weight * unit
    height, width = layer.kernel_size
    if layer.stride != layer.kernel_size or layer.dilation != (1, 1) or layer.groups != 1:
        found = conv2d(x.to(weight.dtype), weight, None, layer.stride, 0, layer.dilation, layer.groups)
        return found.float().flatten(2).transpose(1, 2)
    rows = x.shape[2] // height
    columns = x.shape[3] // width
    x = x[:, :, : rows * height, : columns * width]
    grid = x.unflatten(3, (columns, width)).unflatten(2, (rows, height)).permute(0, 2, 4, 1, 3, 5)
    patches = torch.empty(grid.shape, dtype=weight.dtype, device=x.device)
    patches.copy_(grid)  # cut and rounded at once: a convolution would take several times as long
    return (patches.reshape(len(x), rows * columns, -1) @ weight.flatten(1).T).float()


def _middle(x: Tensor) -> Tensor:
    """Return the middle of images, at most SIDE_PIXELS high and wide; other inputs as they are."""
    if x.ndim != IMAGE_AXES:
        return x
    for axis in (2, 3):
        side = min(x.shape[axis], SIDE_PIXELS)
        x = x.narrow(axis, (x.shape[axis] - side) // 2, side)
    return x


def _scale(means: Tensor, squares: Tensor) -> Tensor:
    """Return by what summaries (S,) are divided: the standard deviation over images, times sqrt(S)."""
    std = (squares - means.square()).clamp(min=0).sqrt()
    channels = len(std) // 2
    kinds = std.split([channels, channels, 1])
    floors = [LEAST_SCALE * kind.median().item() or 1.0 for kind in kinds]
    std = torch.cat([kind.clamp(min=floor) for kind, floor in zip(kinds, floors, strict=True)])
    return std * math.sqrt(len(std))


def _left(present: ShiftDetector, distance: float) -> bool:
    """Return whether a look at this distance lies outside of the present domain."""
    return present.shifted(distance) and distance > SHIFT * LEAST_SPREAD


def _alike(domains: Domains, s: np.ndarray) -> bool:
    """Return whether a look lies on the same side of the present domain as the one that raised the alarm."""
    assert domains.alarm is not None
    assert domains.present.centre is not None
    apart = s - domains.alarm.summary.numpy()
    away = s - domains.present.centre.numpy()
    return bool(apart @ apart <= ALIKE * (away @ away))


def _check(domains: Domains, most: int) -> None:
    """Reject a state whose values are out of range."""
    vectors = [domains.total, domains.scale]
    if domains.alarm is not None:
        vectors.append(domains.alarm.summary)
    sound = is_count(domains.count) and all(v is None or (isinstance(v, Tensor) and v.ndim == 1) for v in vectors)
    if not sound or len(domains.known) > most:
        raise ValueError("invalid recall state: it has values that are out of range")
