"""A search for one setting of mgtta+ that serves every kind of stream, on the images for choosing.

    python benchmarks/stream_search.py search --data SHARDS --checkpoint DEIT_TINY --out runs/streams --workers 14
    python benchmarks/stream_search.py generators --data SHARDS --checkpoint DEIT_TINY --out runs/streams --workers 14
    python benchmarks/stream_search.py table results/research/streams.jsonl [--all]

`search` tries rates, pulls and variants with the shipped generator, with Adam and with SGD. `generators` trains six
generators in the regime of deployment and tries them. Both append a line of JSON for each finished stream to
OUT/streams.jsonl, and skip what is there. `table` prints the markdown tables of docs/research.md from such a file.

Images: DeiT-Tiny, images 128-999 of shard 0 under the four validation corruptions at severity 5, batches of 64. The
kind `continual` has two rounds, `one` has 250 single images of each corruption. A line's accuracies are in percent, one
for each visit of a domain; a table shows their mean.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import imagenet
import torch
from pages import read_lines, table
from torch import Tensor

import mgtta
from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.method import Method
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, corrupt
from mgtta.methods import _neighbours, mgtta_plus
from mgtta.methods._descent import Descent
from mgtta.training.meta import shifted_domains

Config = dict[str, Any]
KINDS = ("reset", "continual", "mixed", "labels", "one", "clean")
BATCH_SIZE = 64
ROUNDS = 2  # of the kind `continual`
SINGLE_IMAGES = 250  # of each corruption, in the kind `one`
CORRUPTED_AT_ONCE = 50  # images
DEFAULTS: Config = {"memory": 640, "trade_off": 0.8, "gather": 16}  # where a config does not say
PULLS = (0.02, 0.05, 0.1)
BASE: Config = {"opt": "mgg", "lr": 5e-3, "pull": 0.05}
VARIANTS: tuple[Config, ...] = (
    {"memory": 160},
    {"memory": 160, "pull": 0.03},
    {"memory": 320},
    {"trade_off": 0.4},
    {"trade_off": 1.6},
    {"gather": 32},
    {"agree": [0.15, 1.0]},
    {"agree": [0.3, 0.5]},
    {"agree": [0.3, 1.0]},
    {"average": 0.5},
    {"average": 0.25},
)
TRAININGS = {  # where a training starts, and its outer learning rate
    "shipped": 3e-3,
    "new": 1e-2,
}
TRAINING_SEEDS = 3
SHOWN = 5  # configs of a short table, the best ones


# --- what is tried


def configs() -> list[Config]:
    """Return the configs of `search`."""
    grid = [{**BASE, "lr": lr, "pull": pull} for lr in (2e-3, 3.5e-3, 5e-3, 8e-3) for pull in PULLS]
    variants = [{**BASE, **variant} for variant in VARIANTS]
    adam = [{"opt": "adam", "lr": lr, "pull": pull} for lr in (1e-3, 2e-3, 5e-3, 8e-3) for pull in PULLS]
    sgd = [{"opt": "sgd", "lr": lr, "pull": pull} for lr in (0.01, 0.02, 0.05, 0.1) for pull in PULLS]
    return [*grid, *variants, *adam, *sgd]


def generator_configs(names: list[str]) -> list[Config]:
    """Return the configs of `generators`."""
    return [
        {**BASE, "lr": lr, "memory": memory, "generator": name}
        for name in names
        for lr, memory in ((5e-3, 320), (8e-3, 160))
    ]


# --- one method


def build(model: mgtta.Classifier, source: mgtta.SourceStatistics, config: Config, folder: Path) -> Gathered:
    """Return mgtta+ at a constant rate, moved by the generator, Adam or SGD, with pull and gather."""
    full = {**DEFAULTS, **config}
    _neighbours.MEMORY_IMAGES = full["memory"]
    descent = Descent(full["lr"], full["opt"], momentum=0.0)
    if "generator" in full:
        descent = Descent(full["lr"], "mgg", generator=folder / f"{full['generator']}.safetensors")
    method = mgtta_plus.MGTTAPlus(
        model, descent.factory(), source=source, trade_off=full["trade_off"], decay=float("inf")
    )
    method.pull = full["pull"]
    if "agree" in full:
        scale_by_agreement(method, *full["agree"])
    if "average" in full:
        average_parameters(method, full["average"])
    return Gathered(method, full["gather"])


def scale_by_agreement(method: Method, enough: float, power: float) -> None:
    """Shorten the optimizer's steps where gradients disagree. Tried, and of no use.

    The agreement is |mean g|^2 / mean |g|^2 over about ten updates. A step is scaled by (agreement / enough) ** power,
    and by one where that is more.
    """
    optimizer = method.optimizer
    assert optimizer is not None
    step = optimizer.step
    params = list(method.adapted.values())
    kept: dict[str, Any] = {}

    @torch.no_grad()
    def agreeing() -> None:
        grad = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        if method.updates == 0:
            kept["mean"] = torch.zeros_like(grad)
            kept["square"] = grad.new_zeros(())
            kept["t"] = 0
        kept["t"] += 1
        kept["mean"].lerp_(grad, 0.1)
        kept["square"].lerp_(grad.square().sum(), 0.1)
        agreement = kept["mean"].square().sum() / kept["square"].clamp_min(1e-20) / (1 - 0.9 ** kept["t"])
        factor = (agreement / enough).clamp(max=1.0) ** power
        before = [p.clone() for p in params]
        step()
        for p, old in zip(params, before, strict=True):
            p.copy_(torch.lerp(old, p, factor))

    optimizer.step = agreeing  # type: ignore[method-assign, assignment]


def average_parameters(method: Method, rate: float) -> None:
    """Predict, and take gradients, at a running average of the parameters that the optimizer moves.

    Tried, and of no use.
    """
    engine: Any = method.engine
    update = engine.update
    params = list(method.adapted.values())
    moved: list[Tensor] = []

    @torch.no_grad()
    def averaged(grads: Any) -> None:
        average = [p.clone() for p in params]
        if method.updates == 0:
            moved[:] = average
        for p, own in zip(params, moved, strict=True):
            p.copy_(own)
        update(grads)
        moved[:] = [p.clone() for p in params]
        for p, old in zip(params, average, strict=True):
            p.copy_(torch.lerp(old, p, rate))

    engine.update = averaged


# --- one stream


class Validation:
    """The images for choosing, clean and under each validation corruption, on the device."""

    def __init__(self, shard0: imagenet.Held, device: str, images: int | None = None):
        part = shard0.part(imagenet.CHOOSING).part(slice(0, images))
        self.labels = part.labels
        self.device = device
        self.sets = {"clean": part.x.to(device)}
        for name in VALIDATION_CORRUPTIONS:
            self.sets[name] = torch.cat(
                [
                    corrupt(x, name, index=index)
                    for x, index in zip(
                        self.sets["clean"].split(CORRUPTED_AT_ONCE),
                        torch.arange(len(part)).split(CORRUPTED_AT_ONCE),
                        strict=True,
                    )
                ]
            )

    def visits(self, kind: str, seed: int) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        """Yield the batches (x, y) of each visit of a domain."""
        if kind == "mixed":
            yield self._mixed(seed)
            return
        names = ("clean",) if kind == "clean" else VALIDATION_CORRUPTIONS
        rounds = ROUNDS if kind == "continual" else 1
        for turn in range(rounds):
            for k, name in enumerate(names):
                order = torch.randperm(len(self.labels), generator=_random(seed + 100 * turn + k))
                if kind == "labels":
                    order = order[self.labels[order].argsort(stable=True)]
                size = BATCH_SIZE
                if kind == "one":
                    order = order[:SINGLE_IMAGES]
                    size = 1
                yield self._batches(name, order.split(size))

    def _batches(self, name: str, parts: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in parts:
            yield self.sets[name][rows.to(self.device)], self.labels[rows]

    def _mixed(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels), generator=_random(seed))
        rows = torch.cartesian_prod(torch.arange(len(VALIDATION_CORRUPTIONS)), order)
        rows = rows[torch.randperm(len(rows), generator=_random(seed))]
        for part in rows.split(BATCH_SIZE):
            x = torch.stack([self.sets[VALIDATION_CORRUPTIONS[d]][i] for d, i in part.tolist()])
            yield x, self.labels[part[:, 1]]


def accuracies(method: Gathered, validation: Validation, kind: str, seed: int = 0) -> list[float]:
    """Return the accuracy in percent of each visit."""
    found = []
    method.reset()
    for batches in validation.visits(kind, seed):
        if kind == "reset":
            method.reset()
        right = 0
        images = 0
        for x, y in batches:
            right += int((method(x).argmax(1).cpu() == y).sum())
            images += len(y)
        found.append(100 * right / images)
    return found


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- many of them


class Lab:
    """Model, statistics and images in a worker process."""

    here: "Lab | None" = None

    def __init__(self, data: Path, checkpoint: Path, device: str):
        torch.set_num_threads(1)
        if device.startswith("cuda"):
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        self.device = device
        self.model = imagenet.deit_tiny(checkpoint, device)
        self.shard0 = imagenet.shard(data, 0)
        self.source = imagenet.source_of(self.model, self.shard0)
        self.validation = Validation(self.shard0, device)

    def run(self, config: Config, kind: str, folder: Path) -> dict[str, Any]:
        began = time.perf_counter()
        found = accuracies(build(self.model, self.source, config, folder), self.validation, kind)
        seconds = time.perf_counter() - began
        return {"config": config, "kind": kind, "seed": 0, "accuracies": found, "seconds": seconds}

    def train(self, start: str, seed: int, path: Path) -> None:
        """Train a generator as it is deployed, on the images for training."""
        images = shifted_domains(self.shard0.part(imagenet.TRAINING), 128, device=self.device)
        generator = None
        if start == "shipped":
            generator = mgtta.load_generator("imagenet")
        trained = mgtta.meta_train(
            self.model,
            self.source,
            images,
            generator=generator,
            steps=1200,
            batch_size=16,
            lr=5e-3,
            outer_lr=TRAININGS[start],
            trade_off=0.8,
            seed=seed,
            pull=0.05,
            mirror=True,
            episodes="streams",
            progress=False,
        )
        mgtta.save_generator(trained, path)


def _open(data: Path, checkpoint: Path, device: str) -> None:
    Lab.here = Lab(data, checkpoint, device)


def _stream(task: tuple[Config, str], folder: Path) -> dict[str, Any]:
    assert Lab.here is not None
    return Lab.here.run(*task, folder)


def _training(task: tuple[str, int], folder: Path) -> None:
    assert Lab.here is not None
    start, seed = task
    path = folder / f"g_{start}_{seed}.safetensors"
    if not path.exists():
        Lab.here.train(start, seed, path)


def run_all(pool: ProcessPoolExecutor, work: Callable[..., Any], tasks: list[Any], out: Path | None = None) -> None:
    """Run the tasks, and append what each returns to the file as soon as it has finished."""
    for done in as_completed([pool.submit(work, task) for task in tasks]):
        found = done.result()
        if out is not None:
            with open(out, "a") as file:
                file.write(json.dumps(found) + "\n")


def search(args: argparse.Namespace) -> None:
    out = args.out / "streams.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    start = (args.data, args.checkpoint, args.device)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, spawn, _open, start) as pool:
        wanted = configs()
        if args.what == "generators":
            trainings = [(start, seed) for start in TRAININGS for seed in range(TRAINING_SEEDS)]
            run_all(pool, partial(_training, folder=args.out), trainings)
            wanted = generator_configs([f"g_{start}_{seed}" for start, seed in trainings])
        there = [(line["config"], line["kind"]) for line in read_lines(out)]
        tasks = [(config, kind) for config in wanted for kind in KINDS if (config, kind) not in there]
        run_all(pool, partial(_stream, folder=args.out), tasks, out)
    print(tables(read_lines(out)))


# --- tables


class Results:
    """The mean accuracy of each config and kind."""

    def __init__(self, lines: list[dict[str, Any]]):
        self.found: dict[str, dict[str, float]] = {}
        self.configs: dict[str, Config] = {}
        for line in lines:
            if line["kind"] in KINDS:
                key = _key(line["config"])
                self.configs[key] = line["config"]
                self.found.setdefault(key, {})[line["kind"]] = statistics.mean(line["accuracies"])

    def complete(self) -> list[Config]:
        """Return the configs that ran on all kinds, the best mean first."""
        found = [config for key, config in self.configs.items() if len(self.found[key]) == len(KINDS)]
        return sorted(found, key=self.mean, reverse=True)

    def of(self, config: Config) -> dict[str, float]:
        return self.found[_key(config)]

    def mean(self, config: Config) -> float:
        return statistics.mean(self.of(config).values())


def _key(config: Config) -> str:
    return json.dumps({**DEFAULTS, **config}, sort_keys=True)


def name(config: Config) -> str:
    """Return a config in words; what is at its default is not said."""
    moved_by = {"mgg": "shipped generator", "adam": "Adam", "sgd": "SGD"}[config["opt"]]
    if "generator" in config:
        _, start, seed = config["generator"].split("_")
        moved_by = {"new": f"new generator {seed}", "shipped": f"fine-tuned generator {seed}"}[start]
    words = {
        "memory": "running mean of {}",
        "trade_off": "trade_off {}",
        "gather": "gather {}",
        "agree": "agree {}",
        "average": "average {}",
    }
    more = [words[key].format(value) for key, value in config.items() if key in words and value != DEFAULTS.get(key)]
    return ", ".join([moved_by, f"lr {config['lr']:g}", f"pull {config['pull']:g}", *more])


def tables(lines: list[dict[str, Any]], everything: bool = False) -> str:
    """Return the table of the configs, the best mean first, and that of the differences that the text speaks of.

    Configs that did not run on all kinds are left out. Without `everything`, there are the best five, Adam and SGD,
    what was tried beside rate and pull, and the trained generators at the rate of their training.
    """
    results = Results(lines)
    there = results.complete()
    shown = there
    if not everything:
        shown = [config for k, config in enumerate(there) if k < SHOWN or _telling(config)]
    rows = []
    for config in shown:
        figures = [f"{results.of(config)[kind]:.2f}" for kind in KINDS]
        rows.append([name(config), *figures, f"{results.mean(config):.2f}"])
    found = table(["moved by", *KINDS, "mean"], rows, right=True)
    return f"{found}\n\n{table(['difference', *KINDS, 'mean'], differences(results), right=True)}"


def _telling(config: Config) -> bool:
    if "generator" in config:
        return config["lr"] == BASE["lr"]
    return config["opt"] != "mgg" or bool(config.keys() & {"agree", "average", "gather", "trade_off"})


def differences(results: Results) -> list[list[str]]:
    """Return the rows of differences between configs: what the search has learned."""
    there = results.complete()

    def only(**wanted: Any) -> list[Config]:
        full = {**DEFAULTS, **wanted}
        return [c for c in there if {**DEFAULTS, **c} == full]

    def best(opt: str) -> list[Config]:
        return [c for c in there if c["opt"] == opt and "generator" not in c][:1]

    same = {"lr": 5e-3, "pull": 0.05, "memory": 320}
    shipped = only(opt="mgg", **same)
    trained = [c for c in there if "generator" in c and {**c, **same} == c]
    faster = [c for c in there if "generator" in c and c["lr"] == 8e-3 and c["pull"] == 0.05]
    pairs = {
        "best of the generator - best of Adam": (best("mgg"), best("adam")),
        "generator - Adam, same rate, pull and running mean": (shipped, only(opt="adam", **same)),
        "best of the generator - best of SGD": (best("mgg"), best("sgd")),
        "trained - shipped generator, same settings": (trained, shipped),
        "trained generators at lr 0.008 - at 0.005": (faster, trained),
        "agree - without": ([c for c in there if "agree" in c], only(**BASE)),
        "average - without": ([c for c in there if "average" in c], only(**BASE)),
        "gather 32 - gather 16": (only(**BASE, gather=32), only(**BASE)),
    }
    rows = [[what, *_span(results, first, second)] for what, (first, second) in pairs.items() if first and second]
    if len(trained) > 1:
        rows.append(["largest - smallest of the trained generators", *_spread(results, trained)])
    return rows


def _figures(results: Results, config: Config) -> list[float]:
    return [*(results.of(config)[kind] for kind in KINDS), results.mean(config)]


def _span(results: Results, first: list[Config], second: list[Config]) -> list[str]:
    """Return the smallest and the largest difference of each column; of generators, each with itself."""
    pairs = [(a, b) for a in first for b in second if len(second) == 1 or a.get("generator") == b.get("generator")]
    columns = zip(
        *[[x - y for x, y in zip(_figures(results, a), _figures(results, b), strict=True)] for a, b in pairs],
        strict=True,
    )
    return [_range(list(column)) for column in columns]


def _range(values: list[float]) -> str:
    low = f"{min(values):+.2f}"
    high = f"{max(values):+.2f}"
    if low == high:
        return low
    return f"{low} to {high}"


def _spread(results: Results, found: list[Config]) -> list[str]:
    columns = zip(*[_figures(results, config) for config in found], strict=True)
    return [f"{max(column) - min(column):.2f}" for column in columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("search", "generators"):
        command = commands.add_parser(what)
        command.add_argument("--data", type=Path, required=True)
        command.add_argument("--checkpoint", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--workers", type=int, default=14)
    printing = commands.add_parser("table")
    printing.add_argument("results", type=Path)
    printing.add_argument("--all", action="store_true")
    args = parser.parse_args()
    if args.what == "table":
        print(tables(read_lines(args.results), args.all))
    else:
        search(args)


if __name__ == "__main__":
    main()
