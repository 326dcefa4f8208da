"""One generator for several networks: trained on a ViT, a ResNet-50 and a ResNet-56 in turns, beside Adam.

    python benchmarks/networks.py train --data DATA --out results/networks --tries 6 --workers 6
    python benchmarks/networks.py run --data DATA --out results/networks --workers 12
    python benchmarks/networks.py page --out results/networks

DATA is a folder, or several (--data A --data B), with imagenet-val5k-0000{0,1,2}.tar, the weights
deit_tiny_patch16_224, resnet50 (benchmarks/weights.py) and cifar10_resnet56 (.safetensors), and cifar10_test.npz and
cifar10_validation.npz (benchmarks/cifar.py).

`train` is Algorithm 1 in turns: one pass over 128 images of a network's validation images, 32 under each validation
corruption, then the next network. After each round over all networks the generator is judged by its mean accuracy on
other validation images under the same corruptions. The best round is kept, and of all tries the best one.

`run` adapts each network to the 15 corruptions at severity 5, reset before each: Adam and SGD on Eq. 7, the shipped
generator, which has only seen DeiT-Tiny, and the one that `train` kept. Each gets its learning rate from the same
number of tries on the validation corruptions. `page` makes the table from the records.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pages import table, write_page

import mgtta
from mgtta._lib.files import atomic
from mgtta.bench.cells import SWEEP, Cell, Options, Setup
from mgtta.bench.run import run_cells, run_swept
from mgtta.bench.store import Store
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.datasets import open_dataset
from mgtta.data.streams import corrupted, stream
from mgtta.training.meta import shifted_images

TRAINING_IMAGES = 128
SOURCE_IMAGES = 1000
SHIPPED = "imagenet"
EXPERIMENT = "networks"
CHOSEN = "networks.safetensors"  # the generator of the best try
BATCH = 64
METHODS = ("noadapt", "bn", "tent", "eq7_sgd", "eq7_adam", "mgtta")
NO_BATCHNORM = ("deit_tiny_patch16_224",)


@dataclass(frozen=True)
class Network:
    """A network, its images, and the learning rate at which a generator is judged on it."""

    name: str
    checkpoint: str
    test: str
    validation: str
    constants: str  # of the corruptions
    judged_at: float


IMAGENET = ("imagenet-val5k-0000{1..2}.tar", "imagenet-val5k-00000.tar", "imagenet")
CIFAR = ("cifar10_test.npz", "cifar10_validation.npz", "cifar")
NETWORKS = (
    Network("deit_tiny_patch16_224", "deit_tiny_patch16_224.safetensors", *IMAGENET, 1e-3),
    Network("keras_resnet50", "resnet50.safetensors", *IMAGENET, 5e-3),
    Network("cifar_resnet56", "cifar10_resnet56.safetensors", *CIFAR, 5e-3),
)


def found(name: str, folders: list[Path]) -> str:
    """Return the path of a file in one of the folders; of several tars, by their first."""
    first = name.replace("{1..2}", "1")
    for folder in folders:
        if (folder / first).exists():
            return str(folder / name)
    raise SystemExit(f"{first} is in none of {', '.join(map(str, folders))}: name its folder with --data")


# --- train


class Pupil:
    """A network with its statistics, the images it trains a generator on, and those that judge one."""

    def __init__(self, network: Network, args: argparse.Namespace):
        self.network = network
        checkpoint = found(network.checkpoint, args.data)
        self.model = mgtta.load_model(network.name, checkpoint=checkpoint).to(args.device)
        side, crop_pct = self.model.input_size
        images = open_dataset(found(network.validation, args.data), size=side, crop_pct=crop_pct)
        own = Part(images, 0, args.images)
        others = Part(images, args.images, args.images + args.judges)
        clean = stream(images, first=args.source_images, device=args.device)
        self.source = mgtta.source_statistics(self.model, clean)
        constants = network.constants
        self.images = shifted_images(own, args.images, shuffle=False, device=args.device, constants=constants)
        domains = corrupted(others, VALIDATION_CORRUPTIONS, constants=constants)
        self.judges = list(stream(domains, batch_size=BATCH, device=args.device))

    def accuracy(self, generator: mgtta.MetaGradientGenerator) -> float:
        """Return the mean top-1 on the judges, the network being adapted with the generator."""
        method = mgtta.create(
            "mgtta", self.model, source=self.source, generator=generator, lr=self.network.judged_at, precision="fp32"
        )
        return statistics.mean(record.top1 or 0.0 for record in mgtta.evaluate(method, self.judges))


class Part:
    """Some images of a data set, from `start` to before `end`."""

    def __init__(self, images: Any, start: int, end: int):
        self.images = images
        self.start = start
        self.length = min(end, len(images)) - start

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.images[self.start + i]


def train_one(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train a generator on all networks in turns; write the best round's to a file, and return how it did."""
    torch.set_num_threads(1)
    pupils = [Pupil(network, args) for network in _networks(args)]
    generator = None
    best: dict[str, Any] = {"mean": -1.0}
    ends = time.monotonic() + args.seconds
    for turn in range(args.rounds):
        if turn and time.monotonic() > ends:
            break
        for pupil in pupils:
            generator = mgtta.meta_train(
                pupil.model,
                pupil.source,
                pupil.images,
                generator=generator,
                steps=args.steps,
                seed=seed * args.rounds + turn,
                progress=False,
            )
        scores = {pupil.network.name: pupil.accuracy(generator) for pupil in pupils}
        mean = statistics.mean(scores.values())
        print(f"seed {seed}, round {turn + 1}: {mean:.2f} {_rounded(scores)}", flush=True)
        if mean > best["mean"]:
            best = {"seed": seed, "round": turn + 1, "mean": mean, "scores": scores, "file": f"seed{seed}.safetensors"}
            generator.about["networks"] = {**best, "rounds": args.rounds, "steps of each turn": args.steps}
            mgtta.save_generator(generator, args.out / "generators" / best["file"], command=_command(args))
    return best


