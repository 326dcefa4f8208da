"""The paper's experiments as cells: one method over one stream with one seed.

An experiment is a function Options -> list[Cell]. Cells that ask for the same work have the same key, whichever
experiment asks.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from mgtta._lib.errors import unknown
from mgtta._lib.shipped import shipped
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.datasets import KINDS
from mgtta.methods.create import recipe_settings

EMBEDDED = "glyphs_vit"
UPDATES = (1, 2, 5, 10, 20, 35, 50, 75, 100, 200)
SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 90.0)
LIMITED = {"mgtta": (20, 50, 100)}  # Table 5 runs these with fewer updates too
RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # a sweep's tries, times the recipe's own learning rate
SMALL = {"mgtta": 1e-4, "mgtta_lstm": 1e-4}  # the paper's learning rates at batch sizes 2 and 4
TRADE_OFF = {"imagenet-r": 0.2}  # the paper's lambda, where it is not the recipes'
STILL = ("noadapt",)  # never learns, so that neither budgets nor settings make a difference


@dataclass(frozen=True)
class Setup:
    """What all cells of a run share, as plain values: a worker process builds the rest from it."""

    model: str = EMBEDDED
    checkpoint: str | None = None
    data: str | None = None  # the test images; None: the embedded characters
    validation: str | None = None  # other images: source statistics, sweeps and training
    source: str | None = None
    generator: str = "imagenet"  # "train": trained by the paper's protocol, on the validation images
    images: int | None = None  # of each domain
    device: str = "cpu"
    tf32: bool = False  # matrix products on the GPU rounded to TF32: faster, and no longer exact
    ranks: int = 1  # processes that share every batch
    precision: str = "fp32"  # as `create` takes it
    profile: bool = False  # whether records say where the time went
    num_classes: int | None = None  # of the checkpoint; None: the model's own

    @property
    def head(self) -> dict[str, Any]:
        """What `load_model` is told beside model and checkpoint."""
        return {} if self.num_classes is None else {"num_classes": self.num_classes}


@dataclass(frozen=True)
class Training:
    """A generator to be trained on validation images under the validation corruptions.

    judges: images of each corruption by whose accuracy it is judged after every pass, where they are labelled.
    """

    images: int = 128
    hidden_size: int = 8
    memory: str = "gml"
    steps: int = 2000
    seed: int = 0
    judges: int = 256

    def __str__(self) -> str:
        size = f"{self.memory} of hidden size {self.hidden_size}"
        return f"trained on {self.images} images: {size}, {self.steps} steps, seed {self.seed}"


@dataclass(frozen=True)
class Cell:
    """One method over one stream."""

    experiment: str
    method: str
    domains: tuple[str, ...]  # corruptions; with severity 0, the name of the images
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 64
    severity: int = 5  # 0: the images as they are
    mixed: bool = False
    reset: str = "domain"
    max_updates: int | None = None
    max_seconds: float | None = None
    split: str = "test"
    data: str | None = None  # images other than the setup's
    training: Training | None = None  # of the method's generator
    alone: bool = False  # measured for time and memory, in a process of its own
    chosen_from: tuple[float, ...] = ()  # the learning rates of a sweep

    def __str__(self) -> str:
        where = self.domains[0] if len(self.domains) == 1 else f"{len(self.domains)} corruptions"
        return f"{self.method} on {where}"

    @property
    def timed(self) -> bool:
        """Whether the outcome hangs on the clock, so that nothing else may run meanwhile."""
        return self.alone or self.max_seconds is not None

    @property
    def stream(self) -> tuple[Any, ...]:
        """The same for cells that see the same batches."""
        return (self.split, self.data, self.domains, self.severity, self.batch_size, self.mixed, self.seed)

    def key(self, setup: Setup) -> str:
        """The same for the same work, whatever the experiment that asks for it and, but for times, device and ranks."""
        cell = dataclasses.replace(self, experiment="", chosen_from=())
        if self.method in STILL:
            cell = dataclasses.replace(cell, max_updates=None, max_seconds=None, settings=())
        exact = setup.precision == "auto" and not setup.device.startswith("cuda")
        precision = Setup.precision if exact else setup.precision
        place = setup if cell.timed else dataclasses.replace(setup, device="cpu", ranks=1)
        return digest([cell, dataclasses.replace(place, precision=precision, profile=False)])


def digest(what: Any) -> str:
    """A hash of plain values and dataclasses; fields at their default do not count, so new ones change no key."""

    def plain(value: Any) -> Any:
        return {f.name: v for f in dataclasses.fields(value) if (v := getattr(value, f.name)) != f.default}

    return hashlib.sha256(json.dumps(what, sort_keys=True, default=plain).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Options:
    """What the user chose: who, how often, on what beside the corruptions, and how much of it."""

    methods: Sequence[str]
    seeds: int = 1
    variants: Sequence[tuple[str, str]] = ()  # name -> images
    generator: str = "imagenet"
    batch_size: int = 64
    batches: int | None = None  # of a domain, where known: larger budgets are as good as none
    corruptions: Sequence[str] = field(default_factory=lambda: CORRUPTIONS)
    seconds: Sequence[float] = SECONDS
    samples: Sequence[int] = (64, 128, 256, 1000)
    sizes: Sequence[int] = (2, 4, 8, 16, 32, 64)  # of a generator's memory
    rates: Sequence[float] = RATES
    training: Training = Training()

    def below(self, budgets: Iterable[int]) -> list[int]:
        return [k for k in budgets if self.batches is None or k < self.batches]


# what --quick changes
QUICK: dict[str, Any] = {
    "batch_size": 16,
    "corruptions": ("gaussian_noise", "contrast"),
    "seconds": (0.2, 1.0),
    "samples": (8, 16, 32, 64),
    "sizes": (2, 8, 16),
    "rates": (0.1, 1.0, 10.0),
    "training": Training(images=16, steps=16, judges=16),
}


def corruptions(o: Options) -> list[Cell]:
    """Table 1: fifteen corruptions, reset before each."""
    return _cells("corruptions", o, _corrupted(o.corruptions))


def budgets(o: Options) -> list[Cell]:
    """Table 2: so many batches, or seconds, are learned from; then the model only predicts."""
    limits: list[dict[str, Any]] = [{"max_updates": k} for k in o.below(UPDATES)]
    limits += [{"max_seconds": s} for s in o.seconds]
    return [cell for limit in [*limits, {}] for cell in _cells("budgets", o, _corrupted(o.corruptions), **limit)]


def variants(o: Options) -> list[Cell]:
    """Table 3: -R, -Sketch, -A, or any images, as they are."""
    if not o.variants:
        raise ValueError("name the data sets: --variant imagenet-r=FOLDER --variant imagenet-sketch=FOLDER ...")
    return _cells("variants", o, _named(o.variants))


def ablation(o: Options) -> list[Cell]:
    """Table 4: the generator, an LSTM in its memory's place, SGD and Adam in its own.

    A shipped generator has a shipped twin with an LSTM; beside any other, the LSTM is trained.
    """
    streams = [*_corrupted(o.corruptions), *_named(o.variants)]
    twin = f"{o.generator}-lstm" in shipped("generators")
    lstm = None if twin else dataclasses.replace(o.training, memory="lstm")
    return [
        *_cells("ablation", o, streams, ["mgtta", "eq7_sgd", "eq7_adam"]),
        *_cells("ablation", o, streams, ["mgtta_lstm"], training=lstm),
    ]


def runtime(o: Options) -> list[Cell]:
    """Table 5: one method at a time, each in a process of its own; MGTTA with fewer updates, too."""
    return _alone("runtime", o)


def samples(o: Options) -> list[Cell]:
    """Table 6: generators trained on so many images."""
    return _trained("samples", o, [dataclasses.replace(o.training, images=n) for n in o.samples])


def mixed(o: Options) -> list[Cell]:
    """Table 7: fifteen corruptions mixed within each batch."""
    return _cells("mixed", o, [{"domains": tuple(o.corruptions)}], mixed=True)


def small_batch(o: Options) -> list[Cell]:
    """Table 8: batch sizes 2 and 4; without a sweep, MGTTA at the paper's 1e-4."""
    return [
        dataclasses.replace(cell, settings=(("lr", SMALL[cell.method]),)) if cell.method in SMALL else cell
        for size in (2, 4)
        for cell in _cells("small-batch", o, _corrupted(o.corruptions), batch_size=size)
    ]


