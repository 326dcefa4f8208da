"""ROID: robust to any order of domains and classes (Marsden, Döbler, Yang, WACV 2024, arXiv 2306.00650).

Followed: the authors' code, github.com/mariodoebler/test-time-adaptation, for all networks: clipped soft likelihood
ratio, SGD with Nesterov momentum, views padded by reflection. It multiplies the logits by the smoothed prior, where the
paper multiplies probabilities by it.
Ours on purpose: a batch of one has weight 1, where the released weight is 0 / 0; a prediction that is not a number has
no part in the prior.
Equations are named by what they define.
Notation    p  predicted probabilities (C,); p_bar  their moving average over batches; w  an image's weight;
            theta_0  the source's parameters; pi  the class prior of the batch
"""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mgtta.adaptation.method import Method, OptimizerFactory
from mgtta.adaptation.step import Pass
from mgtta.losses import entropy, symmetric_cross_entropy
from mgtta.methods._augment import random_view
from mgtta.methods._descent import Descent
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters

PAPER = Paper(
    "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and Prior Correction", "2306.00650"
)


@register(
    "roid",
    papers=[PAPER],
    descent=Descent(lr=2.5e-4, nesterov=True),
    code="github.com/mariodoebler/test-time-adaptation",
    passes=(2, 2),
    revision=1,
)
class ROID(Method):
    """Weighted likelihood ratios, weights ensembled with the source, priors corrected (Marsden et al., WACV 2024)."""

    changes_images = True
    may_be_rounded = True
    cannot_export = "it corrects predictions by the classes of a batch"
    random: torch.Generator
    probs: Tensor

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        temperature: float = 1 / 3,
        source_ema: float = 0.99,
        probs_ema: float = 0.9,
        seed: int = 0,
    ):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)
        self.temperature = temperature
        self.source_ema = source_ema
        self.probs_ema = probs_ema
        self.register_buffer("probs", torch.empty(0))  # p_bar; uniform until there is one
        self.random = torch.Generator().manual_seed(seed)

    def answer(self, seen: Pass, observe: bool) -> Tensor:
        return prior_corrected(seen.logits)

    def loss(self, x: Tensor) -> tuple[Pass, Tensor]:
        """Return the logits before their correction, and the weighted likelihood ratio and consistency."""
        logits = self.model(x)
        weight = self.weights(logits)
        kept = weight > 0
        images = random_view(self.model.pixels(x)[kept], self.random, noise=False, padding="reflect")
        view = self.model(images)
        loss = soft_likelihood_ratio(logits[kept]) + symmetric_cross_entropy(logits[kept], view)
        loss = (weight[kept] * loss).sum() / len(logits)
        return Pass(logits), loss

    def weights(self, logits: Tensor) -> Tensor:
        """exp(diversity * certainty / temperature), and 0 for the less diverse than the mean: (N,).

        In a batch of one there is nothing to compare with: its weight is 1.
        """
        logits = logits.detach()
        probs = logits.softmax(-1)
        diversity = unit_range(1 - cosine_similarity(probs, self._average(probs)[None], dim=1))
        certainty = unit_range(-entropy(logits))
        weight = (diversity * certainty / self.temperature).exp()
        return torch.where(diversity < diversity.mean(), 0, weight)

    def _average(self, probs: Tensor) -> Tensor:
        return self.probs if len(self.probs) else torch.full_like(probs[0], 1 / probs.shape[1])

    @torch.no_grad()
    def learned(self, seen: Pass) -> None:
        torch._foreach_lerp_(list(self.adapted.values()), list(self.origin), 1 - self.source_ema)  # weight ensembling
        probs = seen.logits.softmax(-1)
        self.probs = self.probs_ema * self._average(probs) + (1 - self.probs_ema) * probs.mean(0)


def soft_likelihood_ratio(logits: Tensor, clip: float = 0.99, eps: float = 1e-5) -> Tensor:
    """-sum_c p_c log(p_c / (1 - p_c)): (N, C) -> (N,)."""
    p = logits.softmax(-1).clamp(max=clip)
    return -(p * (p / (1 - p) + eps).log()).sum(-1)


def unit_range(values: Tensor) -> Tensor:
    """Shifted and scaled to [0, 1]; zeros where all are the same."""
    low, high = values.aminmax()
    return torch.where(high > low, (values - low) / (high - low), 0)


def prior_corrected(logits: Tensor) -> Tensor:
    """Return the logits times pi, the batch's mean prediction, smoothed so that a small batch says little about it.

    A prediction that is not a number has no part in pi.
    """
    n, n_classes = logits.shape
    prior = logits.softmax(-1).nanmean(0)
    gamma = max(1 / n, 1 / n_classes) / prior.max()
    return logits * (prior + gamma) / (1 + gamma * n_classes)
