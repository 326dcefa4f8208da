"""The outer loop: train a generator on a few unlabelled, shifted images (arXiv 2412.16901, Algorithm 1).

Notation    theta  the model's norm parameters, updated by the generator with `lr`
            phi    the generator's weights, updated by Adam with `outer_lr`

One step: a forward and backward pass at theta_t gives g_t. Since theta_t = theta_{t-1} - lr * update_{t-1}(phi), the
same g_t, passed back through that one update, is phi's gradient. phi is updated, and then generates the next update of
theta. Memory and moments carry values from step to step but no graph, so the gradient reaches one step back.
"""

import copy
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from mgtta import __version__
from mgtta._lib.files import check_kind, fingerprint, read_tree, write_tree
from mgtta.adaptation.step import EagerEngine
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.data.streams import corrupted, stream
from mgtta.evaluation.loop import evaluate
from mgtta.learned.generator import MetaGradientGenerator
from mgtta.learned.optimizer import BETAS, EPS, MGG, generator_inputs
from mgtta.losses import objective
from mgtta.methods.mgtta import MGTTA
from mgtta.models.classifier import Classifier
from mgtta.models.loading import as_classifier
from mgtta.models.norms import norm_parameters
from mgtta.models.source import SourceStatistics

KIND = "mgtta training run"
VERSION = 1
SEED_STRIDE = 1_000_003  # between the seeds of the orders of two trainings; more than there are passes


