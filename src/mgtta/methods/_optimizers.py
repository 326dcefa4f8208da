"""Optimizers by name, for methods that take any: a factory from parameters to a torch optimizer."""

import os
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import SGD, Adam, Optimizer

from mgtta._lib.errors import unknown
from mgtta.learned.files import load_generator
from mgtta.learned.generator import MetaGradientGenerator
from mgtta.learned.optimizer import MGG

OPTIMIZERS = ("sgd", "adam", "mgg")


def optimizer_factory(
    name: str,
    lr: float,
    *,
    momentum: float = 0.9,
    generator: MetaGradientGenerator | str | os.PathLike = "imagenet",
) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Args:
    momentum: for "sgd" alone.
    generator: for "mgg" alone; a generator, the name of a shipped one, or a file.
    """
    if name == "sgd":
        return partial(SGD, lr=lr, momentum=momentum)
    if name == "adam":
        return partial(Adam, lr=lr)
    if name == "mgg":
        if isinstance(generator, str | os.PathLike):
            generator = load_generator(generator)
        return partial(MGG, generator=generator, lr=lr)
    raise unknown("optimizer", name, OPTIMIZERS)
