"""The paper's experiments as cells: a cell is one method on one stream with one seed, and is never run twice.

`mgtta bench NAME` makes the cells of an experiment, runs those that the store does not hold yet, here or in worker
processes, and appends their records.
"""

import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from typing import Any

import torch

from mgtta import __version__
from mgtta._timm import timm
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, frost_source
from mgtta.data.datasets import open_dataset
from mgtta.data.glyphs import TEST_SEED, VALIDATION_SEED, Glyphs
from mgtta.data.streams import Domain, corrupted, stream
from mgtta.errors import unknown
from mgtta.evaluation import Record, evaluate
from mgtta.fisher import Fisher, fisher_information
from mgtta.models import Classifier, load_model
from mgtta.recipes import create, needs_source, recipe_settings
from mgtta.source import SourceStatistics, load_source, source_statistics
from mgtta.store import Store

EMBEDDED = "glyphs_vit"
RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # a sweep's tries, times the recipe's own learning rate
CACHED_BYTES = 2**31  # a stream up to this size is kept for the cells that share it


@dataclass(frozen=True)
class Setup:
    """What all cells of a run share, as plain values: a worker process builds the rest from it."""

    model: str = EMBEDDED
    checkpoint: str | None = None
    data: str | None = None  # the test images; None: the embedded characters
    validation: str | None = None  # other images: source statistics and sweeps
    source: str | None = None
    generator: str = "imagenet"
    images: int | None = None  # of each domain
    device: str = "cpu"


@dataclass(frozen=True)
class Cell:
    """One method over one stream."""

    experiment: str
    method: str
    domains: tuple[str, ...]  # corruptions
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 64
    severity: int = 5
    mixed: bool = False
    reset: str = "domain"
    max_updates: int | None = None
    split: str = "test"

    def key(self, setup: Setup) -> str:
        """The same for the same work, whatever the device and the experiment that asks for it."""
        what = {**dataclasses.asdict(self), **dataclasses.asdict(setup), "experiment": None, "device": None}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


class Lab:
    """The model, the statistics and the images of a setup; runs cells."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.data = {"test": self._images("test"), "validation": self._images("validation")}
        classes = getattr(self.data["test"], "class_indices", None)
        self.model: Classifier = load_model(setup.model, setup.checkpoint, classes=classes).to(setup.device)
        self.fingerprint = self.model.fingerprint()
        self._kept: tuple[Any, list[Any]] = (None, [])

    def _images(self, split: str) -> Any:
        path = self.setup.data if split == "test" else self.setup.validation
        if self.setup.data is None:
            return Glyphs(self.setup.images or 2048, TEST_SEED if split == "test" else VALIDATION_SEED)
        return None if path is None else open_dataset(path)

    @cached_property
    def source(self) -> SourceStatistics:
        """The statistics named, the shipped ones, or those of the clean validation images."""
        if self.setup.source is not None or self.setup.model == EMBEDDED:
            return load_source(self.setup.source or EMBEDDED)
        if self.data["validation"] is None:
            raise ValueError("source statistics are needed: name a file, or clean validation images")
        return source_statistics(self.model, stream(self.data["validation"], first=1000))

    @cached_property
    def fisher(self) -> Fisher:
        """From up to 2,000 clean validation images, as EATA's paper does."""
        return fisher_information(self.model, stream(self.data["validation"], first=2000))

    def run(self, cell: Cell, on_batch: Callable[..., None] | None = None) -> list[dict[str, Any]]:
        """The cell's records, one for each domain."""
        settings = dict(cell.settings)
        if needs_source(cell.method):
            settings["source"] = self.source
        if "fisher" in recipe_settings(cell.method) and self.data["validation"] is not None:
            settings["fisher"] = self.fisher
        if cell.method == "mgtta" and "generator" not in settings:
            settings["generator"] = self.setup.generator
        method = create(cell.method, self.model, max_updates=cell.max_updates, **settings)
        records = evaluate(method, self._batches(cell), cell.reset, on_batch=on_batch)
        return [self._described(cell, record) for record in records]

    def _batches(self, cell: Cell) -> Any:
        images = self.data[cell.split]
        if images is None:
            raise ValueError("validation images are needed for this: name some that are not among the test's")
        options = {"batch_size": cell.batch_size, "mixed": cell.mixed, "seed": cell.seed}
        wanted = (cell.split, cell.domains, cell.severity, *options.values())
        if self._kept[0] == wanted:
            return self._kept[1]
        domains: list[Domain] = corrupted(images, cell.domains, cell.severity)
        batches = stream(domains, first=self.setup.images, device=self.setup.device, **options)  # type: ignore[arg-type]
        size = sum(len(plan.rows) for plan in batches.plan) * images[0][0].nbytes
        if size > CACHED_BYTES:
            return batches
        self._kept = (wanted, list(batches))
        return self._kept[1]

    def _described(self, cell: Cell, record: Record) -> dict[str, Any]:
        model = self.model
        protocol = {
            "model": model.name,
            "weights": self.fingerprint,
            "mean": None if model.mean is None else model.mean.flatten().tolist(),
            "std": None if model.std is None else model.std.flatten().tolist(),
            "data": self.setup.data or "rendered characters",
            "corruptions": f"mgtta, frost: {frost_source()}",
            "source images": self.source.images if needs_source(cell.method) else None,
            "generator": self.setup.generator if cell.method == "mgtta" else None,
            "device": torch.cuda.get_device_name() if "cuda" in self.setup.device else platform.processor() or "cpu",
            "versions": {"mgtta": __version__, "torch": torch.__version__, "timm": timm.__version__},
            "command": " ".join(["mgtta", *sys.argv[1:]]),
        }
        described = {**record.to_dict(), **dataclasses.asdict(cell), "protocol": protocol}
        return {**described, "settings": dict(cell.settings)}


