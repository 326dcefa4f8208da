"""The outer loop: train a generator on a few unlabelled, shifted images (arXiv 2412.16901, Algorithm 1).

Notation    theta  the model's norm parameters, updated by the generator with `lr`
            phi    the generator's weights, updated by Adam with `outer_lr`

One step: a forward and backward pass at theta_t gives g_t. Since theta_t = theta_{t-1} - lr * update_{t-1}(phi), the
same g_t, passed back through that one update, is phi's gradient. phi is updated, and then generates the next update of
theta. Memory and moments carry values from step to step but no graph, so the gradient reaches one step back.

With a pull, theta_t = (1 - pull) * (theta_{t-1} - lr * update_{t-1}(phi)) + pull * theta_source, as when deployed.
Which batches come is decided in `mgtta.training.episodes`.
"""

import copy
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from mgtta import __version__
from mgtta._lib.errors import unknown
from mgtta._lib.files import check_kind, fingerprint, read_tree, write_tree
from mgtta.adaptation.step import EagerEngine
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.data.streams import corrupted, stream
from mgtta.evaluation.loop import evaluate
from mgtta.learned.generator import MetaGradientGenerator
from mgtta.learned.optimizer import BETAS, EPS, MGG, generator_inputs
from mgtta.losses import fair_share, objective
from mgtta.methods.mgtta import MGTTA
from mgtta.methods.mgtta_plus import MGTTAPlus
from mgtta.models.classifier import Classifier
from mgtta.models.loading import as_classifier
from mgtta.models.norms import norm_parameters
from mgtta.models.source import SourceStatistics
from mgtta.training.episodes import EPISODES, Episodes, Passes, Streams

KIND = "mgtta training run"
VERSION = 1


def meta_train(
    model: Classifier | nn.Module,
    source: SourceStatistics,
    images: Tensor | Sequence[Tensor],
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
    pull: float = 0.0,
    mirror: bool = False,
    episodes: str = "passes",
    episode_steps: int = 32,
) -> MetaGradientGenerator:
    """Train a generator by Algorithm 1, with the paper's settings, and return the best one. `model` does not change.

    After each pass over the images, the generator is judged by adapting the source model with it, and the best is kept.
    With `episodes="streams"`, it is judged after each episode if there are validation batches; otherwise the last one
    is returned.

    Args:
        images: unlabelled images of shifted domains, (M, 3, H, W); 128 are enough. With `episodes="streams"`, a list
            of such tensors, one for each domain.
        generator: one to continue training; by default a new one of `hidden_size` and `memory`.
        validation: labelled batches that can be iterated more than once. The generator is judged by its accuracy on
            them at `validation_lr`; without them, by the mean objective over the training images.
        checkpoint: checkpoint file, written after each pass or episode; if it exists, the training resumes from it.
        pull: after each update the model's parameters move this share of the distance to the source, as in `create`.
        mirror: every image is seen with its mirror image, as by mgtta+.
        episodes: "passes" over the images, as in the paper, or "streams": episodes of `episode_steps` batches of one
            domain, of changing domains or of mixed domains, most of them from the source model, while `outer_lr`
            falls linearly to zero. Give the `lr` and the `pull` that the generator will be used with.
    """
    _check(steps, pull)
    model = as_classifier(model)
    start = _start(generator, hidden_size, memory, seed)
    found = _episodes(episodes, images, batch_size, seed, episode_steps)
    trainer = _Trainer(model, source, found, start, batch_size, lr, outer_lr, trade_off, seed, pull, mirror)
    protocol = trainer.protocol(steps, _judged_by(validation, validation_lr))
    if checkpoint is not None and Path(checkpoint).exists():
        trainer.resume(checkpoint, protocol)
    judges_all = validation is not None or not found.judged_at_end
    with Progress(disable=not progress, transient=True) as bar:
        task = bar.add_task("training the generator", total=steps, completed=trainer.step)
        for _ in trainer.passes_up_to(steps, bar, task):
            if judges_all or trainer.step >= steps:
                trainer.judge(validation, validation_lr)
            if checkpoint is not None:
                trainer.save(checkpoint, protocol)
    return trainer.result(protocol)


