"""MEMO: adapt to one image at a time, by its augmentations (Zhang et al., NeurIPS 2022, arXiv 2110.09506).

Notation    x one image, x_1 ... x_B its random views; p(x_j) predicted probabilities, (C,)

    L = H( mean_j p(x_j) ), the entropy of the marginal prediction: one step on L, then predict x, then the source again

MEMO is episodic: it predicts an image after its own update, and keeps nothing for the next one. So it is the one method
here whose logits come from after the update; `predict` without an update is the source model. An image costs B forward
and backward passes. Settings are those of the authors' code for ImageNet: all parameters move, B = 64, AdamW for ViTs
(their RVT) and SGD for ResNet-50. Views are AugMix's (see _augmix.py).
BatchNorm layers mix the source's statistics with those of the image, 16 to 1. Ours: AdamW has no moments from other
images; in the authors' code they are kept. The mixed variance is the biased one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mgtta._lib.errors import unknown
from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.methods._augment import check_images
from mgtta.methods._augmix import augmix
from mgtta.methods.bn import mixed
from mgtta.methods.registry import GRADIENTS, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import with_running_statistics

PAPER = Paper("MEMO: Test Time Robustness via Adaptation and Augmentation", "2110.09506")
RULES = ("adamw", "sgd")
EPS = 1e-8  # of AdamW


@register(
    "memo",
    papers=[PAPER],
    needs=[GRADIENTS],
    code="github.com/zhangmarvin/memo",
    resnets={"lr": 2.5e-4, "optimizer": "sgd", "weight_decay": 0.0},
    passes=(66, 64),
)
class MEMO(Method):
    """One step for each image on the marginal entropy of its augmentations, then back (Zhang et al., NeurIPS 2022).

    It keeps nothing between images: `updates` counts batches, and when a budget is spent it is the source model. It is
    slow: an image costs `augmentations` forward and backward passes.

    optimizer: "adamw" or "sgd", both without moments from other images.
    prior: how many images the source's statistics of BatchNorm layers count for.
    """

    changes_images = True
    cannot_export = "it adapts to each image and goes back to the source"
    random: torch.Generator

    def __init__(
        self,
        model: Classifier,
        *,
        lr: float = 1e-5,
        optimizer: str = "adamw",
        weight_decay: float = 0.01,
        augmentations: int = 64,
        prior: float = 16.0,
        seed: int = 0,
    ):
        super().__init__(model)
        if optimizer not in RULES:
            raise unknown("optimizer of memo", optimizer, RULES)
        if augmentations < 1:
            raise ValueError(f"augmentations must be at least 1, not {augmentations}")
        self.lr = lr
        self.rule = optimizer
        self.weight_decay = weight_decay
        self.augmentations = augmentations
        self.prior = prior
        self.random = torch.Generator().manual_seed(seed)

    def adapt(self, x: Tensor) -> Pass:
        seen = self.engine.predict(x)
        if not seen.logits.isfinite().all():
            self.engine.skipped += 1
            return seen
        images = check_images(self.model.pixels(x))
        logits = [self.adapted_logits(image, source) for image, source in zip(images, seen.logits, strict=True)]
        self.engine.updates += 1
        return Pass(torch.stack(logits))

    def adapted_logits(self, image: Tensor, source: Tensor) -> Tensor:
        """Return the logits (C,) of an image after one step on it; the source's if the step is not finite."""
        views = torch.stack([augmix(image, self.random) for _ in range(self.augmentations)])
        params = {name: p.detach().requires_grad_() for name, p in self.model.named_parameters()}
        with mixed_statistics(self.model.net, self.prior):
            loss = marginal_entropy(functional_call(self.model, params, (views,)))
            grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            with torch.no_grad():
                moved = {name: self.step_of(p, grad) for (name, p), grad in zip(params.items(), grads, strict=True)}
                logits = functional_call(self.model, moved, (image[None],))[0]
        return logits if logits.isfinite().all() else source

    def step_of(self, p: Tensor, grad: Tensor | None) -> Tensor:
        """Return a parameter after the first step of its optimizer."""
        if grad is None:
            return p
        if self.rule == "sgd":
            return p - self.lr * (grad + self.weight_decay * p)
        return p * (1 - self.lr * self.weight_decay) - self.lr * grad / (grad.abs() + EPS)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction: (B, C) -> scalar."""
    log_p = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum()


@contextmanager
def mixed_statistics(net: nn.Module, prior: float) -> Iterator[None]:
    """Let BatchNorm layers normalise by the source's statistics and a batch's, which counts as one image."""
    layers: list[Any] = list(with_running_statistics(net))
    source = {layer: (layer.running_mean, layer.running_var) for layer in layers}

    def mix(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        layer.running_mean, layer.running_var = mixed(inputs[0].detach(), *source[layer], prior, 1)

    handles = [layer.register_forward_pre_hook(mix) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer, (mean, var) in source.items():
            layer.running_mean = mean
            layer.running_var = var