def meta_train(
    model: Classifier | nn.Module,
    source: SourceStatistics,
    images: Tensor,
    *,
    generator: MetaGradientGenerator | None = None,
    hidden_size: int = 8,
    memory: str = "gml",
    steps: int = 2000,
    batch_size: int = 2,
    lr: float = 1e-4,
    outer_lr: float = 1e-2,
    trade_off: float = 0.4,
    validation: Iterable[Any] | None = None,
    validation_lr: float = 1e-3,
    seed: int = 0,
    checkpoint: str | os.PathLike | None = None,
    progress: bool = True,
) -> MetaGradientGenerator:
    """Train a generator by Algorithm 1, with the paper's settings, and return the best one. `model` does not change.

    After each pass over the images, the generator is judged by adapting the source model with it, and the best is kept.

    Args:
        images: unlabelled images of shifted domains, (M, 3, H, W); 128 are enough.
        generator: one to continue training; by default a new one of `hidden_size` and `memory`.
        validation: labelled batches that can be iterated more than once. The generator is judged by its accuracy on
            them at `validation_lr`; without them, by the mean objective over the training images.
        checkpoint: checkpoint file, written after each pass; if it exists, the training resumes from it.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    model = as_classifier(model)
    start = _start(generator, hidden_size, memory, seed)
    trainer = _Trainer(model, source, images, start, batch_size, lr, outer_lr, trade_off, seed)
    judged_by = "mean objective" if validation is None else f"accuracy at lr {validation_lr}"
    protocol = trainer.protocol(steps, judged_by)
    if checkpoint is not None and Path(checkpoint).exists():
        trainer.resume(checkpoint, protocol)
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("training the generator", total=steps, completed=trainer.step)
        while trainer.step < steps:
            for _ in trainer.one_pass(steps):
                bar.update(task, completed=trainer.step)
            trainer.judge(validation, validation_lr)
            bar.update(task, description=f"training the generator ({trainer.best_so_far()})")
            if checkpoint is not None:
                trainer.save(checkpoint, protocol)
    return trainer.result(protocol)


class _Trainer:
    """The state of a training: theta, phi, the outer optimizer, and the best generator so far."""

    def __init__(
        self,
        model: Classifier,
        source: SourceStatistics,
        images: Tensor,
        generator: MetaGradientGenerator,
        batch_size: int,
        lr: float,
        outer_lr: float,
        trade_off: float,
        seed: int,
    ):
        if not isinstance(images, Tensor) or images.ndim < 2 or len(images) == 0:
            raise ValueError("images must be one tensor of at least one image, (M, 3, H, W)")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.fingerprint = model.fingerprint()
        source.check(model.name, self.fingerprint)
        self.source_model = model
        self.images = images
        self.batch_size = batch_size
        self.lr = lr
        self.outer_lr = outer_lr
        self.trade_off = trade_off
        self.seed = seed
        self.model = copy.deepcopy(model).requires_grad_(False).use_batch_statistics()
        self.theta = [p.requires_grad_() for p in norm_parameters(self.model)]
        like = self.theta[0]
        self.source = source.to(like)
        self.generator = generator.to(like.device, like.dtype)
        self.phi = list(self.generator.parameters())
        self.outer = torch.optim.Adam(self.phi, lr=outer_lr)
        self.step = 0
        self.passes = 0
        self.skipped = 0  # batches whose gradient was not finite
        self.pending: tuple[Tensor, Tensor | None] | None = None  # inputs, and the memory they were written into
        self.update: Tensor | None = None  # the update made from them, with its graph to phi
        self.best: dict[str, Any] = {}
        self.scores: list[float] = []

    def protocol(self, steps: int, judged_by: str) -> dict[str, Any]:
        """Return what defines the training: it is kept with the generator, and a checkpoint must have the same.

        Called before the first step: it holds a hash of the starting weights.
        """
        return {
            "model": self.source_model.name,
            "fingerprint": self.fingerprint,
            "hidden_size": self.generator.hidden_size,
            "memory": self.generator.memory_kind,
            "images": len(self.images),
            "images' hash": fingerprint({"images": self.images.float()}),
            "starting weights": fingerprint(self.generator.state_dict()),
            "steps": steps,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "outer_lr": self.outer_lr,
            "trade_off": self.trade_off,
            "seed": self.seed,
            "validated by": judged_by,
        }

    def one_pass(self, steps: int) -> Iterable[int]:
        """Take at most one pass over the images, up to step `steps`, starting with empty moments and memory."""
        order = torch.Generator().manual_seed(SEED_STRIDE * self.seed + self.passes)
        index = torch.randperm(len(self.images), generator=order)
        n = sum(p.numel() for p in self.theta)
        exp_avg = self.theta[0].new_zeros(n)
        exp_avg_sq = self.theta[0].new_zeros(n)
        memory: Tensor | None = None
        t = 0
        for batch in index.split(self.batch_size):
            if self.step >= steps:
                break
            self.step += 1
            grad = self.gradient(self.images[batch])
            if grad is None:
                self.skipped += 1
                continue
            self.move_phi(grad)
            t += 1
            inputs, exp_avg, exp_avg_sq = generator_inputs(grad, exp_avg, exp_avg_sq, t, BETAS, EPS)
            memory = self.generate(inputs, memory)
            self.move_theta()
            yield self.step
        self.passes += 1

    def gradient(self, x: Tensor) -> Tensor | None:
        """Return g_t = d objective / d theta, (n,), or None if it is not finite."""
        logits, features = self.model.features(x)
        loss = objective(logits, features, self.source.mean, self.source.std, self.trade_off)
        grads = torch.autograd.grad(loss, self.theta, materialize_grads=True)
        grad = torch.cat([g.flatten() for g in grads])
        if not grad.isfinite().all():
            return None
        return grad

    def move_phi(self, grad: Tensor) -> None:
        """Take one Adam step along d objective / d phi = -lr * g_t . d update_{t-1} / d phi."""
        if self.update is None:
            return
        grads = torch.autograd.grad(self.update, self.phi, grad_outputs=-self.lr * grad, allow_unused=True)
        for p, g in zip(self.phi, grads, strict=True):
            p.grad = g
        self.outer.step()

    def generate(self, inputs: Tensor, memory: Tensor | None) -> Tensor:
        """Generate the next update and return the memory after it.

        Without a memory, the learned initial one is used, which then gets a gradient.
        """
        self.pending = (inputs, memory)
        before = self.generator.init_memory(len(inputs)) if memory is None else memory
        self.update, after = self.generator(inputs, before)
        return after.detach()

    @torch.no_grad()
    def move_theta(self) -> None:
        """theta_{t+1} = theta_t - lr * update_t."""
        assert self.update is not None
        updates = self.update.split([p.numel() for p in self.theta])
        for p, update in zip(self.theta, updates, strict=True):
            p.sub_(update.view_as(p), alpha=self.lr)

    def judge(self, validation: Iterable[Any] | None, lr: float) -> None:
        """Adapt the source model with the present generator; keep a copy of it if it scores best so far."""
        score = self.score(validation, lr)
        self.scores.append(score)
        if score > self.best.get("score", -float("inf")):  # False if the score is NaN
            weights = {name: t.detach().clone() for name, t in self.generator.state_dict().items()}
            self.best = {"score": score, "step": self.step, "weights": weights}

    def score(self, validation: Iterable[Any] | None, lr: float) -> float:
        """Return the accuracy on the validation batches; without them, the negative mean objective."""
        if validation is None:
            return -self.mean_objective()
        return self.accuracy(validation, lr)

    def mean_objective(self) -> float:
        """Return the mean objective over the training images while the source model adapts to them."""
        method = self.method(self.lr)
        engine = EagerEngine(method)
        losses = []
        for x in self.images.split(self.batch_size):
            seen = method.look(x)
            loss = method.objective(*seen)
            losses.append(loss.detach())
            engine.learn(loss)
        return float(torch.stack(losses).nanmean())

    def accuracy(self, validation: Iterable[Any], lr: float) -> float:
        """Return the accuracy in percent on labelled batches, as the mean over their domains."""
        records = evaluate(self.method(lr), validation)
        figures = [record.top1 for record in records if record.top1 is not None]
        if not records or len(figures) < len(records):
            raise ValueError("validation must be labelled batches that can be iterated more than once")
        return sum(figures) / len(figures)

    def method(self, lr: float) -> MGTTA:
        """Return the method that adapts a copy of the source model with the present generator."""
        optimizer = partial(MGG, generator=self.generator, lr=lr)
        return MGTTA(self.source_model, optimizer, source=self.source, trade_off=self.trade_off)

    def best_so_far(self) -> str:
        """Return the best score and its step, for the progress bar."""
        score = self.best.get("score", float("nan"))
        step = self.best.get("step", 0)
        return f"best {score:.4g} at {step}"

    def result(self, protocol: dict[str, Any]) -> MetaGradientGenerator:
        """Return a copy of the generator that scored best; its `about` says how it was trained."""
        if not self.best:
            raise ValueError("no image gave a finite objective: give uint8 pixels, or finite floats in [0, 1]")
        found = copy.deepcopy(self.generator).requires_grad_(True)
        found.load_state_dict(self.best["weights"])
        found.about = {
            "training": protocol,
            "best": {"step": self.best["step"], "score": self.best["score"]},
            "scores": self.scores,
            "skipped": self.skipped,
            "versions": {"mgtta": __version__, "torch": torch.__version__},
        }
        return found

    def save(self, path: str | os.PathLike, protocol: dict[str, Any]) -> None:
        """Write a checkpoint."""
        state = {
            "protocol": protocol,
            "counters": {
                "step": self.step,
                "passes": self.passes,
                "skipped": self.skipped,
                "scores": self.scores,
            },
            "best": self.best,
            "theta": [p.detach() for p in self.theta],
            "phi": self.generator.state_dict(),
            "outer": self.outer.state_dict(),
            "pending": self.pending,
        }
        write_tree(path, state, {"kind": KIND, "version": str(VERSION)})

    def resume(self, path: str | os.PathLike, protocol: dict[str, Any]) -> None:
        """Continue from a checkpoint of the same protocol; only the number of steps may differ."""
        state, metadata = read_tree(path)
        check_kind(metadata, KIND, VERSION, path, "meta_train writes one as its checkpoint")
        if not isinstance(state, dict) or {**state.get("protocol", {}), "steps": 0} != {**protocol, "steps": 0}:
            raise ValueError(f"{path} belongs to a training run with other settings; name another file, or delete it")
        with torch.no_grad():
            for p, value in zip(self.theta, state["theta"], strict=True):
                p.copy_(value)
        self.generator.load_state_dict(state["phi"])
        self.outer.load_state_dict(state["outer"])
        self.best = state["best"]
        for name, value in state["counters"].items():
            setattr(self, name, value)
        if state["pending"] is not None:
            inputs, memory = state["pending"]
            device = self.theta[0].device
            if memory is not None:
                memory = memory.to(device)
            self.generate(inputs.to(device), memory)


def shifted_images(
    dataset: Any,
    count: int = 128,
    corruptions: Sequence[str] = VALIDATION_CORRUPTIONS,
    *,
    shuffle: bool = True,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return `count` different images of a clean data set to train on, an equal share under each corruption.

    The corruptions have severity 5.
    """
    parts = []
    for i, domain in enumerate(corrupted(dataset, corruptions)):
        [batch] = stream(domain, batch_size=count, first=count, shuffle=shuffle, seed=seed, device=device)
        parts.append(batch.x[i :: len(corruptions)])
    return torch.cat(parts)


def _start(generator: MetaGradientGenerator | None, hidden_size: int, memory: str, seed: int) -> MetaGradientGenerator:
    """Return a copy of the generator, or a new one from the seed."""
    if generator is not None:
        return copy.deepcopy(generator).requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MetaGradientGenerator(hidden_size, memory)