class _Trainer:
    """The state of a training: theta, phi, the outer optimizer, and the best generator so far."""

    def __init__(
        self,
        model: Classifier,
        source: SourceStatistics,
        episodes: Episodes,
        generator: MetaGradientGenerator,
        batch_size: int,
        lr: float,
        outer_lr: float,
        trade_off: float,
        seed: int,
        pull: float = 0.0,
        mirror: bool = False,
    ):
        self.fingerprint = model.fingerprint()
        source.check(model.name, self.fingerprint)
        self.source_model = model
        self.episodes = episodes
        self.batch_size = batch_size
        self.lr = lr
        self.outer_lr = outer_lr
        self.trade_off = trade_off
        self.seed = seed
        self.pull = pull
        self.mirror = mirror
        self.model = copy.deepcopy(model).requires_grad_(False).use_batch_statistics()
        self.theta = [p.requires_grad_() for p in norm_parameters(self.model)]
        self.origin = [p.detach().clone() for p in self.theta]
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
        found = {
            "model": self.source_model.name,
            "fingerprint": self.fingerprint,
            "hidden_size": self.generator.hidden_size,
            "memory": self.generator.memory_kind,
            **self.episodes.protocol(),
            "starting weights": fingerprint(self.generator.state_dict()),
            "steps": steps,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "outer_lr": self.outer_lr,
            "trade_off": self.trade_off,
            "seed": self.seed,
            "validated by": judged_by,
        }
        if self.pull:
            found["pull"] = self.pull
        if self.mirror:
            found["mirror"] = True
        if self.episodes.decays:  # not by `steps`, which a checkpoint may change
            found["outer_lr falls to 0 at step"] = steps
        return found

    def passes_up_to(self, steps: int, bar: Progress, task: TaskID) -> Iterator[int]:
        """Take one episode after another up to step `steps`, show it on the bar, and yield the step after each."""
        while self.step < steps:
            for _ in self.one_pass(steps):
                bar.update(task, completed=self.step)
            yield self.step
            bar.update(task, description=f"training the generator ({self.best_so_far()})")

    def one_pass(self, steps: int) -> Iterable[int]:
        """Take at most one episode, up to step `steps`, starting with empty moments and memory."""
        episode = self.episodes.episode(self.passes)
        if episode.from_source:
            self.return_to_source()
        n = sum(p.numel() for p in self.theta)
        exp_avg = self.theta[0].new_zeros(n)
        exp_avg_sq = self.theta[0].new_zeros(n)
        memory: Tensor | None = None
        t = 0
        for x in episode.batches:
            if self.step >= steps:
                break
            if self.episodes.decays:
                self.outer.param_groups[0]["lr"] = self.outer_lr * (1 - self.step / steps)
            self.step += 1
            grad = self.gradient(x)
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
        if self.mirror:
            x = self.model.pixels(x)
            x = torch.cat([x, x.flip(-1)])
        logits, features = self.model.features(x)
        weight = None
        if self.mirror:  # as mgtta+: the mean over an image and its mirror image, and shares of the classes
            logits = logits.reshape(2, len(x) // 2, logits.shape[1]).mean(0)
            weight = fair_share(logits)
        loss = objective(logits, features, self.source.mean, self.source.std, self.trade_off, weight=weight)
        grads = torch.autograd.grad(loss, self.theta, materialize_grads=True)
        grad = torch.cat([g.flatten() for g in grads])
        if not grad.isfinite().all():
            return None
        return grad

    def move_phi(self, grad: Tensor) -> None:
        """Take one Adam step along d objective / d phi = -lr * (1 - pull) * g_t . d update_{t-1} / d phi."""
        if self.update is None:
            return
        back = -self.lr * (1 - self.pull) * grad
        grads = torch.autograd.grad(self.update, self.phi, grad_outputs=back, allow_unused=True)
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
        """theta_{t+1} = theta_t - lr * update_t; then theta moves the share `pull` of the distance to the source."""
        assert self.update is not None
        updates = self.update.split([p.numel() for p in self.theta])
        for p, update, origin in zip(self.theta, updates, self.origin, strict=True):
            p.sub_(update.view_as(p), alpha=self.lr)
            if self.pull:
                p.lerp_(origin, self.pull)

    @torch.no_grad()
    def return_to_source(self) -> None:
        """Set theta to the source's values. The last update is forgotten, since it moves theta no longer."""
        for p, origin in zip(self.theta, self.origin, strict=True):
            p.copy_(origin)
        self.update = None
        self.pending = None

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
        """Return the mean objective over the training images while the source model adapts to them, by domain."""
        losses = []
        for images in self.episodes.domains:
            method = self.method(self.lr)
            engine = EagerEngine(method)
            for x in images.split(self.batch_size):
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
        own: dict[str, Any] = {"source": self.source, "trade_off": self.trade_off}
        if self.mirror:
            method: MGTTA = MGTTAPlus(self.source_model, optimizer, recentre=0.0, decay=math.inf, **own)
        else:
            method = MGTTA(self.source_model, optimizer, **own)
        method.pull = self.pull
        return method

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
    **options: Any,
) -> Tensor:
    """Return `count` different images of a clean data set to train on, an equal share under each corruption.

    The corruptions have severity 5; `options` are those of `corrupted`.
    """
    parts = []
    for i, domain in enumerate(corrupted(dataset, corruptions, **options)):
        [batch] = stream(domain, batch_size=count, first=count, shuffle=shuffle, seed=seed, device=device)
        parts.append(batch.x[i :: len(corruptions)])
    return torch.cat(parts)


def shifted_domains(
    dataset: Any,
    count: int = 128,
    corruptions: Sequence[str] = VALIDATION_CORRUPTIONS,
    *,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Return the same `count` images of a clean data set under each corruption at severity 5: one tensor for each."""
    found = []
    for domain in corrupted(dataset, corruptions):
        [batch] = stream(domain, batch_size=count, first=count, seed=seed, device=device)
        found.append(batch.x)
    return found


def _check(steps: int, pull: float) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    if not 0 <= pull < 1:
        raise ValueError(f"pull is a share of the distance to the source: at least 0 and below 1, not {pull}")


def _episodes(name: str, images: Any, batch_size: int, seed: int, steps: int) -> Episodes:
    if name not in EPISODES:
        raise unknown("kind of episodes", name, EPISODES)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if name == "passes":
        return Passes(images, batch_size, seed)
    return Streams(images, batch_size, seed, steps)


def _judged_by(validation: Any, lr: float) -> str:
    if validation is None:
        return "mean objective"
    return f"accuracy at lr {lr}"


def _start(generator: MetaGradientGenerator | None, hidden_size: int, memory: str, seed: int) -> MetaGradientGenerator:
    """Return a copy of the generator, or a new one from the seed."""
    if generator is not None:
        return copy.deepcopy(generator).requires_grad_(True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MetaGradientGenerator(hidden_size, memory)
