"""The experiment `streams` for many processes on one GPU: every image is corrupted once, and all processes read it.

    python benchmarks/streams.py --data SHARDS --checkpoint DEIT_TINY --workers 10 --out results

It is the experiment `mgtta bench streams` on DeiT-Tiny: kinds, batches, scores and records are the same, but the
seeds only change the order of the images, since corruptions are drawn once. Every gradient method has gather=16 and
recall=16; its learning rate and pull are those of SETTINGS, the best on shard 0 under the validation
corruptions, six pairs for each method. Records are appended to OUT/streams.jsonl; what is there is not run again.
OUT/streams.md is their table.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagenet
import torch
from pages import read_lines, table
from processes import in_processes
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic
from mgtta.data.corruptions import CORRUPTIONS, corrupt
from mgtta.data.streams import GRADUAL
from mgtta.evaluation.metrics import expected_calibration_error, reliability
from mgtta.methods.registry import recipe
from mgtta.report.summary import spelled

BATCH_SIZE = 64
SINGLE_IMAGES = 400  # of each corruption, in batches of one
ROUNDS = 10
ROUND_IMAGES = 1000  # of each corruption in a round
GRADUAL_IMAGES = 100  # of each corruption and severity
CORRUPTED_AT_ONCE = 50  # images
SEEDS = 3
KINDS = ("rounds", "one", "continual", "mixed", "labels", "reset", "gradual", "clean")  # the longest first
SHOWN = ("reset", "continual", "rounds", "mixed", "labels", "one", "gradual", "clean")  # columns
SETTINGS: dict[str, tuple[float, float]] = {  # learning rate and pull, the best of six on validation streams
    "mgtta_plus": (5e-3, 0.05),
    "plus_adam": (5e-3, 0.05),
    "mgtta": (5e-3, 0.05),
    "eq7_adam": (5e-3, 0.05),
    "spa_eata": (1e-2, 0.05),
    "roid": (7.5e-4, 0.05),
    "eata": (2.5e-3, 0.0),
    "plus_sgd": (1.5e-2, 0.0),
    "eq7_sgd": (1.5e-2, 0.0),
    "deyo": (1.5e-4, 0.0),
    "rdumb": (7.5e-4, 0.0),
    "actmad": (1.5e-2, 0.0),
    "sar": (1.5e-3, 0.0),
    "tent": (3e-4, 0.0),
    "shot": (1e-3, 0.0),
    "eta": (3e-4, 0.0),
    "tent_come": (3e-3, 0.05),
    "eata_come": (1e-3, 0.0),
    "sar_come": (3e-3, 0.05),
    "spa_eta": (3e-3, 0.05),
    "spa": (1.5e-3, 0.05),
    "cmf": (7.5e-5, 0.05),
    "mgtta_lstm": (5e-3, 0.05),
    "cotta": (2.5e-2, 0.0),
}
FORWARD_ONLY = ("noadapt", "neo", "foa_shift", "t3a", "lame", "foa")  # as their recipes are
Job = tuple[str, str, int]  # method, kind, seed


class Bench:
    """DeiT-Tiny, the test images under all corruptions on the device, and what methods need."""

    def __init__(self, path: Path, device: str, precision: str):
        made = torch.load(path, mmap=True)
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        self.precision = precision
        self.labels = made["labels"]
        self.images = made["images"].to(device)
        self.sets = made["sets"]
        self.model = imagenet.deit_tiny(Path(made["checkpoint"]), device)
        clean = made["clean"].to(device)
        self.needs = {
            "source": mgtta.source_statistics(self.model, clean),
            "fisher": mgtta.fisher_information(self.model, clean[:256]),
        }

    def method(self, name: str) -> Any:
        chosen = recipe(name)
        settings: dict[str, Any] = {key: value for key, value in self.needs.items() if key in chosen.settings}
        return mgtta.create(name, self.model, precision=self.precision, **settings, **wrapped(name))

    def visits(self, kind: str, seed: int) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the name of each domain and the rows of its batches; a row is a place in a set, and in all images."""
        random = torch.Generator().manual_seed(seed)

        def some(name: str, images: int | None = None) -> Tensor:
            first, length = self.sets[name]
            order = torch.randperm(length, generator=random)[:images]
            if kind == "labels":
                order = order[self.labels[order].argsort(stable=True)]
            return torch.stack([order, first + order], 1)

        if kind == "mixed":
            rows = torch.cat([some(name) for name in CORRUPTIONS])
            yield "mixed", list(rows[torch.randperm(len(rows), generator=random)].split(BATCH_SIZE))
        elif kind == "clean":
            yield "clean", list(some("clean").split(BATCH_SIZE))
        elif kind == "gradual":
            for name in CORRUPTIONS:
                for severity in GRADUAL:
                    yield f"{name}/{severity}", list(some(f"{name}/{severity}").split(BATCH_SIZE))
        elif kind == "one":
            for name in CORRUPTIONS:
                yield name, list(some(name, SINGLE_IMAGES).split(1))
        elif kind == "rounds":
            for _ in range(ROUNDS):
                for name in CORRUPTIONS:
                    yield name, list(some(name, ROUND_IMAGES).split(BATCH_SIZE))
        else:
            for name in CORRUPTIONS:
                yield name, list(some(name).split(BATCH_SIZE))

    def run(self, name: str, kind: str, seed: int) -> list[dict[str, Any]]:
        """Return the records of a method on a stream, one for each visit of a domain."""
        torch.manual_seed(seed)
        method = self.method(name)
        records = []
        for domain, batches in self.visits(kind, seed):
            if kind == "reset":
                method.reset()
            logits = [method(self.images[rows[:, 1].to(self.images.device)]) for rows in batches]
            y = self.labels[torch.cat(batches)[:, 0]]
            records.append({"domain": domain, **scores(torch.cat(logits).float().cpu(), y)})
        own = {"experiment": "streams", "method": name, "kind": kind, "seed": seed, "settings": wrapped(name)}
        return [{**own, **record, "without": [], "split": "test"} for record in records]


