"""The experiment `streams` for many processes on one GPU: every image is corrupted once, and all processes read it.

    python benchmarks/streams.py choose --network deit_tiny --data SHARDS --checkpoint DEIT_TINY --out results
    python benchmarks/streams.py run --network deit_tiny --data SHARDS --checkpoint DEIT_TINY --out results

It is the experiment `mgtta bench streams`: kinds, batches, scores and records are the same, but the seeds only change
the order of the images, since corruptions are drawn once. Other networks: resnet50 and efficientnet_lite0 (weights of
benchmarks/weights.py), cifar10 (benchmarks/cifar.py).

`choose` tries settings of each gradient method on three short streams of the validation images (continual, mixed,
batches of one), and appends to OUT/choices.jsonl: on DeiT-Tiny three learning rates, on other networks, whose rates are
less known, four, each with two pulls. mgtta+ is not tried: it has its default.

`run` takes the best pair of each method, by the mean of the three streams, with gather=16 and recall=16. Records are
appended to OUT/streams.jsonl; what is there is not run again. OUT/streams.md is their table; `page` writes it again.
With --streams validation they are of the validation images, and the files are named so. --alike sets how much alike
images must be to count fully in mgtta+'s means; inf: all of them do. --without class_mix (balance, source_share) leaves
that out of mgtta+ and its kin. --set source_share=0.6,own_share=0.1 gives mgtta+ other settings than its default; its
files are named so, and have no page. The kind `long` is the mixed stream eight times over, in other orders; `classes`
is the mixed stream sorted by class. The network `pacs` has validation streams only.
"""

import argparse
import gc
import json
import math
import statistics
import textwrap
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pages import read_lines, table
from processes import check_time, in_processes
from stream_images import NETWORKS, make
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic
from mgtta.adaptation.wrapper import Adapting
from mgtta.data.streams import GRADUAL
from mgtta.evaluation.metrics import expected_calibration_error, reliability
from mgtta.fast import engine
from mgtta.methods import _neighbours
from mgtta.methods.registry import recipe
from mgtta.report.summary import spelled

SINGLE_IMAGES = 400  # of each corruption, in batches of one
TRIAL_SINGLES = 96  # the same, for choosing
ROUNDS = 10
LONG = 8  # times the mixed stream
ROUND_IMAGES = 1000  # of each corruption in a round, at most; half of those that there are
SEEDS = 3
LINE_WIDTH = 120  # characters, of the page
KINDS = ("rounds", "one", "continual", "mixed", "labels", "reset", "gradual", "clean")  # the longest first
SHOWN = ("reset", "continual", "rounds", "mixed", "long", "labels", "classes", "one", "gradual", "clean")  # columns
TRIALS = ("one", "continual", "mixed")
RATES = (1 / 3, 1.0, 3.0)  # that are tried, relative to the recipe's own
PULLS = (0.0, 0.05)
OTHER_RATES = (*RATES, 10.0)  # the same for networks other than DeiT-Tiny
OPTIONS = {"gather": 16, "recall": 16}
WITHOUT = {"balance": False, "class_mix": False, "source_share": 0.0}  # of mgtta+: what leaves it out
GRADIENT = (
    "mgtta_plus,plus_adam,plus_sgd,mgtta,mgtta_lstm,eq7_adam,eq7_sgd,actmad,tent,eta,eata,rdumb,tent_come,eata_come,"
    "sar_come,sar,deyo,roid,cmf,shot,cotta,spa,spa_eta,spa_eata"
)
FORWARD_ONLY = "noadapt,bn,neo,foa_shift,t3a,lame,foa"  # as their recipes are
Settings = dict[str, Any]
Job = tuple[str, str, int, Settings]  # method, kind, seed, settings
Records = list[dict[str, Any]]


