"""The Meta Gradient Generator and its Gradient Memory Layer (arXiv 2412.16901, Eqs. 3-6).

A pure function: `update, memory = generator(inputs, memory)`. Each coordinate of theta is a row; no row sees another.
Equation numbers are the paper's. Where the paper is silent, the code follows the authors' released system, as
docs/method.md lists.

Notation    z        inputs: normalised momentum and gradient, the paper's g_t            (n, 2)
            q, k, v  z times phi_Q, phi_K, phi_V                                          (n, d)
            W, b     a coordinate's memory phi^m, one linear layer; packed (n, d*d + d)   (n, d, d), (n, d)
            f(x; W, b) = x + LN(x W + b), with x a row vector: the paper's f_GML          (n, d)
Shapes      n coordinates of theta, d hidden size
"""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

from mgtta._lib.errors import unknown

INPUTS = 2  # momentum and gradient
EPS = 1e-6  # of both LayerNorms


class GradientMemory(nn.Module):
    """The Gradient Memory Layer: writes (k, v) into a linear layer by one gradient step, then reads q from it."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.k_proj = nn.Linear(INPUTS, hidden_size, bias=False)
        self.v_proj = nn.Linear(INPUTS, hidden_size, bias=False)
        self.norm = nn.LayerNorm(hidden_size, eps=EPS)
        self.W = nn.Parameter(torch.randn(hidden_size, hidden_size) * 0.02)  # the memory before the first write
        self.b = nn.Parameter(torch.zeros(hidden_size))
        self.lr_weight = nn.Parameter(torch.randn(INPUTS) * 0.02)
        self.lr_bias = nn.Parameter(torch.zeros(()))
        self.lr_scale = nn.Parameter(torch.zeros(()))  # tau

    @property
    def width(self) -> int:
        """The number of values in the memory of one coordinate."""
        return self.hidden_size * (self.hidden_size + 1)

    def init(self, n: int) -> Tensor:
        """Return the memory of n coordinates before the first write, (n, d*d + d)."""
        return torch.cat([self.W.flatten(), self.b]).expand(n, -1)

    def forward(self, z: Tensor, q: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(q; W', b') (n, d), and the memory (W', b') that the inputs z were written into."""
        d = self.hidden_size
        W = memory[:, : d * d].unflatten(1, (d, d))  # (n, d, d)
        b = memory[:, d * d :]  # (n, d)
        W, b = self.memorise(z, W, b)
        hidden = q + self.norm(_linear(q, W, b))  # f(q; W', b'), inside Eq. 6
        return hidden, torch.cat([W.flatten(1), b], dim=1)

    def memorise(self, z: Tensor, W: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return W and b after one gradient step on the loss of Eq. 3.

        The gradient of the loss is written out, so that the gradient of phi can flow through it.
        """
        k = self.k_proj(z)
        v = self.v_proj(z)
        u = _linear(k, W, b)
        centred = u - u.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + EPS).rsqrt()
        x = centred * scale  # LN(u) = x * gain + bias
        gain = self.norm.weight

        error = k + x * gain + self.norm.bias - v  # d loss / d f, with loss = |f(k; W, b) - v|^2 / 2          Eq. 3
        dx = error * gain
        du = scale * (dx - dx.mean(1, keepdim=True) - x * (dx * x).mean(1, keepdim=True))  # LayerNorm's backward pass
        step = self.rate(z).unsqueeze(1) * du

        W = torch.addcmul(W, k.unsqueeze(2), step.unsqueeze(1), value=-1)  # W - eta * k^T du                  Eq. 4
        b = b - step  # b - eta * du                                                                           Eq. 4
        return W, b

    def rate(self, z: Tensor) -> Tensor:
        """Return eta, the learning rate of each coordinate's memory, (n,)."""
        eta = torch.sigmoid(z @ self.lr_weight + self.lr_bias)  # Eq. 5
        return (1 + self.lr_scale).clamp(min=0) * eta / self.hidden_size


class LSTMMemory(nn.Module):
    """The ablation of Table 4: a coordinate-wise LSTM cell in place of the Gradient Memory Layer."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.cell = nn.LSTMCell(hidden_size, hidden_size)
        self.start = nn.Parameter(torch.zeros(2 * hidden_size))  # hidden and cell state

    @property
    def width(self) -> int:
        """The number of values in the memory of one coordinate."""
        return 2 * self.hidden_size

    def init(self, n: int) -> Tensor:
        """Return the memory of n coordinates before the first write, (n, 2 d)."""
        return self.start.expand(n, -1)

    def forward(self, z: Tensor, q: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cell's output (n, d), and its new memory."""
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
    """The update rule of a learned optimizer: it turns gradients into updates, and remembers them.

    It has 164 weights at hidden size 8.

    Args:
        memory: "gml", the paper's Gradient Memory Layer, or "lstm", its ablation.
        about: how it was trained; saved with its files.
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
        """Return the learned memory of n coordinates before their first gradient, (n, memory width)."""
        if n < 0:
            raise ValueError(f"n, the number of coordinates, must be at least 0, not {n}")
        return self.memory.init(n)

    def forward(self, inputs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Memorise the inputs (n, 2), then generate the update (n,) from the memory just written."""
        if inputs.ndim != 2 or inputs.shape[1] != INPUTS:
            raise ValueError(f"inputs must be (n, {INPUTS}), not {tuple(inputs.shape)}")
        n = len(inputs)
        dtype = self.o_proj.weight.dtype
        if not inputs.dtype == memory.dtype == dtype:
            raise TypeError(
                f"inputs ({inputs.dtype}), memory ({memory.dtype}) and generator ({dtype}) must have one dtype"
            )
        if memory.shape != (n, self.memory.width):
            raise ValueError(
                f"invalid memory of shape {tuple(memory.shape)}: {n} coordinates of a {self.memory_kind} generator of "
                f"hidden size {self.hidden_size} need ({n}, {self.memory.width}); init_memory(n) gives a new one"
            )
        hidden, memory = self.memory(inputs, self.q_proj(inputs), memory)
        update = torch.tanh(self.o_proj(self.post_norm(hidden)))  # Eq. 6
        return update.squeeze(1), memory

    def _save_pretrained(self, save_directory: Path) -> None:
        self._hub_mixin_config = {**self._hub_mixin_config, "about": self.about}  # type: ignore[dict-item]
        super()._save_pretrained(save_directory)


def _linear(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """Return x W + b, where each coordinate has its own layer: (n, d), (n, d, d), (n, d) -> (n, d)."""
    return torch.baddbmm(b.unsqueeze(1), x.unsqueeze(1), W).squeeze(1)