def memory(o: Options) -> list[Cell]:
    """Appendix C.1: the work of `runtime`, looked at for memory."""
    return _alone("memory", o)


def hidden_size(o: Options) -> list[Cell]:
    """Appendix C.2: generators of several sizes."""
    return _trained("hidden-size", o, [dataclasses.replace(o.training, hidden_size=d) for d in o.sizes])


def learning_rate(o: Options) -> list[Cell]:
    """Appendix C.3: every method over the rates of a sweep, on the test stream; for looking, not for choosing."""
    return [
        dataclasses.replace(cell, settings=(("lr", rate),))
        for cell in _cells("learning-rate", o, _corrupted(o.corruptions))
        for rate in rates(cell.method, o.rates)
    ]


def convergence(o: Options) -> list[Cell]:
    """Figure 3: after so many updates the model is frozen; `remaining` is its accuracy on the images left."""
    streams = [*_corrupted(o.corruptions), *_named(o.variants[:1])]
    return [cell for k in (0, *o.below(UPDATES)) for cell in _cells("convergence", o, streams, max_updates=k)]


def continual(o: Options) -> list[Cell]:
    """Fifteen corruptions one after another, never reset."""
    return _cells("continual", o, [{"domains": tuple(o.corruptions)}], reset="never")


def everything(o: Options) -> list[Cell]:
    """All of them; the variants where there are some."""
    skipped = {everything} if o.variants else {everything, variants}
    return [cell for make in EXPERIMENTS.values() if make not in skipped for cell in make(o)]


