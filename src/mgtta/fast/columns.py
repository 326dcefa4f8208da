"""The generator, column by column: the layout for a GPU, where arithmetic runs along the coordinates.

`generate(generator, inputs, memory)` is `generator(inputs, memory)`, which mgtta.learned.generator writes like the
paper. Here each number of the memory is a vector over all coordinates. Nothing of the size of the memory is made beside
the new memory, and a compiler fuses the rest.

Notation    as in mgtta.learned.generator, transposed
Shapes      n coordinates of theta, d hidden size; W (d, d, n), b and row vectors (d, n)
"""

import torch
from torch import Tensor, nn

from mgtta.learned.generator import EPS, GradientMemory, MetaGradientGenerator


def generate(generator: MetaGradientGenerator, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the update (n,) and the new memory (n, width), from inputs (n, 2) and the memory.

    It is quickest where the memory has strides (1, n), as the memory that it returns has.
    """
    layer = generator.memory
    if not isinstance(layer, GradientMemory):
        return generator(inputs, memory)
    z = inputs.t().contiguous()  # (2, n)
    columns = memory.t().contiguous()  # (d*d + d, n)
    hidden, columns = _written_and_read(layer, z, generator.q_proj.weight @ z, columns)
    update = torch.tanh(generator.o_proj.weight @ _norm(hidden, generator.post_norm))  # Eq. 6
    return update.squeeze(0), columns.t()


def _written_and_read(layer: GradientMemory, z: Tensor, q: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(q; W', b') (d, n), and the new memory (d*d + d, n)."""
    d = layer.hidden_size
    W = columns[: d * d].unflatten(0, (d, d))
    b = columns[d * d :]
    k = layer.k_proj.weight @ z
    v = layer.v_proj.weight @ z
    x, scale = _standardise(_times_plus(k, W, b))
    error = k + _scale(x, layer.norm) - v  # Eq. 3
    dx = error * layer.norm.weight.unsqueeze(1)
    du = scale * (dx - dx.mean(0) - x * (dx * x).mean(0))
    step = layer.rate(z.t()) * du  # Eq. 5
    W = torch.addcmul(W, k.unsqueeze(1), step, value=-1)  # Eq. 4
    b = b - step
    hidden = q + _norm(_times_plus(q, W, b), layer.norm)
    return hidden, torch.cat([W.flatten(0, 1), b])


def _times_plus(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """Return x W + b: (d, n), (d, d, n), (d, n) -> (d, n)."""
    for number, weights in zip(x, W, strict=True):
        b = torch.addcmul(b, number, weights)
    return b


def _standardise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each coordinate's d numbers with mean 0 and variance 1, (d, n), and 1 / standard deviation, (n,)."""
    centred = x - x.mean(0)
    scale = (centred.square().mean(0) + EPS).rsqrt()
    return centred * scale, scale


def _scale(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """Return x times the layer's gain, plus its bias."""
    return x * layer.weight.unsqueeze(1) + layer.bias.unsqueeze(1)


def _norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """Return LN of each coordinate's d numbers, (d, n)."""
    standardised, _ = _standardise(x)
    return _scale(standardised, layer)
