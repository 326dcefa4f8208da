"""The laboratory, one in each process: it tries rules over streams, and trains generators.

Notation    theta  the norm parameters, flat, (n,); g  the objective's gradient; phi  a generator's weights
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagenet
import torch
from objective import Loss, Model, Statistics, statistics_of
from rules import Generator, Inputs, Mover
from tasks import Objective, Training, Trial, key
from torch import Tensor, nn

import mgtta
from mgtta._lib.files import read_tensors, write_tensors
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt

PAPER = "paper"  # the shipped generator, trained by the paper's Algorithm 1


class Lab:
    def __init__(self, data: str, checkpoint: str, device: str, out: Path):
        torch.set_num_threads(1)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        self.data = Path(data)
        self.device = device
        self.out = out
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
            found = corrupt(self.images(split)[0], name, 5, seed=seed)
            self._domains[split, name, seed] = found
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
        accuracy = {}
        curves = {}
        theta = model.source
        for i, (name, batches) in enumerate(self.streams(trial)):
            if trial.setting != "continual" or i == 0:
                theta = model.source
                mover.reset()
                loss.reset()
            hits = []
            seen = 0
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
        values = []
        done = 0
        for episode in range(training.episodes):
            theta = model.source
            memory = generator.memory.init(len(model.source))
            z = Inputs(training.inputs, model, training.lr)
            travelled = 0.0
            surrogate = 0.0
            held = 0
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
                    memory = memory.detach()
                    travelled = 0.0
                    surrogate = 0.0
                    held = 0
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
