"""FOA: input prompts evolved by CMA-ES, activations shifted to the source (Niu et al., ICML 2024, arXiv 2404.01650).

Notation: p (P, d) the prompts of one candidate, K candidates a batch, e_N (N, d) the final class tokens,
mu_N(t) their running mean over the test stream, mu_N^S the source's. Numbers are the paper's.

Followed: the authors' code, github.com/mr-eggplant/FOA, also where the paper differs, since the published figures are
the code's: Eq. 5 has squared distances and its discrepancy is scaled by N / 64; K = 28 is 27 samples and the previous
best; CMA-ES starts at zero with step size 1, and the first "previous best" is uniform; a batch is shifted by what was
known before it (the first, not at all); mu_N(X_t) is the mean over all candidates.
Ours on purpose: prompts stand behind all prefix tokens, so that register tokens keep their place, and are inserted
before the first block, behind `norm_pre`. The code inserts them behind the first token, before `norm_pre`. For a ViT
with a class token only and no `norm_pre`, such as the paper's, both are the same.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.losses import objective
from mgtta.methods._checks import check_tokens
from mgtta.methods._evolution import Evolution
from mgtta.methods.registry import SOURCE, TOKENS, Paper, register
from mgtta.models.classifier import Classifier
from mgtta.models.source import Source, as_source

IMAGES = 64  # images of a forward pass, over which small batches are filled up with candidates


PAPER = Paper("Test-Time Model Adaptation with Only Forward Passes", "2404.01650")


@register(
    "foa",
    papers=[PAPER],
    needs=[SOURCE, TOKENS],
    code="github.com/mr-eggplant/FOA",
    mgtta={"prompts": 3, "population": 28, "trade_off": 0.4},
    passes=(28, 0),
)
class FOA(Method):
    """Prompts evolved by CMA-ES and activations shifted to the source, for ViTs (Niu et al., ICML 2024).

    The paper takes trade_off 0.2 on ImageNet-R.
    """

    cannot_export = "its prompts are not weights of the network"
    prompt: Tensor
    mean: Tensor

    def __init__(
        self,
        model: Classifier,
        *,
        source: Source,
        prompts: int = 3,
        population: int = 28,
        trade_off: float = 0.4,
        momentum: float = 0.9,
        seed: int = 0,
    ):
        super().__init__(model)
        check_tokens(self.model)
        if prompts < 1 or population < 4:
            raise ValueError(f"prompts must be at least 1 and population 4, not {prompts} and {population}")
        self.source = as_source(source, model.name, self.fingerprint)
        self.trade_off = trade_off
        self.momentum = momentum
        net: Any = self.model.net
        patch = net.patch_embed.proj.weight  # (d, channels, height, width)
        bound = math.sqrt(6 / (patch[0].numel() + len(patch)))
        first = torch.rand(prompts, len(patch), generator=torch.Generator().manual_seed(seed)) * 2 * bound - bound
        self.register_buffer("prompt", first.to(patch))  # the best of the last batch
        self.register_buffer("mean", torch.zeros_like(self.source.mean[-1]).to(patch))  # mu_N(t)
        self.evolution = Evolution(first.numel(), population - 1, seed)

    def look(self, x: Tensor) -> Pass:
        """Predict by the last best prompt and the shift; by the source model as long as nothing is learned."""
        if not self.updates:
            return Pass(self.model(x))
        return Pass(self.evaluate(x, self.prompt[None])[1][0] + self.shift())

    @torch.no_grad()
    def adapt(self, x: Tensor) -> Pass:
        shift = self.shift()
        found = [self.evaluate(x, self.prompt[None])]
        if not found[0][0].isfinite().all():  # before anything is drawn: this batch leaves no trace
            self.engine.skipped += 1
            return Pass(found[0][1][0] + shift)
        sampled = torch.from_numpy(self.evolution.ask()).to(self.prompt).unflatten(1, self.prompt.shape)  # Eq. 6
        found += [self.evaluate(x, some) for some in sampled.split(max(1, IMAGES // len(x)))]
        fitness, logits, means = (torch.cat(parts) for parts in zip(*found, strict=True))  # (K,), (K, N, C), (K, d)
        finite = fitness.isfinite()
        fitness = fitness.where(finite, fitness[finite].max())
        self.evolution.tell(self.prompt.flatten().double().cpu().numpy(), fitness.tolist())
        best = int(fitness.argmin())
        self.prompt = torch.cat([self.prompt[None], sampled])[best]
        mean = means[finite].mean(0)  # mu_N(X_t)
        self.mean = self.momentum * self.mean + (1 - self.momentum) * mean if self.updates else mean  # Eq. 9
        self.engine.updates += 1
        return Pass(logits[best] + shift)

    def evaluate(self, x: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fitness (K,), unshifted logits (K, N, C) and mean class token (K, d) of candidates (K, P, d), in one pass."""
        k = len(prompts)
        n = len(x)
        per_image = prompts.repeat_interleave(n, 0)  # (K N, P, d)
        net: Any = self.model.net
        place = net.num_prefix_tokens

        def insert(_block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            tokens = inputs[0]  # (K N, L, d): the class token first
            return torch.cat([tokens[:, :place], per_image, tokens[:, place:]], 1), *inputs[1:]

        with net.blocks[0].register_forward_pre_hook(insert):
            logits, features = self.model.features(x if k == 1 else x.repeat(k, *[1] * (x.ndim - 1)))
        source = self.source = self.source.to(logits)
        logits = logits.unflatten(0, (k, n))
        features = [f.unflatten(0, (k, n)) for f in features]
        fitness = [  # Eq. 5
            n * objective(y, f, source.mean, source.std, self.trade_off)
            for y, *f in zip(logits, *features, strict=True)
        ]
        return torch.stack(fitness), logits, features[-1].mean(1)

    def shift(self) -> Tensor:
        """What the move of e_N by mu_N^S - mu_N(t) (Eqs. 7, 8, gamma = 1) adds to the logits (C,): a head is linear."""
        weight = self.model.head.weight
        classes = self.model.classes
        direction = self.source.mean[-1].to(weight) - self.mean if self.updates else torch.zeros_like(self.mean)
        return (weight if classes is None else weight[classes]) @ direction

    def own_state(self) -> Any:
        return self.evolution.state()

    def load_own_state(self, own: Any) -> None:
        self.evolution.load(own)
