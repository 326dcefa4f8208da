"""Trains the source model of the embedded benchmark: a small ViT with a convolutional stem on rendered characters.

    python benchmarks/train_glyphs.py --out DIR --device cuda --strength 0,contrast=5,share=0.05

Each word after --strength is one training: a factor on every augmentation, then knobs that replace single
values. The augmentation is generic and mild; none of it is a test corruption. Clean accuracy and accuracy
under the 15 + 4 corruptions at severity 5 are measured on the weights as saved, that is after rounding to
float16. Every training starts from the same weights and the same random numbers, whatever ran before it.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import PIL
import torch
import torch.nn.functional as F
from pages import table
from safetensors.torch import save_file
from torch import Tensor, nn

import mgtta
from mgtta._lib.timm import timm
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.glyphs import CLASSES, SIZE, TEST_SEED, TRAIN_SEED, Glyphs
from mgtta.models.loading import vision_transformer

MEAN = 0.5
STD = 0.5
SEVERITY = 5
QUICK = {
    "train_images": 512,
    "test_images": 32,
    "steps": 60,
    "batch": 64,
    "processes": 1,
    "width": 48,
    "depth": 2,
}


@dataclass(frozen=True)
class Augment:
    """Random changes of images (N, 3, H, W) in [0, 1]; each is applied to a share of the images."""

    share: float = 0.5
    noise: float = 0.15  # standard deviation, at most
    blur: float = 1.5  # passes of a 3 x 3 box, at most
    colour: float = 0.4  # saturation lost; half of it for brightness, a quarter for one channel
    contrast: float = 1.5  # octaves up or down, at most
    light: float = 0.3  # height of a smooth bump of light or shadow, at most
    erase: float = 0.5  # side of the erased rectangle relative to the image's, at most
    affine: float = 0.1  # change of an entry of the affine matrix, at most

    @classmethod
    def parse(cls, text: str) -> "Augment":
        """From "0.75" or "0.75,noise=0.3": a factor on the defaults, then absolute values."""
        factor, *knobs = text.split(",")
        scaled = {name: value * float(factor) for name, value in asdict(cls()).items()} | {"share": cls.share}
        for name, value in (knob.split("=") for knob in knobs):
            if name not in scaled:
                raise argparse.ArgumentTypeError(f"no augmentation {name!r}; there are {', '.join(scaled)}")
            scaled[name] = float(value)
        return cls(**scaled)

    def __call__(self, x: Tensor) -> Tensor:
        x = self._shade(self._warp(x))
        x = self._blur(self._erase(x))
        noise = math.sqrt(12) * (torch.rand_like(x) - 0.5)
        return (x + self._amount(x, self.noise) * noise).clamp(0, 1)

    def _amount(self, x: Tensor, most: float, channels: int = 1) -> Tensor:
        """(N, channels, 1, 1): uniform in [0, most] for a share of the images, zero for the others."""
        on = torch.rand(len(x), 1, 1, 1, device=x.device) < self.share
        return most * on * torch.rand(len(x), channels, 1, 1, device=x.device)

    def _signed(self, x: Tensor, most: float, channels: int = 1) -> Tensor:
        amount = self._amount(x, most, channels)
        return torch.where(torch.rand_like(amount) < 0.5, amount, -amount)

    def _warp(self, x: Tensor) -> Tensor:
        matrix = torch.eye(2, 3, device=x.device) + self._signed(x, self.affine, 6).view(-1, 2, 3)
        grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    def _shade(self, x: Tensor) -> Tensor:
        x = torch.lerp(x, x.mean(1, keepdim=True), self._amount(x, min(self.colour, 1)))
        mean = x.mean((1, 2, 3), keepdim=True)
        x = mean + (x - mean) * 2 ** self._signed(x, self.contrast)
        bumps = 2 * torch.rand(len(x), 1, 3, 3, device=x.device) - 1
        bumps = F.interpolate(bumps, x.shape[-2:], mode="bicubic", align_corners=True)
        shift = self._signed(x, self.colour / 2) + self._signed(x, self.colour / 4, 3)
        return (x + shift + self._amount(x, self.light) * bumps).clamp(0, 1)

    def _erase(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        side = self._amount(x, self.erase, 2) / 2  # half of it, as the distance is from the centre
        centre = torch.rand(n, 2, 1, 1, device=x.device)
        row = (torch.arange(h, device=x.device).view(1, h, 1) / h - centre[:, 0]).abs() < side[:, 0]
        column = (torch.arange(w, device=x.device).view(1, 1, w) / w - centre[:, 1]).abs() < side[:, 1]
        return torch.where((row & column)[:, None], torch.rand(n, 3, 1, 1, device=x.device), x)

    def _blur(self, x: Tensor) -> Tensor:
        passes = self._amount(x, self.blur)
        for done in range(math.ceil(self.blur)):
            box = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
            x = torch.lerp(x, box, (passes - done).clamp(0, 1))
        return x


def normalise(x: Tensor) -> Tensor:
    return (x - MEAN) / STD


def learning_rate(progress: float, peak: float, warmup: float = 0.05) -> float:
    """Return the learning rate: linear up, then a cosine down to zero."""
    if progress < warmup:
        return peak * (progress + 1e-3) / warmup
    return peak * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


def train(model: nn.Module, images: Tensor, labels: Tensor, augment: Augment, args) -> list[float]:
    """Train in place until `args.steps` or `args.seconds` are over; return some of the losses."""
    device = images.device
    torch.manual_seed(args.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    forward = torch.compile(model) if args.compile else model
    model.train()
    losses: list[float] = []
    step = 0
    progress = 0.0
    start = time.monotonic()
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, args.lr)
        pick = torch.randint(len(images), (args.batch,), device=device)
        x = normalise(augment(images[pick].float() / 255))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = forward(x)
        loss = F.cross_entropy(logits.float(), labels[pick], label_smoothing=args.smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not args.plain:
            without_brightness(model, args.free)
        if progress >= len(losses) / 20:
            losses.append(loss.item())
            say(f"  step {step:6d}  {time.monotonic() - start:6.1f} s  loss {losses[-1]:.4f}")
        step += 1
        progress = max(step / args.steps, (time.monotonic() - start) / args.seconds)
    losses.append(loss.item())
    seconds = time.monotonic() - start
    rate = step * args.batch / seconds
    say(f"  {step} steps in {seconds:.1f} s, {rate:.0f} images/s, loss {losses[-1]:.4f}")
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return top-1 in percent, in float32."""
    model.eval()
    chunks = zip(images.split(512), labels.split(512), strict=True)
    right = sum((model(normalise(x.float() / 255)).argmax(1) == y).sum().item() for x, y in chunks)
    return 100 * right / len(labels)


