"""The units of work: a cell is one method over one stream with one seed, and a setup is what all cells share."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgtta._lib.names import spelled
from mgtta.bench.needs import work_of
from mgtta.data.corruptions import CORRUPTIONS

EMBEDDED = "glyphs_vit"
SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 90.0)
RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # tried by a sweep, times the recipe's own learning rate
SWEEP = "sweep"  # the experiment of tries
STILL = ("noadapt",)  # never learns, so that neither budgets nor settings make a difference


@dataclass(frozen=True)
class Setup:
    """What all cells of a run share, as plain values; a worker process builds the rest from it."""

    model: str = EMBEDDED
    checkpoint: str | None = None
    data: str | None = None  # the test images; None: the embedded ones
    validation: str | None = None  # other images, for source statistics, sweeps and training
    source: str | None = None
    generator: str = "imagenet"  # "train": trained by the paper's protocol, on the validation images
    images: int | None = None  # per domain
    device: str = "cpu"
    tf32: bool = False  # matrix products on the GPU are rounded to TF32: faster, and no longer exact
    ranks: int = 1  # processes that share every batch
    precision: str = "fp32"  # as `create` takes it
    profile: bool = False  # records say where the time went
    num_classes: int | None = None  # of the checkpoint; None: the model's own
    classes: str | None = None  # file of the model's classes, for trees of class folders
    restrict: bool = False  # score only the classes that have a folder
    frost_textures: str | None = None  # folder of images for frost; None: generated
    constants: str = "imagenet"  # of the corruptions
    cache: str | None = None  # folder that keeps corrupted images

    @property
    def head(self) -> dict[str, Any]:
        """The arguments of `load_model` besides model and checkpoint."""
        if self.num_classes is None:
            return {}
        return {"num_classes": self.num_classes}


@dataclass(frozen=True)
class Training:
    """A generator to be trained on validation images under the validation corruptions.

    judges: labelled images of each corruption, whose accuracy judges the generator after every pass.
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
    chosen_from: tuple[float, ...] = ()  # the learning rates of a sweep, one for each try
    kind: str | None = None  # of stream, in the experiment `streams`
    by_class: bool = False  # sorted by class within each domain
    limit: int | None = None  # images per domain, if fewer than the setup's
    without: tuple[str, ...] = ()  # settings that all methods were to have, and that this one refuses
    sets: tuple[tuple[str, str], ...] = ()  # name and images of each domain, for a stream over several data sets

    def __str__(self) -> str:
        where = f"{len(self.domains)} corruptions"
        if self.sets:
            where = f"{len(self.sets)} data sets"
        if self.kind is not None:
            return f"{spelled(self.method)} on the stream {self.kind}"
        if len(self.domains) == 1:
            where = self.domains[0]
        return f"{spelled(self.method)} on {where}"

    @property
    def timed(self) -> bool:
        """True if the outcome depends on the clock, so that nothing else may run meanwhile."""
        return self.alone or self.max_seconds is not None

    @property
    def stream(self) -> tuple[Any, ...]:
        """The same for cells that see the same batches."""
        order = (self.mixed, self.by_class, self.limit, self.seed)
        return (self.split, self.data, self.sets, self.domains, self.severity, self.batch_size, *order)

    def key(self, setup: Setup) -> str:
        """Return a hash of the work.

        It does not depend on the experiment that asks for the work, nor, unless time is measured, on the device and
        the number of ranks. Work that a method did at other settings of the same name has another hash.
        """
        name, revision = work_of(self.method)
        cell = dataclasses.replace(self, experiment="", chosen_from=(), method=name, kind=None, without=())
        if self.method in STILL:
            cell = dataclasses.replace(cell, max_updates=None, max_seconds=None, settings=())
        counted = dataclasses.replace(setup, profile=False, cache=None)
        if setup.data is not None and cell.limit is not None:  # the first images of a data set, whoever limits them
            counted = dataclasses.replace(counted, images=min(filter(None, (cell.limit, setup.images))))
            cell = dataclasses.replace(cell, limit=None)
        if setup.precision == "auto" and not setup.device.startswith("cuda"):
            counted = dataclasses.replace(counted, precision=Setup.precision)
        if not cell.timed:
            counted = dataclasses.replace(counted, device="cpu", ranks=1)
        parts: list[Any] = [cell, counted]
        if revision:
            parts.append({"revision": revision})
        return digest(parts)


def digest(what: Any) -> str:
    """Return a hash of plain values and dataclasses.

    Fields at their default do not count, so that a new field does not change old hashes.
    """

    def plain(value: Any) -> Any:
        found = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        defaults = {each.name: each.default for each in dataclasses.fields(value)}
        return {name: one for name, one in found.items() if one != defaults[name]}

    return hashlib.sha256(json.dumps(what, sort_keys=True, default=plain).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Options:
    """What the user chose: methods, seeds, data sets, and the sizes of the experiments."""

    methods: Sequence[str]
    seeds: int = 1
    variants: Sequence[tuple[str, str]] = ()  # name and images of data sets besides the corruptions
    generator: str = "imagenet"
    batch_size: int = 64
    batches: int | None = None  # per domain, if known: a larger budget is not a limit
    corruptions: Sequence[str] = field(default_factory=lambda: CORRUPTIONS)
    seconds: Sequence[float] = SECONDS
    samples: Sequence[int] = (64, 128, 256, 1000)
    sizes: Sequence[int] = (2, 4, 8, 16, 32, 64)  # of a generator's memory
    rates: Sequence[float] = RATES
    training: Training = Training()
    wrappers: Sequence[tuple[str, Any]] = ()  # of `streams`: settings for all methods, or METHOD.NAME for one
    rounds: int = 10  # of `streams`
    round_images: int = 1000  # per domain and round
    single: int = 400  # images per domain that come in batches of one
    # a method, an experiment or SWEEP, or EXPERIMENT/METHOD -> images per domain, if fewer; 0: it is left out
    limits: Sequence[tuple[str, int]] = ()

    def limit(self, experiment: str, method: str) -> int | None:
        """Return the images per domain of a method in an experiment, or in the sweep; None for all."""
        names = (experiment, method, f"{experiment}/{method}")
        return min((images for name, images in self.limits if name in names), default=None)

    def below(self, budgets: Iterable[int]) -> list[int]:
        """Return the budgets that are smaller than a domain."""
        return [k for k in budgets if self.batches is None or k < self.batches]
