"""One stream: a method, the images that its next update learns from, and what is told about it.

The answer comes first: `answer` predicts and follows running statistics, and keeps the images. `learn` learns from the
kept images later. Kept images are never saved: a stream that is saved and loaded again has none.

Shapes: n images, C classes.
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgtta.adaptation.gathered import Gathered, come_few
from mgtta.adaptation.guarded import Guarded
from mgtta.adaptation.method import Events
from mgtta.adaptation.recalled import Domains, Recalled
from mgtta.adaptation.shift import ShiftDetector
from mgtta.adaptation.wrapper import Adapting, find
from mgtta.serve.live import Live

MEMORY_IMAGES = 640  # of the running mean of the entropy
RECENT_IMAGES = 64  # with which an image is compared
TRUST = "trust"  # what a guard does that is not an alarm
KEEP_BATCHES = 4  # updates' worth of images that wait at most; the oldest are dropped


class CannotExportError(ValueError):
    """No network predicts as this method does."""


class Answer(NamedTuple):
    """What a stream says about images."""

    probabilities: Tensor  # (n, C)
    updates: int  # so far
    shifted: bool  # the stream seems to have changed its domain with these images


class Stream:
    """A method with its counts.

    Attributes:
        kept: images that were answered and not yet learned from.
        changed_at: the time of the first change that is not saved; None if all is saved.
        unsaved: updates since the last save.
        bytes: what the stream holds in memory for itself, when it was last saved.
        live: what the live view shows.
        repeated: images with the same bytes as one of the RECENT_IMAGES before.
    """

    def __init__(self, name: str, method: Adapting, update_images: int, thumbnails: int = 0):
        self.name = name
        self.method = method
        self.update_images = update_images
        self.gather = 0  # images that an update needs; 0: the method learns while it answers, or not at all
        self._gathered = find(method, Gathered)
        if method.optimizer is not None:
            self.gather = 1 if self._gathered is None else self._gathered.images
        self.live = Live(thumbnails)
        self.kept: list[Tensor] = []
        self._recent: deque[bytes] = deque(maxlen=RECENT_IMAGES)  # digests of the last images
        self.changed_at: float | None = None
        self.unsaved = 0
        self.bytes = 0
        self._begin()

    def _begin(self) -> None:
        self.images = 0
        self.dropped = 0
        self.repeated = 0
        self.entropy: float | None = None
        self.shifts = 0
        self.recalled = 0
        self.alarms = 0
        self.kept.clear()

    @property
    def waiting(self) -> int:
        """Images that wait to be learned from."""
        return sum(map(len, self.kept))

    @property
    def due(self) -> bool:
        """True if there are enough images for an update."""
        return self.gather > 0 and self.waiting >= self.gather

    @property
    def resting(self) -> bool:
        """True while a guard lets the source model answer."""
        guarded = find(self.method, Guarded)
        return guarded is not None and (guarded.watch.shadow or guarded.watch.resting)

    def answer(self, x: Tensor) -> Answer:
        """Predict the images, keep them for an update, and look for a shift. Images that repeat are only predicted."""
        new = self._are_new(x)
        if not bool(new.any()):
            return Answer(self._tell(x, self.method.predict(x)), self.method.updates, False)
        before = _place(self.method)
        guarded = find(self.method, Guarded)
        turns = len(self._turns)
        events = 0 if guarded is None else len(guarded.watch.events)
        learning = self.method.learning
        probabilities = self._tell(x, self.method.step(x, learn=not self.gather).logits)
        if guarded is not None:
            self._note_guard(guarded.watch.events[events:])
            learning = learning and not guarded.watch.resting
            if learning:
                new = new & guarded.shown
        shifted = self._note_shift(before)
        for event in self._turns[turns:]:
            self.live.mark(self.images, event["action"])
        if self.gather and learning and bool(new.any()):
            self._keep(x[new])
        return Answer(probabilities, self.method.updates, shifted)

    def _tell(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the probabilities (n, C), and follow them."""
        if not bool(logits.isfinite().all()):
            raise RuntimeError(f"stream {self.name!r} gives invalid predictions: reset it")
        probabilities = logits.softmax(1).cpu()
        self._follow(probabilities)
        self.live.answered(x, probabilities, self.images)
        self.images += len(x)
        self._changed()
        return probabilities

    def _are_new(self, x: Tensor) -> Tensor:
        """Return which images differ from the last RECENT_IMAGES: (n,) of bool. The others are counted as repeated.

        Many copies of one image would teach only its class, and running statistics would forget all others.
        """
        new = torch.ones(len(x), dtype=torch.bool)
        for i, image in enumerate(x.cpu().numpy()):
            digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            new[i] = digest not in self._recent
            self._recent.append(digest)
        self.repeated += int((~new).sum())
        return new

    def learn(self) -> None:
        """Make one update from the kept images, at most `update_images` of them."""
        taken: list[Tensor] = []
        room = self.update_images
        while self.kept and room:
            batch = self.kept.pop(0)
            if len(batch) > room:
                self.kept.insert(0, batch[room:])
            taken.append(batch[:room])
            room -= len(taken[-1])
        self.method.learn(torch.cat(taken), come_few(taken))
        if not self.method.learning:  # a schedule begins a rest
            self.drop_kept()
        self.unsaved += 1
        self._changed()

    def reset(self) -> None:
        """Go back to the source model, and learn again."""
        self.method.reset()
        self.method.unpause()
        self._begin()
        self.live = Live(self.live.thumbnails)
        self.live.mark(0, "reset")
        self._changed()

    def freeze(self, frozen: bool) -> None:
        """Only predict from now on; or, with False, learn again."""
        if frozen:
            self.method.pause()
        else:
            self.method.unpause()
        self.live.mark(self.images, "freeze" if frozen else "learn")
        self.drop_kept()
        self._changed()

    def drop_kept(self) -> None:
        """Forget the images that wait to be learned from."""
        self.dropped += self.waiting
        self.kept.clear()

    def weights(self) -> dict[str, Tensor]:
        """Return the adapted network's weights."""
        try:
            state = self.method.export().state_dict()
        except ValueError as error:
            raise CannotExportError(str(error)) from error
        return {name: t.detach().cpu().contiguous().clone() for name, t in state.items()}

    def report(self) -> dict[str, Any]:
        """Return what is told about the stream."""
        return {
            "stream": self.name,
            "images": self.images,
            "updates": self.method.updates,
            "skipped": self.method.skipped,
            "waiting": self.waiting,
            "dropped": self.dropped,
            "repeated": self.repeated,
            "entropy": self.entropy,
            "shifts": self.shifts,
            "recalled": self.recalled,
            "alarms": self.alarms,
            "resting": self.resting,
            "frozen": self.method.paused,
            "bytes": self.bytes,
        }

    # --- what is saved besides the method's state

    def counts(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        names = ("images", "dropped", "repeated", "entropy", "shifts", "recalled", "alarms")
        return {**{name: getattr(self, name) for name in names}, "frozen": self.method.paused}

    def load_counts(self, counts: dict[str, Any]) -> None:
        """Load what `counts` gave."""
        self.images = int(counts["images"])
        self.dropped = int(counts["dropped"])
        self.repeated = int(counts.get("repeated", 0))  # services before 0.3 did not count them
        self.entropy = counts["entropy"]
        self.shifts = int(counts["shifts"])
        self.recalled = int(counts["recalled"])
        self.alarms = int(counts.get("alarms", 0))  # services before 0.3 did not count them
        if counts["frozen"]:
            self.method.pause()
        for event in self.method.events:
            self.live.mark(event["image"], event["action"])

    def saved(self) -> None:
        """Note that all is saved."""
        self.changed_at = None
        self.unsaved = 0

    def _changed(self) -> None:
        if self.changed_at is None:
            self.changed_at = time.monotonic()

    @property
    def _turns(self) -> Events:
        """How classes began and ceased to come in turn."""
        return () if self._gathered is None else self._gathered.events

    def _note_shift(self, before: "Place | None") -> bool:
        """Count a change of the domain since `before`; return whether there was one."""
        now = _place(self.method)
        if before is None or now is None:
            return False
        if now.domains is not before.domains or now.present is before.present:
            return False
        self.shifts += 1
        known = any(now.present is detector for detector in before.known)
        if known:
            self.recalled += 1
            self.drop_kept()  # they are of the domain that has ended
        self.live.mark(self.images, "recall" if known else "shift")
        return True

    def _note_guard(self, events: Sequence[dict[str, Any]]) -> None:
        """Mark what a guard did, and count alarms; images that were kept before an alarm are not learned from."""
        for event in events:
            self.live.mark(self.images, event["action"])
            if event["action"] != TRUST:
                self.alarms += 1
                self.drop_kept()

    def _follow(self, probabilities: Tensor) -> None:
        found = float(torch.special.entr(probabilities).sum(1).mean())
        if not math.isfinite(found):
            return
        if self.entropy is None:
            self.entropy = found
        share = len(probabilities) / min(self.images + len(probabilities), MEMORY_IMAGES)
        self.entropy += min(share, 1.0) * (found - self.entropy)

    def _keep(self, x: Tensor) -> None:
        """Keep the images; drop the oldest if learning does not keep up."""
        if not len(x):
            return
        self.kept.append(x)
        most = KEEP_BATCHES * max(self.update_images, self.gather)
        while self.waiting > most:
            self.dropped += len(self.kept.pop(0))


class Place(NamedTuple):
    """In which domain a stream is believed to be."""

    domains: Domains
    present: ShiftDetector
    known: list[ShiftDetector]


def _place(method: Adapting) -> Place | None:
    """Return the domain of a stream; None if its method does not look for shifts."""
    recalled = find(method, Recalled)
    if recalled is None:
        return None
    domains = recalled.domains
    return Place(domains, domains.present, [known.detector for known in domains.known])
