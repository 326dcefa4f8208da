"""Variants of the objective, of the optimizer and of its training, tried on DeiT-Tiny: docs/research.md is the log.

    python benchmarks/research.py STAGE --data SHARDS --checkpoint DEIT_TINY --out runs/research --workers 12

    python benchmarks/research.py page results/research/results.jsonl docs/research.md

A stage is a list of tasks, spread over processes; a finished task is not run again. Choices are made on shard 0 under
the four validation corruptions, on images that no generator was trained on, twice over with two draws of the
corruption, so that a stream is about as long as the test's. The test is shards 1 and 2 under the fifteen.

Notation    theta  the norm parameters, flat, (n,); g  the objective's gradient; phi  a generator's weights
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import imagenet
import torch
from marks import between
from torch import Tensor, nn

import mgtta
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from mgtta.files import atomic, read_tensors, write_tensors
from mgtta.generator import GradientMemory
from mgtta.losses import cross_entropy, entropy
from mgtta.models import Classifier
from mgtta.params import norm_parameters
from mgtta.workers import spread

# --- what is varied


@dataclass(frozen=True)
class Objective:
    """What is lowered, and how predictions are made."""

    trade_off: float = 0.4  # lambda of Eq. 7
    tokens: str = "class"  # whose statistics: "class", "patch" or "both"
    patch_weight: float = 1.0
    history: float = 0.0  # weight of earlier batches in the statistics
    entropy_weight: float = 1.0
    margin: float = math.inf  # images above this entropy, in units of ln C, do not count
    balance: float = 0.0  # weight of the negative entropy of the mean prediction
    recentre: float = 0.0  # share of the final features' mean shift that is taken back before the head
    late: bool = False  # the last layers' statistics alone: the second half
    align: float = 0.0  # share of the tokens' shift from the source that is taken back at every tapped norm
    align_tokens: str = "both"  # whose: "class", "patch" or "both"
    align_std: bool = True  # their spread too
    mirror: bool = False  # every image comes with its mirror image, and their logits are averaged
    noisy: float = 0.0  # weight of cross-entropy between the prediction and that of the same images under mild noise
    steps: int = 1  # updates a batch
    adapts: str = "norms"  # or "biases": these, and every bias


@dataclass(frozen=True)
class Rule:
    """What moves theta."""

    name: str = "adam"  # or "learned"
    lr: float = 5e-3
    decay: float = math.inf  # lr / sqrt(1 + t / decay)
    generator: str | None = None  # the name of a training


@dataclass(frozen=True)
class Training:
    """How a generator is trained: in episodes of one corruption each, from the source model."""

    inputs: tuple[str, ...] = ("momentum", "gradient")
    hidden_size: int = 8
    lr: float = 5e-3
    decay: float = math.inf
    batch: tuple[int, ...] = (32,)  # episodes take turns
    steps: int = 32  # of an episode
    episodes: int = 80
    unroll: int = 1  # steps that credit reaches back
    outer: str = "objective"  # or "twin": cross-entropy with the source model's prediction on the clean image
    outer_lr: float = 1e-2
    images: int = 128
    flip: bool = True
    seed: int = 0
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class Trial:
    """One rule on one objective over streams."""

    rule: Rule
    objective: Objective = field(default_factory=Objective)
    split: str = "validation"
    setting: str = "reset"  # or "mixed", "continual"
    batch: int = 64
    seed: int = 0
    max_updates: int | None = None
    images: int | None = None


def key(task: Any) -> str:
    text = json.dumps([type(task).__name__, dataclasses.asdict(task)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- the model, its statistics, the objective


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
        self.o, self.source = objective, source
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
                mean, square = self.running[layer, kind] = old + rate * (now - old)
                mu, sigma = self.source[layer][kind]
                scale = sigma / (square - mean * mean).clamp(min=1e-6).sqrt() if self.o.align_std else 1.0
                part = part + self.o.align * ((part - mean) * scale + mu - part)
            parts.append(part)
        return torch.cat(parts, 1)


class Loss:
    """The objective with its state: averages over earlier batches."""

    def __init__(self, objective: Objective, model: Model, source: Statistics):
        self.o, self.model, self.source = objective, model, source
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
            first, self.mean_p = self.mean_p is None, p.detach()
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
        o, total = self.o, tokens[0].new_zeros(())
        for i in range(1 + (len(tokens) - 1) // 2 if o.late else 1, len(tokens)):
            for kind in kinds(o.tokens):
                f = tokens[i][:, KINDS[kind]].flatten(0, 1)
                mean, std = f.mean(0), None if len(f) == 1 else f.std(0)
                mu, sigma = self.source[i][kind]
                if o.history and (i, kind) in self.past and std is not None:
                    m, s = self.past[i, kind]
                    mean, std = o.history * m + (1 - o.history) * mean, o.history * s + (1 - o.history) * std
                if std is not None:
                    self.past[i, kind] = mean.detach(), std.detach()
                distance = (mean - mu).square().sum() + (0 if std is None else (std - sigma).square().sum())
                total = total + (o.patch_weight if kind == "patch" else 1.0) * distance / (1 - o.history)
        return total


# --- rules


class Inputs:
    """Per coordinate: what a generator sees of the gradients so far. (n, number of inputs)"""

    BETAS, SLOW, EPS = (0.9, 0.99), 0.97, 1e-8

    def __init__(self, names: tuple[str, ...], model: Model, lr: float):
        self.names, self.model, self.lr = names, model, lr
        zeros = torch.zeros_like(model.source)
        self.m, self.v, self.slow, self.t, self.travel = zeros, zeros, zeros, 0, 0.0

    def __call__(self, grad: Tensor, theta: Tensor) -> Tensor:
        self.t += 1
        a, b = self.BETAS
        self.m = a * self.m + (1 - a) * grad
        self.v = b * self.v + (1 - b) * grad.square()
        self.slow = self.SLOW * self.slow + (1 - self.SLOW) * grad
        t = self.t + 1  # the released system's power
        size = (self.v / (1 - b**t)).sqrt() + self.EPS
        columns = {
            "momentum": lambda: self.m / (1 - a**t) / size,
            "gradient": lambda: grad / size,
            "slow": lambda: self.slow / (1 - self.SLOW**t) / size,
            "magnitude": lambda: torch.tanh(0.3 * (size.log() - size.log().mean())),
            "time": lambda: torch.full_like(grad, self.t**-0.5),
            "late": lambda: torch.full_like(grad, math.tanh(self.t / 32)),
            "kind": lambda: self.model.kind,
            "depth": lambda: self.model.depth,
            "travel": lambda: torch.tanh((theta - self.model.source) / (self.lr * self.t**0.5)),
        }
        return torch.stack([columns[name]() for name in self.names], 1)


class Generator(nn.Module):
    """The paper's generator with any number of inputs, and a learned decay of its step."""

    def __init__(self, inputs: int, hidden_size: int):
        super().__init__()
        self.q_proj = nn.Linear(inputs, hidden_size, bias=False)
        self.memory = GradientMemory(hidden_size)
        self.memory.k_proj = nn.Linear(inputs, hidden_size, bias=False)
        self.memory.v_proj = nn.Linear(inputs, hidden_size, bias=False)
        self.memory.lr_weight = nn.Parameter(torch.randn(inputs) * 0.02)
        self.post_norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.o_proj = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, z: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        hidden, memory = self.memory(z, self.q_proj(z), memory)
        return torch.tanh(self.o_proj(self.post_norm(hidden))).squeeze(-1), memory


