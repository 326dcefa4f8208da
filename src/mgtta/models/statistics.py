"""Which statistics BatchNorm layers normalise by: the running ones, the batch's, or those of a stream.

Shapes: N images, C channels.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mgtta.models.alike import LookAlikes
from mgtta.models.blended import ROUNDING, blended_forward, can_blend
from mgtta.models.hooks import has_hook, own_hook, remove_hook, set_forward, unset_forward
from mgtta.models.norms import batch_norms, with_running_statistics

MOMENTUM = 0.1  # share of a batch of MOMENTUM_IMAGES in the stream's statistics
MOMENTUM_IMAGES = 64

BatchMoments = tuple[Tensor, Tensor]  # mean and variance (C,)


def use_batch_statistics(
    net: nn.Module, source_share: float = 0.0, own_share: float = 0.0, alikes: LookAlikes | None = None
) -> None:
    """Let BatchNorm layers normalise by the current batch; their running statistics do not change.

    Args:
        source_share: of the running statistics among those that layers normalise by; see blended.py.
        own_share: of each image's own statistics; only with a source_share.
        alikes: tell how much the images of a batch count for one another; only with a source_share. None: all the same.
    """
    if not 0 <= source_share <= 1:
        raise ValueError(f"source_share is a share of the statistics: from 0 to 1, not {source_share}")
    most = 1 - source_share
    if not 0 <= own_share <= most + ROUNDING:
        raise ValueError(f"own_share is a share of what source_share leaves: from 0 to {most:g}, not {own_share}")
    if own_share and not source_share:
        raise ValueError("own_share needs a source_share above 0")
    if alikes is not None and not source_share:
        raise ValueError("alike=True needs a source_share above 0")
    for layer in batch_norms(net):
        layer.track_running_stats = False
        unset_forward(layer)
        if source_share and can_blend(layer):
            blend = partial(blended_forward, source_share=source_share, own_share=own_share, alikes=alikes)
            set_forward(layer, blend)
        if not has_hook(layer, _batch_statistics_where_defined):
            layer.register_forward_pre_hook(_batch_statistics_where_defined)


def use_running_statistics(net: nn.Module) -> None:
    """Let BatchNorm layers normalise by their running statistics: undo `use_batch_statistics`."""
    remove_hook(net, _batch_statistics_where_defined)
    for layer in batch_norms(net):
        layer.track_running_stats = layer.running_mean is not None
        unset_forward(layer)


@own_hook
def _batch_statistics_where_defined(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Take the running statistics where a batch has only one value per channel, which has no variance."""
    layer.training = has_variance(inputs[0]) or getattr(layer, "running_mean", None) is None


def image_by_image(net: nn.Module) -> AbstractContextManager[None]:
    """Return a block in which layers normalise each image by the source's statistics, blended ones also by its own."""
    return running_statistics(with_running_statistics(net))