def measure(model: nn.Module, domains: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Return the accuracy in each domain; "mean" and "worst" are over the 15 test corruptions."""
    each = {name: accuracy(model, images, labels) for name, images in domains.items()}
    test = [each[name] for name in CORRUPTIONS]
    return {"mean": sum(test) / len(test), "worst": min(test), **each}


def round_weights(model: nn.Module) -> dict[str, Tensor]:
    """Round the model's weights to float16, and return them on the CPU."""
    weights = {name: p.to("cpu", torch.float16).contiguous() for name, p in model.state_dict().items()}
    model.load_state_dict(weights)
    return weights


def save(path: Path, weights: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
    part = path.with_name(path.name + ".part")
    save_file(weights, part, metadata=texts)
    part.replace(path)


def command(args: argparse.Namespace, strength: str) -> str:
    """Return the command that repeats this training."""
    given = vars(args) | {"out": "DIR", "strength": strength}
    words = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
        for key, value in given.items()
        if value is not False and value != math.inf and key != "processes"
    ]
    return " ".join(["python benchmarks/train_glyphs.py", *words])


def versions() -> dict[str, str]:
    modules = {"mgtta": mgtta, "torch": torch, "timm": timm, "numpy": numpy, "pillow": PIL}
    return {"python": platform.python_version()} | {name: m.__version__ for name, m in modules.items()}


def say(text: str) -> None:
    print(text, flush=True)


def compared(trials: dict[str, dict[str, float]]) -> str:
    """Return a table in markdown, with a column for each training."""
    rows = [[name, *(f"{figures[name]:.1f}" for figures in trials.values())] for name in next(iter(trials.values()))]
    return table(["accuracy, %", *trials], rows, right=True)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--out", required=True, help="folder for the weights and figures.json")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--strength", nargs="+", default=["1"], help="FACTOR[,knob=value...], one training each")
    add("--steps", type=int, default=1200)
    add("--seconds", type=float, default=math.inf, help="end a training after this time, if before its steps")
    add("--batch", type=int, default=1024)
    add("--lr", type=float, default=1.5e-3)
    add("--smoothing", type=float, default=0.0, help="label smoothing")
    add("--train-images", type=int, default=50_000)
    add("--test-images", type=int, default=2048)
    add("--width", type=int, default=96)
    add("--depth", type=int, default=6)
    add("--heads", type=int, default=4)
    add("--plain", action="store_true", help="patches in place of the convolutional stem: only LayerNorm")
    add("--free", type=float, default=0.5, help="share of the stem's first filters that may see brightness")
    add("--seed", type=int, default=0, help="of weights, batches and augmentation")
    add("--processes", type=int, default=os.cpu_count(), help="that render")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--quick", action="store_true", help="a few steps of a tiny model, to see that everything runs")
    if parser.parse_args(words).quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(words)
    for strength in args.strength:  # a typo ends the run here, not after the first training
        try:
            Augment.parse(strength)
        except (ValueError, argparse.ArgumentTypeError) as error:
            parser.error(f"--strength {strength}: {error}")
    return args