class Bench:
    """A network, its images under all corruptions on the device, and what methods need."""

    def __init__(self, path: Path, device: str, precision: str, alike: float, singles: int):
        _neighbours.ALIKE = alike
        engine.COMPILE_BATCHES = math.inf  # graphs are captured, but many processes would compile side by side
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        made = torch.load(path, mmap=True)
        self.device = torch.device(device).type
        self.precision = precision
        self.singles = singles
        self.labels = made["labels"]
        self.images = made["images"].to(device)
        self.sets = made["sets"]
        self.names = made["names"]  # of the corruptions
        self.split = made["split"]
        self.batch = made["batch"]
        self.model = mgtta.load_model(made["model"], checkpoint=made["checkpoint"], num_classes=made["classes"]).to(
            device
        )
        clean = made["clean"].to(device)
        self.needs = {
            "source": mgtta.source_statistics(self.model, clean),
            "fisher": mgtta.fisher_information(self.model, clean[:256]),
        }

    def visits(self, kind: str, seed: int) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the name of each domain and the rows of its batches; a row is a place in a set, and in all images."""
        random = torch.Generator().manual_seed(seed)

        def some(name: str, images: int | None = None) -> Tensor:
            first, length = self.sets[name]
            order = torch.randperm(length, generator=random)[:images]
            if kind == "labels":
                order = order[self.labels[order].argsort(stable=True)]
            return torch.stack([order, first + order], 1)

        if kind in ("mixed", "long"):
            for _ in range(LONG if kind == "long" else 1):
                rows = torch.cat([some(name) for name in self.names])
                yield "mixed", list(rows[torch.randperm(len(rows), generator=random)].split(self.batch))
        elif kind == "classes":
            rows = torch.cat([some(name) for name in self.names])
            rows = rows[torch.randperm(len(rows), generator=random)]
            yield "mixed", list(rows[self.labels[rows[:, 0]].argsort(stable=True)].split(self.batch))
        elif kind == "clean":
            yield "clean", list(some("clean").split(self.batch))
        elif kind == "gradual":
            for name in self.names:
                for severity in GRADUAL:
                    yield f"{name}/{severity}", list(some(f"{name}/{severity}").split(self.batch))
        elif kind == "one":
            for name in self.names:
                yield name, list(some(name, self.singles).split(1))
        elif kind == "rounds":
            for _ in range(ROUNDS):
                for name in self.names:
                    yield name, list(some(name, min(ROUND_IMAGES, len(self.labels) // 2)).split(self.batch))
        else:
            for name in self.names:
                yield name, list(some(name).split(self.batch))

    def run(self, name: str, kind: str, seed: int, settings: Settings) -> Records:
        """Return the records of a method on a stream, one for each visit of a domain."""
        gc.collect()  # the graphs of the method before this one take gigabytes
        torch.cuda.empty_cache()
        torch.manual_seed(seed)
        needs = {key: value for key, value in self.needs.items() if key in recipe(name).settings}
        method = mgtta.create(name, self.model, precision=self.precision, **needs, **settings)
        records = []
        turns = 0
        for domain, batches in self.visits(kind, seed):
            if kind == "reset":
                turns += changes_of_turns(method)  # it forgets them
                method.reset()
            logits = []
            for rows in batches:
                check_time()
                logits.append(method(self.images[rows[:, 1].to(self.images.device)]))
            y = self.labels[torch.cat(batches)[:, 0]]
            records.append({"domain": domain, **scores(torch.cat(logits).float().cpu(), y)})
        own = {"experiment": "streams", "method": name, "kind": kind, "seed": seed, "settings": settings}
        more = {"without": [], "split": self.split, "device": self.device, "precision": method.precision}
        more["turns"] = turns + changes_of_turns(method)
        return [{**own, **record, **more, "part": part} for part, record in enumerate(records)]


def changes_of_turns(method: Adapting) -> int:
    """Return how often a method began, or ceased, to normalise images one by one since its last reset."""
    return sum(event["action"] in ("one by one", "by batch") for event in method.events)


def scores(logits: Tensor, y: Tensor) -> dict[str, Any]:
    right = logits.argmax(1) == y
    bins = reliability(logits, y)
    return {
        "images": len(y),
        "labelled": len(y),
        "top1": 100 * float(right.float().mean()),
        "ece": expected_calibration_error(bins),
    }


_BENCH: Bench | None = None


def begin(*setup: Any) -> None:
    global _BENCH
    _BENCH = Bench(*setup)


def work(job: Job) -> Records:
    assert _BENCH is not None
    return _BENCH.run(*job)


# --- choose


def choose(args: argparse.Namespace) -> None:
    """Try settings of each gradient method on short validation streams."""
    args.streams = "trial"
    args.kinds = ",".join(TRIALS)
    store = args.out / "choices.jsonl"
    known = {_trial(record) for record in read_lines(store)}
    todo = [
        (method, kind, 0, settings)
        for method in args.methods.split(",")
        for settings in tries(method, args.network)
        for kind in TRIALS
        if (method, kind, settings["lr"], settings["pull"]) not in known
    ]
    setup = (make(args), args.device, args.precision, _neighbours.ALIKE, args.singles)
    for (method, kind, _, settings), records in in_processes(todo, work, begin, setup, args.workers, args.seconds):
        top1 = statistics.fmean(record["top1"] for record in records)
        chosen = {"method": method, "kind": kind, "lr": settings["lr"], "pull": settings["pull"], "top1": top1}
        with open(store, "a") as file:
            file.write(json.dumps(chosen) + "\n")
        print(method, kind, settings["lr"], settings["pull"], f"{top1:.2f}", flush=True)


def tries(method: str, network: str) -> list[Settings]:
    """Return the settings that are tried, pairs of learning rate and pull; none for mgtta+."""
    own = recipe(method)
    if own.descent is None or method == "mgtta_plus":
        return []
    centre = own.settings["lr"]
    pairs = product(RATES, PULLS)
    if network != "deit_tiny":
        pairs = product(OTHER_RATES, PULLS)
    if NETWORKS[network].is_resnet:
        centre = own.resnets.get("lr", centre)
    return [{"lr": float(f"{centre * rate:.3g}"), "pull": pull, **OPTIONS} for rate, pull in pairs]


def chosen(path: Path) -> dict[str, Settings]:
    """Return the best settings of each method, by the mean over kinds of stream; none if tries are missing."""
    found: dict[str, dict[tuple[float, float], list[float]]] = {}
    for record in read_lines(path):
        pair = (record["lr"], record["pull"])
        found.setdefault(record["method"], {}).setdefault(pair, []).append(record["top1"])
    whole = {m: pairs for m, pairs in found.items() if all(len(top1) == len(TRIALS) for top1 in pairs.values())}
    best = {method: max(pairs, key=lambda pair: statistics.fmean(pairs[pair])) for method, pairs in whole.items()}
    return {method: {"lr": lr, "pull": pull, **OPTIONS} for method, (lr, pull) in best.items()}


def _trial(record: dict[str, Any]) -> tuple[str, str, float, float]:
    return record["method"], record["kind"], record["lr"], record["pull"]


# --- run


def run(args: argparse.Namespace) -> None:
    """Run all methods at their settings on all kinds of stream."""
    name = "streams" if args.streams == "test" else args.streams
    if args.alike != _neighbours.ALIKE:
        name += f"_alike_{args.alike:g}"
    if args.without:
        name += f"_without_{args.without}"
    name += "".join(f"_{key}_{value:g}" for key, value in args.set.items())
    store = args.out / f"{name}.jsonl"
    done = {(record["method"], record["kind"], record["seed"]) for record in read_lines(store)}
    todo = [job for job in jobs(args) if job[:3] not in done]
    setup = (make(args), args.device, args.precision, args.alike, args.singles)
    for (method, kind, seed, _), records in in_processes(todo, work, begin, setup, args.workers, args.seconds):
        with open(store, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        print(method, kind, seed, f"{statistics.fmean(record['top1'] for record in records):.2f}", flush=True)
    if not args.set:
        write(args, name)


def write(args: argparse.Namespace, name: str = "streams") -> None:
    """Write the table of the records that are there."""
    records = read_lines(args.out / f"{name}.jsonl")
    pairs = read_lines(args.out / "choices.jsonl")
    with atomic(args.out / f"{name}.md") as temporary:
        temporary.write_text(page(records, args.network, name, args.images, pairs))


def jobs(args: argparse.Namespace) -> list[Job]:
    """Return all jobs: ten rounds, the longest stream, come first, then all methods with the first seed."""
    settings = chosen(args.out / "choices.jsonl")
    few = set(args.rounds.split(","))
    found: list[Job] = []
    for given in args.methods.split(","):
        method, _, seeds = given.partition(":")
        if recipe(method).descent is not None and method != "mgtta_plus" and method not in settings:
            print(f"{method} has no settings yet: run `choose`", flush=True)
            continue
        less = {args.without: WITHOUT[args.without]} if args.without in recipe(method).settings else {}
        more = args.set if method == "mgtta_plus" else {}
        for seed in range(int(seeds or args.seeds)):
            own = [kind for kind in args.kinds.split(",") if kind != "rounds" or (method in few and not seed)]
            found += [(method, kind, seed, settings.get(method, {}) | less | more) for kind in own]
    return sorted(found, key=lambda job: (job[1] != "rounds", job[2]))


PROTOCOL = """{words}, {images}, batches of {batch}, one H200, precision="auto", the default: bfloat16 where there is a
fast path. Top-1 in percent; in parentheses the expected calibration error. With the standard deviation where there are
several seeds; empty where a stream was not run. Of rounds and of the long stream: the last, and in brackets the first
and the lowest; the calibration error is over all. mgtta+ has its default settings. Every other gradient method has
gather=16, recall=16, and {tries}, by the mean of three short validation streams (continual, mixed, batches of one). The
remaining methods are as their recipes are. ROID and CMF multiply logits by their prior, so that probabilities are
nearly equal: their calibration error says only that."""


def page(records: Records, network: str, name: str, first: int | None, tried: Records) -> str:
    """Return the table of top-1 by method and kind, the best continual stream first.

    Args:
        name: of the file.
        first: so many images under each corruption; None: all.
        tried: the lines of choices.jsonl.
    """
    figures: dict[tuple[str, str], dict[int, Records]] = {}  # method and kind -> seed -> records
    for record in records:
        figures.setdefault((record["method"], record["kind"]), {}).setdefault(record["seed"], []).append(record)
    kinds = [kind for kind in SHOWN if any(kind == known for _, known in figures)]
    methods = sorted({method for method, _ in figures}, key=lambda method: -_top1(figures, method, "continual"))
    rows = [[spelled(method), *(_shown(figures.get((method, kind)), kind) for kind in kinds)] for method in methods]
    about = NETWORKS[network]
    images = f"{about.test} under each of the 15 corruptions at severity 5"
    if not name.startswith("streams"):
        images = f"{about.validation} under each of the four validation corruptions at severity 5"
    if first is not None:
        images = f"the first {first:,} of {images}"
    command = f"python benchmarks/streams.py run --network {network} --data DATA --checkpoint WEIGHTS --out results"
    if first is not None:
        command += f" --images {first}"
    tries = f"the best of its pairs of learning rate and pull ({_numbers_of_pairs(tried, methods)})"
    protocol = PROTOCOL.format(words=about.words, images=images, batch=about.batch, tries=tries)
    words = textwrap.fill(" ".join((protocol + _on_a_cpu(records)).split()), LINE_WIDTH)
    shown = table(["method", *kinds], rows, right=True)
    return f"# One setting for every stream\n\n`{command}`\n\n{words}\n\n{shown}\n"


def _on_a_cpu(records: Records) -> str:
    """Return which streams were run on a CPU, in a sentence; empty if none was."""
    found: dict[str, set[str]] = {}
    for record in records:
        if record.get("device") == "cpu":
            found.setdefault(spelled(record["method"]), set()).add(record["kind"])
    streams = "; ".join(f"{method} ({', '.join(sorted(kinds))})" for method, kinds in sorted(found.items()))
    return f" On a CPU, in float32: {streams}." if streams else ""


def _numbers_of_pairs(tried: Records, methods: list[str]) -> str:
    """Return with how many pairs each of the methods was tried, in words."""
    pairs: dict[str, set[tuple[float, float]]] = {}
    for line in tried:
        pairs.setdefault(line["method"], set()).add((line["lr"], line["pull"]))
    alike: dict[int, list[str]] = {}
    for method in methods:
        if method in pairs:
            alike.setdefault(len(pairs[method]), []).append(spelled(method))
    if len(alike) == 1:
        return f"of {next(iter(alike))}"
    return "; ".join(f"of {count}: {', '.join(alike[count])}" for count in sorted(alike, reverse=True))


def _top1(figures: dict[Any, Any], method: str, kind: str) -> float:
    seeds = figures.get((method, kind), {})
    return statistics.fmean([r["top1"] for own in seeds.values() for r in own] or [0.0])


def _shown(seeds: dict[int, Records] | None, kind: str) -> str:
    if not seeds:
        return ""
    ece = statistics.fmean(record["ece"] for own in seeds.values() for record in own)
    if kind in ("rounds", "long"):
        by_seed = [by_round(own) for own in seeds.values()]
        first, *others = (statistics.fmean(rounds) for rounds in zip(*by_seed, strict=True))
        return f"{others[-1]:.1f} [{first:.1f}, {min(first, *others):.1f}] ({ece:.1f})"
    means = [statistics.fmean(record["top1"] for record in own) for own in seeds.values()]
    spread = f" ± {statistics.stdev(means):.1f}" if len(means) > 1 else ""
    return f"{statistics.fmean(means):.1f}{spread} ({ece:.1f})"


def by_round(records: Records) -> list[float]:
    """Return the mean top-1 of each round, from the records of its domains in turn."""
    domains = len({record["domain"] for record in records})
    top1 = [record["top1"] for record in records]
    return [statistics.fmean(top1[k : k + domains]) for k in range(0, len(top1), domains)]


def numbers(text: str) -> Settings:
    """Return settings from NAME=NUMBER, separated by commas."""
    return {name: float(value) for name, _, value in (item.partition("=") for item in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for do, methods, singles in (
        (choose, GRADIENT, TRIAL_SINGLES),
        (run, f"{GRADIENT},{FORWARD_ONLY}", SINGLE_IMAGES),
    ):
        verb = verbs.add_parser(do.__name__, help=do.__doc__)
        verb.set_defaults(do=do)
        verb.add_argument("--network", choices=list(NETWORKS), default="deit_tiny")
        verb.add_argument("--data", type=Path, required=True, help="folder of the shards, or of CIFAR-10's .npz files")
        verb.add_argument("--checkpoint", type=Path, required=True, help="the network's weights")
        verb.add_argument("--out", type=Path, required=True, help="folder for records and table")
        verb.add_argument("--folder", type=Path, default=Path("runs/streams"), help="for the corrupted images")
        verb.add_argument("--methods", default=methods, help="NAME, or for `run` NAME:SEEDS, separated by commas")
        verb.add_argument("--images", type=int, help="the first so many images under each corruption; by default all")
        verb.add_argument("--singles", type=int, default=singles, help="images of each corruption in batches of one")
        verb.add_argument("--precision", default="auto", help="as of create: auto is bf16 on a GPU")
        verb.add_argument("--workers", type=int, default=12, help="processes; each holds all images, 6 GB")
        verb.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
        verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if do is run:
            verb.add_argument("--streams", choices=["test", "validation"], default="test")
            verb.add_argument("--alike", type=float, default=_neighbours.ALIKE)
            verb.add_argument("--without", choices=list(WITHOUT), help="of mgtta+ and its kin")
            verb.add_argument("--set", type=numbers, default={}, help="settings of mgtta+: NAME=NUMBER,...")
            verb.add_argument("--kinds", default=",".join(KINDS), help="of stream, the longest first; long is another")
            verb.add_argument("--rounds", default="mgtta_plus,plus_adam", help="methods that run ten rounds, one seed")
            verb.add_argument("--seeds", type=int, default=SEEDS)
    verb = verbs.add_parser("page", help=write.__doc__)
    verb.set_defaults(do=write)
    verb.add_argument("--network", choices=list(NETWORKS), default="deit_tiny")
    verb.add_argument("--out", type=Path, required=True, help="folder of the records")
    verb.add_argument("--images", type=int, help="of which the records are, if not of all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.do(args)


if __name__ == "__main__":
    main()
