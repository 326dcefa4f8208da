"""The Meta Gradient Generator and its Gradient Memory Layer (arXiv 2412.16901, Eqs. 3-6).

Pure: `update, memory = generator(inputs, memory)`. Every line works on each coordinate of theta by itself and
batches over all of them; no coordinate sees another. Tensors have a row for each coordinate, and are quickest where the
rows lie side by side in memory, number by number (strides (1, n)): so arithmetic runs along the coordinates.

Notation    z  inputs: normalised momentum and gradient, (n, 2)
            W, b  a coordinate's memory: one linear layer, (n, d, d) and (n, d); packed as (n, d*d + d)
            f(x; W, b) = x + LN(x W + b)
Shapes      n coordinates of theta, d hidden size; within the memory layer transposed, (d, n) and (d, d, n)
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from mgtta._lib.errors import unknown

INPUTS = 2
EPS = 1e-6  # of both LayerNorms


class GradientMemory(nn.Module):
    """The Gradient Memory Layer: writes (k, v) into a linear layer by one gradient step, then reads q from it."""

    def __init__(self, hidden_size: int):
        super().__init__()
        d = self.hidden_size = hidden_size
        self.k_proj = nn.Linear(INPUTS, d, bias=False)
        self.v_proj = nn.Linear(INPUTS, d, bias=False)
        self.norm = nn.LayerNorm(d, eps=EPS)
        self.W = nn.Parameter(torch.randn(d, d) * 0.02)  # the memory before anything is written
        self.b = nn.Parameter(torch.zeros(d))
        self.lr_weight = nn.Parameter(torch.randn(INPUTS) * 0.02)
        self.lr_bias = nn.Parameter(torch.zeros(()))
        self.lr_scale = nn.Parameter(torch.zeros(()))  # tau

    @property
    def width(self) -> int:
        return self.hidden_size * (self.hidden_size + 1)

    def init(self, n: int) -> Tensor:
        return torch.cat([self.W.flatten(), self.b]).expand(n, -1)  # (n, d*d + d)

    def forward(self, z: Tensor, q: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        d, columns, q = self.hidden_size, memory.t(), q.t()
        W, b = columns[: d * d].unflatten(0, (d, d)), columns[d * d :]  # (d, d, n), (d, n)
        k, v = _columnwise(self.k_proj, z).t(), _columnwise(self.v_proj, z).t()
        x, scale = _standardised(_read(k, W, b))
        error = k + _scaled(x, self.norm) - v  # d loss / d f, with loss = |f(k) - v|^2 / 2           Eq. 3
        g = error * self.norm.weight.unsqueeze(1)
        du = scale * (g - g.mean(0) - x * (g * x).mean(0))  # d loss / d (k W + b); so that phi's gradient flows
        eta = (1 + self.lr_scale).clamp(min=0) * torch.sigmoid(z @ self.lr_weight + self.lr_bias) / d  # Eq. 5
        step = eta * du
        W = torch.addcmul(W, k.unsqueeze(1), step, value=-1)  # Eq. 4; d loss / d W = k^T du
        b = b - step
        hidden = q + _normed(_read(q, W, b), self.norm)
        return hidden.t(), torch.cat([W.flatten(0, 1), b]).t()


class LSTMMemory(nn.Module):
    """The ablation of Table 4: a coordinate-wise LSTM cell in place of the Gradient Memory Layer."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.cell = nn.LSTMCell(hidden_size, hidden_size)
        self.start = nn.Parameter(torch.zeros(2 * hidden_size))  # hidden and cell state

    @property
    def width(self) -> int:
        return 2 * self.hidden_size

    def init(self, n: int) -> Tensor:
        return self.start.expand(n, -1)

    def forward(self, z: Tensor, q: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        h, c = self.cell(q, memory.chunk(2, dim=1))
        return h, torch.cat([h, c], dim=1)


MEMORIES: dict[str, type[GradientMemory] | type[LSTMMemory]] = {"gml": GradientMemory, "lstm": LSTMMemory}


class MetaGradientGenerator(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="mgtta",
    tags=["test-time-adaptation", "learned-optimizer"],
    license="apache-2.0",
):
    """A learned optimizer's rule: turns gradients into updates, and remembers. 164 weights at hidden size 8.

    Args:
        memory: "gml", the paper's Gradient Memory Layer, or "lstm", its ablation.
        about: how it was trained; travels with its files.
    """

    def __init__(self, hidden_size: int = 8, memory: str = "gml", about: dict[str, Any] | None = None):
        super().__init__()
        if not isinstance(hidden_size, int) or hidden_size < 1:
            raise ValueError(f"hidden_size must be a whole number of at least 1, not {hidden_size!r}")
        if memory not in MEMORIES:
            raise unknown("memory", memory, MEMORIES)
        self.hidden_size = hidden_size
        self.memory_kind = memory
        self.about = dict(about or {})
        self.q_proj = nn.Linear(INPUTS, hidden_size, bias=False)
        self.memory = MEMORIES[memory](hidden_size)
        self.post_norm = nn.LayerNorm(hidden_size, eps=EPS)
        self.o_proj = nn.Linear(hidden_size, 1, bias=False)

    def init_memory(self, n: int) -> Tensor:
        """The learned memory of n coordinates before their first gradient, (n, memory width)."""
        if n < 0:
            raise ValueError(f"a memory of {n} coordinates")
        return self.memory.init(n)

    def forward(self, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Memorise the inputs (n, 2), then generate the update (n,) from the memory just written."""
        if inputs.ndim != 2 or inputs.shape[1] != INPUTS:
            raise ValueError(f"inputs must be (n, {INPUTS}), not {tuple(inputs.shape)}")
        n, dtype = len(inputs), self.o_proj.weight.dtype
        if not inputs.dtype == memory.dtype == dtype:
            raise TypeError(f"inputs {inputs.dtype} and memory {memory.dtype} for a generator of {dtype}: cast one")
        if memory.shape != (n, self.memory.width):
            raise ValueError(
                f"a memory of shape {tuple(memory.shape)} does not fit {n} coordinates of a {self.memory_kind} "
                f"generator of hidden size {self.hidden_size}: ({n}, {self.memory.width}) is needed; "
                "init_memory(n) makes a fresh one"
            )
        inputs, memory = (x.t().contiguous().t() for x in (inputs, memory))  # sums round by how their numbers lie
        hidden, memory = self.memory(inputs, _columnwise(self.q_proj, inputs), memory)
        update = torch.tanh(_columnwise(self.o_proj, _normed(hidden.t(), self.post_norm).t())).squeeze(-1)  # Eq. 6
        return update, memory

    def _save_pretrained(self, save_directory: Path) -> None:
        self._hub_mixin_config = {**self._hub_mixin_config, "about": self.about}  # type: ignore[dict-item]
        super()._save_pretrained(save_directory)


def _columnwise(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer, which has no bias, of x (n, inputs): (n, d), in memory number by number."""
    return (layer.weight @ x.t()).t()


def _read(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """x W + b with a layer of its own for each coordinate: (d, n), (d, d, n), (d, n) -> (d, n).

    Number by number, so that nothing of W's size is made.
    """
    for number, weights in zip(x, W, strict=True):
        b = torch.addcmul(b, number, weights)
    return b


def _standardised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each coordinate's d numbers with mean 0 and variance 1, (d, n); and 1 / their standard deviation, (n,)."""
    centred = x - x.mean(0)
    scale = (centred.square().mean(0) + EPS).rsqrt()
    return centred * scale, scale


def _normed(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """LN of each coordinate's d numbers, (d, n)."""
    return _scaled(_standardised(x)[0], layer)


def _scaled(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    return x * layer.weight.unsqueeze(1) + layer.bias.unsqueeze(1)