def train(args: argparse.Namespace) -> None:
    """Train as many generators as there are tries, side by side, and keep the best."""
    results = []
    for result in _side_by_side(args):
        results.append(result)
        with atomic(args.out / "tries.json") as path:
            path.write_text(json.dumps(results, indent=1) + "\n")
    best = max(results, key=lambda result: result["mean"])
    with atomic(args.out / CHOSEN) as path:
        path.write_bytes((args.out / "generators" / best["file"]).read_bytes())
    print(tries_table(results))
    print(f"{args.out / CHOSEN} is that of seed {best['seed']}")


def judge(args: argparse.Namespace) -> None:
    """Judge a generator as the rounds of `train` are judged, and write it beside the tries."""
    pupils = [Pupil(network, args) for network in _networks(args)]
    generator = mgtta.load_generator(args.generator)
    scores = {pupil.network.name: pupil.accuracy(generator) for pupil in pupils}
    path = args.out / "tries.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there: `train` writes it")
    results = [r for r in json.loads(path.read_text()) if r["seed"] != args.generator]
    results.append({"seed": args.generator, "round": "", "mean": statistics.mean(scores.values()), "scores": scores})
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    with atomic(args.out / "tries.md") as temporary:
        temporary.write_text(tries_page(results, args.judges))
    print(tries_table(results))


def tries_page(results: list[dict[str, Any]], judges: int) -> str:
    """Return the page of the tries: how each training ended, beside generators that were judged alike.

    Args:
        judges: validation images under each corruption.
    """
    tries = sum(isinstance(r["seed"], int) for r in results)
    words = (
        f"Top-1 in percent on {judges} validation images under each of the four validation corruptions, reset before "
        "each, MGTTA on Eq. 7 in float32, at a learning rate of 1e-3 on DeiT-Tiny and 5e-3 on the ResNets. Numbers are "
        f"seeds of {tries} trainings on all of these networks in turns, of which the best rounds count; names: other "
        "generators."
    )
    return f"# Generators for several networks\n\n{textwrap.fill(words, 120)}\n\n{tries_table(results)}\n"


def tries_table(results: list[dict[str, Any]]) -> str:
    """Return a table of tries, the best first."""
    rows = [
        [str(r["seed"]), str(r["round"]), *(f"{value:.1f}" for value in r["scores"].values()), f"{r['mean']:.2f}"]
        for r in sorted(results, key=lambda r: -r["mean"])
    ]
    return table(["seed", "best round", *results[0]["scores"], "mean"], rows, right=True)


