"""A guard: it watches a method without labels, and answers with the source model if adaptation does harm.

The guard keeps the source model beside the adapting one; they share all weights that do not adapt. Now and then it asks
the source about images of the present batch, and estimates from both predictions what adaptation costs (see watch.py).

- Trusted: the method answers. The source is asked about every small batch at first, and more and more rarely later; of
  large batches about a fair sample now and then, and the more rarely the less the two models differ.
- Doubt: there are signs of harm, hardly anything is known yet, or there was an alarm before. The source is asked about
  all images, and the answer is the mean of both models' probabilities.
- Alarm: the harm is above the tolerance, or logits are not finite. The method goes back to the last state that was
  found good, or to the source, and learns more slowly.
- Shadow: after an alarm the source answers, and the method learns beside it, until it seems to do good.
- Rest: after a second alarm the source answers for a long while, and nothing is learned.

An image without content (plain, or random pixels) is answered by the source and not learned from.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgtta.adaptation.content import has_content
from mgtta.adaptation.method import Events, Method
from mgtta.adaptation.reference import SAMPLE_IMAGES, Reference
from mgtta.adaptation.step import Pass
from mgtta.adaptation.watch import KNOWN_IMAGES, Watch, blended, saved_watch, what_is_lost
from mgtta.adaptation.wrapper import EVENTS, Wrapper, wrappers

EARLY_IMAGES = 1024  # in which every small batch is asked about; after k times as many, one in k
LONGEST_PAUSE = 8  # times `every`, between two questions about large batches
TRUST_IMAGES = 96  # in the shadow, after which a method may be trusted
REST_IMAGES = 8192  # without learning, the first time; twice as many each time
FAILURES = 2  # alarms of a trusted method after which it rests
SLOWEST = 1e-3  # pace below which a method in the shadow rests
CALM_IMAGES = 8192  # without alarm after which the learning rate rises again


@dataclass(frozen=True)
class Guard:
    """Settings of a guard.

    Attributes:
        tolerance: the harm above which there is an alarm, as a share of the predictions: 0.04 is 4 points of accuracy
            by the source's own judgement. More is tolerated where it is estimated from few images. After an alarm a
            method is trusted again when the harm is below minus half of it.
        doubt: the share of the tolerance above which there is doubt.
        window: images over which harm is estimated, at most.
        every: images between two questions to the source: of small batches at most; of large ones where `lost` is
            half of the tolerance or more. Half of that, twice as many images, and so on, up to eight times.
        slower: factor on the learning rate at each alarm.
    """

    tolerance: float = 0.04
    doubt: float = 0.3
    window: int = 256
    every: int = 256
    slower: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a share of the predictions, between 0 and 1, not {self.tolerance}")
        if not 0 < self.doubt <= 1:
            raise ValueError(f"doubt is a share of the tolerance, above 0 and at most 1, not {self.doubt}")
        if not 0 < self.slower <= 1:
            raise ValueError(f"slower is a factor above 0 and at most 1, not {self.slower}")
        if self.window < TRUST_IMAGES:
            raise ValueError(f"window must be at least {TRUST_IMAGES} images, not {self.window}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 image, not {self.every}")


class Guarded(Wrapper):
    """A method under a guard; a method like any other.

    Attributes:
        watch: what the guard knows; saved and resumed with the method.
        shown: which images of the last batch have content (n,); the others are not to be learned from.
        events: what the guard did since the last reset, and why: dicts of plain values, the first 1,000; and what
            recall did.
    """

    state_name = "guard"

    def __init__(self, method: Method | Wrapper, guard: Guard):
        super().__init__(method)
        self.guard = guard
        self.reference = Reference(method)
        self._rates = [group["lr"] for group in method.optimizer.param_groups] if method.optimizer else []
        self.shown = torch.ones(0, dtype=torch.bool)
        self.begin()

    @property
    def events(self) -> Events:
        inside = self.method.events
        if not inside:
            return self.watch.events
        return sorted([*inside, *self.watch.events], key=lambda event: event["image"])

    def begin(self) -> None:
        self.watch = Watch()

    @torch.inference_mode(False)
    def step(self, x: Tensor, learn: bool = True) -> Pass:
        """Give the method's logits, or the source's where the guard does not trust the method."""
        if self.paused:
            return Pass(self.predict(x))
        self.reference.source.check(x)
        watch = self.watch
        if watch.resting:
            watch.images += len(x)
            for wrapper in wrappers(self.method):  # which do not see these images
                wrapper.log.images += len(x)
            return Pass(self.reference(x))
        self.shown = has_content(x)
        if bool(self.shown.all()):
            return self._step(x, learn)
        of_source = self.reference(x[~self.shown])
        logits = of_source.new_empty(len(x), of_source.shape[1])
        shown = self.shown.to(logits.device)
        logits[~shown] = of_source
        if bool(shown.any()):
            logits[shown] = self._step(x[self.shown], learn).logits
        return Pass(logits)

    @property
    def learning(self) -> bool:
        return self.method.learning and not self.watch.resting

    def predict(self, x: Tensor) -> Tensor:
        if self.watch.shadow or self.watch.resting:
            return self.reference(x)
        return self.method.predict(x)

    def own(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self.watch))

    def check_own(self, state: Any) -> Watch:
        watch = saved_watch(state)
        if watch.snapshot is not None:  # load it, to find out if it fits
            before = self.method.snapshot()
            self.method.restore(watch.snapshot)
            self.method.restore(before)
        return watch

    def load_own(self, checked: Watch) -> None:
        self.watch = checked

    def signals(self) -> dict[str, float]:
        """Return the estimated harm, its parts, and the pace of learning."""
        return {**self.watch.signals(), "pace": self.watch.pace}

    # --- one batch

    def _step(self, x: Tensor, learn: bool) -> Pass:
        watch = self.watch
        first = watch.images == watch.began  # of a start: the method is still what it was there
        seen = self.method.step(x, learn)
        watch.images += len(seen.logits)
        broken = not math.isfinite(float(seen.logits.sum()))  # the sum takes fewer operations than isfinite
        all_images = broken or watch.shadow or watch.in_doubt
        if not all_images and (first or not self._due(len(x))):
            return seen
        which = torch.arange(len(x))
        if not all_images:
            which = self.reference.sample(len(x), watch.images)
        which = which.to(seen.logits.device)
        asked = self.reference.ask(x, which)
        watch.take(*what_is_lost(asked.judge, asked.own, seen.logits[which]), self.guard.window)
        watch.compare(asked.steady)
        by_source = watch.shadow
        if broken or watch.alarming(self.guard.tolerance):
            by_source = True
            self._alarm()
        else:
            self._judge()
        if by_source:
            own = asked.own
            if own is None or len(own) < len(x):
                own = self.reference(x)
            return Pass(own, seen.features)
        return Pass(self._of_both(seen.logits, which, asked.judge), seen.features)

    def _of_both(self, logits: Tensor, which: Tensor, asked: Tensor) -> Tensor:
        """Return the method's logits; in doubt, the answer of both models where the source was asked."""
        if self.watch.in_doubt or len(self.watch.lost) < KNOWN_IMAGES:
            logits = logits.clone()
            logits[which] = blended(asked, logits[which])
        return logits

    def _due(self, n: int) -> bool:
        """Return whether the source should be asked about this batch of n images, if there is no doubt."""
        watch = self.watch
        early = max(watch.asked_at - watch.began - n, 1)  # after a start the pauses double
        return watch.images - watch.asked_at >= min(early, self._pause(n))

    def _pause(self, n: int) -> float:
        """Return the images between two questions about batches of n images."""
        watch = self.watch
        if n <= SAMPLE_IMAGES:
            age = watch.images - watch.began
            return min(self.guard.every, n * max(1, age // EARLY_IMAGES))
        calm = self.guard.tolerance / 2 / max(watch.mean_lost(len(watch.lost)), 1e-9)
        pause = self.guard.every * min(max(calm, 1), LONGEST_PAUSE)
        return pause * len(self.reference.sample(n, 0)) / SAMPLE_IMAGES

    # --- the verdict

    def _judge(self) -> None:
        """Trust the method again if it seems to do good, keep its state while it does no harm, and let it speed up."""
        watch = self.watch
        watch.doubted = watch.doubtful(self.guard.doubt * self.guard.tolerance)
        harm = watch.harm()
        if watch.shadow and len(watch.lost) >= TRUST_IMAGES and harm < -self.guard.tolerance / 2:
            watch.shadow = False
            self._note("trust")
        good = not watch.shadow and len(watch.lost) >= KNOWN_IMAGES and harm < self.guard.tolerance / 2
        if good and watch.images - watch.snapshot_at >= 2 * self.guard.window:
            watch.snapshot = self.method.snapshot()
            watch.snapshot_at = watch.images
        if watch.pace < 1 and not watch.shadow and watch.images - watch.began > CALM_IMAGES:
            watch.pace = min(1.0, watch.pace / self.guard.slower)
            watch.failures = 0
            watch.began = watch.images
            self._set_rates()

    def _alarm(self) -> None:
        """Go back, learn more slowly from now on, and let the source answer."""
        watch = self.watch
        if not watch.shadow:
            watch.failures += 1
        watch.pace *= self.guard.slower
        action = "slow"
        if watch.failures >= FAILURES or watch.pace < SLOWEST:
            action = "rest"
            watch.rest_until = watch.images + REST_IMAGES * 2**watch.rests
            watch.rests += 1
            watch.pace = max(watch.pace, SLOWEST)
        self._note(action)
        self._restore(watch.snapshot)
        watch.snapshot = None  # what raises an alarm again was not good
        watch.shadow = True
        watch.forget()

    def _note(self, action: str) -> None:
        watch = self.watch
        if len(watch.events) < EVENTS:
            watch.events.append({"image": watch.images, "action": action, **self.signals()})

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Go back to this state, or to the start, at the present pace.

        What was counted stays counted, and what is known of the stream stays known.
        """
        counted = (self.updates, self.skipped, self.seconds)
        inside = list(wrappers(self.method))
        logs = [wrapper.log for wrapper in inside]
        normalisation = self.reference.normalisation
        turns = None if normalisation is None else normalisation.turns
        if state is None:
            self.method.reset()
        else:
            self.method.restore(state)
        self.engine.updates, self.engine.skipped, self.seconds = counted
        for wrapper, log in zip(inside, logs, strict=True):
            wrapper.log = log
        if normalisation is not None:
            normalisation.turns = turns
        self._set_rates()

    def _set_rates(self) -> None:
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
