"""What a recipe declares, in words: its needs, its papers, and its sets of settings."""

import inspect
from typing import NamedTuple

GRADIENTS = "gradients"
SOURCE = "source statistics"
FISHER = "Fisher information of source images"
GENERATOR = "a generator"
HEAD = "linear head"
TOKENS = "tokens"
BATCH_NORM = "BatchNorm layers"
REQUIRED = inspect.Parameter.empty  # the default of a setting that must be given
AUTHORS = "authors"
MGTTA = "mgtta"
SETS = {  # set of settings -> where it comes from
    AUTHORS: "the method's authors: their public code, or their paper where there is none",
    MGTTA: "appendix B.2 of the MGTTA paper, arXiv 2412.16901",
}
RESNETS = "networks with BatchNorm or GroupNorm"


class Paper(NamedTuple):
    title: str
    arxiv: str | None = None  # its number, if it is there
