"""What the shipped generator does, unchanged, on networks and batch sizes that it was not trained for.

    python benchmarks/transfer.py train --device cuda --out NETS
    python benchmarks/transfer.py run --nets NETS --out results

It was trained on a DeiT-Tiny, on ImageNet, in batches of two. Here it adapts the embedded ViT, and a ResNet and a
ConvNeXt of timm that `train` trains on the same characters, with the embedded ViT's augmentation. Fifteen corruptions
at severity 5, reset before each; every learning rate is the best of three on the four validation corruptions.
"""

import argparse
import json
from pathlib import Path

import torch
from pages import table
from train_glyphs import Augment, render, round_weights, save, train
from train_glyphs import parse as training_arguments

import mgtta
from mgtta._lib.files import atomic
from mgtta._lib.timm import timm
from mgtta.adaptation.method import Method
from mgtta.bench.needs import needs_source
from mgtta.bench.sweep import rates
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.glyphs import CLASSES, TRAIN_SEED, VALIDATION_SEED, Glyphs
from mgtta.data.streams import Stream, corrupted, stream
from mgtta.models.norms import batch_norms

NETS = ("resnet10t", "convnext_atto")
AUGMENTATION = "0,contrast=5,share=0.05"  # the embedded ViT's
METHODS = ("noadapt", "bn", "tent", "eq7_adam", "mgtta")
BATCHES = (16, 64, 128)
FACTORS = (0.2, 1.0, 5.0)  # on the recipe's learning rate
HALF = (0.5, 0.5, 0.5)
SOURCE_SEED = 3  # of the clean characters for the source statistics


def train_nets(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    words = ["--out", str(args.out), "--device", args.device, "--plain", "--steps", str(args.steps)]
    settings = training_arguments([*words, "--batch", str(args.batch)])
    images, labels = render(args.images, TRAIN_SEED, args.device, settings.processes)
    for name in NETS:
        torch.manual_seed(settings.seed)
        net = timm.create_model(name, num_classes=len(CLASSES)).to(args.device)
        train(net, images, labels, Augment.parse(AUGMENTATION), settings)
        command = (
            f"python benchmarks/transfer.py train --steps {args.steps} --batch {args.batch} --images {args.images}"
        )
        save(args.out / f"{name}.safetensors", round_weights(net), {"command": command})


def classifier(name: str, nets: Path) -> mgtta.Classifier:
    if name == "glyphs_vit":
        return mgtta.load_model(name)
    checkpoint = nets / f"{name}.safetensors"
    return mgtta.load_model(name, checkpoint, pretrained=False, num_classes=len(CLASSES), mean=HALF, std=HALF)


def accuracies(method: Method, batches: Stream) -> list[float]:
    return [record.top1 or 0.0 for record in mgtta.evaluate(method, batches)]


def cells(name: str, args: argparse.Namespace) -> list[dict]:
    """Return a row for each method and batch size."""
    model = classifier(name, args.nets).to(args.device)
    test = Held(Glyphs(args.images), Room(2**30))
    validation = Held(Glyphs(args.images // 2, VALIDATION_SEED), Room(2**30))
    source = mgtta.source_statistics(model, Glyphs(1024, SOURCE_SEED).tensors()[0].to(args.device))
    rows = []
    for size in BATCHES:
        chosen_on, scored = (
            list(stream(corrupted(images, names), batch_size=size, device=args.device))
            for images, names in ((validation, VALIDATION_CORRUPTIONS), (test, CORRUPTIONS))
        )
        for method in METHODS:
            if method == "bn" and not batch_norms(model.net):
                continue
            settings: dict = {"source": source} if needs_source(method) else {}
            tried = rates(method, FACTORS)
            if tried:
                found = {lr: sum(accuracies(mgtta.create(method, model, lr=lr, **settings), chosen_on)) for lr in tried}
                settings["lr"] = max(found, key=lambda lr: found[lr])
            each = accuracies(mgtta.create(method, model, **settings), scored)
            row = {"model": name, "batch": size, "method": method, "lr": settings.get("lr"), "accuracy": each}
            print(f"{name} {size} {method} lr {row['lr']}: {sum(each) / len(each):.1f}", flush=True)
            rows.append(row)
    return rows


def _shown(mean: float | None, best: float) -> str:
    if mean is None:
        return ""
    if round(mean, 1) == best:
        return f"**{mean:.1f}**"
    return f"{mean:.1f}"


def page(protocol: dict, rows: list[dict]) -> str:
    lines = []
    for name, size in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        found = {row["method"]: row for row in rows if (row["model"], row["batch"]) == (name, size)}
        means = [sum(found[m]["accuracy"]) / len(CORRUPTIONS) if m in found else None for m in METHODS]
        best = max(round(mean, 1) for mean in means if mean is not None)
        shown = [_shown(mean, best) for mean in means]
        lines.append([name, str(size), *shown])
    about = __doc__.split("\n\n")[2].strip()
    shown = table(["network", "batch", *METHODS], lines, right=True)
    return (
        f"# The shipped generator on other networks\n\n`{protocol['command']}`\n\n{about}\n\n"
        f"Mean top-1 in percent over the 15 corruptions, {protocol['images']:,} images each, one seed; mgtta with the "
        f"generator `imagenet`, torch {torch.__version__} on {protocol['device']}.\n\n{shown}\n"
    )


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    path = args.out / "transfer.json"
    command = f"python benchmarks/transfer.py run --nets NETS --images {args.images} --out results"
    protocol = {"command": command, "images": args.images, "device": args.device, "factors": FACTORS}
    rows: list[dict] = []
    for name in ("glyphs_vit", *NETS):
        rows += cells(name, args)
        with atomic(path) as temporary:
            temporary.write_text(json.dumps({"protocol": protocol, "rows": rows}, indent=1) + "\n")
        with atomic(args.out / "transfer.md") as temporary:
            temporary.write_text(page(protocol, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    training = verbs.add_parser("train", help="train the ResNet and the ConvNeXt")
    training.set_defaults(do=train_nets)
    training.add_argument("--steps", type=int, default=1200)
    training.add_argument("--batch", type=int, default=1024)
    training.add_argument("--images", type=int, default=50_000)
    running = verbs.add_parser("run", help="adapt them, and the embedded ViT")
    running.set_defaults(do=run)
    running.add_argument("--nets", type=Path, required=True, help="the folder that `train` wrote")
    running.add_argument("--images", type=int, default=512, help="of each corruption")
    for verb in (training, running):
        verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        verb.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