@contextmanager
def running_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let BatchNorm layers that use batch statistics normalise by their running ones, within the block."""
    handles = [layer.register_forward_pre_hook(_use_running) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers:
            layer.training = True


def _use_running(layer: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
    """Normalise by the running statistics: called after the hook that asks for those of the batch."""
    layer.training = False


def has_variance(x: Tensor) -> bool:
    """Return whether x (N, C, ...) has more than one value per channel."""
    return x.numel() > x.shape[1]


class StreamStatistics(nn.Module):
    """Running mean and variance of a stream, for every BatchNorm layer with running statistics.

    An adapting network normalises by batch statistics. A network that is exported from it needs statistics that do not
    depend on the batch: these. They are averages over all images at first, and then over about the last
    MOMENTUM_IMAGES / MOMENTUM images. Nothing is read back from a GPU, and the buffers are updated in place.

    Attributes:
        layers: names of the layers in the network.
        images: number of images that each layer's statistics have seen; 0 means that they are still the source's.
    """

    images: Tensor

    def __init__(self, net: nn.Module):
        super().__init__()
        self.layers: list[str] = []
        for name, layer in net.named_modules():
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None and layer.running_var is not None:
                self.register_buffer(f"mean_{len(self.layers)}", layer.running_mean.detach().clone())
                self.register_buffer(f"var_{len(self.layers)}", layer.running_var.detach().clone())
                self.layers.append(name)
        device = next(net.parameters()).device
        self.register_buffer("images", torch.zeros(len(self.layers), device=device))
        self._made_places: dict[Any, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def collect(self, net: nn.Module) -> Iterator[None]:
        """Take in the batch of the first forward pass of `net` inside the block; later ones see the same images again.

        Args:
            net: the network that the statistics were made for, or a copy of it.
        """
        waiting = set(range(len(self.layers)))

        def read(i: int, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if i in waiting:
                waiting.remove(i)
                self.update(i, inputs[0])

        handles = [
            net.get_submodule(name).register_forward_pre_hook(partial(read, i)) for i, name in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def update(self, i: int, x: Tensor) -> None:
        """Take one batch x (N, C, ...) into the statistics of layer i; one that is not finite changes nothing."""
        if not has_variance(x):
            return
        axes = [axis for axis in range(x.ndim) if axis != 1]
        dtype = self.get_buffer(f"mean_{i}").dtype
        batch_var, batch_mean = torch.var_mean(x.detach().to(dtype), axes, correction=0)
        self.follow(i, batch_mean, batch_var, len(x))

    @torch.no_grad()
    def follow(self, i: int, batch_mean: Tensor, batch_var: Tensor, n: int) -> None:
        """Take mean and variance (C,) of a batch of n images into the statistics of layer i."""
        mean = self.get_buffer(f"mean_{i}")  # (C,)
        var = self.get_buffer(f"var_{i}")  # (C,)
        new_mean, new_var = _followed((mean, var), (batch_mean, batch_var), self.images[i], n)
        finite = new_mean.isfinite().all() & new_var.isfinite().all()
        mean.copy_(torch.where(finite, new_mean, mean))
        var.copy_(torch.where(finite, new_var, var))
        self.images[i] += n * finite

    @torch.no_grad()
    def follow_all(self, found: Mapping[int, BatchMoments], n: int) -> None:
        """Take mean and variance of a batch of n images into the statistics of several layers, by few operations.

        Args:
            found: number of the layer -> mean and variance (C_i,) of the batch.
        """
        layers = sorted(found)
        means = [self.get_buffer(f"mean_{i}") for i in layers]
        vars_ = [self.get_buffer(f"var_{i}") for i in layers]
        sizes = [len(mean) for mean in means]
        chosen, place = self.places(layers)
        images = self.images[chosen]
        new_mean, new_var = _followed(
            (torch.cat(means), torch.cat(vars_)),
            (torch.cat([found[i][0] for i in layers]), torch.cat([found[i][1] for i in layers])),
            images[place],
            n,
        )
        bad = ~(new_mean.isfinite() & new_var.isfinite())
        good = images.new_zeros(len(layers)).index_add_(0, place, bad.to(images)) == 0
        torch._foreach_copy_(means, torch.where(good[place], new_mean, torch.cat(means)).split(sizes))
        torch._foreach_copy_(vars_, torch.where(good[place], new_var, torch.cat(vars_)).split(sizes))
        self.images.index_add_(0, chosen, n * good.to(images))

    def places(self, layers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the numbers of layers, and for each of their channels the place of its layer among them.

        They are made once, before anything is compiled or captured: a CUDA graph cannot copy them from the CPU.
        """
        key = (tuple(layers), self.images.device)
        if key not in self._made_places:
            place = [k for k, i in enumerate(layers) for _ in range(len(self.get_buffer(f"mean_{i}")))]
            made = (torch.tensor(layers), torch.tensor(place))
            self._made_places[key] = (made[0].to(key[1]), made[1].to(key[1]))
        return self._made_places[key]

    @torch.no_grad()
    def write_to(self, net: nn.Module, source_shares: Mapping[str, float] | None = None) -> None:
        """Put the statistics into the running statistics of the network's layers.

        Args:
            source_shares: name of a layer -> the share of the source's statistics, which they are; others keep nothing.
        """
        shares = source_shares or {}
        for i, name in enumerate(self.layers):
            layer = net.get_submodule(name)
            for own, ours in (("running_mean", f"mean_{i}"), ("running_var", f"var_{i}")):
                running = layer.get_buffer(own)
                running.copy_(torch.lerp(self.get_buffer(ours).to(running), running, shares.get(name, 0.0)))


def _followed(moments: BatchMoments, batch: BatchMoments, images: Tensor, n: int) -> BatchMoments:
    """Return the mean and variance of a stream after a batch of n images.

    Args:
        moments, batch: mean and variance (C,) of the stream before, and of the batch.
        images: that the stream had before, () or (C,).
    """
    mean, var = moments
    batch_mean, batch_var = batch
    lowest_rate = 1 - (1 - MOMENTUM) ** (n / MOMENTUM_IMAGES)
    rate = (n / (images + n)).clamp(min=lowest_rate).to(mean.dtype)
    between = rate * (1 - rate) * (batch_mean - mean).square()  # variance of the batches' means
    return torch.lerp(mean, batch_mean, rate), torch.lerp(var, batch_var, rate) + between
