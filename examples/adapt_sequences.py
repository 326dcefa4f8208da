"""Adapt a classifier that takes no images: a small 1-D ConvNet with BatchNorm on sequences of three sensors.

python examples/adapt_sequences.py [--quick]

The four classes are movements of different rhythm. Then a sensor is mounted in another way: its readings have another
gain and offset, and more noise.
"""

import argparse
import math

import torch
from torch import Tensor, nn

import mgtta

CLASSES = 4
LENGTH = 64  # readings of a sequence


def sequences(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences (n, 3, LENGTH) and their classes (n,)."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=draw)
    time = torch.linspace(0, 2 * math.pi, LENGTH)
    phase = 2 * math.pi * torch.rand(n, 3, 1, generator=draw)
    rhythm = (2 + labels).view(-1, 1, 1) * torch.tensor([1.0, 1.0, 2.0]).view(1, 3, 1)
    strength = 0.5 + torch.rand(n, 3, 1, generator=draw)
    clean = strength * torch.sin(rhythm * time + phase)
    return clean + 0.5 * torch.randn(n, 3, LENGTH, generator=draw), labels


def remounted(x: Tensor, seed: int) -> Tensor:
    """Return the readings of the same movements by the sensor as it is now."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    gain = torch.tensor([0.4, 1.8, 0.6]).view(1, 3, 1)
    offset = torch.tensor([1.5, -1.0, 0.8]).view(1, 3, 1)
    return gain * x + offset + 0.3 * noise


def network() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv1d(inputs, outputs, 5, stride=2), nn.BatchNorm1d(outputs), nn.ReLU()]

    head = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, CLASSES)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *head)


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (128,))
        loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run in a few seconds, as a test")
    quick = parser.parse_args().quick
    torch.manual_seed(0)

    x, y = sequences(512 if quick else 8192, seed=0)
    net = network()
    train(net, x, y, steps=20 if quick else 400)

    model = mgtta.load_model(net)
    source = mgtta.source_statistics(model, x[:256])  # clean sequences, no labels
    clean, labels = sequences(256 if quick else 2048, seed=1)
    shifted = remounted(clean, seed=2)
    print(f"clean    noadapt  {accuracy(mgtta.create('noadapt', model), clean, labels):.1f} %")
    for name, settings in (("noadapt", {}), ("tent", {}), ("mgtta+", {"source": source})):
        method = mgtta.create(name, model, **settings)
        print(f"shifted  {name:8} {accuracy(method, shifted, labels):.1f} %")


def accuracy(method: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in percent over a stream of batches of 64."""
    predicted = torch.cat([method(batch).argmax(1) for batch in x.split(64)])
    return 100 * float((predicted == y).double().mean())


if __name__ == "__main__":
    main()
