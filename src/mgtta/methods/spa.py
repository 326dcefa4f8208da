"""SPA: consistency of an image with its deteriorated twins (Niu et al., ICML 2025, arXiv 2504.08010).

From the paper: the image's prediction is the target for its twins'. One twin has low-frequency amplitudes masked at
random, the other has noise injected. Only images of which the model is surer than of their twin teach it.
From the authors' code, github.com/mr-eggplant/SPA: KL divergence; ratios and learning rates; a linear predictor before
the head, only for the twins, which starts as the identity; noise strengths a_ij^2 on a 14 x 14 grid, learned by ascent.
Ours on purpose: twins are made relative to the model's own input mean and std (0.5 if it has none); predictor and noise
move by SGD with momentum whatever optimizer moves the norm layers.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mgtta.adaptation.method import Method, OptimizerFactory
from mgtta.adaptation.step import EagerEngine, Pass
from mgtta.losses import cross_entropy, entropy
from mgtta.methods._augment import check_images, mask_low_frequencies
from mgtta.methods._descent import Descent
from mgtta.methods.registry import Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters

GRID = 14
MOMENTUM = 0.9  # of predictor and noise


PAPER = Paper("Self-Bootstrapping for Versatile Test-Time Adaptation", "2504.08010")


@register(
    "spa",
    papers=[PAPER],
    descent=Descent(lr=0.01),
    code="github.com/mr-eggplant/SPA",
    resnets={"lr": 2.5e-3, "predictor_lr": 0.025, "mask_ratio": 0.1, "noise_ratio": 0.1},
    passes=(3, 2),
)
class SPA(Method):
    """Consistency of an image with its deteriorated twins (Niu et al., ICML 2025).

    entropy_weight: 0.1 joins it with TENT.
    """

    changes_images = True
    engine: EagerEngine
    random: torch.Generator
    predictor: Tensor
    predictor_velocity: Tensor
    noise: Tensor
    noise_velocity: Tensor

    def __init__(
        self,
        model: Classifier,
        optimizer: OptimizerFactory,
        *,
        predictor_lr: float = 0.05,
        mask_ratio: float = 0.2,
        low_frequencies: float = 0.2,
        noise_ratio: float = 0.4,
        noise_lr: float = 1.0,
        entropy_weight: float = 0.0,
        seed: int = 0,
    ):
        super().__init__(model)
        self.learns(norm_parameters, optimizer)
        weight = self.model.head.weight
        self.register_buffer("predictor", torch.eye(weight.shape[1]).to(weight))  # (D, D)
        self.register_buffer("predictor_velocity", torch.zeros_like(self.predictor))
        self.register_buffer("noise", torch.full((1, 1, GRID, GRID), noise_ratio**0.5).to(weight))  # a
        self.register_buffer("noise_velocity", torch.zeros_like(self.noise))
        self.predictor_lr = predictor_lr
        self.mask_ratio = mask_ratio
        self.low_frequencies = low_frequencies
        self.noise_ratio = noise_ratio
        self.noise_lr = noise_lr
        self.entropy_weight = entropy_weight
        self.random = torch.Generator().manual_seed(seed)

    def loss(self, x: Tensor) -> tuple[Pass, Tensor | None]:
        return self._loss(x, self.predictor, self.noise)

    def _loss(self, x: Tensor, predictor: Tensor, noise: Tensor) -> tuple[Pass, Tensor | None]:
        logits = self.model(x)
        x = check_images(self.model.pixels(x))
        mean, std = (0.5 if b is None else b for b in (self.model.mean, self.model.std))
        masked = mean + mask_low_frequencies(x - mean, self.mask_ratio, self.low_frequencies, self.random)
        drawn = mean + std * torch.randn(x.shape[1:], generator=self.random).to(x)  # shared by the batch
        strength = interpolate(noise.square(), x.shape[2:], mode="nearest")
        noisy = (x + strength * (drawn - x)).clamp(0, 1)
        twins = [self.through_predictor(twin, predictor) for twin in (masked, noisy)]
        terms = [self.consistency(logits.detach(), twin) for twin in twins]
        if self.entropy_weight:
            terms.append(self.entropy_weight * entropy(logits).mean())
        found = [term for term in terms if term is not None]
        return Pass(logits), torch.stack(found).sum() if found else None

    def consistency(self, target: Tensor, twin: Tensor) -> Tensor | None:
        """The KL divergence of the twin's prediction from the target, over images surer than their twin."""
        surer = self.surer(target, twin.detach())
        divergence = cross_entropy(target, twin) - entropy(target)
        return divergence[surer].mean() if surer.any() else None

    def surer(self, target: Tensor, twin: Tensor) -> Tensor:
        """Return where the image's largest probability is above its twin's: (N,) of bool."""
        return target.softmax(-1).amax(-1) > twin.softmax(-1).amax(-1)

    def through_predictor(self, x: Tensor, predictor: Tensor) -> Tensor:
        """The logits of x with the predictor before the head."""
        predicted = self.model.head.register_forward_pre_hook(lambda _head, inputs: (inputs[0] @ predictor.T,))
        with predicted, self.model.unwatched():
            return self.model(x)

    def adapt(self, x: Tensor) -> Pass:
        predictor = self.predictor.clone().requires_grad_()
        noise = self.noise.clone().requires_grad_()
        seen, loss = self._loss(x, predictor, noise)
        finite = bool(seen.logits.isfinite().all())
        grads = self.engine.gradients(loss, [predictor, noise]) if loss is not None and finite else None
        if grads is not None:
            *theirs, down, up = grads
            self.engine.update(theirs)
            self.deteriorate(down, up)
        elif loss is not None or not finite:
            self.engine.skipped += 1
        return seen

    @torch.no_grad()
    def deteriorate(self, down: Tensor | None, up: Tensor | None) -> None:
        """The predictor descends; noise goes where it hurts most, its mean strength held as far as its bound allows."""
        if down is not None:
            self.predictor_velocity = MOMENTUM * self.predictor_velocity + down
            self.predictor = self.predictor - self.predictor_lr * self.predictor_velocity
        if up is not None:
            self.noise_velocity = MOMENTUM * self.noise_velocity + up
            noise = self.noise + self.noise_lr * self.noise_velocity
            self.noise = (noise * (self.noise_ratio / noise.square().mean().clamp(min=1e-12)).sqrt()).clamp(-1, 1)
