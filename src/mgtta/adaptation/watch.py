"""What a guard knows of a method: the estimate of the harm that adaptation does, and all else that is saved with it.

Notation    q  the source's probabilities of an image, y = argmax q its prediction; y' the method's prediction
            lost = q_y - q_y', averaged over n images: by the source's own judgement, the accuracy that y' costs
            repeats = the chance that two of the n images get the same class; r of the source, r' of the method
            spread = log((r + e) / (r' + e)), between -1 and 1; e is the chance that a few pairs make up
            harm = lost - CREDIT * spread, and at most twice what is lost
In a network of BatchNorm layers the source judges under the statistics of the batch (reference.py). There
            lost = q_z - q_y', z the prediction of the source by itself; below 0, harm is lost - CREDIT * max(spread, 0)
The images are a fair sample. Among those of which the method is least sure, harm looks like a gain.

The source cannot know what adaptation has learned, so `lost` rises when adaptation helps, too. But a model that gets
better under a shift spreads its predictions over more classes, and one that collapses does the opposite. A model that
is wrong in ever new ways spreads them as well, so spread makes up for CREDIT at most. Where hardly anything is lost,
repeats say nothing: they can at most double what is lost.

How much harm is tolerated depends on how much there is to gain. Probabilities do not tell it: some models are too sure,
others not sure enough. So the source also sees some images moved by a few pixels. The share of them that keep their
class is its steadiness, which is near its accuracy (in a network of BatchNorm layers: that get the same class under the
statistics of the batch and, moved, by the source itself). The steadier the source, the less is tolerated. And where the
source is surer than it is steady, its judgement counts for less: `lost` is divided by the ratio of the two.

Harm of one or two points cannot be told from a gain of as much. But where both models are asked, the mean of their
probabilities loses hardly anything and keeps most of the gain (`blended`). So it is the answer while there is doubt.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CREDIT = 0.1  # accuracy for which a spread of 1 makes up: repeats that are fewer by a factor of e
LEAST_REPEATS = 1e-3  # added to both chances: one in a thousand classes
FEW_PAIRS = 4  # that may be of one class by accident: their chance is added instead where it is larger
SLACK_IMAGES = 128  # of which twice the tolerance is tolerated: few images do not show that predictions spread
FEWEST_IMAGES = 32  # of which the harm is estimated; then twice as many, and so on, up to the window
KNOWN_IMAGES = 64  # of which a state's harm is known roughly
STEADY_IMAGES = 128  # over which the steadiness of the source is estimated
USUAL_STEADINESS = 0.6  # at which the tolerance is what the setting says
PRIOR_IMAGES = 16  # for which the usual steadiness counts
OF_SOURCE = 0.4  # weight of the source's probabilities in a blended answer


@dataclass
class Watch:
    """What a guard knows: all of it is saved and resumed with the method."""

    images: int = 0
    began: int = 0  # images at the last start
    asked_at: int = 0  # images when the source was last asked
    lost: list[float] = field(default_factory=list)  # of the last images that the source was asked about
    sure: list[float] = field(default_factory=list)  # the source's probabilities for its own predictions of them
    of_source: list[int] = field(default_factory=list)  # the source's predictions of the same images
    of_method: list[int] = field(default_factory=list)  # the method's
    steady: list[int] = field(default_factory=list)  # 1 if the source gives a moved image the same class, else 0
    doubted: bool = False  # True after signs of harm
    shadow: bool = False  # True while the source answers, and the method learns beside it
    pace: float = 1.0  # factor on the learning rate
    failures: int = 0  # alarms of a trusted method since the last calm
    rests: int = 0
    rest_until: int = 0  # images until which the source answers and nothing is learned
    snapshot: dict[str, Any] | None = None  # the method's state when it was last found good; None: its start
    snapshot_at: int = 0  # images when it was kept
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def resting(self) -> bool:
        """True while the source answers and nothing is learned."""
        return self.images < self.rest_until

    @property
    def in_doubt(self) -> bool:
        """True if there are signs of harm, or the method has failed before."""
        return self.doubted or self.pace < 1

    def take(self, lost: Tensor, sure: Tensor, of_source: Tensor, of_method: Tensor, window: int) -> None:
        """Take in images (n,) that the source was asked about; the window keeps the last ones."""
        self.lost = [*self.lost, *lost.tolist()][-window:]
        self.sure = [*self.sure, *sure.tolist()][-window:]
        self.of_source = [*self.of_source, *of_source.tolist()][-window:]
        self.of_method = [*self.of_method, *of_method.tolist()][-window:]
        self.asked_at = self.images

    def compare(self, steady: Tensor) -> None:
        """Take in of which images (n,) the source keeps the class if they are moved by a few pixels."""
        self.steady = [*self.steady, *steady.int().tolist()][-STEADY_IMAGES:]

    def forget(self) -> None:
        """Forget what was seen of a state that is left; the next one begins now, or after a rest."""
        self.lost = []
        self.sure = []
        self.of_source = []
        self.of_method = []
        self.doubted = False
        self.began = max(self.images, self.rest_until)

    def harm(self, n: int | None = None) -> float:
        """Return the harm over the last n images that the source was asked about, or over all of the window."""
        n = min(n or len(self.lost), len(self.lost))
        if not n:
            return 0.0
        lost = self.mean_lost(n)
        least = max(LEAST_REPEATS, FEW_PAIRS / max(n * (n - 1) / 2, 1))
        spread = math.log((repeats(self.of_source[-n:]) + least) / (repeats(self.of_method[-n:]) + least))
        return lost - max(CREDIT * min(max(spread, -1), 1), min(-lost, 0))

    def mean_lost(self, n: int) -> float:
        """Return what the last n images have lost on average; less where the source is surer than it is steady."""
        too_sure = max(mean(self.sure[-n:]) / self.steadiness, 1.0)
        return mean(self.lost[-n:]) / too_sure

    def alarming(self, tolerance: float) -> bool:
        """Return whether the harm is above what is tolerated over any of several stretches."""
        n = FEWEST_IMAGES
        while n <= len(self.lost):
            if self.harm(n) > self.tolerated(tolerance, n):
                return True
            n *= 2
        return False

    def doubtful(self, tolerance: float) -> bool:
        """Return whether the harm over all of the window is above this tolerance."""
        return self.harm() > self.tolerated(tolerance, max(len(self.lost), 1))

    @property
    def steadiness(self) -> float:
        """The share of moved images that keep their class, by the source."""
        return (sum(self.steady) + PRIOR_IMAGES * USUAL_STEADINESS) / (len(self.steady) + PRIOR_IMAGES)

    def tolerated(self, tolerance: float, n: int) -> float:
        """Return the harm that is tolerated where it is estimated from n images."""
        to_gain = (1 - self.steadiness) / (1 - USUAL_STEADINESS)
        return tolerance * min(to_gain**2, 1) * (1 + SLACK_IMAGES / n)

    def signals(self) -> dict[str, float]:
        """Return what an event tells: the harm, its two parts, and what decides how much of it is tolerated."""
        return {
            "harm": self.harm(),
            "lost": self.mean_lost(len(self.lost)),
            "repeats": repeats(self.of_method),
            "repeats of the source": repeats(self.of_source),
            "steadiness of the source": self.steadiness,
        }


def mean(values: list[float]) -> float:
    """Return the mean; 0 of nothing."""
    return sum(values) / max(len(values), 1)


def repeats(classes: list[int]) -> float:
    """Return the chance that two of the predictions are the same class."""
    n = len(classes)
    if n < 2:
        return 0.0
    pairs = sum(count * (count - 1) for count in Counter(classes).values())
    return pairs / (n * (n - 1))


def what_is_lost(judge: Tensor, own: Tensor | None, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what each image has lost, how sure the judge is, its prediction and the method's: (n,), on the CPU.

    Args:
        judge: logits of the source (n, C), as it judges.
        own: of the source by itself (n, C), whose predictions are what may be lost; None: those of the judge.
        logits: of the method; a prediction that is not finite loses all of the source's probability.
    """
    q = judge.softmax(-1).nan_to_num()
    best, y = q.max(-1)
    kept = _probability(q, logits.nan_to_num())
    kept = torch.where(logits.isfinite().all(-1), kept, 0.0)
    to_lose = best if own is None else _probability(q, own)
    return (to_lose - kept).cpu(), best.cpu(), y.cpu(), logits.nan_to_num().argmax(-1).cpu()


