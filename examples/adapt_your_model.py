"""Adapt your own classifier: a small ConvNet with BatchNorm, which this script first trains on rendered characters.

python examples/adapt_your_model.py [--quick]
"""

import argparse

import torch
from torch import nn

import mgtta
from mgtta.data.glyphs import TRAIN_SEED, Glyphs
from mgtta.data.streams import corrupted, stream


def network(classes: int) -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    head = [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * 128, classes)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), *head)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (128,))
        loss = nn.functional.cross_entropy(net(x[batch] / 255), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run in a few seconds, as a test")
    quick = parser.parse_args().quick
    torch.manual_seed(0)

    images, labels = Glyphs(512 if quick else 20_000, seed=TRAIN_SEED).tensors()
    net = network(len(Glyphs.classes))
    train(net, images, labels, steps=5 if quick else 600)
    net.eval()

    model = mgtta.load_model(net)  # a copy of your module
    source = mgtta.source_statistics(model, images[:256])  # clean images, no labels
    for corruption in ("gaussian_noise", "defocus_blur", "brightness", "contrast"):
        shifted = stream(corrupted(Glyphs(128 if quick else 1024), [corruption]), batch_size=64)
        for name, settings in (("noadapt", {}), ("mgtta+", {"source": source})):
            [record] = mgtta.evaluate(mgtta.create(name, model, **settings), shifted)
            print(f"{corruption:16} {name:8} {record.top1:.1f} %")


if __name__ == "__main__":
    main()