EXPERIMENTS: dict[str, Callable[[Options], list[Cell]]] = {
    "corruptions": corruptions,
    "budgets": budgets,
    "variants": variants,
    "ablation": ablation,
    "runtime": runtime,
    "samples": samples,
    "mixed": mixed,
    "small-batch": small_batch,
    "memory": memory,
    "hidden-size": hidden_size,
    "learning-rate": learning_rate,
    "convergence": convergence,
    "continual": continual,
    "all": everything,
}


def experiment_cells(name: str, options: Options) -> list[Cell]:
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    for method in options.methods:
        recipe_settings(method)  # an unknown name is told before anything runs
    for corruption in options.corruptions:
        if corruption not in (*CORRUPTIONS, *VALIDATION_CORRUPTIONS):
            raise unknown("corruption", corruption, (*CORRUPTIONS, *VALIDATION_CORRUPTIONS))
    return EXPERIMENTS[name](options)


def variant(text: str) -> tuple[str, str]:
    """NAME=IMAGES as name and images; "r", "sketch" and "a" are ImageNet's."""
    name, equals, images = text.partition("=")
    if not (name and equals and images):
        raise ValueError(f"--variant takes NAME=IMAGES, such as imagenet-r=FOLDER, not {text!r}")
    full = f"imagenet-{name.lower()}"
    return (full if full in KINDS else name), images


# --- sweeps


def rates(method: str, factors: Sequence[float] = RATES) -> list[float]:
    """A sweep's learning rates for a method: as many for each that has one."""
    default = recipe_settings(method).get("lr")
    return [] if default is None else [float(f"{default * factor:.3g}") for factor in factors]


