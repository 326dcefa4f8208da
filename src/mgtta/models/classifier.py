"""The Classifier: any nn.Module with images in, scored logits and pooled layer features out.

Shapes: N images, C scored classes, d_i features of layer i.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

import torch
from torch import Tensor, nn

from mgtta._lib.files import fingerprint
from mgtta.models.alike import LookAlikes, Looks
from mgtta.models.checks import FirstBatches, check_images, check_logits, refused
from mgtta.models.features import Tap, TapReader, feature_taps
from mgtta.models.head import HeadTap, head_layer, linear_head, logits_of
from mgtta.models.norms import Chosen, as_norm_types, batch_norms
from mgtta.models.statistics import use_batch_statistics, use_running_statistics

SAME = 1e-5  # largest difference of features that were pooled in another order, as a share of the largest value


class Classifier(nn.Module):
    """An image classifier that normalises its own input and returns the features of each layer.

    Images are uint8, or float in [0, 1]. If `mean` and `std` are not given, images go to the network as they are.
    Dropout stays off, also after `train()`.

    Attributes:
        normalised: images come already normalised, so nothing is applied to them.
        size: what `input_size` returns; None: what the network tells.
        takes_empty: whether a batch of no images returns no logits (a rank's share of a small batch) or is refused.
        image_dtype: in which images are normalised; None: the dtype of the weights.
        norm_types: classes of a user's own that count as normalisation layers.
        adapts: the parameters that adapt, if a user chose them; see `mgtta.create`.
        full_precision: name in the network -> float32 value on the CPU, of weights that were rounded to bfloat16.
    """

    takes_empty = False
    image_dtype: torch.dtype | None = None
    adapts: Chosen | None = None
    mean: Tensor | None
    std: Tensor | None
    classes: Tensor | None

    def __init__(
        self,
        net: nn.Module,
        *,
        name: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        classes: Sequence[int] | None = None,
        normalised: bool = False,
        size: tuple[int, float] | None = None,
        norm_types: Sequence[type[nn.Module]] | type[nn.Module] = (),
    ):
        super().__init__()
        if (mean is None) != (std is None):
            raise ValueError("mean and std come together: give both or neither")
        if normalised and mean is not None:
            raise ValueError("normalised images need no mean and std: give these, or normalised=True")
        self.net = net
        self.name = name or type(net).__name__
        self.normalised = normalised
        self.size = size
        self.norm_types = as_norm_types(norm_types)
        self.register_buffer("mean", _per_channel(mean))
        self.register_buffer("std", _per_channel(std))
        self.register_buffer("classes", None)
        self._last_class = -1
        if classes is not None:
            self.classes = _class_index(classes, net)
            self._last_class = int(self.classes.max())
        self._taps: list[Tap | HeadTap] = [*feature_taps(net, self.norm_types)]
        self.source_share = 0.0  # of the statistics that BatchNorm layers normalise by
        self.own_share = 0.0  # the same, of each image's own
        self.looks: Looks | None = None  # by which they find images that look alike
        self.alikes: LookAlikes | None = None
        self._uses_batch_statistics = False
        self._first_batches = FirstBatches()
        self.full_precision: dict[str, Tensor] = {}
        self.train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the scored classes, (N, C)."""
        logits = self._all_logits(x)
        check_logits(logits, x, self.name)
        self._first_batches.look_at_logits(logits, self.name)
        if self.classes is None:
            return logits
        if self._last_class >= logits.shape[1]:
            raise _too_few_classes(self._last_class, logits.shape[1])
        return logits[:, self.classes]

    def features(self, x: Tensor, *more: HeadTap) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and the pooled features (N, d_i) of each layer i, from one forward pass.

        Args:
            more: what else is read in this pass; it comes after the layers' features.
        """
        x = self.pixels(x)
        reader = TapReader(self.net, [*self._taps, *more], self.name)
        reader.images = len(x) or 1
        try:
            logits = self(x)
        finally:
            reader.remove()
        features = reader.take()
        if len(x) == 0:
            features = [f[:0] for f in features]
        return logits, features

    def head_layer(self, x: Tensor) -> str:
        """Return the name of the layer that gives the logits of x; "" if no single layer does."""
        return head_layer(self.net, lambda: self._all_logits(x))

    def is_last_layer(self, last: Tensor, read: Tensor) -> bool:
        """Return whether what the head reads (N, d) are the last layer's features, which `features` returned."""
        tap = self._taps[-1]
        if not isinstance(tap, Tap) or tap.at_input or last.shape != read.shape or not read.any():
            return False
        return bool((last - read).abs().max() <= SAME * read.abs().max())

    def read_head(self, layer: str) -> None:
        """Let `features` return, after the layers' features, what this head reads (see `head_layer`)."""
        self._taps.append(HeadTap(layer))

    @property
    def reads_head(self) -> bool:
        """True after `read_head`."""
        return isinstance(self._taps[-1], HeadTap)

    def reader(self) -> TapReader:
        """Return a reader of the layers' features, which reads every forward pass until it is removed."""
        return TapReader(self.net, self._taps, self.name)

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (N, C), and the head's input (N, D)."""
        found: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _head, inputs: found.append(inputs[0]))
        try:
            logits = self(x)
        finally:
            handle.remove()
        return logits, found[-1].reshape(len(logits), -1)

    @property
    def head(self) -> nn.Linear:
        """The linear layer that returns the logits."""
        return linear_head(self.net, self.name)

    @property
    def num_classes(self) -> int:
        """The number of scored classes, C."""
        if self.classes is not None:
            return len(self.classes)
        return getattr(self.net, "num_classes", None) or self.head.out_features

    @property
    def input_size(self) -> tuple[int, float]:
        """The side in pixels of the images it was trained on, and the share of an image that the centre crop keeps."""
        if self.size is not None:
            return self.size
        config = getattr(self.net, "pretrained_cfg", None) or {}
        crop = config.get("crop_pct") or 0.875
        patches = getattr(getattr(self.net, "patch_embed", None), "img_size", None)
        if patches:
            return patches[0], crop
        huggingface = getattr(getattr(self.net, "config", None), "image_size", None)
        if isinstance(huggingface, int):
            return huggingface, crop
        shape = config.get("input_size") or (3, 224, 224)
        return shape[-1], crop

    def use_batch_statistics(
        self, source_share: float = 0.0, own_share: float = 0.0, looks: Looks | None = None
    ) -> "Classifier":
        """Let BatchNorm layers normalise by the current batch; their running statistics do not change.

        Args:
            source_share: of the running statistics among those that layers normalise by.
            own_share: of each image's own statistics.
            looks: of clean images. Images of a batch that look alike count more for one another; None: all the same.
        """
        alikes = None if looks is None else LookAlikes(self.net, looks)
        use_batch_statistics(self.net, source_share, own_share, alikes)
        self._uses_batch_statistics = True
        self.source_share = source_share
        self.own_share = own_share
        self.looks = looks
        self.alikes = alikes
        return self.train()

    def use_running_statistics(self) -> "Classifier":
        """Let BatchNorm layers normalise by their running statistics: undo `use_batch_statistics`."""
        self._uses_batch_statistics = False
        self.source_share = 0.0
        self.own_share = 0.0
        self.looks = None
        self.alikes = None
        use_running_statistics(self.net)
        return self.train()

    def train(self, mode: bool = True) -> "Classifier":
        """Keep evaluation mode, except for BatchNorm layers that use batch statistics."""
        super().train(False)
        if self._uses_batch_statistics:
            for layer in batch_norms(self.net):
                layer.training = True
        return self

    def fingerprint(self) -> str:
        """Return a hash of weights, running statistics and normalisation, the same on any device and in float64.

        Weights that are rounded to half precision have another hash.
        """
        return fingerprint(self.state_dict())

    def pixels(self, x: Tensor) -> Tensor:
        """Return the images as floats in [0, 1], on the network's device and in its dtype; invalid ones are refused.

        If the images come normalised, they stay so.
        """
        self.check(x)
        like = next(self.net.parameters())
        moved = x.to(like.device, self.image_dtype or like.dtype, non_blocking=True)
        return moved / 255 if x.dtype == torch.uint8 else moved

    def check(self, x: Tensor) -> None:
        """Raise an error unless x is a batch of images; warn of images that would be normalised twice."""
        channels = None if self.mean is None else self.mean.shape[1]
        check_images(x, self.name, channels, self.takes_empty)
        if self.normalised and x.dtype == torch.uint8:
            raise TypeError(f"{self.name} was loaded with normalised=True, and uint8 images are not normalised")
        if self.mean is not None:
            self._first_batches.look_at_images(x, self.name)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Return a block in which no image is warned of: views that a method makes may lie outside [0, 1]."""
        left = self._first_batches.images_left
        self._first_batches.images_left = 0
        try:
            yield
        finally:
            self._first_batches.images_left = left

    def prepare(self, x: Tensor) -> Tensor:
        """Return the images as the network takes them: on its device, in its dtype, normalised."""
        x = self.pixels(x)
        if self.mean is None or self.std is None:
            return x
        return (x - self.mean.to(x)) / self.std.to(x)

    def _all_logits(self, x: Tensor) -> Tensor:
        """Return the network's output for images x, which may be none.

        Few networks take no images. Then the output comes from one black image, so it has the graph of any batch.
        """
        if self.takes_empty and len(x) == 0:
            black = x.new_zeros(1, *x.shape[1:])
            return self._run(self.prepare(black))[:0]
        return self._run(self.prepare(x))

    def _run(self, x: Tensor) -> Tensor:
        try:
            return logits_of(self.net(x))
        except (AssertionError, ValueError, RuntimeError) as error:  # timm refuses a size with an assertion
            better = refused(error, x, self.name)
            if better is None:
                raise
            raise better from error


def _per_channel(values: Sequence[float] | None) -> Tensor | None:
    if values is None:
        return None
    return torch.tensor(values).view(1, -1, 1, 1)


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
