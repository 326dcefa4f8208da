"""Gather: predict every call at once, keep the images, and learn from so many together.

A gradient of one image is mostly noise, and a step along it does harm. So images of small batches are kept until there
are enough of them; then the method learns from all of them, once, and forgets them. A call takes one forward pass, and
now and then one update.

BatchNorm layers cannot normalise by one image. A batch of fewer than FEW_IMAGES images is predicted with the statistics
of the stream so far, and of the source before there are enough images in them. The update normalises by the images that
were gathered. Only there are statistics collected from small batches: layer by layer, each behind layers that normalise
by the same images. Statistics of layers behind others that normalise otherwise do not fit together.

A network that blends statistics, that of mgtta+ on ResNets, predicts few images one by one (models/blended.py). It
learns from them in the same way: what is learned under other statistics does harm under these. Where classes come in
turn (turns.py), no batch has statistics to normalise by, however large: its images are also taken one by one.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta._lib.names import spelled
from mgtta.adaptation.method import Events, Method
from mgtta.adaptation.shift import Arriving
from mgtta.adaptation.step import Pass, scaled_rates
from mgtta.adaptation.turns import FEW_IMAGES, Turns
from mgtta.adaptation.wrapper import Log, Wrapper, unlearned_model
from mgtta.models.classifier import Classifier
from mgtta.models.statistics import StreamStatistics, image_by_image, running_statistics

PRIOR_IMAGES = 16  # for which the source's statistics count among those of the stream
BY_IMAGE_RATE = 0.3  # of the learning rate, where images are normalised one by one


class Gathered(Wrapper):
    """A method that learns from at least `images` images at a time, however few of them come in a call.

    Kept images are part of the state. If they differ in size, the most frequent size is learned from. A batch whose
    logits are not finite is not kept, and counts as skipped.

    Attributes:
        images: the number of images; with ranks, on all of them together.
        kept: the images that wait, batch by batch, as they came. Whether those of the last batch do is known before the
            next one: a GPU is not waited for.
        unlearned: the source model, normalising as the method does; None if the network blends no statistics. It is
            not a part of the state.
        turns: whether classes come in turn; None if the network blends no statistics, for which it makes no difference.
    """

    state_name = "gather"
    method: Method
    _kept: list[Tensor]
    _tried: list[Tensor]  # learned from before it was known whether the last of them was finite
    _total: Arriving  # sum of the absolute logits of the last batch
    unlearned: Classifier | None
    turns: Turns | None

    def __init__(self, method: Method, images: int):
        name = spelled(method.name)
        if method.optimizer is None:
            raise ValueError(f"{name} does not learn by gradients, so it has no use for gather: leave it out")
        super().__init__(method)
        self.images = images
        unlearned = unlearned_model(method) if self._blends else None
        vars(self)["unlearned"] = unlearned  # not a submodule, whose weights torch would save
        self.begin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Gathered":
        """Move the source model along with the method."""
        super()._apply(fn, recurse)
        if self.unlearned is not None:
            self.unlearned._apply(fn)
        return self

    @property
    def kept(self) -> list[Tensor]:
        self._settle()
        return self._kept

    @property
    def waiting(self) -> int:
        return sum(map(len, self.kept))

    @property
    def events(self) -> Events:
        self._look_at_turns()
        return [*self.method.events, *self.log.events]

    @torch.inference_mode(False)
    def step(self, x: Tensor, learn: bool = True) -> Pass:
        """Predict x; keep it, and learn from all that is kept if that is enough."""
        if self.paused:
            return Pass(self.predict(x))
        self.model.check(x)
        self._look_at_turns()
        if self.turns is not None:
            self.log.images += len(x)
        if self.spent:
            source_logits = self._ask_source(x)
            seen = Pass(self.predict(x))
            self._follow_turns(seen, source_logits)
            return seen
        if not learn:
            return self._predict(x)
        ranks = self.ranks
        if ranks.size == 1 and len(x) < self.images:
            seen = self._predict(x)  # first: what follows is done while a GPU predicts
            before, coming = float(self.waiting), float(len(x))
        else:
            before, coming = ranks.total([self.waiting, len(x)])
            if not before and coming >= self.images and not self._poor(len(x)):
                return self._step_at_once(x)
            seen = self._predict(x)
        self._kept.append(x.detach().clone())
        self._total.send(torch.linalg.vector_norm(seen.logits, 1), None)  # one kernel; finite only if all logits are
        if before + coming >= self.images:
            self._learn_together(before + coming)
        elif ranks.size > 1:  # they decide together, at each call
            self._settle()
        return seen

    def _step_at_once(self, x: Tensor) -> Pass:
        """Predict x and learn from it in one step."""
        source_logits = self._ask_source(x)
        if self.one_by_one(len(x)):
            with self._by_image(), self._slower():
                seen = self.method.step(x, collect=False)
        else:
            seen = self.method.step(x)
        self._follow_turns(seen, source_logits)
        return seen

    def _ask_source(self, x: Tensor) -> Tensor | None:
        """Return the source's logits of images one by one, for `turns`; None if it does not ask."""
        if self.turns is None or self.unlearned is None or not self.turns.asks or self._poor(len(x)):
            return None
        return predicted_one_by_one(self.unlearned, x)

    def _follow_turns(self, seen: Pass, source_logits: Tensor | None) -> None:
        """Let `turns` know the predictions of a batch.

        Args:
            source_logits: what `_ask_source` gave.
        """
        if self.turns is None or self._poor(len(seen.logits)):
            return
        self.turns.follow(None if self.turns.come else seen.logits, source_logits)

    def _learn_together(self, expected: float) -> None:
        """Learn from all that is kept, unless the last batch was not finite and there are fewer images than expected.

        A GPU does so while the caller reads the last prediction. Whether that is finite is not known yet then; if it is
        not, the GPU leaves out the update, and the other images are kept for the next one.
        """
        waits = self.ranks.size > 1 or not self.engine.leaves_out or not self._total.comes_later
        if waits:
            [found] = self.ranks.total([self.waiting])
            if found < expected:
                return
        alike = self._alike()
        together = torch.cat([x.to(alike[0].device) for x in alike])
        tried = self._kept
        total = self._total
        self.forget()
        if not waits:
            self._tried = tried
            self._total = total
        with self.engine.apart(together):
            self._learn(together, come_few(alike))

    def _settle(self) -> None:
        """Drop the last batch, and count it as skipped, if its logits were not finite."""
        held = self._total.take()
        tried = self._tried
        self._tried = []
        if held is None or self.ranks.all(held[0].isfinite()):
            return
        if tried:  # the engine has counted a skip
            self._kept = tried[:-1]
            return
        self._kept.pop()
        self.engine.skipped += 1

    def learn(self, x: Tensor, few: bool = False) -> Pass:
        self._look_at_turns()
        return self._learn(x, few)

    def _learn(self, x: Tensor, few: bool) -> Pass:
        """Do what `learn` does, as things stood when the last batch came: a GPU is not waited for."""
        if self.turns is None or not (few or self.turns.come):
            return self.method.step(x, observe=False, collect=few)
        with self._by_image(), self._slower():
            return self.method.step(x, observe=False, collect=False)

    def predict(self, x: Tensor) -> Tensor:
        self.model.check(x)
        self._look_at_turns()
        with self._normalising(len(x)):
            return self.method.predict(x)

    def warm_up(self, x: Tensor) -> None:
        """Compile for batches of x's shape, and for the batch in which so many of them are learned from."""
        batches = math.ceil(self.images / len(x))
        few = self._poor(len(x))
        if batches == 1 and not few:
            self.method.warm_up(x)
            return
        with self._normalising(len(x)):
            self.method.warm_up(x, learn=False, collect=not few)
        with self._by_image() if few and self.turns is not None else nullcontext():
            together = x.repeat(batches, *(1 for _ in x.shape[1:]))
            self.method.warm_up(together, learn=True, observe=False, collect=few and self.turns is None)

    def export(self) -> nn.Module:
        """Return what the method's `export` does; where classes come in turn, with the source's statistics."""
        self._look_at_turns()
        statistics = self.method.statistics
        if self.turns is not None and self.turns.come:
            self.method.statistics = None
        try:
            return self.method.export()
        finally:
            self.method.statistics = statistics

    def snapshot(self) -> dict[str, Any]:
        self._settle()  # this and the next line may change what the method saves
        self._look_at_turns()
        return super().snapshot()

    def own(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kept": [x.clone() for x in self.kept]}
        if self.turns is not None:
            state["turns"] = self.turns.state()
            state["log"] = self.log.state()
        return state

    def check_own(self, state: Any) -> tuple[list[Tensor], Turns | None, Log]:
        names = [{"kept"}]  # files of earlier versions have no more
        if self.turns is not None:
            names.append({"kept", "turns", "log"})
        if not isinstance(state, dict) or state.keys() not in names:
            raise ValueError("invalid gather state: it has other entries")
        kept = state["kept"]
        if not isinstance(kept, list | tuple) or not all(isinstance(x, Tensor) and x.ndim for x in kept):
            raise ValueError("invalid gather state: what it kept are not images")
        if sum(map(len, kept)) >= self.images:
            raise ValueError(f"invalid gather state: it kept more images than gather={self.images} lets wait")
        try:
            for x in kept:
                self.model.check(x)
        except (TypeError, ValueError) as error:
            raise ValueError(f"invalid gather state: {error}") from error
        turns = None if self.turns is None else Turns()
        log = Log()
        if "turns" in state:
            turns = Turns.loaded(state["turns"])
            log = Log.loaded(state["log"], "gather")
        return [x.clone() for x in kept], turns, log

    def load_own(self, checked: tuple[list[Tensor], Turns | None, Log]) -> None:
        self.begin()
        kept, self.turns, self.log = checked
        self._kept += kept

    def begin(self) -> None:
        self.forget()
        self.turns = Turns() if self._blends else None

    def forget(self) -> None:
        """Forget the images that wait."""
        self._kept = []
        self._tried = []
        self._total = Arriving()

    def one_by_one(self, n: int) -> bool:
        """Return whether a batch of n images is normalised image by image, as things stood when the last one came."""
        return self.turns is not None and (n < FEW_IMAGES or self.turns.come)

    def _look_at_turns(self) -> None:
        """Decide whether classes come in turn."""
        change = None if self.turns is None else self.turns.decide()
        if self.turns is None or change is None:
            return
        self.log.note(self.log.images, "one by one" if self.turns.come else "by batch", change=change)
        if self.turns.come and self.method.statistics is not None:  # those so far are of few classes: begin anew
            self.method.statistics.load_state_dict(StreamStatistics(self.model.net).state_dict())

    def _predict(self, x: Tensor) -> Pass:
        source_logits = self._ask_source(x)
        with self._normalising(len(x)):
            poor = self._poor(len(x)) or self.one_by_one(len(x))
            seen = self.method.step(x, learn=False, collect=not poor)
        self._follow_turns(seen, source_logits)
        return seen

    def _alike(self) -> list[Tensor]:
        """Return the kept images of the most frequent shape and dtype, batch by batch."""
        images: Counter[Any] = Counter()
        for x in self._kept:
            images[x.shape[1:], x.dtype] += len(x)
        [(frequent, _)] = images.most_common(1)
        return [x for x in self._kept if (x.shape[1:], x.dtype) == frequent]

    def _poor(self, n: int) -> bool:
        """Return whether n images are too few for BatchNorm layers, if there are any."""
        return self.method.statistics is not None and n < FEW_IMAGES

    @property
    def _blends(self) -> bool:
        """True if BatchNorm layers blend statistics, so that few images are predicted one by one."""
        return self.method.statistics is not None and self.model.source_share > 0

    def _normalising(self, n: int) -> AbstractContextManager[None]:
        """Return a block in which BatchNorm layers normalise n images as suits so many."""
        if self.one_by_one(n):
            return self._by_image()
        if self._poor(n):
            return self._stream_statistics()
        return nullcontext()

    def _slower(self) -> AbstractContextManager[None]:
        """Return a block in which the learning rate is that of images which are normalised one by one."""
        assert self.optimizer is not None
        return scaled_rates(self.optimizer, BY_IMAGE_RATE)

    @contextmanager
    def _by_image(self) -> Iterator[None]:
        self.engine.by_image = True
        try:
            yield
        finally:
            self.engine.by_image = False

    @contextmanager
    def _stream_statistics(self) -> Iterator[None]:
        """Let BatchNorm layers normalise by the stream's statistics within the block."""
        statistics = self.method.statistics
        assert statistics is not None
        layers = [layer for _, layer in self._batch_norms()]
        before = [(layer, layer.running_mean, layer.running_var) for layer in layers]
        for i, layer in self._batch_norms():
            layer.running_mean, layer.running_var = blended(statistics, i, layer)
        by_modules = self.engine.by_modules
        self.engine.by_modules = True
        try:
            with running_statistics(layers):
                yield
        finally:
            self.engine.by_modules = by_modules
            for layer, mean, var in before:
                layer.running_mean = mean
                layer.running_var = var

    def _batch_norms(self) -> Iterator[tuple[int, _BatchNorm]]:
        """Yield number and layer of all statistics, in the adapting network and in copies of it such as a teacher."""
        assert self.method.statistics is not None
        for model in self.method.modules():
            if isinstance(model, Classifier):
                for i, name in enumerate(self.method.statistics.layers):
                    layer = model.net.get_submodule(name)
                    assert isinstance(layer, _BatchNorm)
                    yield i, layer


@torch.no_grad()
def predicted_one_by_one(model: Classifier, x: Tensor) -> Tensor:
    """Return the logits (n, C) of images that do not depend on one another, by a model that blends statistics."""
    with image_by_image(model.net):
        return model(x)


def come_few(batches: Sequence[Tensor]) -> bool:
    """Return whether most images come in batches of fewer than FEW_IMAGES."""
    few = sum(len(x) for x in batches if len(x) < FEW_IMAGES)
    return 2 * few > sum(map(len, batches))


def blended(statistics: StreamStatistics, i: int, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return mean and variance (C,) of the stream for layer i, with the source's as if of PRIOR_IMAGES images.

    As in Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation" (2020).
    """
    source_mean = layer.get_buffer("running_mean")
    source_var = layer.get_buffer("running_var")
    mean = statistics.get_buffer(f"mean_{i}").to(source_mean)
    var = statistics.get_buffer(f"var_{i}").to(source_var)
    share = (statistics.images[i] / (statistics.images[i] + PRIOR_IMAGES)).to(source_mean)
    return torch.lerp(source_mean, mean, share), torch.lerp(source_var, var, share)