class Mover:
    """theta -> theta, given a gradient."""

    def __init__(self, rule: Rule, model: Model, generator: Generator | None, inputs: tuple[str, ...]):
        self.rule, self.model, self.generator, self.inputs = rule, model, generator, inputs
        self.reset()

    def reset(self) -> None:
        self.t = 0
        if self.generator is not None:
            self.z = Inputs(self.inputs, self.model, self.rule.lr)
            self.memory = self.generator.memory.init(len(self.model.source))
        else:
            self.m = self.v = torch.zeros_like(self.model.source)

    @torch.no_grad()
    def __call__(self, theta: Tensor, grad: Tensor) -> Tensor:
        lr = self.rule.lr / math.sqrt(1 + self.t / self.rule.decay)
        self.t += 1
        if self.generator is not None:
            update, self.memory = self.generator(self.z(grad, theta), self.memory)
        else:
            self.m = 0.9 * self.m + 0.1 * grad
            self.v = 0.999 * self.v + 0.001 * grad.square()
            update = self.m / (1 - 0.9**self.t) / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-8)
        return theta - lr * update


# --- the laboratory: one in each process


class Lab:
    def __init__(self, data: str, checkpoint: str, device: str, out: Path):
        torch.set_num_threads(1)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        self.data, self.device, self.out = Path(data), device, out
        self.checkpoint = checkpoint
        self._models: dict[str, Model] = {}
        self._images: dict[str, tuple[Tensor, Tensor]] = {}
        self._domains: dict[Any, Tensor] = {}
        self._statistics: Statistics | None = None
        self._targets: Tensor | None = None

    def images(self, split: str) -> tuple[Tensor, Tensor]:
        """uint8 images and labels: "training", "validation" or "test"."""
        if split not in self._images:
            parts = {"training": imagenet.TRAINING, "validation": imagenet.CHOOSING}
            held = (
                imagenet.shard(self.data, 0).part(parts[split]) if split in parts else imagenet.shard(self.data, 1, 2)
            )
            self._images[split] = held.x.to(self.device), held.labels.to(self.device)
        return self._images[split]

    def domain(self, split: str, name: str, seed: int) -> Tensor:
        found = self._domains.get((split, name, seed))
        if found is None:
            if split == "test":  # one draw at a time: fifteen corruptions of it are 4.5 GB
                self._domains = {about: x for about, x in self._domains.items() if about[::2] == (split, seed)}
            found = self._domains[split, name, seed] = corrupt(self.images(split)[0], name, 5, seed=seed)
        return found

    def loss(self, objective: Objective) -> Loss:
        """With statistics of shard 0's clean images."""
        model = self._models.get(objective.adapts)
        if model is None:
            model = Model(imagenet.deit_tiny(self.checkpoint, self.device), objective.adapts)
            self._models[objective.adapts] = model
        if self._statistics is None:
            x = torch.cat([self.images("training")[0], self.images("validation")[0]])
            self._statistics = statistics_of(model, x)
        return Loss(objective, model, self._statistics)

    def __call__(self, task: Any) -> dict[str, Any]:
        start = time.perf_counter()
        result = self.train(task) if isinstance(task, Training) else self.try_out(task)
        return {"key": key(task), "task": dataclasses.asdict(task), "seconds": time.perf_counter() - start, **result}

    # --- trials

    def streams(self, trial: Trial) -> Iterator[tuple[str, Iterator[tuple[Tensor, Tensor]]]]:
        """Name and batches of each stream; the validation images come twice, under two draws."""
        names = VALIDATION_CORRUPTIONS if trial.split == "validation" else CORRUPTIONS
        passes = (0, 1) if trial.split == "validation" else (trial.seed,)
        _, labels = self.images(trial.split)
        n = min(trial.images or len(labels), len(labels))
        order = torch.Generator().manual_seed(trial.seed)
        picks = {
            name: [(name, seed, row) for seed in passes for row in torch.randperm(len(labels), generator=order)[:n]]
            for name in names
        }
        if trial.setting == "mixed":
            every = [pick for name in names for pick in picks[name]]
            picks = {"mixed": [every[i] for i in torch.randperm(len(every), generator=order)]}
        for name, chosen in picks.items():
            yield name, self._batches(trial, chosen, labels)

    def _batches(
        self, trial: Trial, picks: list[tuple[str, int, Tensor]], labels: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(0, len(picks), trial.batch):
            part = picks[i : i + trial.batch]
            rows = torch.stack([row for _, _, row in part]).to(self.device)
            sources = {(name, seed) for name, seed, _ in part}
            if len(sources) == 1:
                x = self.domain(trial.split, *sources.pop())[rows]
            else:
                x = torch.stack([self.domain(trial.split, name, seed)[row] for name, seed, row in part])
            yield x, labels[rows]

    def generator(self, name: str | None) -> tuple[Generator | None, tuple[str, ...]]:
        if name is None:
            return None, ()
        if name == PAPER:
            generator = Generator(len(Training.inputs), 8)
            generator.load_state_dict(mgtta.load_generator("imagenet").state_dict())
            return generator.to(self.device).requires_grad_(False), Training.inputs
        tensors, metadata = read_tensors(self.out / f"{name}.safetensors")
        inputs = tuple(json.loads(metadata["inputs"]))
        generator = Generator(len(inputs), int(metadata["hidden_size"]))
        generator.load_state_dict(tensors)
        return generator.to(self.device).requires_grad_(False), inputs

    def try_out(self, trial: Trial) -> dict[str, Any]:
        loss = self.loss(trial.objective)
        model = loss.model
        mover = Mover(trial.rule, model, *self.generator(trial.rule.generator))
        accuracy, curves = {}, {}
        theta = model.source
        for i, (name, batches) in enumerate(self.streams(trial)):
            if trial.setting != "continual" or i == 0:
                theta = model.source
                mover.reset()
                loss.reset()
            hits, seen = [], 0
            for t, (x, y) in enumerate(batches):
                model.put(theta)
                for step in range(trial.objective.steps):
                    frozen = trial.max_updates is not None and t >= trial.max_updates
                    with torch.set_grad_enabled(not frozen):
                        predicted, value = loss(x)
                    if step == 0:
                        hits.append((predicted.argmax(1) == y).sum())
                    if frozen:
                        break
                    grads = torch.autograd.grad(value, model.params)
                    moved = mover(theta, torch.cat([g.flatten() for g in grads]))
                    theta = torch.where(moved.isfinite().all(), moved, theta)
                    model.put(theta)
                seen += len(y)
            curve = torch.stack(hits).tolist()
            accuracy[name] = 100 * sum(curve) / seen
            curves[name] = curve
        model.put(model.source)
        early = sum(sum(c[:10]) for c in curves.values())
        return {"mean": statistics.mean(accuracy.values()), "early": early, "accuracy": accuracy}

    # --- training

    def train(self, training: Training) -> dict[str, Any]:
        torch.manual_seed(training.seed)
        generator = Generator(len(training.inputs), training.hidden_size).to(self.device)
        phi = list(generator.parameters())
        outer = torch.optim.Adam(phi, lr=training.outer_lr)
        total = training.episodes * training.steps
        loss = self.loss(training.objective)
        model = loss.model
        rng = torch.Generator().manual_seed(training.seed)
        values, done = [], 0
        for episode in range(training.episodes):
            theta, memory = model.source, generator.memory.init(len(model.source))
            z, travelled, surrogate, held = Inputs(training.inputs, model, training.lr), 0.0, 0.0, 0
            loss.reset()
            for t, (x, target) in enumerate(self._episode(training, episode, rng)):
                model.put(theta)
                grad, outer_grad, value = self._gradients(loss, x, target if training.outer == "twin" else None)
                values.append(value)
                if isinstance(travelled, Tensor):  # d outer / d phi, through the steps since the last cut
                    surrogate = surrogate - (outer_grad * travelled).sum()
                    held += 1
                if held == training.unroll:
                    rate = training.outer_lr * (1 + math.cos(math.pi * done / total)) / 2
                    for group in outer.param_groups:
                        group["lr"] = rate
                    outer.zero_grad()
                    surrogate.backward()
                    nn.utils.clip_grad_norm_(phi, 1.0)
                    outer.step()
                    memory, travelled, surrogate, held = memory.detach(), 0.0, 0.0, 0
                lr = training.lr / math.sqrt(1 + t / training.decay)
                update, memory = generator(z(grad, theta), memory)
                travelled = travelled + lr * update
                theta = (theta - lr * update).detach()
                done += 1
        model.put(model.source)
        metadata = {"inputs": json.dumps(training.inputs), "hidden_size": str(training.hidden_size)}
        weights = {name: p.detach().cpu().contiguous() for name, p in generator.state_dict().items()}
        write_tensors(self.out / f"{key(training)}.safetensors", weights, metadata)
        losses = torch.stack(values)
        tenth = max(1, len(losses) // 10)
        return {"first": losses[:tenth].mean().item(), "last": losses[-tenth:].mean().item()}

    def _episode(self, training: Training, episode: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of one corruption, drawn anew, and what the source model says of their clean twins."""
        x, targets = self._twins(training)
        name = VALIDATION_CORRUPTIONS[episode % len(VALIDATION_CORRUPTIONS)]
        size = training.batch[episode // len(VALIDATION_CORRUPTIONS) % len(training.batch)]
        for step in range(training.steps):
            rows = torch.randperm(training.images, generator=rng)[:size].to(self.device)
            flip = int(training.flip and torch.rand((), generator=rng) < 0.5)
            clean = x[rows].flip(-1) if flip else x[rows]
            yield corrupt(clean, name, 5, seed=1000 + episode * training.steps + step), targets[flip, rows]

    def _twins(self, training: Training) -> tuple[Tensor, Tensor]:
        """The clean images, and the source model's predictions (2, M, C): of each, and of its mirror image."""
        x = self.images("training")[0][: training.images]
        if self._targets is None:
            model = self.loss(training.objective).model
            model.put(model.source)
            with torch.no_grad():
                both = [torch.cat([model.run(part)[0] for part in y.split(64)]) for y in (x, x.flip(-1))]
            self._targets = torch.stack(both).softmax(-1)
        return x, self._targets

    @staticmethod
    def _gradients(loss: Loss, x: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The inner gradient, the outer one, and the outer loss: the inner one itself where there is no target."""
        params = loss.model.params
        if target is None:
            _, value = loss(x)
            grad = torch.cat([g.flatten() for g in torch.autograd.grad(value, params)])
            return grad, grad, value.detach()
        found: list[Tensor] = []
        handle = loss.model.classifier.register_forward_hook(lambda _m, _i, out: found.append(out))
        _, value = loss(x)
        handle.remove()
        logits = found[0].view(-1, *target.shape).mean(0)
        twin = -(target * logits.log_softmax(-1)).sum(-1).mean()
        inner = torch.autograd.grad(value, params, retain_graph=True)
        beyond = torch.autograd.grad(twin, params)
        grad, outer_grad = (torch.cat([g.flatten() for g in gs]) for gs in (inner, beyond))
        return grad, outer_grad, twin.detach()


# --- stages: each a function of the results so far, which chooses from them what to do next

Results = dict[str, dict[str, Any]]  # by key
LRS = (5e-3, 1e-2, 2e-2)
DECAYS = (math.inf, 5.0, 15.0)
EQ7 = Objective()
PAPER = "paper"  # the shipped generator, trained by the paper's Algorithm 1
TIME = ("momentum", "gradient", "time", "late")
RICH = ("momentum", "gradient", "slow", "magnitude", "time", "late", "kind", "depth", "travel")
CHANGES: list[dict[str, Any]] = [
    {"trade_off": 0.8},
    {"recentre": 1.0},
    {"align": 0.5, "align_tokens": "class"},
    {"mirror": True},
    *({"noisy": v} for v in (0.3, 1.0)),
    *({"steps": v} for v in (2, 3)),
    {"adapts": "biases"},
]  # fmt: skip
FIRST_CHANGES: list[dict[str, Any]] = [  # tried before, none of which paid: docs/research.md
    *({"trade_off": v} for v in (0.1, 0.2, 0.8, 1.6, 3.2)),
    *({"tokens": "patch", "trade_off": v} for v in (0.1, 0.4, 1.6)),
    *({"tokens": "both", "patch_weight": v} for v in (0.25, 1.0, 4.0)),
    *({"history": v} for v in (0.5, 0.8)),
    *({"margin": v} for v in (0.4, 0.6, 0.8)),
    *({"entropy_weight": v} for v in (0.0, 0.5, 2.0)),
    *({"balance": v} for v in (0.1, 0.3, 1.0)),
    *({"recentre": v} for v in (0.5, 1.0)),
    {"late": True},
]  # fmt: skip


def best(trials: list[Trial], results: Results) -> Trial:
    return max(trials, key=lambda trial: results[key(trial)]["mean"])


def adam_trials(objective: Objective = EQ7, decays: tuple[float, ...] = (math.inf,)) -> list[Trial]:
    lrs = LRS if objective == EQ7 or len(decays) > 1 else LRS[:2]
    return [Trial(Rule(lr=lr, decay=decay), objective) for decay in decays for lr in lrs]


def objectives(_: Results) -> list[Trial]:
    """What to lower, with Adam, one piece changed at a time."""
    return [*adam_trials(decays=DECAYS), *(trial for change in CHANGES for trial in adam_trials(Objective(**change)))]


def first_objectives(_: Results) -> list[Trial]:
    """What was tried first."""
    return [Trial(Rule(lr=lr, decay=5.0), Objective(**change)) for change in FIRST_CHANGES for lr in LRS]


def combined(results: Results) -> list[Trial]:
    """The pieces that paid alone, together: the best value of each, added in the order of their gain."""
    base = results[key(best(adam_trials(decays=DECAYS), results))]["mean"]
    gains: dict[str, tuple[float, dict[str, Any]]] = {}
    for change in CHANGES:
        gain = results[key(best(adam_trials(Objective(**change)), results))]["mean"] - base
        piece = next(iter(change))
        if gain > max(0.1, gains.get(piece, (0.0,))[0]):
            gains[piece] = gain, change
    ordered = [change for _, change in sorted(gains.values(), key=lambda pair: -pair[0])]
    sums = [{k: v for change in ordered[: n + 1] for k, v in change.items()} for n in range(1, len(ordered))]
    pairs = [{**ordered[0], **change} for change in ordered[2:]]
    return [trial for change in [*sums, *pairs] for trial in adam_trials(Objective(**change))]


def plus(results: Results) -> Objective:
    """The best objective so far."""
    return best([*objectives(results), *combined(results)], results).objective


def trainings(results: Results) -> list[Training]:
    """How to train a generator, one piece changed at a time; then the same for the best objective."""
    twin = partial(Training, outer="twin", unroll=4)
    own = partial(twin, objective=plus(results))
    return [
        Training(),
        twin(),
        twin(inputs=TIME),
        twin(inputs=RICH),
        twin(inputs=RICH, lr=1e-2),
        twin(inputs=RICH, hidden_size=16),
        twin(inputs=RICH, unroll=8),
        twin(inputs=RICH, batch=(4, 16, 64)),
        own(),
        own(inputs=TIME),
        own(inputs=RICH),
        own(inputs=RICH, lr=1e-2),
        Training(inputs=RICH),
        *(Training(inputs=inputs, objective=plus(results)) for inputs in (Training.inputs, RICH)),
        Training(inputs=RICH, objective=plus(results), lr=1e-2),
    ]


def learned_trials(training: Training) -> list[Trial]:
    rules = itertools.product((0.5, 1.0, 2.0), (math.inf, 10.0))
    return [
        Trial(Rule("learned", lr=training.lr * factor, decay=decay, generator=key(training)), training.objective)
        for factor, decay in rules
    ]


def paper_trials(objective: Objective) -> list[Trial]:
    rules = itertools.product(LRS, DECAYS)
    return [Trial(Rule("learned", lr=lr, decay=decay, generator=PAPER), objective) for lr, decay in rules]


def generators(results: Results) -> list[Trial]:
    """Every generator, and Adam on the best objective, at several rates and decays."""
    own = [trial for training in trainings(results) for trial in learned_trials(training)]
    hand_made = adam_trials(plus(results), DECAYS)
    return [*own, *paper_trials(EQ7), *paper_trials(plus(results)), *hand_made]


def contenders(results: Results) -> dict[str, Trial]:
    """Who goes to the test: for both objectives Adam, the paper's generator, ours in its form, ours with all inputs."""
    found = {
        "eq7_adam": best(adam_trials(decays=DECAYS), results),
        "plus_adam": best(adam_trials(plus(results), DECAYS), results),
    }
    for name, objective in (("eq7", EQ7), ("plus", plus(results))):
        found[f"{name}_paper"] = best(paper_trials(objective), results)
        own = [t for t in trainings(results) if t.objective == objective]
        for kind, group in (("form", [t for t in own if t.inputs == Training.inputs]), ("best", own)):
            found[f"{name}_{kind}"] = best([trial for t in group for trial in learned_trials(t)], results)
    return found


def test(results: Results) -> list[Trial]:
    """The fifteen corruptions, three seeds; and with ten updates."""
    return [
        dataclasses.replace(trial, split="test", seed=seed, max_updates=updates)
        for updates, seeds in ((None, 3), (10, 3))
        for seed in range(seeds)
        for trial in contenders(results).values()
    ]


SETTINGS: list[dict[str, Any]] = [
    {"setting": "mixed"},
    {"setting": "continual"},
    {"batch": 2, "images": 256},
    {"batch": 4, "images": 256},
]


def rates(trial: Trial, setting: dict[str, Any]) -> list[Trial]:
    """A contender in another setting, at rates that fit it, without decay: such streams have no end."""
    factors = (0.02, 0.05, 0.1, 0.3) if "batch" in setting else (0.1, 0.2, 0.5, 1.0)
    rules = [dataclasses.replace(trial.rule, lr=trial.rule.lr * f, decay=math.inf) for f in factors]
    return [dataclasses.replace(trial, rule=rule, **setting) for rule in rules]


def finalists(results: Results) -> list[Trial]:
    return [contenders(results)[name] for name in ("eq7_adam", "eq7_paper", "eq7_best", "plus_adam", "plus_best")]


def settings(results: Results) -> list[Trial]:
    """Rates for mixed and continual streams and for small batches, on validation."""
    return [t for s in SETTINGS for trial in finalists(results) for t in rates(trial, s)]


def settings_test(results: Results) -> list[Trial]:
    found = [best(rates(trial, s), results) for s in SETTINGS for trial in finalists(results)]
    return [dataclasses.replace(trial, split="test", seed=seed) for seed in range(3) for trial in found]


STAGES = {
    stage.__name__: stage
    for stage in (first_objectives, objectives, combined, trainings, generators, test, settings, settings_test)
}  # fmt: skip


def read(log: Path) -> Results:
    return {r["key"]: r for r in map(json.loads, log.read_text().splitlines())} if log.exists() else {}


def run(tasks: list[Any], args: argparse.Namespace) -> Results:
    """The results so far and those of the tasks; what is in the file already is not run again."""
    log = args.out / "results.jsonl"
    done = read(log)
    todo = [task for task in dict.fromkeys(tasks) if key(task) not in done]
    start = partial(Lab, str(args.data), str(args.checkpoint), args.device, args.out)
    if args.workers:
        results: Iterator[tuple[Any, Any]] = spread(todo, start, args.workers)
    else:
        lab = start()
        results = ((task, lab(task)) for task in todo)
    for task, result in results:
        done[key(task)] = result
        with open(log, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result.get('mean', result.get('last')):8.3f}  {result['seconds']:6.1f} s  {short(task)}", flush=True)
    return done


def short(task: Any) -> str:
    """What differs from the defaults."""
    words = []
    for f in dataclasses.fields(task):
        value = getattr(task, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if value != default:
            words.append(f"{f.name}=({short(value)})" if dataclasses.is_dataclass(value) else f"{f.name}={value}")
    return " ".join(words)


def summary(stage: str, tasks: list[Any], results: Results) -> str:
    """Best first; what differs by its seed alone as one line, with the spread."""
    groups: dict[Any, list[float]] = {}
    for task in tasks:
        result = results[key(task)]
        alike = dataclasses.replace(task, seed=0)
        groups.setdefault(alike, []).append(result.get("mean", -result.get("last", 0.0)))
    lines = [f"{stage}, best first:"]
    for task, scores in sorted(groups.items(), key=lambda pair: -statistics.mean(pair[1])):
        spread_ = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        lines.append(f"{statistics.mean(scores):8.2f}{spread_}  {short(task)}")
    return "\n".join(lines)


def page(results: Results) -> str:
    """The log's tables: each piece of the objective alone and together, every generator, and the test."""
    reference = results[key(best(adam_trials(decays=DECAYS), results))]["mean"]
    rows = [["objective, with Adam", "validation, %", "against Eq. 7"], ["Eq. 7", f"{reference:.2f}", ""]]
    tried = [*(Objective(**change) for change in CHANGES), *dict.fromkeys(t.objective for t in combined(results))]
    for objective in tried:
        mean = results[key(best(adam_trials(objective), results))]["mean"]
        rows.append([short(objective), f"{mean:.2f}", f"{mean - reference:+.2f}"])
    pieces = rows
    rows = [["objective", "rule", "its training", "validation, %", "learning rate", "decay"]]
    for name, objective in (("Eq. 7", EQ7), ("plus", plus(results))):
        groups = {"Adam": adam_trials(objective, DECAYS), "the paper's generator": paper_trials(objective)}
        own = [t for t in trainings(results) if t.objective == objective]
        groups |= {_described(t): learned_trials(t) for t in own}
        for what, trials in groups.items():
            trial = best(trials, results)
            rule, _, training = what.partition(": ")
            found = f"{results[key(trial)]['mean']:.2f}"
            rows.append([name, rule, training, found, f"{trial.rule.lr:g}", f"{trial.rule.decay:g}"])
    generators_ = rows
    rows = [["contender", "whole stream", "10 updates, then frozen"]]
    for name, trial in contenders(results).items():
        cells = []
        for updates in (None, 10):
            trials = [dataclasses.replace(trial, split="test", seed=s, max_updates=updates) for s in range(3)]
            found = [results[key(t)]["mean"] for t in trials if key(t) in results]
            cells.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}" if len(found) == 3 else "")
        if any(cells):
            rows.append([name, *cells])
    return "\n\n".join(map(_table, (pieces, generators_, rows)))


def _described(training: Training) -> str:
    many = (
        "all inputs" if training.inputs == RICH else "two inputs" if training.inputs == Training.inputs else "with time"
    )
    rest = short(dataclasses.replace(training, inputs=Training.inputs, objective=EQ7))
    return f"ours, {many}: {rest or 'as it stands'}"


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def main() -> None:
    if sys.argv[1:2] == ["page"]:
        log, target = map(Path, sys.argv[2:])
        text = between(target.read_text(), "research", page(read(log)))
        with atomic(target) as path:
            path.write_text(text)
        return
    parser = imagenet.arguments(__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        tasks = STAGES[stage](read(args.out / "results.jsonl"))
        text = summary(stage, tasks, run(tasks, args))
        with atomic(args.out / f"{stage}.txt") as path:
            path.write_text(text + "\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
