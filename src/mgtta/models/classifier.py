"""A timm name, or any nn.Module, as a Classifier: images in, scored logits and pooled layer features out.

Shapes: N images, C scored classes, d_i features of layer i.
"""

import re
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

from mgtta._lib.files import fingerprint
from mgtta.models.features import feature_taps
from mgtta.models.norms import batch_norms

REFUSAL = re.compile("shape|size|dimension|channels|Expected")  # a network's own words about images that do not fit


class Classifier(nn.Module):
    """An image classifier that normalises its own input and gives the features of each layer.

    It never trains in torch's sense: dropout stays off whatever `train()` is told. Images are uint8, or float
    in [0, 1]; where `mean` and `std` are not given, the network is taken to do its own normalising.
    """

    takes_empty = False  # whether a batch of no images, a rank's share of a small one, gives no logits or is refused
    image_dtype: torch.dtype | None = None  # in which images are normalised, where it is not the weights'

    def __init__(
        self,
        net: nn.Module,
        *,
        name: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        classes: Sequence[int] | None = None,
    ):
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError("mean and std come together: give both or neither")
        self.net = net
        self.name = name or type(net).__name__
        self.mean: Tensor | None
        self.std: Tensor | None
        self.classes: Tensor | None
        self.register_buffer("mean", None if mean is None else torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", None if std is None else torch.tensor(std).view(1, -1, 1, 1))
        self.register_buffer("classes", None if classes is None else _class_index(classes, net))
        self._last_class = -1 if self.classes is None else int(self.classes.max())
        self._taps = feature_taps(net)
        self._uses_batch_statistics = False
        self.train(False)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the scored classes, (N, C)."""
        logits = self._run(self._prepare(x)) if len(x) or not self.takes_empty else self._run_none(x)
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(x):
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"{self.name} returned {shape} for images {tuple(x.shape)}; a classifier returns one tensor of logits "
                "(N, classes): wrap it in a module that does, and give it batches (x.unsqueeze(0) for one image)"
            )
        if self.classes is None:
            return logits
        if self._last_class >= logits.shape[1]:
            raise _too_few_classes(self._last_class, logits.shape[1])
        return logits[:, self.classes]

    def features(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits, and the pooled features (N, d_i) of each layer i, from one forward pass."""
        x = self.pixels(x)
        found: dict[str, Tensor] = {}
        handles = [tap.attach(self.net, len(x) or 1, found) for tap in self._taps]
        try:
            logits = self(x)
        finally:
            for handle in handles:
                handle.remove()
        pooled = self.in_order(found)
        return logits, pooled if len(x) else [f[:0] for f in pooled]

    def in_order(self, found: dict[str, Tensor]) -> list[Tensor]:
        """What the taps found, layer by layer."""
        if not found:
            raise ValueError(f"none of {self.name}'s normalisation layers takes part in its forward pass")
        return [found[tap.name] for tap in self._taps if tap.name in found]

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits (N, C), and what the head turned into them, (N, D)."""
        found: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _head, inputs: found.append(inputs[0]))
        try:
            logits = self(x)
        finally:
            handle.remove()
        return logits, found[-1].reshape(len(logits), -1)

    @property
    def head(self) -> nn.Linear:
        """The linear layer that gives the logits."""
        get_classifier = getattr(self.net, "get_classifier", None)
        head = get_classifier() if get_classifier is not None else None
        if not isinstance(head, nn.Linear):
            head = next((m for m in reversed(list(self.net.modules())) if isinstance(m, nn.Linear)), None)
        if head is None:
            raise ValueError(f"{self.name} has no linear head, which this method works on")
        return head

    @property
    def num_classes(self) -> int:
        """The number of scored classes, C."""
        if self.classes is not None:
            return len(self.classes)
        return getattr(self.net, "num_classes", None) or self.head.out_features

    @property
    def input_size(self) -> tuple[int, float]:
        """The side of the images it was trained on, and the part of an image that the centre crop keeps."""
        config = getattr(self.net, "pretrained_cfg", None) or {}
        patches = getattr(getattr(self.net, "patch_embed", None), "img_size", None)
        side = patches[0] if patches else (config.get("input_size") or (3, 224, 224))[-1]
        return side, config.get("crop_pct") or 0.875

    def use_batch_statistics(self) -> "Classifier":
        """Let BatchNorm layers normalise by the batch at hand; their running statistics stay as they are."""
        self._uses_batch_statistics = True
        for layer in batch_norms(self.net):
            layer.track_running_stats = False
            layer.register_forward_pre_hook(_batch_statistics_where_defined)
        return self.train()

    def use_running_statistics(self) -> "Classifier":
        """Let BatchNorm layers normalise by their running statistics: what `use_batch_statistics` did, undone."""
        self._uses_batch_statistics = False
        for layer in batch_norms(self.net):
            layer.track_running_stats = True
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is _batch_statistics_where_defined:
                    del layer._forward_pre_hooks[key]
        return self.train()

    def train(self, mode: bool = True) -> "Classifier":
        super().train(False)
        if self._uses_batch_statistics:
            for layer in batch_norms(self.net):
                layer.training = True
        return self

    def fingerprint(self) -> str:
        """A hash of weights, running statistics and normalisation, the same on any device and in float64.

        Rounded to half precision, the weights are others, and so is the hash.
        """
        return fingerprint(self.state_dict())

    def pixels(self, x: Tensor) -> Tensor:
        """The images as floats in [0, 1], on the network's device and in its dtype; refused where they do not fit."""
        self.check(x)
        like = next(self.net.parameters())
        moved = x.to(like.device, self.image_dtype or like.dtype, non_blocking=True)
        return moved / 255 if x.dtype == torch.uint8 else moved

    def check(self, x: Tensor) -> None:
        """Refuse what is not a batch of images."""
        if not isinstance(x, Tensor):
            raise TypeError(f"images must be a torch.Tensor, not {type(x).__name__}")
        channels = None if self.mean is None else self.mean.shape[1]
        if channels is not None and (x.ndim != 4 or x.shape[1] != channels):
            raise ValueError(
                f"{self.name} takes images of shape (N, {channels}, H, W), not {tuple(x.shape)}"
                + ("; add the batch dimension with x.unsqueeze(0)" if x.ndim == 3 else "")
            )
        if x.ndim < 2 or (x.numel() == 0 and not self.takes_empty):
            raise ValueError(f"the batch is empty or has no batch dimension: its shape is {tuple(x.shape)}")
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise TypeError(f"images must be uint8, or float in [0, 1], not {x.dtype}")

    def _prepare(self, x: Tensor) -> Tensor:
        x = self.pixels(x)
        return x if self.mean is None or self.std is None else (x - self.mean.to(x)) / self.std.to(x)

    def _run_none(self, x: Tensor) -> Tensor:
        """The logits (0, C), from one black image, since few networks take none: the graph is that of any batch."""
        return self._run(self._prepare(x.new_zeros(1, *x.shape[1:])))[:0]

    def _run(self, x: Tensor) -> Tensor:
        try:
            return self.net(x)
        except (AssertionError, ValueError, RuntimeError) as error:  # an assertion is timm's way to refuse a size
            if isinstance(error, RuntimeError) and not REFUSAL.search(str(error)):
                raise
            hint = "; x.unsqueeze(0) makes a batch of one image" if x.ndim == 3 else ""
            raise ValueError(f"{self.name} refuses images of shape {tuple(x.shape)}: {error}{hint}") from error


def _batch_statistics_where_defined(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A batch of one value a channel has no variance; there the running statistics serve."""
    x = inputs[0]
    layer.training = x.numel() > x.shape[1] or getattr(layer, "running_mean", None) is None


def _class_index(classes: Sequence[int], net: nn.Module) -> Tensor:
    numbers = classes.tolist() if isinstance(classes, Tensor) else list(classes)
    if not all(isinstance(c, Integral) for c in numbers):
        raise ValueError(f"classes must be whole numbers, not {numbers[:3]}")
    index = torch.tensor(numbers, dtype=torch.long)
    if index.numel() < 2 or index.min() < 0 or len(index.unique()) != len(index):
        raise ValueError("classes must be at least two different, non-negative class indices")
    total = getattr(net, "num_classes", None)
    if total and index.max() >= total:
        raise _too_few_classes(int(index.max()), total)
    return index


def _too_few_classes(wanted: int, total: int) -> ValueError:
    return ValueError(f"classes asks for class {wanted}, but the model has {total} classes (0 to {total - 1})")
