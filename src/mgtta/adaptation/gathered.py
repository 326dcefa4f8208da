"""Gather: predict every call at once, keep the images, and learn from so many together.

A gradient of one image is mostly noise, and a step along it does harm. So images of small batches are kept until there
are enough of them; then the method learns from all of them, once, and forgets them. A call takes one forward pass, and
now and then one update. By what BatchNorm layers normalise few images, in both, is told in normalising.py.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.names import spelled
from mgtta.adaptation.method import Events, Method
from mgtta.adaptation.normalising import Normalisation
from mgtta.adaptation.shift import Arriving
from mgtta.adaptation.step import Pass
from mgtta.adaptation.turns import FEW_IMAGES, Turns
from mgtta.adaptation.wrapper import Log, Wrapper


class Gathered(Wrapper):
    """A method that learns from at least `images` images at a time, however few of them come in a call.

    Kept images are part of the state. If they differ in size, the most frequent size is learned from. A batch whose
    logits are not finite is not kept, and counts as skipped.

    Attributes:
        images: the number of images; with ranks, on all of them together.
        kept: the images that wait, batch by batch, as they came. Whether those of the last batch do is known before the
            next one: a GPU is not waited for.
        normalisation: by what BatchNorm layers normalise.
    """

    state_name = "gather"
    method: Method
    _kept: list[Tensor]
    _tried: list[Tensor]  # learned from before it was known whether the last of them was finite
    _total: Arriving  # sum of the absolute logits of the last batch

    def __init__(self, method: Method, images: int):
        name = spelled(method.name)
        if method.optimizer is None:
            raise ValueError(f"{name} does not learn by gradients, so it has no use for gather: leave it out")
        super().__init__(method)
        self.images = images
        self.normalisation = Normalisation(method)
        self.begin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Gathered":
        """Move the source model along with the method."""
        super()._apply(fn, recurse)
        if self.normalisation.unlearned is not None:
            self.normalisation.unlearned._apply(fn)
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
        self._decide()
        return [*self.method.events, *self.log.events]

    @torch.inference_mode(False)
    def step(self, x: Tensor, learn: bool = True) -> Pass:
        """Predict x; keep it, and learn from all that is kept if that is enough."""
        if self.paused:
            return Pass(self.predict(x))
        self.model.check(x)
        self._decide()
        if self.normalisation.blends:
            self.log.images += len(x)
        if self.spent:
            return self.normalisation.followed(x, lambda: Pass(self.predict(x)))
        if not learn:
            return self._predict(x)
        ranks = self.ranks
        if ranks.size == 1 and len(x) < self.images:
            seen = self._predict(x)  # first: what follows is done while a GPU predicts
            before, coming = float(self.waiting), float(len(x))
        else:
            before, coming = ranks.total([self.waiting, len(x)])
            if not before and coming >= self.images and not self.normalisation.few(len(x)):
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
        by_image = self.normalisation.by_image(len(x))
        with self.normalisation.learning(by_image):
            return self.normalisation.followed(x, lambda: self.method.step(x, collect=not by_image))

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
        self._decide()
        return self._learn(x, few)

    def _learn(self, x: Tensor, few: bool) -> Pass:
        """Do what `learn` does, as things stood when the last batch came: a GPU is not waited for."""
        turns = self.normalisation.turns
        by_image = turns is not None and (few or turns.come)
        with self.normalisation.learning(by_image):
            return self.method.step(x, observe=False, collect=few and not by_image)

    def predict(self, x: Tensor) -> Tensor:
        self.model.check(x)
        self._decide()
        with self.normalisation.suiting(len(x)):
            return self.method.predict(x)

    def warm_up(self, x: Tensor) -> None:
        """Compile for batches of x's shape, and for the batch in which so many of them are learned from."""
        batches = math.ceil(self.images / len(x))
        few = self.normalisation.few(len(x))
        if batches == 1 and not few:
            self.method.warm_up(x)
            return
        with self.normalisation.suiting(len(x)):
            self.method.warm_up(x, learn=False, collect=not few)
        by_image = few and self.normalisation.blends
        with self.normalisation.learning(by_image):
            together = x.repeat(batches, *(1 for _ in x.shape[1:]))
            self.method.warm_up(together, learn=True, observe=False, collect=few and not by_image)

    def export(self) -> nn.Module:
        """Return what the method's `export` does; where classes come in turn, with the source's statistics."""
        self._decide()
        with self.normalisation.exporting():
            return self.method.export()

    def snapshot(self) -> dict[str, Any]:
        self._settle()  # this and the next line may change what the method saves
        self._decide()
        return super().snapshot()

    def own(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kept": [x.clone() for x in self.kept]}
        if self.normalisation.turns is not None:
            state["turns"] = self.normalisation.turns.state()
            state["log"] = self.log.state()
        return state

    def check_own(self, state: Any) -> tuple[list[Tensor], Turns | None, Log]:
        if not isinstance(state, dict) or state.keys() not in ({"kept"}, {"kept", "turns", "log"}):
            raise ValueError("invalid gather state: it has other entries")
        if "turns" in state and not self.normalisation.blends:
            raise ValueError(
                "this state is of a network that blends BatchNorm statistics, and this one does not: give the "
                "source_share with which it was made"
            )
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
        turns = Turns() if self.normalisation.blends else None  # files of earlier versions do not have it
        log = Log()
        if "turns" in state:
            turns = Turns.loaded(state["turns"])
            log = Log.loaded(state["log"], "gather")
        return [x.clone() for x in kept], turns, log

    def load_own(self, checked: tuple[list[Tensor], Turns | None, Log]) -> None:
        self.begin()
        kept, self.normalisation.turns, self.log = checked
        self._kept += kept

    def begin(self) -> None:
        self.forget()
        self.normalisation.begin()

    def forget(self) -> None:
        """Forget the images that wait."""
        self._kept = []
        self._tried = []
        self._total = Arriving()

    def _decide(self) -> None:
        """Decide whether classes come in turn, and note a change."""
        change = self.normalisation.decide()
        turns = self.normalisation.turns
        if turns is not None and change is not None:
            self.log.note(self.log.images, "one by one" if turns.come else "by batch", change=change)

    def _predict(self, x: Tensor) -> Pass:
        n = len(x)
        collect = not self.normalisation.few(n) and not self.normalisation.by_image(n)

        def predict() -> Pass:
            with self.normalisation.suiting(n):
                return self.method.step(x, learn=False, collect=collect)

        return self.normalisation.followed(x, predict)

    def _alike(self) -> list[Tensor]:
        """Return the kept images of the most frequent shape and dtype, batch by batch."""
        images: Counter[Any] = Counter()
        for x in self._kept:
            images[x.shape[1:], x.dtype] += len(x)
        [(frequent, _)] = images.most_common(1)
        return [x for x in self._kept if (x.shape[1:], x.dtype) == frequent]


def come_few(batches: Sequence[Tensor]) -> bool:
    """Return whether most images come in batches of fewer than FEW_IMAGES."""
    few = sum(len(x) for x in batches if len(x) < FEW_IMAGES)
    return 2 * few > sum(map(len, batches))