def render(n: int, seed: int, device: str, processes: int = 1) -> tuple[Tensor, Tensor]:
    start = time.monotonic()
    images, labels = Glyphs(n, seed).tensors(processes)
    say(f"rendered {n} images of seed {seed} in {time.monotonic() - start:.1f} s")
    return images.to(device), labels.to(device)


def stem(width: int) -> dict[str, list[int]]:
    """Two convolutions: 48 -> 23 -> 8; the first one without padding, whose edge would show an image's brightness."""
    return {"channels": [width // 4, width // 2], "kernel_size": [3, 3], "stride": [2, 3], "padding": [0, 1]}


@torch.no_grad()
def without_brightness(model: nn.Module, free: float) -> None:
    """Make the first filters, but for a share of them, sum to zero: they see contrasts, which a haze only scales.

    Then BatchNorm's statistics tell a foggy batch from a clear one, and those of the batch make up for it.
    """
    filters = next(p for p in model.parameters() if p.ndim == 4)
    bound = filters[round(free * len(filters)) :]
    bound -= bound.mean((2, 3), keepdim=True)


def main(words: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Return the figures of each training."""
    args = parse(words)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    clean, truth = render(args.test_images, TEST_SEED, args.device)

    start = time.monotonic()
    domains = {"clean": clean}
    for name in (*CORRUPTIONS, *VALIDATION_CORRUPTIONS):
        domains[name] = corrupt(clean, name, severity=SEVERITY)
    say(f"corrupted {len(clean)} images {len(domains) - 1} times in {time.monotonic() - start:.1f} s")
    images, labels = render(args.train_images, TRAIN_SEED, args.device, args.processes)

    architecture = {
        "img_size": SIZE,
        "embed_dim": args.width,
        "depth": args.depth,
        "num_heads": args.heads,
        "num_classes": len(CLASSES),
        **({"patch_size": 6} if args.plain else {"stem": stem(args.width)}),  # 8 x 8 tokens, both
    }
    torch.manual_seed(args.seed)
    model = vision_transformer(**architecture).to(args.device)
    initial = {name: p.clone() for name, p in model.state_dict().items()}
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {args.device}")

    trials = {}
    for strength in args.strength:
        augment = Augment.parse(strength)
        say(f"strength {strength}: {augment}")
        model.load_state_dict(initial)
        losses = train(model, images, labels, augment, args)
        weights = round_weights(model)
        figures = measure(model, domains, truth)
        trials[strength] = figures
        say(f"strength {strength}: " + "  ".join(f"{name} {value:.1f}" for name, value in figures.items()))
        metadata = {
            "model": architecture,
            "normalisation": {"mean": [MEAN] * 3, "std": [STD] * 3},
            "classes": "".join(CLASSES),
            "command": command(args, strength),
            "augmentation": asdict(augment),
            "loss": losses[-1],
            "accuracy": {"images": len(truth), "severity": SEVERITY, **figures},
            "versions": versions(),
        }
        short = strength.replace(",", "-").replace("=", "")
        save(out / f"glyphs-{'plain' if args.plain else 'vit'}-{short}.safetensors", weights, metadata)
        (out / "figures.json").write_text(json.dumps(trials, indent=1) + "\n")
    say(compared(trials))
    return trials


if __name__ == "__main__":
    main(sys.argv[1:])
