"""What a guard knows of a method: the estimate of what adaptation has lost, and all else that is saved with it.

Notation    q  the probabilities of an image before adaptation, y = argmax q; y'  the method's prediction
            lost = q_y - q_y' where q_y >= sure, else 0, so 0 where the two agree
Shapes: N images, C classes, K anchors.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

WINDOW = 128  # images that the estimate of what is lost looks back on
DEVIATIONS = 1.5  # standard errors by which that estimate must be above what is tolerated
GONE = {"anchor_probs"}  # entries of states that earlier releases wrote


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
    there: dict[str, Tensor] | None = None  # the parameters of which the source was last asked
    snapshot: dict[str, Any] | None = None  # the method's state when it was last found good; None: its start
    anchors: Tensor | None = None  # (K, 3, H, W) uint8
    pace: float = 1.0  # of the learning rate
    step: int = 0  # alarms since all was calm
    alarm_at: int = 0
    rests: int = 0
    rest_until: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def began(self) -> int:
        """Number of images at the last start."""
        return max(self.alarm_at, self.rest_until)

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

    def forget(self) -> None:
        """What was seen of a state that is left."""
        self.lost = self.unsure = self.weight = 0.0
        self.look = [0.0, 0.0, 0.0]
        self.doubt, self.left = False, 0
        self.there = self.entropy = self.probs = None
        self.good = {}

    def excess(self, tolerance: float) -> float:
        lost, unsure, images = self.seen()
        return excess(lost, unsure, images, tolerance) if images else 0.0

    def alarming(self, tolerance: float) -> bool:
        """Whether more is lost than tolerated, beyond chance."""
        lost, _, _ = self.seen()
        return lost > 0 and self.excess(tolerance) * (1 - DEVIATIONS / math.sqrt(lost)) > 1

    def follow(self, probs: Tensor, entropy: float, keep: float) -> None:
        """Take in mean probabilities (C,) and entropy of a batch; keep: the part of the past that stays."""
        known = self.probs is not None and self.entropy is not None
        self.probs = keep * self.probs + (1 - keep) * probs if known else probs  # type: ignore[operator]
        self.entropy = keep * self.entropy + (1 - keep) * entropy if known else entropy  # type: ignore[operator]

    def diversity(self) -> float:
        """Of the predicted classes, in [0, 1]: 1 where all are as frequent."""
        p = self.probs
        return float(torch.special.entr(p).sum()) / math.log(len(p)) if p is not None else 1.0


def excess(lost: float, unsure: float, images: float, tolerance: float) -> float:
    """The share that is lost over the one that is tolerated, 1 where they are the same."""
    return lost / (images + 2 * unsure) / tolerance


def what_is_lost(asked: Tensor, logits: Tensor, sure: float, top: int | None = None) -> tuple[Tensor, Tensor]:
    """What each image has lost (N,), and of which the source is sure (N,); asked are its logits (N, C).

    Args:
        top: a class that the method gives to most images: where it does, the source need not be sure.
    """
    q = asked.softmax(-1)
    best, _ = q.max(-1)
    y = logits.nan_to_num().argmax(-1)
    found = torch.where(logits.isfinite().all(-1), q.gather(1, y[:, None])[:, 0], 0.0)
    certain = best >= (sure if top is None else torch.where(y == top, 0.0, sure))  # never where q is not finite
    return torch.where(certain, best - found, 0.0).cpu(), certain.cpu()


def saved_watch(found: Any, shapes: dict[str, torch.Size]) -> Watch:
    """What a state says that a guard knew; refused where its entries have other names, types or shapes.

    Args:
        shapes: of the method's adapted parameters.
    """
    fresh = Watch()
    if not isinstance(found, dict) or found.keys() - GONE != vars(fresh).keys():
        raise ValueError("this state does not fit a guard: it has other entries")

    def numbers(values: Any) -> bool:
        return all(isinstance(value, float | int) for value in values)

    def tensors(value: Any) -> dict[str, Any]:
        return {name: getattr(t, "shape", None) for name, t in value.items()}

    checks: dict[str, Callable[[Any], bool]] = {
        "entropy": lambda value: value is None or isinstance(value, float),
        "probs": lambda value: value is None or (isinstance(value, Tensor) and value.ndim == 1),
        "anchors": lambda value: value is None or (isinstance(value, Tensor) and value.ndim == 4),
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
    return Watch(**{name: copy.deepcopy(value) for name, value in found.items() if name not in GONE})
