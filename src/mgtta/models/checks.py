"""Errors and warnings about images and logits that do not fit a classifier."""

import math
import re
import warnings

import torch
from torch import Tensor

REFUSAL = re.compile("shape|size|dimension|channels|Expected")  # a network's own words about images that do not fit
IMAGE_AXES = 4  # (N, channels, height, width)
LOOKS = 3  # batches whose values are looked at: to look at a GPU's values waits for the GPU
MARGIN = 0.25  # by which noise or resampling may push float images out of [0, 1]
SUM_TOLERANCE = 0.01  # of probabilities in bfloat16


class FirstBatches:
    """Looks at the values of a classifier's first batches, and warns at most once of each kind."""

    def __init__(self) -> None:
        self.images_left = LOOKS
        self.logits_left = LOOKS

    def look_at_images(self, x: Tensor, name: str) -> None:
        """Warn of float images outside [0, 1], which are about to be normalised a second time."""
        if not can_look(x) or not self.images_left or x.dtype == torch.uint8 or not x.numel():
            return
        self.images_left -= 1
        low = x.min().item()
        high = x.max().item()
        outside = low < -MARGIN or high > 1 + MARGIN
        if outside and math.isfinite(high - low):  # a method counts images that are not finite as skipped
            self.images_left = 0
            warnings.warn(
                f"{name} normalises its images itself, and these lie outside [0, 1] ({low:.3g} to {high:.3g}): give "
                "uint8 images, or floats in [0, 1]; if your images are already normalised, load the model with "
                "mgtta.load_model(..., normalised=True)",
                stacklevel=2,
            )

    def look_at_logits(self, logits: Tensor, name: str) -> None:
        """Warn of outputs that are probabilities: every row is non-negative and sums to 1."""
        if not can_look(logits) or not self.logits_left or not len(logits):
            return
        self.logits_left -= 1
        rows = logits.detach().float()
        if bool((rows >= 0).all() & ((rows.sum(1) - 1).abs() < SUM_TOLERANCE).all()):
            self.logits_left = 0
            warnings.warn(
                f"{name} returns rows that are non-negative and sum to 1, so they look like softmax probabilities; "
                "methods need logits: leave the softmax out, or return the logarithm of the probabilities",
                stacklevel=2,
            )


def can_look(t: Tensor) -> bool:
    """Return whether values may be read now: not while a graph is compiled or captured."""
    if torch.compiler.is_compiling():
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def check_images(x: Tensor, name: str, channels: int | None, takes_empty: bool) -> None:
    """Raise an error unless x is a batch of images.

    Args:
        channels: of the images; None: not known.
        takes_empty: whether a batch of no images is valid.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"images must be a torch.Tensor, not {type(x).__name__}")
    if channels is not None and (x.ndim != 4 or x.shape[1] != channels):
        raise ValueError(f"{name} takes images of shape (N, {channels}, H, W), not {tuple(x.shape)}{_hint(x)}")
    if x.ndim < 2 or (x.numel() == 0 and not takes_empty):
        raise ValueError(f"the batch is empty or has no batch dimension: its shape is {tuple(x.shape)}")
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise TypeError(f"images must be uint8, or float in [0, 1], not {x.dtype}")


def check_logits(logits: object, x: Tensor, name: str) -> None:
    """Raise an error unless a network's output for images x is a tensor of logits, (N, two classes or more)."""
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{name} returned {found} for images {tuple(x.shape)}; a classifier returns one tensor of logits "
            "(N, classes): wrap it in a module that does, and give it batches (x.unsqueeze(0) for one image)"
        )
    if logits.shape[1] < 2:
        raise one_logit(name)


def one_logit(name: str) -> ValueError:
    """Return the error for a network with a head of one logit."""
    return ValueError(
        f"{name} returns one logit, and a classifier needs two or more: for a binary classifier, wrap it in a module "
        "that returns torch.cat([-z, z], dim=1) / 2 for its logit z, whose softmax is the sigmoid of z"
    )


def refused(error: Exception, x: Tensor, name: str) -> ValueError | None:
    """Return the error to raise where a network refuses images x; None where its error is about something else."""
    if isinstance(error, RuntimeError) and not REFUSAL.search(str(error)):
        return None
    return ValueError(f"{name} refuses images of shape {tuple(x.shape)}: {error}{_hint(x)}")


def _hint(x: Tensor) -> str:
    """Return what to do if x looks like one image; empty if it does not."""
    return "; x.unsqueeze(0) makes a batch of one image, a DataLoader batches of many" if x.ndim == 3 else ""
