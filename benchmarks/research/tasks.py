"""What is varied: objectives, rules that move theta, trainings of generators, and trials of them over streams."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Objective:
    """What is lowered, and how predictions are made."""

    trade_off: float = 0.4  # lambda of Eq. 7
    tokens: str = "class"  # whose statistics: "class", "patch" or "both"
    patch_weight: float = 1.0
    history: float = 0.0  # weight of earlier batches in the statistics
    entropy_weight: float = 1.0
    margin: float = math.inf  # images above this entropy, in units of ln C, do not count
    balance: float = 0.0  # weight of the negative entropy of the mean prediction
    recentre: float = 0.0  # share of the final features' mean shift that is taken back before the head
    late: bool = False  # the last layers' statistics alone: the second half
    align: float = 0.0  # share of the tokens' shift from the source that is taken back at every tapped norm
    align_tokens: str = "both"  # whose: "class", "patch" or "both"
    align_std: bool = True  # their spread too
    mirror: bool = False  # every image comes with its mirror image, and their logits are averaged
    noisy: float = 0.0  # weight of cross-entropy between the prediction and that of the same images under mild noise
    steps: int = 1  # updates a batch
    adapts: str = "norms"  # or "biases": these, and every bias


@dataclass(frozen=True)
class Rule:
    """What moves theta."""

    name: str = "adam"  # or "learned"
    lr: float = 5e-3
    decay: float = math.inf  # lr / sqrt(1 + t / decay)
    generator: str | None = None  # the name of a training


@dataclass(frozen=True)
class Training:
    """How a generator is trained: in episodes of one corruption each, from the source model."""

    inputs: tuple[str, ...] = ("momentum", "gradient")
    hidden_size: int = 8
    lr: float = 5e-3
    decay: float = math.inf
    batch: tuple[int, ...] = (32,)  # episodes take turns
    steps: int = 32  # of an episode
    episodes: int = 80
    unroll: int = 1  # steps that credit reaches back
    outer: str = "objective"  # or "twin": cross-entropy with the source model's prediction on the clean image
    outer_lr: float = 1e-2
    images: int = 128
    flip: bool = True
    seed: int = 0
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class Trial:
    """One rule on one objective over streams."""

    rule: Rule
    objective: Objective = field(default_factory=Objective)
    split: str = "validation"
    setting: str = "reset"  # or "mixed", "continual"
    batch: int = 64
    seed: int = 0
    max_updates: int | None = None
    images: int | None = None


def key(task: Any) -> str:
    text = json.dumps([type(task).__name__, dataclasses.asdict(task)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def short(task: Any) -> str:
    """What differs from the defaults."""
    words = []
    for f in dataclasses.fields(task):
        value = getattr(task, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if value != default:
            words.append(f"{f.name}=({short(value)})" if dataclasses.is_dataclass(value) else f"{f.name}={value}")
    return " ".join(words)
