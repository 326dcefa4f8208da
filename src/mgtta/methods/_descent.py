"""Which optimizer moves a gradient method's parameters: a default in the method's file, and settings of the caller."""

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import SGD, Adam

from mgtta._lib.errors import unknown
from mgtta.adaptation.method import OptimizerFactory
from mgtta.learned.files import load_generator
from mgtta.learned.generator import MetaGradientGenerator
from mgtta.learned.optimizer import MGG

IMAGES = 64  # of the batch that learning rates are for
OPTIMIZERS = ("sgd", "adam", "mgg")
Generator = MetaGradientGenerator | str | os.PathLike


@dataclass(frozen=True)
class Descent:
    """A recipe's optimizer.

    Attributes:
        momentum: only for "sgd".
        nesterov: only for "sgd" with momentum: the step looks ahead by it.
        generator: only for "mgg": a generator, the name of a shipped one, or a file.
        betas: only for "adam" and "mgg": of the two running means of gradients; None: the optimizer's own.
        fixed: the recipe is named after its optimizer, so that callers cannot choose another.
    """

    lr: float
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    generator: Generator = "imagenet"
    betas: tuple[float, float] | None = None
    fixed: bool = False

    def settings(self) -> dict[str, Any]:
        """Return the settings that a caller may give, with their defaults."""
        if not self.fixed:
            names = ["lr", "optimizer", "momentum", "nesterov", "generator"]
        elif self.optimizer == "mgg":
            names = ["lr", "generator", "betas"]
        elif self.optimizer == "adam":
            names = ["lr", "betas"]
        else:
            names = ["lr"]
        return {name: getattr(self, name) for name in names}

    def factory(self) -> OptimizerFactory:
        """Return what makes the optimizer from a list of parameters."""
        if self.optimizer == "sgd":
            nesterov = self.nesterov and self.momentum > 0  # torch rejects it without momentum
            return partial(SGD, lr=self.lr, momentum=self.momentum, nesterov=nesterov)
        own: dict[str, Any] = {}
        if self.betas is not None:
            own["betas"] = _two_shares(self.betas)
        if self.optimizer == "adam":
            return partial(Adam, lr=self.lr, **own)
        if self.optimizer == "mgg":
            generator = self.generator
            if not isinstance(generator, MetaGradientGenerator):
                generator = load_generator(generator)
            return partial(MGG, generator=generator, lr=self.lr, **own)
        raise unknown("optimizer", self.optimizer, OPTIMIZERS)


def _two_shares(betas: Any) -> tuple[float, float]:
    """Return betas as optimizers take them; a ValueError says what is invalid."""
    two = isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas)
    if not two or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, such as (0.9, 0.99), not {betas!r}")
    return betas[0], betas[1]


def linear_rate(lr: float, images: int) -> float:
    """Return the learning rate for a batch of so many images: lr * B / 64, for ViTs by the authors of SAR."""
    return lr * min(images, IMAGES) / IMAGES


def doubled_at_one(lr: float, images: int) -> float:
    """Return the same, doubled for single images, as SAR's and DeYO's authors do."""
    rate = linear_rate(lr, images)
    if images == 1:
        return 2 * rate
    return rate


def constant_rate(lr: float, _images: int) -> float:
    """Return the same learning rate for every batch: for methods that gather images of small batches."""
    return lr
