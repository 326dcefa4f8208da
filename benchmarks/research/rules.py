"""What moves theta: Adam, or a generator with any number of inputs."""

import math

import torch
from objective import Model
from tasks import Rule
from torch import Tensor, nn

from mgtta.learned.generator import GradientMemory


class Inputs:
    """Per coordinate: what a generator sees of the gradients so far. (n, number of inputs)"""

    BETAS = (0.9, 0.99)
    SLOW = 0.97
    EPS = 1e-8

    def __init__(self, names: tuple[str, ...], model: Model, lr: float):
        self.names = names
        self.model = model
        self.lr = lr
        zeros = torch.zeros_like(model.source)
        self.m = zeros
        self.v = zeros
        self.slow = zeros
        self.t = 0
        self.travel = 0.0

    def __call__(self, grad: Tensor, theta: Tensor) -> Tensor:
        self.t += 1
        a, b = self.BETAS
        self.m = a * self.m + (1 - a) * grad
        self.v = b * self.v + (1 - b) * grad.square()
        self.slow = self.SLOW * self.slow + (1 - self.SLOW) * grad
        t = self.t + 1  # the released system's power
        size = (self.v / (1 - b**t)).sqrt() + self.EPS
        columns = {
            "momentum": lambda: self.m / (1 - a**t) / size,
            "gradient": lambda: grad / size,
            "slow": lambda: self.slow / (1 - self.SLOW**t) / size,
            "magnitude": lambda: torch.tanh(0.3 * (size.log() - size.log().mean())),
            "time": lambda: torch.full_like(grad, self.t**-0.5),
            "late": lambda: torch.full_like(grad, math.tanh(self.t / 32)),
            "kind": lambda: self.model.kind,
            "depth": lambda: self.model.depth,
            "travel": lambda: torch.tanh((theta - self.model.source) / (self.lr * self.t**0.5)),
        }
        return torch.stack([columns[name]() for name in self.names], 1)


class Generator(nn.Module):
    """The paper's generator with any number of inputs, and a learned decay of its step."""

    def __init__(self, inputs: int, hidden_size: int):
        super().__init__()
        self.q_proj = nn.Linear(inputs, hidden_size, bias=False)
        self.memory = GradientMemory(hidden_size)
        self.memory.k_proj = nn.Linear(inputs, hidden_size, bias=False)
        self.memory.v_proj = nn.Linear(inputs, hidden_size, bias=False)
        self.memory.lr_weight = nn.Parameter(torch.randn(inputs) * 0.02)
        self.post_norm = nn.LayerNorm(hidden_size, eps=1e-6)
        self.o_proj = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, z: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        hidden, memory = self.memory(z, self.q_proj(z), memory)
        return torch.tanh(self.o_proj(self.post_norm(hidden))).squeeze(-1), memory


class Mover:
    """theta -> theta, given a gradient."""

    def __init__(self, rule: Rule, model: Model, generator: Generator | None, inputs: tuple[str, ...]):
        self.rule = rule
        self.model = model
        self.generator = generator
        self.inputs = inputs
        self.reset()

    def reset(self) -> None:
        self.t = 0
        if self.generator is not None:
            self.z = Inputs(self.inputs, self.model, self.rule.lr)
            self.memory = self.generator.memory.init(len(self.model.source))
        else:
            self.m = torch.zeros_like(self.model.source)
            self.v = self.m

    @torch.no_grad()
    def __call__(self, theta: Tensor, grad: Tensor) -> Tensor:
        lr = self.rule.lr / math.sqrt(1 + self.t / self.rule.decay)
        self.t += 1
        if self.generator is not None:
            update, self.memory = self.generator(self.z(grad, theta), self.memory)
        else:
            self.m = 0.9 * self.m + 0.1 * grad
            self.v = 0.999 * self.v + 0.001 * grad.square()
            update = self.m / (1 - 0.9**self.t) / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-8)
        return theta - lr * update
