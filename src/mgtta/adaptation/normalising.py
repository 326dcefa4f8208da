"""By what BatchNorm layers normalise images that come to a method: their batch, the stream, or each image by itself.

A layer cannot normalise by few images. A batch of fewer than FEW_IMAGES is normalised by the statistics of the stream
so far, and of the source before there are enough images in them. Only batches that are gathered from such images add to
these statistics: layer by layer, each behind layers that normalise by the same images. Statistics of layers behind
others that normalise otherwise do not fit together.

A network that blends statistics, that of mgtta+ on ResNets, normalises few images one by one (models/blended.py). It
learns from them in the same way: what is learned under other statistics does harm under these. Where classes come in
turn (turns.py), no batch has statistics to normalise by, however large: its images are also taken one by one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass, scaled_rates
from mgtta.adaptation.turns import FEW_IMAGES, Turns
from mgtta.adaptation.wrapper import unlearned_model
from mgtta.models.classifier import Classifier
from mgtta.models.statistics import StreamStatistics, image_by_image, running_statistics

PRIOR_IMAGES = 16  # for which the source's statistics count among those of the stream
BY_IMAGE_RATE = 0.3  # of the learning rate, where images are normalised one by one


class Normalisation:
    """How the BatchNorm layers of a method normalise what it predicts and learns from; without any, nothing happens.

    Attributes:
        blends: whether the layers blend statistics, so that few images are normalised one by one.
        unlearned: the source model, normalising as the method does; None if the layers blend nothing. It is not a part
            of the state, nor of the method's own modules.
        turns: whether classes come in turn; None if the layers blend nothing, for which it makes no difference.
    """

    def __init__(self, method: Method):
        self.method = method
        self.blends = method.statistics is not None and method.model.source_share > 0
        self.unlearned = unlearned_model(method) if self.blends else None
        self.turns: Turns | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the stream."""
        self.turns = Turns() if self.blends else None

    def few(self, n: int) -> bool:
        """Return whether n images are too few for BatchNorm layers, if there are any."""
        return self.method.statistics is not None and n < FEW_IMAGES

    def by_image(self, n: int) -> bool:
        """Return whether a batch of n images is normalised image by image, as things stood when the last one came."""
        return self.turns is not None and (n < FEW_IMAGES or self.turns.come)

    def suiting(self, n: int) -> AbstractContextManager[None]:
        """Return a block in which layers normalise n images as suits so many."""
        if self.by_image(n):
            return self._image_by_image()
        if self.few(n):
            return self._by_the_stream()
        return nullcontext()

    @contextmanager
    def learning(self, by_image: bool) -> Iterator[None]:
        """Within the block, normalise image by image and learn at the rate that suits it, or do as usual."""
        if not by_image:
            yield
            return
        assert self.method.optimizer is not None
        with self._image_by_image(), scaled_rates(self.method.optimizer, BY_IMAGE_RATE):
            yield

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Within the block, an export has the source's statistics where classes come in turn."""
        statistics = self.method.statistics
        if self.turns is not None and self.turns.come:
            self.method.statistics = None
        try:
            yield
        finally:
            self.method.statistics = statistics

    # --- whether classes come in turn

    def followed(self, x: Tensor, predict: Callable[[], Pass]) -> Pass:
        """Return what `predict` gives for x, and let `turns` know it; it may also want the source's prediction."""
        if self.turns is None or self.few(len(x)):
            return predict()
        by_source = None
        if self.unlearned is not None and self.turns.asks:
            by_source = predicted_by_image(self.unlearned, x)
        seen = predict()
        self.turns.follow(None if self.turns.come else seen.logits, by_source)
        return seen

    def decide(self) -> float | None:
        """Decide whether classes come in turn; return the change that decided, or None if the answer stays."""
        if self.turns is None:
            return None
        change = self.turns.decide()
        if change is not None and self.turns.come:  # statistics so far are of few classes: begin anew
            statistics = self.method.statistics
            assert statistics is not None
            statistics.load_state_dict(StreamStatistics(self.method.model.net).state_dict())
        return change

    # --- blocks

    @contextmanager
    def _image_by_image(self) -> Iterator[None]:
        engine = self.method.engine
        engine.by_image = True
        try:
            yield
        finally:
            engine.by_image = False

    @contextmanager
    def _by_the_stream(self) -> Iterator[None]:
        """Let layers normalise by the stream's statistics within the block."""
        layers = [layer for _, layer in self._batch_norms()]
        before = [(layer, layer.running_mean, layer.running_var) for layer in layers]
        statistics = self.method.statistics
        assert statistics is not None
        for i, layer in self._batch_norms():
            layer.running_mean, layer.running_var = of_stream_and_source(statistics, i, layer)
        engine = self.method.engine
        by_modules = engine.by_modules
        engine.by_modules = True
        try:
            with running_statistics(layers):
                yield
        finally:
            engine.by_modules = by_modules
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
def predicted_by_image(model: Classifier, x: Tensor) -> Tensor:
    """Return the logits (n, C) of images that do not depend on one another, by a model that blends statistics."""
    with image_by_image(model.net):
        return model(x)


def of_stream_and_source(statistics: StreamStatistics, i: int, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return mean and variance (C,) of the stream for layer i, with the source's as if of PRIOR_IMAGES images.

    As in Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation" (2020).
    """
    source_mean = layer.get_buffer("running_mean")
    source_var = layer.get_buffer("running_var")
    mean = statistics.get_buffer(f"mean_{i}").to(source_mean)
    var = statistics.get_buffer(f"var_{i}").to(source_var)
    share = (statistics.images[i] / (statistics.images[i] + PRIOR_IMAGES)).to(source_mean)
    return torch.lerp(source_mean, mean, share), torch.lerp(source_var, var, share)