def wrapped(name: str) -> dict[str, Any]:
    if recipe(name).descent is None:
        return {}
    lr, pull = SETTINGS[name]
    return {"lr": lr, "pull": pull, "gather": 16, "recall": 16}


def scores(logits: Tensor, y: Tensor) -> dict[str, Any]:
    right = logits.argmax(1) == y
    bins = reliability(logits, y)
    return {
        "images": len(y),
        "labelled": len(y),
        "top1": 100 * float(right.float().mean()),
        "ece": expected_calibration_error(bins),
    }


def make(args: argparse.Namespace) -> Path:
    """Write the images for the processes to read."""
    path = args.folder / "streams.pt"
    args.folder.mkdir(parents=True, exist_ok=True)
    held = imagenet.shard(args.data, 1, 2)
    x = held.x.to(args.device)

    def corrupted(name: str, severity: int, images: int) -> Tensor:
        parts = zip(x[:images].split(CORRUPTED_AT_ONCE), torch.arange(images).split(CORRUPTED_AT_ONCE), strict=True)
        return torch.cat([corrupt(part, name, severity, index=index).cpu() for part, index in parts])

    sets = {"clean": held.x}
    sets |= {name: corrupted(name, 5, len(x)) for name in CORRUPTIONS}
    for name in CORRUPTIONS:
        for severity in sorted(set(GRADUAL)):
            sets[f"{name}/{severity}"] = corrupted(name, severity, GRADUAL_IMAGES)
    clean = imagenet.shard(args.clean or args.data, 0).x
    lengths = [len(images) for images in sets.values()]
    places = {name: (sum(lengths[:k]), lengths[k]) for k, name in enumerate(sets)}  # where a set begins, and its length
    images = torch.cat(list(sets.values()))
    made = {"images": images, "sets": places, "labels": held.labels, "clean": clean, "checkpoint": str(args.checkpoint)}
    torch.save(made, path)
    return path


_BENCH: Bench | None = None