def sweep_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Every learning rate of everything that runs in `cells`, on the validation corruptions and images.

    A rate for a long stream, mixed or never reset, is tried on one of the same kind and of as many domains, for which
    the validation corruptions come again and again. What runs at several rates already is not swept.
    """
    asked: dict[Any, set[Any]] = {}
    for cell in cells:
        asked.setdefault(_contender(cell), set()).add(dict(cell.settings).get("lr"))
    return [
        Cell(
            "sweep", method, domains, settings=(("lr", rate),), batch_size=size, mixed=mixed, reset=reset,
            split="validation", training=training,
        )
        for (method, size, mixed, reset, long, training), found in asked.items()
        if len(found) == 1
        for domains in _validation(long)
        for rate in rates(method)
    ]  # fmt: skip


def tuned(cells: Sequence[Cell], sweep: Sequence[Cell], records: Sequence[dict[str, Any]]) -> list[Cell]:
    """The cells with the learning rates that did best, on average, in the records of the sweep's cells.

    records: of each cell in turn, one for every stretch of its stream that has a domain of its own.
    """
    scores: dict[Any, dict[float, list[float]]] = {}
    owners = [cell for cell in sweep for _ in range(1 if cell.mixed else len(cell.domains))]
    for cell, record in zip(owners, records, strict=True):
        scores.setdefault(_contender(cell), {}).setdefault(dict(cell.settings)["lr"], []).append(record["top1"])
    result = []
    for cell in cells:
        if tried := scores.get(_contender(cell)):
            best = max(tried, key=lambda lr: sum(tried[lr]) / len(tried[lr]))
            settings = tuple(sorted({**dict(cell.settings), "lr": best}.items()))
            cell = dataclasses.replace(cell, settings=settings, chosen_from=tuple(tried))
        result.append(cell)
    return result


def _contender(cell: Cell) -> tuple[str, int, bool, str, int, Training | None]:
    """The same for cells that share a learning rate."""
    long = len(cell.domains) if cell.mixed or cell.reset == "never" else 1
    return cell.method, cell.batch_size, cell.mixed, cell.reset, long, cell.training


def _validation(long: int) -> list[tuple[str, ...]]:
    """The domains of the streams to try rates on: one corruption each, or so many in one."""
    if long == 1:
        return [(name,) for name in VALIDATION_CORRUPTIONS]
    return [tuple(islice(cycle(VALIDATION_CORRUPTIONS), long))]


# --- building blocks: a stream is a dict of a cell's fields


def _corrupted(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"domains": (name,)} for name in names]


def _named(sets: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"domains": (name,), "data": images, "severity": 0} for name, images in sets]


def _cells(
    experiment: str, o: Options, streams: Sequence[dict[str, Any]], methods: Sequence[str] = (), **more: Any
) -> list[Cell]:
    def settings(method: str, name: str) -> tuple[tuple[str, Any], ...]:
        special = name in TRADE_OFF and "trade_off" in recipe_settings(method)
        return (("trade_off", TRADE_OFF[name]),) if special else ()

    return [
        Cell(
            experiment, method, seed=seed, settings=settings(method, stream["domains"][0]),
            **{"batch_size": o.batch_size, **stream, **more},
        )
        for stream in streams
        for seed in range(o.seeds)
        for method in methods or o.methods
    ]  # fmt: skip


def _trained(experiment: str, o: Options, trainings: Sequence[Training]) -> list[Cell]:
    """MGTTA with each generator, on the corruptions and, as the paper adds -R, the first data set that is named."""
    streams = [*_corrupted(o.corruptions), *_named(o.variants[:1])]
    return [cell for training in trainings for cell in _cells(experiment, o, streams, ["mgtta"], training=training)]


def _alone(experiment: str, o: Options) -> list[Cell]:
    stream = {"domains": tuple(o.corruptions), "alone": True}
    limited = [(m, k) for m in o.methods for k in o.below(LIMITED.get(m, ()))]
    return [
        *_cells(experiment, o, [stream]),
        *(cell for m, k in limited for cell in _cells(experiment, o, [stream], [m], max_updates=k)),
    ]