@dataclass(frozen=True)
class Options:
    """What the user chose: who, how often, and the settings that a sweep has found."""

    methods: Sequence[str]
    seeds: int = 1
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # method -> settings

    def each(self) -> Iterator[tuple[int, str, tuple[tuple[str, Any], ...]]]:
        for seed in range(self.seeds):
            for method in self.methods:
                yield seed, method, tuple(sorted(self.settings.get(method, {}).items()))


def corruptions(o: Options) -> list[Cell]:
    """Table 1: fifteen corruptions, reset before each."""
    return [Cell("corruptions", m, (c,), seed, s) for c in CORRUPTIONS for seed, m, s in o.each()]


def ablation(o: Options) -> list[Cell]:
    """Table 4: the generator, an LSTM in its memory's place, SGD and Adam in its own."""
    variants = Options(("mgtta", "mgtta_lstm", "eq7_sgd", "eq7_adam"), o.seeds, o.settings)
    return [dataclasses.replace(cell, experiment="ablation") for cell in corruptions(variants)]


def budgets(o: Options) -> list[Cell]:
    """Table 2: only so many batches are learned from."""
    return [
        dataclasses.replace(cell, experiment="budgets", max_updates=updates)
        for updates in (1, 2, 5, 10, 20, 50, 100, 200)
        for cell in corruptions(o)
    ]


def mixed(o: Options) -> list[Cell]:
    """Table 7: fifteen corruptions mixed within each batch."""
    return [Cell("mixed", m, tuple(CORRUPTIONS), seed, s, mixed=True) for seed, m, s in o.each()]


def continual(o: Options) -> list[Cell]:
    """Fifteen corruptions one after another, never reset."""
    return [Cell("continual", m, tuple(CORRUPTIONS), seed, s, reset="never") for seed, m, s in o.each()]


def small_batch(o: Options) -> list[Cell]:
    """Table 8: batch sizes 2 and 4; without a sweep, MGTTA at the paper's 1e-4."""
    settings = {**{m: {"lr": 1e-4} for m in ("mgtta", "mgtta_lstm")}, **o.settings}
    small = Options(o.methods, o.seeds, settings)
    return [
        Cell("small-batch", m, (c,), seed, s, batch_size=size)
        for size in (2, 4)
        for c in CORRUPTIONS
        for seed, m, s in small.each()
    ]


def learning_rate(o: Options) -> list[Cell]:
    """Appendix C.3: every method over the rates of a sweep, on the test stream; for looking, not for choosing."""
    return [
        Cell("learning-rate", m, (c,), seed, (("lr", rate),))
        for c in CORRUPTIONS
        for m in o.methods
        for rate in rates(m)
        for seed in range(o.seeds)
    ]


EXPERIMENTS: dict[str, Callable[[Options], list[Cell]]] = {
    "corruptions": corruptions,
    "budgets": budgets,
    "ablation": ablation,
    "mixed": mixed,
    "continual": continual,
    "small-batch": small_batch,
    "learning-rate": learning_rate,
}


def rates(method: str) -> list[float]:
    """A sweep's learning rates for a method: as many for each that has one."""
    default = recipe_settings(method).get("lr")
    return [] if default is None else [float(f"{default * factor:.3g}") for factor in RATES]


def sweep_cells(methods: Sequence[str], batch_size: int = 64) -> list[Cell]:
    """Every learning rate of every method on the validation corruptions and the validation images."""
    return [
        Cell("sweep", m, (c,), 0, (("lr", rate),), batch_size=batch_size, split="validation")
        for c in VALIDATION_CORRUPTIONS
        for m in methods
        for rate in rates(m)
    ]


def chosen(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Method -> the settings with the best mean accuracy among the records of a sweep."""
    scores: dict[str, dict[float, list[float]]] = {}
    for record in records:
        scores.setdefault(record["method"], {}).setdefault(record["settings"]["lr"], []).append(record["top1"])
    return {m: {"lr": max(tried, key=lambda lr: sum(tried[lr]) / len(tried[lr]))} for m, tried in scores.items()}


def experiment_cells(name: str, options: Options) -> list[Cell]:
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name](options)


def run_cells(
    cells: Sequence[Cell],
    setup: Setup,
    store: Store,
    workers: int = 0,
    on_cell: Callable[[Cell, list[dict[str, Any]]], None] | None = None,
    on_batch: Callable[..., None] | None = None,
) -> list[dict[str, Any]]:
    """Run the cells that the store does not hold, and give the records of all of them, in the cells' order.

    Args:
        workers: processes; 0 runs here, and then alone does `on_batch` see each batch.
    """
    keys = {cell: cell.key(setup) for cell in cells}
    there = store.cells()
    todo = [cell for cell in keys if keys[cell] not in there]
    for cell, records in _run(todo, setup, workers, on_batch):
        store.add(keys[cell], records)
        if on_cell is not None:
            on_cell(cell, records)
    found: dict[str, list[dict[str, Any]]] = {}
    for record in store.records():
        found.setdefault(record["cell"], []).append(record)
    return [record for cell in keys for record in found[keys[cell]]]


_lab: Lab | None = None  # of a worker process


def _run(
    cells: Sequence[Cell], setup: Setup, workers: int, on_batch: Callable[..., None] | None
) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    if not cells:
        return
    if not workers:
        lab = Lab(setup)
        for cell in cells:
            yield cell, lab.run(cell, on_batch)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (setup,))
    try:
        futures = {pool.submit(_run_in_worker, cell): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(setup: Setup) -> None:
    global _lab
    torch.set_num_threads(1)
    _lab = Lab(setup)


def _run_in_worker(cell: Cell) -> list[dict[str, Any]]:
    assert _lab is not None
    return _lab.run(cell)
