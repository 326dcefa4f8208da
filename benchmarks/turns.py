"""How the mean prediction changes from batch to batch, where classes come in turn and where they do not.

    python benchmarks/turns.py --network resnet50 --data SHARDS --checkpoint WEIGHTS --images 448 --out OUT

Forward passes on validation streams, without learning; the network normalises by batch, as mgtta+ does there, or image
by image (models/blended.py). One line for each kind of stream and way goes to OUT/changes.jsonl: the lowest, middle and
highest of what adaptation/turns.py decides by, as F, and top-1. `few` has four corruptions at five severities of an
image in a row. `benchmarks/tried.py` makes the table of docs/research.md.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from stream_images import NETWORKS, held_images, make
from torch import Tensor

import mgtta
from mgtta.adaptation.turns import BATCHES, LEAST_BATCHES, change, mean_and_chance
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, corrupt
from mgtta.methods.mgtta_plus import RESNETS
from mgtta.models.statistics import image_by_image

KINDS = ("reset", "mixed", "labels", "classes", "few")
MOST_BATCHES = 28  # of a stream
SEVERITIES = (1, 2, 3, 4, 5)


def streams(kind: str, made: dict, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images and labels of the batches of a stream."""
    random = torch.Generator().manual_seed(0)
    labels = made["labels"]
    n = len(labels)
    if kind == "few":
        yield from few(made, args)
        return
    order = torch.cat([torch.randperm(n, generator=random) + k * n for k in range(len(made["names"]))])
    if kind in ("mixed", "classes"):
        order = order[torch.randperm(len(order), generator=random)]
    if kind == "classes":
        order = order[labels[order % n].argsort(stable=True)]
    if kind == "labels":
        order = torch.cat([part[labels[part % n].argsort(stable=True)] for part in order.split(n)])
    first = made["sets"][made["names"][0]][0]
    for rows in order.split(made["batch"])[:MOST_BATCHES]:
        yield made["images"][first + rows], labels[rows % n]


def few(made: dict, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches in which each image comes in all corruptions and severities, sorted by class."""
    _, held = held_images(args)
    versions = len(VALIDATION_CORRUPTIONS) * len(SEVERITIES)
    chosen = held.labels.argsort(stable=True)[: MOST_BATCHES * made["batch"] // versions]
    constants = NETWORKS[args.network].constants
    made_of = [
        corrupt(held.x[chosen], name, severity, index=chosen, constants=constants)
        for name in VALIDATION_CORRUPTIONS
        for severity in SEVERITIES
    ]
    x = torch.stack(made_of, 1).flatten(0, 1)
    y = held.labels[chosen].repeat_interleave(versions)
    yield from zip(x.split(made["batch"]), y.split(made["batch"]), strict=True)


@torch.no_grad()
def measured(model: mgtta.Classifier, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return top-1, and the lowest, middle and highest median change over the batches."""
    found: list[float] = []
    before = None
    right = 0
    images = 0
    for x, y in batches:
        logits = model(x)
        now = mean_and_chance(logits)
        if before is not None:
            found.append(float(change(now, before, limit=1.0, deviations=0.0)))
        before = now
        right += int((logits.argmax(1) == y).sum())
        images += len(y)
    latest = [found[max(0, k - BATCHES) : k] for k in range(LEAST_BATCHES, len(found) + 1)]
    medians = [statistics.median(part) for part in latest]
    spread = {"lowest": min(medians), "middle": statistics.median(medians), "highest": max(medians)}
    return {"top1": 100 * right / images, **spread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=list(NETWORKS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/streams"), help="for the corrupted images")
    parser.add_argument("--images", type=int, help="the first so many images under each corruption; by default all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = SimpleNamespace(**vars(args), streams="validation", kinds="", device="cpu")
    made = torch.load(make(where), mmap=True)
    model = mgtta.load_model(made["model"], checkpoint=made["checkpoint"])
    model.use_batch_statistics(float(RESNETS["source_share"]))
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        batches = list(streams(kind, made, where))
        for way in ("by batch", "one by one"):
            if way == "one by one":
                with image_by_image(model.net):
                    found = measured(model, batches)
            else:
                found = measured(model, batches)
            line = {"network": args.network, "kind": kind, "way": way}
            line |= {name: round(value, 3) for name, value in found.items()}
            with open(args.out / "changes.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


if __name__ == "__main__":
    main()
