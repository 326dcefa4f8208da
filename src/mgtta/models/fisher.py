"""The diagonal Fisher information: how much each norm parameter matters to the source task (EATA, Eq. 9)."""

import copy
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgtta._lib.files import check_kind, check_weights, read_tensors, write_tensors
from mgtta.models.batches import image_batches
from mgtta.models.classifier import Classifier
from mgtta.models.loading import as_classifier
from mgtta.models.norms import norm_parameters

KIND = "mgtta fisher"
VERSION = 1


@dataclass(frozen=True)
class Fisher:
    """The importance of each norm parameter, and of which model it is.

    Attributes:
        values: parameter name in the Classifier -> importance, in the parameter's shape.
    """

    values: dict[str, Tensor]
    images: int
    model: str
    fingerprint: str
    notes: dict[str, Any] = field(default_factory=dict)

    def check(self, model: str, fingerprint: str) -> None:
        """Raise an error unless it was taken from the model of this name and fingerprint."""
        remedy = "mgtta.fisher_information(model, clean_images)"
        check_weights("this is Fisher information", (self.model, self.fingerprint), (model, fingerprint), remedy)


def fisher_information(
    model: Classifier | nn.Module,
    clean_images: Tensor | Iterable[Any],
    batch_size: int = 64,
    max_images: int = 2000,
) -> Fisher:
    """Return the mean squared gradient of the loss on clean, in-distribution images with the model's own labels.

    Eq. 9 squares each image's gradient, which is `batch_size=1`. EATA's released system squares the mean gradient of
    batches of 64. Its weight of 2,000 is meant for those values, which are some 64 times smaller. The default here
    follows the released system.

    Args:
        clean_images: one tensor of images, or an iterable of batches: tensors, or tuples that start with one.
            They are split into batches of `batch_size`; images after the first `max_images` are not used.
    """
    model = copy.deepcopy(as_classifier(model)).requires_grad_(False).use_batch_statistics()
    wanted = {id(p) for p in norm_parameters(model)}
    params = {name: p.requires_grad_() for name, p in model.named_parameters() if id(p) in wanted}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    images = 0
    batches = 0
    for x in image_batches(clean_images, batch_size, max_images):
        grads = _gradients(model, x, list(params.values()))
        for value, grad in zip(total.values(), grads, strict=True):
            if grad is not None:
                value += grad.double().square()
        images += len(x)
        batches += 1
    if not images:
        raise ValueError("no clean images: some hundred are needed, and 2,000 are enough")
    values = {name: (value / batches).to(params[name].dtype) for name, value in total.items()}
    return Fisher(values, images, model.name, model.fingerprint(), {"batch_size": batch_size})


@torch.inference_mode(False)
@torch.enable_grad()
def _gradients(model: Classifier, x: Tensor, params: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the loss on x with the model's own labels."""
    logits = model(x.clone())
    if not logits.isfinite().all():
        raise ValueError("clean images must be finite; give uint8 pixels, or floats in [0, 1]")
    loss = cross_entropy(logits, logits.argmax(-1))
    return torch.autograd.grad(loss, params, allow_unused=True)


def save_fisher(fisher: Fisher, path: str | os.PathLike) -> None:
    """Write Fisher information to a safetensors file."""
    about = {
        "images": fisher.images,
        "model": fisher.model,
        "fingerprint": fisher.fingerprint,
        "notes": fisher.notes,
    }
    metadata = {"kind": KIND, "version": str(VERSION), "about": json.dumps(about)}
    write_tensors(path, fisher.values, metadata)


def load_fisher(path: str | os.PathLike) -> Fisher:
    """Return the Fisher information that save_fisher wrote."""
    values, metadata = read_tensors(path)
    check_kind(metadata, KIND, VERSION, path, "make it with mgtta.fisher_information")
    try:
        return Fisher(values, **json.loads(metadata["about"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged Fisher information ({error}); make it again") from error


def as_fisher(fisher: Fisher | str | os.PathLike, model: str, fingerprint: str) -> Fisher:
    """Return the Fisher information itself, or that of a file; refuse that of another model."""
    found = fisher if isinstance(fisher, Fisher) else load_fisher(fisher)
    found.check(model, fingerprint)
    return found
