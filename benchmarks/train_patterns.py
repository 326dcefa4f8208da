"""Trains the source model of the demo: a small ViT with LayerNorm only, on rendered patterns as they are.

    python benchmarks/train_patterns.py --out src/mgtta/weights

It sees no corruption and no augmentation in training, so corruptions hurt it. Weights are rounded to float16, then
measured on clean images and under the 15 corruptions. The source statistics are of other clean images. It runs on one
core in a few minutes.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_glyphs import MEAN, SEVERITY, STD, learning_rate, measure, normalise, round_weights, save, say, versions

import mgtta
from mgtta.data.corruptions import CORRUPTIONS, corrupt
from mgtta.data.patterns import CLASSES, Patterns
from mgtta.data.rendered import SIZE, TRAIN_SEED, VALIDATION_SEED
from mgtta.models.classifier import Classifier
from mgtta.models.loading import vision_transformer

NAME = "patterns_vit"
ARCHITECTURE = {
    "img_size": SIZE,
    "embed_dim": 64,
    "depth": 4,
    "num_heads": 2,
    "num_classes": len(CLASSES),
    "global_pool": "avg",
    "class_token": False,
    "stem": {  # 48 -> 24 -> 12 -> 6: 36 tokens
        "channels": [16, 32, 64],
        "kernel_size": [3, 3, 3],
        "stride": [2, 2, 2],
        "padding": [1, 1, 1],
        "norm": "layer",
    },
}
BATCH = 32
RATE = 2e-3
WEIGHT_DECAY = 0.02


def train(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Train in place, one pass over the images; return the mean loss of the last tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    steps = len(images) // BATCH
    losses: list[float] = []
    began = time.monotonic()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / steps, RATE)
        batch = slice(step * BATCH, (step + 1) * BATCH)
        loss = F.cross_entropy(model(normalise(images[batch].float() / 255)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % math.ceil(steps / 10) == 0:
            say(f"  step {step + 1} of {steps}  {time.monotonic() - began:.0f} s  loss {losses[-1]:.3f}")
    model.eval()
    last = losses[-math.ceil(steps / 10) :]
    return sum(last) / len(last)


def main(words: list[str] | None = None) -> dict[str, float]:
    """Return the accuracy in each domain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for models/ and sources/")
    parser.add_argument("--images", type=int, default=64_000, help="training images; each is seen once")
    parser.add_argument("--test-images", type=int, default=2048)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = vision_transformer(**ARCHITECTURE)
    images, labels = Patterns(args.images, TRAIN_SEED).tensors()
    say(f"rendered {args.images} images; {sum(p.numel() for p in model.parameters()):,} parameters")
    loss = train(model, images, labels)
    weights = round_weights(model)
    clean, truth = Patterns(args.test_images).tensors()
    domains = {"clean": clean}
    for name in CORRUPTIONS:
        domains[name] = corrupt(clean.clone(), name, severity=SEVERITY)
    figures = measure(model, domains, truth)
    say("  ".join(f"{name} {value:.1f}" for name, value in figures.items()))
    metadata = {
        "model": ARCHITECTURE,
        "normalisation": {"mean": [MEAN] * 3, "std": [STD] * 3},
        "classes": " ".join(CLASSES),
        "command": f"python benchmarks/train_patterns.py --out DIR --images {args.images}",
        "loss": loss,
        "accuracy": {"images": len(truth), "severity": SEVERITY, **figures},
        "versions": versions(),
    }
    for folder in ("models", "sources"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    save(args.out / "models" / f"{NAME}.safetensors", weights, metadata)
    source_images = Patterns(args.test_images, VALIDATION_SEED).tensors()[0]
    classifier = Classifier(model, name=NAME, mean=[MEAN] * 3, std=[STD] * 3)
    mgtta.save_source(mgtta.source_statistics(classifier, source_images), args.out / "sources" / f"{NAME}.safetensors")
    return figures


if __name__ == "__main__":
    main()