def begin(*setup: Any) -> None:
    global _BENCH
    _BENCH = Bench(*setup)


def work(job: Job) -> list[dict[str, Any]]:
    assert _BENCH is not None
    return _BENCH.run(*job)


def jobs(args: argparse.Namespace) -> list[Job]:
    methods = args.methods.split(",")
    few = set(args.rounds.split(","))
    found = []
    for seed in range(args.seeds):
        for kind in KINDS:
            for method in methods:
                if kind == "rounds" and (method not in few or seed):
                    continue
                if kind == "one" and seed >= args.single_seeds:
                    continue
                found.append((method, kind, seed))
    return found


def main() -> None:
    parser = imagenet.arguments(__doc__.split("\n")[0])
    parser.add_argument("--clean", type=Path, help="folder of shard 0, if it is another")
    parser.add_argument("--folder", type=Path, default=Path("runs/streams"), help="for the corrupted images")
    parser.add_argument("--methods", default=",".join([*SETTINGS, *FORWARD_ONLY]))
    parser.add_argument("--rounds", default="mgtta_plus,plus_adam", help="methods that run ten rounds, with one seed")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--single-seeds", type=int, default=SEEDS, help="seeds of batches of one")
    parser.add_argument("--precision", default="auto", help="as of create: auto is bf16 on a GPU")
    parser.add_argument("--workers", type=int, default=10, help="processes; each holds all images, 7 GB")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "streams.jsonl"
    known = read_lines(store)
    done = {(record["method"], record["kind"], record["seed"]) for record in known}
    todo = [job for job in jobs(args) if job not in done]
    setup = (make(args), args.device, args.precision)
    for job, records in in_processes(todo, work, begin, setup, args.workers, args.seconds):
        with open(store, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        top1 = sum(record["top1"] for record in records) / len(records)
        print(*job, f"{top1:.2f}", flush=True)
    with atomic(args.out / "streams.md") as temporary:
        temporary.write_text(page(read_lines(store)))


def page(records: list[dict[str, Any]]) -> str:
    """Return the table of top-1 by method and kind, the best continual stream first."""
    figures: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}  # method and kind -> seed -> records
    for record in records:
        figures.setdefault((record["method"], record["kind"]), {}).setdefault(record["seed"], []).append(record)
    kinds = [kind for kind in SHOWN if any(kind == known for _, known in figures)]
    methods = sorted({method for method, _ in figures}, key=lambda method: -_top1(figures, method, "continual"))
    rows = [[spelled(method), *(_shown(figures.get((method, kind))) for kind in kinds)] for method in methods]
    return (
        "# One setting for every stream\n\n"
        "`python benchmarks/streams.py --data SHARDS --checkpoint DEIT_TINY --workers 10 --out results`\n\n"
        "DeiT-Tiny, 2,000 ImageNet validation images (shards 1 and 2) under each of the 15 corruptions at severity 5, "
        "batches of 64, one H200 in bfloat16 (precision='auto', the default). Top-1 in percent, the expected "
        "calibration error in parentheses; with the standard deviation where there are several seeds; empty where a "
        "stream was not run. Every gradient method has gather=16, recall=16, and the best of six pairs of rate "
        "and pull, by the mean of three short validation streams (continual, mixed, batches of one). mgtta+ had more "
        "tries, on longer validation streams "
        "(docs/research.md).\n\n" + table(["method", *kinds], rows, right=True) + "\n"
    )


def _top1(figures: dict[Any, Any], method: str, kind: str) -> float:
    seeds = figures.get((method, kind), {})
    return statistics.fmean([r["top1"] for own in seeds.values() for r in own] or [0.0])


def _shown(seeds: dict[int, list[dict[str, Any]]] | None) -> str:
    if not seeds:
        return ""
    means = [statistics.fmean(record["top1"] for record in own) for own in seeds.values()]
    ece = statistics.fmean(record["ece"] for own in seeds.values() for record in own)
    spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.1f}{spread} ({ece:.1f})"


if __name__ == "__main__":
    main()