def _side_by_side(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if not args.workers:
        for seed in range(args.tries):
            yield train_one(seed, args)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        for future in as_completed([pool.submit(train_one, seed, args) for seed in range(args.tries)]):
            yield future.result()


def _networks(args: argparse.Namespace) -> list[Network]:
    chosen = [network for network in NETWORKS if network.name in args.networks.split(",")]
    if not chosen:
        raise SystemExit(f"--networks takes {', '.join(network.name for network in NETWORKS)}, separated by commas")
    return chosen


def _command(args: argparse.Namespace) -> str:
    return (
        f"python benchmarks/networks.py train --networks {args.networks} --tries {args.tries} --rounds {args.rounds} "
        f"--steps {args.steps}"
    )


def _rounded(scores: dict[str, float]) -> dict[str, float]:
    return {name: round(score, 1) for name, score in scores.items()}


# --- run


def run(args: argparse.Namespace) -> None:
    """Adapt each network with each optimizer; write records and the table after each network."""
    ends = time.monotonic() + args.seconds
    for network in _networks(args):
        for generator in (SHIPPED, str(args.generator or args.out / CHOSEN)):
            try:
                _run_network(network, generator, args, max(0.0, ends - time.monotonic()))
            except TimeoutError as error:
                print(f"{error}: the same command takes up what is missing", flush=True)
        show(args)


def show(args: argparse.Namespace) -> None:
    """Write the table of the records that are there."""
    write_page(args.out, "networks.md", (EXPERIMENT,), page, "run")


def _run_network(network: Network, generator: str, args: argparse.Namespace, seconds: float) -> None:
    """Adapt a network: by all methods with the shipped generator, by mgtta with another one."""
    setup = Setup(
        network.name,
        found(network.checkpoint, args.data),
        data=found(network.test, args.data),
        validation=found(network.validation, args.data),
        generator=generator,
        images=args.images,
        device=args.device,
        precision="auto",
        tf32=True,
        constants=network.constants,
    )
    methods = [m for m in METHODS if m != "bn" or network.name not in NO_BATCHNORM]
    if generator != SHIPPED:
        methods = ["mgtta"]
    cells = [
        Cell(EXPERIMENT, method, (corruption,), seed=seed, batch_size=BATCH)
        for corruption in CORRUPTIONS
        for seed in range(args.seeds)
        for method in methods
    ]
    store = Store(args.out)
    title = f"{network.name}, generator {Path(generator).stem}"
    more: dict[str, Any] = {"workers": args.workers, "title": title, "seconds": seconds}
    if args.sweep:
        limits = () if args.sweep_images is None else ((SWEEP, args.sweep_images),)
        run_swept(cells, setup, store, Options([], limits=limits), **more)
    else:
        run_cells(cells, setup, store, **more)


def page(records: list[dict[str, Any]]) -> str:
    """Return the page: a row for each network, a column for each method and generator."""
    protocol = records[0]["protocol"]
    seeds = len({record["seed"] for record in records})
    spread = " (± standard deviation)" if seeds > 1 else ""
    images = sorted({record["images"] for record in records})
    words = (
        f"Mean top-1 in percent over 15 corruptions at severity 5, {' or '.join(f'{n:,}' for n in images)} images of "
        f"each, reset before each, batches of {BATCH}, seeds: {seeds}{spread}, at the learning rate in parentheses; "
        f"{protocol['device']}, torch {protocol['versions']['torch']}. mgtta: the shipped generator, trained on "
        "DeiT-Tiny only; mgtta, networks: trained on these networks in turns."
    )
    command = f"python benchmarks/networks.py run --seeds {seeds} --images {images[-1]}"
    return f"# One generator for several networks\n\n`{command}`\n\n{words}\n\n{page_table(records)}\n"


def page_table(records: list[dict[str, Any]]) -> str:
    by_cell: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        column = record["method"]
        if column == "mgtta" and record["protocol"]["generator"] != SHIPPED:
            column = "mgtta, networks"
        by_cell.setdefault((record["protocol"]["model"], column), []).append(record)
    networks = dict.fromkeys(network for network, _ in by_cell)
    columns = [name for name in (*METHODS, "mgtta, networks") if any(name == column for _, column in by_cell)]
    rows = [[network, *(_shown(by_cell.get((network, column), [])) for column in columns)] for network in networks]
    return table(["network", *columns], rows, right=True)


def _shown(records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    seeds = sorted({r["seed"] for r in records})
    means = [statistics.mean(r["top1"] for r in records if r["seed"] == seed) for seed in seeds]
    text = f"{statistics.mean(means):.1f}"
    if len(means) > 1:
        text += f" ± {statistics.stdev(means):.1f}"
    rate = records[0]["settings"].get("lr")
    if rate is not None:
        text += f" ({rate:g})"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    training = verbs.add_parser("train", help="train a generator on all networks in turns")
    training.set_defaults(do=train)
    training.add_argument("--tries", type=int, default=6, help="trainings, of which the best is kept")
    training.add_argument("--rounds", type=int, default=10, help="turns of each network")
    training.add_argument("--seconds", type=float, default=math.inf, help="no new round after so long")
    training.add_argument("--steps", type=int, default=64, help="steps of a turn: 64 are one pass")
    running = verbs.add_parser("run", help="adapt the networks")
    running.set_defaults(do=run)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--seconds", type=float, default=1e6, help="with --workers: nothing begins after so long")
    running.add_argument("--images", type=int, help="of each corruption; by default all")
    running.add_argument("--sweep-images", type=int, help="of each validation corruption, for rates; by default all")
    running.add_argument("--generator", type=Path, help="that `train` kept; by default the one in --out")
    running.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    judging = verbs.add_parser("judge", help="judge a generator as those of `train` are")
    judging.set_defaults(do=judge)
    judging.add_argument("--generator", default=SHIPPED, help="the name of a shipped one, or a file")
    for verb in (training, judging):
        verb.add_argument("--images", type=int, default=TRAINING_IMAGES)
        verb.add_argument("--judges", type=int, default=512, help="validation images under each corruption")
        verb.add_argument("--source-images", type=int, default=SOURCE_IMAGES)
    for verb in (training, judging, running):
        verb.add_argument("--data", type=Path, action="append", required=True, help="folder of images and weights")
        verb.add_argument("--networks", default=",".join(network.name for network in NETWORKS))
        verb.add_argument("--workers", type=int, default=0)
        verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    showing = verbs.add_parser("page", help="make the table from the records")
    showing.set_defaults(do=show)
    for verb in (training, judging, running, showing):
        verb.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
