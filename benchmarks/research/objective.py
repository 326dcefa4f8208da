"""A ViT's logits and tokens as a function of flat theta, and the objective with all its variants."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tasks import Objective
from torch import Tensor, nn

from mgtta.losses import cross_entropy, entropy
from mgtta.models.classifier import Classifier
from mgtta.models.norms import norm_parameters


class Model:
    """A ViT's logits and tokens as a function of flat theta."""

    def __init__(self, classifier: Classifier, adapts: str = "norms"):
        self.classifier = classifier.requires_grad_(False)
        norms = {id(p) for p in norm_parameters(classifier)}
        for name, p in classifier.named_parameters():
            p.requires_grad_(id(p) in norms or (adapts == "biases" and name.endswith("bias") and "head" not in name))
        names = [name for name, p in classifier.named_parameters() if p.requires_grad]
        self.params = [p for p in classifier.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.params]
        self.source = self.theta
        self.classes = classifier.num_classes
        vit = classifier.net
        self.norms = [*(block.norm1 for block in vit.blocks), vit.norm]
        self.kind = self._spread([-1.0 if name.endswith("weight") else 1.0 for name in names])
        self.depth = self._spread([2 * i / (len(names) - 1) - 1 for i in range(len(names))])

    def _spread(self, values: list[float]) -> Tensor:
        parts = [torch.full((size,), value) for value, size in zip(values, self.sizes, strict=True)]
        return torch.cat(parts).to(self.params[0].device)

    @property
    def theta(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.params])

    @torch.no_grad()
    def put(self, theta: Tensor) -> None:
        for p, value in zip(self.params, theta.split(self.sizes), strict=True):
            p.copy_(value.view_as(p))

    def run(self, x: Tensor, change: Callable[[int, Tensor], Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the tokens (N, L, d) that each tapped norm gives, which `change` may replace for what follows."""
        tokens: list[Tensor] = []

        def tap(_layer: nn.Module, _inputs: Any, out: Tensor) -> Tensor | None:
            tokens.append(out)
            return None if change is None else change(len(tokens) - 1, out)

        handles = [norm.register_forward_hook(tap) for norm in self.norms]
        try:
            with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):  # norms stay in float32
                return self.classifier(x).float(), tokens
        finally:
            for handle in handles:
                handle.remove()


KINDS = {"class": slice(0, 1), "patch": slice(1, None)}  # of tokens
Statistics = list[dict[str, tuple[Tensor, Tensor]]]  # of each norm and kind: mean and standard deviation


def kinds(which: str) -> list[str]:
    return list(KINDS) if which == "both" else [which]


@torch.no_grad()
def statistics_of(model: Model, x: Tensor) -> Statistics:
    sums: list[dict[str, Tensor]] = []
    for part in x.split(64):
        for i, t in enumerate(model.run(part)[1]):
            found = {}
            for kind, where in KINDS.items():
                f = t[:, where].flatten(0, 1).double()
                found[kind] = torch.stack([torch.full_like(f[0], len(f)), f.sum(0), f.square().sum(0)])
            sums[i : i + 1] = [{k: v + sums[i][k] for k, v in found.items()} if i < len(sums) else found]
    return [{kind: _mean_and_std(*found) for kind, found in layer.items()} for layer in sums]


def _mean_and_std(n: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    return (total / n).float(), ((squares - total * total / n) / (n - 1)).clamp(min=0).sqrt().float()


class Align:
    """Takes tokens back to the source's statistics, layer by layer, judging by running ones."""

    def __init__(self, objective: Objective, source: Statistics):
        self.o = objective
        self.source = source
        self.running: dict[tuple[int, str], Tensor] = {}  # mean and mean square, (2, d)
        self.t = 0

    def __call__(self, layer: int, tokens: Tensor) -> Tensor:
        self.t += layer == 0
        rate = max(1 / self.t, 0.1)
        parts = []
        for kind, where in KINDS.items():
            part = tokens[:, where]
            if kind in kinds(self.o.align_tokens):
                f = part.detach().flatten(0, 1)
                now = torch.stack([f.mean(0), f.square().mean(0)])
                old = self.running.get((layer, kind), now)
                self.running[layer, kind] = old + rate * (now - old)
                mean, square = self.running[layer, kind]
                mu, sigma = self.source[layer][kind]
                scale = sigma / (square - mean * mean).clamp(min=1e-6).sqrt() if self.o.align_std else 1.0
                part = part + self.o.align * ((part - mean) * scale + mu - part)
            parts.append(part)
        return torch.cat(parts, 1)


class Loss:
    """The objective with its state: averages over earlier batches."""

    def __init__(self, objective: Objective, model: Model, source: Statistics):
        self.o = objective
        self.model = model
        self.source = source
        self.reset()

    def reset(self) -> None:
        self.past: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self.mean_p: Tensor | None = None
        self.seen: Tensor | None = None  # the running mean of the final features
        self.align = Align(self.o, self.source) if self.o.align else None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (N, C), as predicted, and the scalar to lower."""
        o = self.o
        n = len(x)
        logits, tokens = self.model.run(torch.cat([x, x.flip(-1)]) if o.mirror else x, self.align)
        final = tokens[-1][:, 0]
        if o.recentre:
            mean = final.detach().mean(0)
            self.seen = mean if self.seen is None else 0.9 * self.seen + 0.1 * mean
            with torch.no_grad():
                mu, _ = self.source[-1]["class"]
                predicted = self.model.classifier.head(final + o.recentre * (mu - self.seen))
        else:
            predicted = logits.detach()
        if o.mirror:
            logits, predicted = (t.view(2, n, -1).mean(0) for t in (logits, predicted))
        loss = self._entropy(logits) + o.trade_off / 64 * self._discrepancy(tokens)
        if o.balance:
            p = logits.softmax(-1).mean(0)
            p = p if self.mean_p is None else 0.9 * self.mean_p + 0.1 * p
            first = self.mean_p is None
            self.mean_p = p.detach()
            loss = loss + o.balance * (p * (p + 1e-8).log()).sum() * (1 if first else 10)
        if o.noisy:
            worse = (self.model.classifier.pixels(x) + 0.1 * torch.randn(x.shape, device=x.device)).clamp(0, 1)
            loss = loss + o.noisy * cross_entropy(logits.detach(), self.model.run(worse)[0]).mean()
        return predicted, loss

    def _entropy(self, logits: Tensor) -> Tensor:
        e = entropy(logits)
        keep = (e.detach() < self.o.margin * math.log(self.model.classes)).float()
        return self.o.entropy_weight * (e * keep).sum() / keep.sum().clamp(min=1)

    def _discrepancy(self, tokens: list[Tensor]) -> Tensor:
        """Of the norms but the first, as in the paper, or of the second half of them."""
        o = self.o
        total = tokens[0].new_zeros(())
        for i in range(1 + (len(tokens) - 1) // 2 if o.late else 1, len(tokens)):
            for kind in kinds(o.tokens):
                f = tokens[i][:, KINDS[kind]].flatten(0, 1)
                mean = f.mean(0)
                std = None if len(f) == 1 else f.std(0)
                mu, sigma = self.source[i][kind]
                if o.history and (i, kind) in self.past and std is not None:
                    m, s = self.past[i, kind]
                    mean = o.history * m + (1 - o.history) * mean
                    std = o.history * s + (1 - o.history) * std
                if std is not None:
                    self.past[i, kind] = mean.detach(), std.detach()
                distance = (mean - mu).square().sum() + (0 if std is None else (std - sigma).square().sum())
                total = total + (o.patch_weight if kind == "patch" else 1.0) * distance / (1 - o.history)
        return total