def _probability(q: Tensor, logits: Tensor) -> Tensor:
    """Return the probability (n,) that q (n, C) gives to the classes predicted by these logits (n, C)."""
    return q.gather(1, logits.argmax(-1, keepdim=True))[:, 0]


def blended(asked: Tensor, logits: Tensor) -> Tensor:
    """Return the logarithm of the mean of both models' probabilities (n, C).

    Some methods return logits on a smaller scale than the model's: they are scaled up to the spread of the source's.

    Args:
        asked: logits of the source (n, C).
        logits: of the method.
    """
    scale = (asked.std(-1).mean() / logits.std(-1).mean()).nan_to_num(1.0).clamp(min=1)
    probs = OF_SOURCE * asked.softmax(-1) + (1 - OF_SOURCE) * (scale * logits).softmax(-1)
    return probs.log()


def saved_watch(found: Any) -> Watch:
    """Return the watch of a state; a ValueError says what is invalid. An earlier guard begins again at its pace."""
    fresh = Watch()
    if isinstance(found, dict) and {"images", "pace"} <= found.keys() and found.keys() & {"anchors", "doubt", "latest"}:
        found = {**vars(fresh), "images": found["images"], "began": found["images"], "pace": found["pace"]}
    if not isinstance(found, dict) or found.keys() != vars(fresh).keys():
        raise ValueError("invalid guard state: it has other entries")

    def numbers(value: Any, kind: type) -> bool:
        return isinstance(value, list) and all(type(each) is kind for each in value)

    checks: dict[str, Callable[[Any], bool]] = {
        "lost": lambda value: numbers(value, float),
        "sure": lambda value: numbers(value, float),
        "of_source": lambda value: numbers(value, int),
        "of_method": lambda value: numbers(value, int),
        "steady": lambda value: numbers(value, int),
        "snapshot": lambda value: value is None or isinstance(value, dict),
        "events": lambda value: numbers(value, dict),
    }
    for name, value in vars(fresh).items():
        fits = checks.get(name, lambda given, like=value: type(given) is type(like))
        if not fits(found[name]):
            raise ValueError(f"invalid guard state: {name!r} has the wrong type")
    if not len(found["lost"]) == len(found["sure"]) == len(found["of_source"]) == len(found["of_method"]):
        raise ValueError("invalid guard state: its lists differ in length")
    return Watch(**{name: copy.deepcopy(value) for name, value in found.items()})
