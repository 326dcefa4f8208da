"""Runs the cells of experiments: those that the store does not hold yet, here or in worker processes.

A run's folder has the records (`records.jsonl`) and the generators that were trained for it (`generators/`).
"""

import dataclasses
import fcntl
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mgtta import __version__
from mgtta._timm import timm
from mgtta.checkpoint import load_generator, save_generator
from mgtta.cluster import connected, spread_on_ray, tasks_of_a_machine
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, frost_source
from mgtta.data.datasets import KINDS, is_imagenet_c, open_dataset, synsets
from mgtta.data.glyphs import TEST_SEED, VALIDATION_SEED, Glyphs
from mgtta.data.held import STAND_INS, Held, Room
from mgtta.data.streams import Domain, corrupted, stream
from mgtta.distributed import ranks_of
from mgtta.evaluation import Record, evaluate
from mgtta.experiments import (
    STILL,
    Cell,
    Options,
    Setup,
    Training,
    digest,
    experiment_cells,
    sweep_cells,
    tuned,
)
from mgtta.files import command
from mgtta.fisher import Fisher, fisher_information
from mgtta.inputs import check_apart, check_unchanged, seen
from mgtta.meta import meta_train, shifted_images
from mgtta.models import Classifier, load_model
from mgtta.profile import PARTS, optimizer_apart, profiled
from mgtta.recipes import create, needs_source, recipe_settings
from mgtta.shipped import shipped
from mgtta.source import SourceStatistics, load_source, source_statistics
from mgtta.store import Store
from mgtta.workers import spread

IMAGES = 2048  # embedded characters of a domain, unless said otherwise
HELD_BYTES = 4 * 2**30  # decoded images that all processes keep
STREAM_BYTES = 2**31  # a stream up to this size is kept for the cells that share it
TRAIN = "train"


class Watch:
    """Is told what happens, as it happens; this one keeps silent."""

    def start(self, title: str, cells: int, finished: int) -> None: ...

    def note(self, text: str) -> None: ...

    def batch(self, cell: Cell, record: Record, part: float) -> None: ...

    def cell(self, cell: Cell, records: list[dict[str, Any]], fresh: bool) -> None: ...


class Lab:
    """The model, the statistics, the images and the generators of a setup; runs cells.

    Args:
        folder: where trained generators are kept.
        held: bytes of decoded images, and of streams, to keep for other cells.
        group: of ranks that run every cell together.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        held: int = HELD_BYTES,
        watch: Watch | None = None,
        group: ProcessGroup | None = None,
    ):
        check_apart(setup.data, setup.validation)
        if torch.device(setup.device).type == "cuda":
            torch.set_float32_matmul_precision("high" if setup.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = setup.tf32
        self.setup, self.folder, self.watch, self.group = setup, folder, watch or Watch(), group
        self.room, self.stream_bytes = Room(held), min(held, STREAM_BYTES)
        self._models: dict[Any, Classifier] = {}
        self._sets: dict[Any, Any] = {}
        self._kept: tuple[Any, list[Any]] = (None, [])
        self._seen: dict[str | None, dict[str, str]] = {}
        self.fingerprint = self.model().fingerprint()

    def model(self, images: Any = None) -> Classifier:
        """The classifier over the classes that the images are scored in."""
        classes = getattr(images, "class_indices", None)
        if (key := tuple(classes or ())) not in self._models:
            loaded = load_model(self.setup.model, self.setup.checkpoint, classes=classes)
            self._models[key] = loaded.to(self.setup.device)
        model, names = self._models[key], getattr(images, "classes", None)
        if names is not None and len(names) != model.num_classes and not set(names) <= synsets().keys():
            raise ValueError(f"the images have {len(names)} classes, {model.name} has {model.num_classes}")
        return model

    def images(self, split: str = "test", data: str | None = None, kind: str | None = None) -> Any:
        """The data set, held in memory; or the folder of ImageNet-C as published."""
        if (split, data) not in self._sets:
            self._sets[split, data] = self._open(split, data, kind)
        return self._sets[split, data]

    def _open(self, split: str, data: str | None, kind: str | None) -> Any:
        count = self.setup.images or IMAGES
        if data in STAND_INS:
            return Held(STAND_INS[data](count), self.room)
        path = data or (self.setup.data if split == "test" else self.setup.validation)
        if path is None and self.setup.data is None:
            glyphs = Glyphs(count, TEST_SEED) if split == "test" else Glyphs(max(count, IMAGES), VALIDATION_SEED)
            return Held(glyphs, self.room)
        if path is None:
            raise ValueError("validation images are needed for this: --validation, some that are not among the test's")
        if Path(path).is_dir() and is_imagenet_c(Path(path)):
            return path
        return Held(open_dataset(path, kind=kind, **self._sizes), self.room)

    @property
    def _sizes(self) -> dict[str, Any]:
        side, crop = self.model().input_size
        return {"size": side, "crop_pct": crop}

    @property
    def _mirrors(self) -> bool:
        """Whether a mirrored image still shows its class: a mirrored character is another one, or none."""
        return self.setup.data is not None

    @property
    def _clean(self) -> Any:
        images = self.images("validation")
        if isinstance(images, str):
            raise ValueError(f"clean images are needed for this: {images} is ImageNet-C, name others by --validation")
        return images

    @cached_property
    def source(self) -> SourceStatistics:
        """The statistics named, the shipped ones, or those of up to 1,000 clean validation images."""
        if (known := _known_source(self.setup)) is not None:
            return load_source(known)
        return source_statistics(self.model(), stream(self._clean, first=1000, device=self.setup.device))

    @cached_property
    def fisher(self) -> Fisher | None:
        """From up to 2,000 clean validation images, as EATA's paper does; None without them."""
        if self.setup.data is not None and self.setup.validation is None:
            return None
        return fisher_information(self.model(), stream(self._clean, first=2000, device=self.setup.device))

    def trained(self, training: Training) -> Path:
        """The file of a generator, trained by the first who asks and waited for by the rest."""
        images, s = self.images("validation"), self.setup
        key = digest([training, training.judges, self.fingerprint, s.data is None, s.validation, self.source.images])
        path = self.folder / "generators" / f"{key}.safetensors"
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                self.watch.note(f"a generator is {training}")
                x = shifted_images(images, training.images, seed=training.seed, device=s.device)
                if len(x) < training.images:
                    raise ValueError(f"training needs {training.images} validation images, and there are {len(x)}")
                part = path.with_suffix(".part")  # a training that was stopped goes on from here
                generator = meta_train(
                    self.model(), self.source, x, hidden_size=training.hidden_size, memory=training.memory,
                    steps=training.steps, validation=self._judges(training), seed=training.seed,
                    checkpoint=part, progress=False,
                )  # fmt: skip
                save_generator(generator, path, command=command())
                part.unlink(missing_ok=True)
        return path

    def _judges(self, training: Training) -> list[Any] | None:
        """Validation batches whose labels are the model's; None without such labels."""
        images = self.images("validation")
        names, some = getattr(images, "classes", None), getattr(images, "class_indices", None)
        if some is not None or (names is not None and len(names) != self.model().num_classes):
            return None
        domains = corrupted(images, VALIDATION_CORRUPTIONS)
        batches = list(stream(domains, first=training.judges, device=self.setup.device))
        return None if batches[0].y is None else batches

    def run(self, cell: Cell) -> list[dict[str, Any]]:
        """The cell's records, one for each domain; the first one has the profile of all, where it is asked for."""
        if not self.setup.profile:
            return self._run(cell)
        with profiled() as found:
            records = self._run(cell)
        records[0]["profile"] = found
        return records

    def _run(self, cell: Cell) -> list[dict[str, Any]]:
        batches, images = self._batches(cell)
        known, training = recipe_settings(cell.method), training_of(cell, self.setup)
        settings = dict(cell.settings)
        if needs_source(cell.method):
            settings["source"] = self.source
        if "fisher" in known:
            settings["fisher"] = self.fisher
        if "mirror" in known:
            settings.setdefault("mirror", self._mirrors)
        if training is not None:
            settings["generator"] = self.trained(training)
        elif known.get("generator") == Setup.generator:
            settings.setdefault("generator", self.setup.generator)
        limits: dict[str, Any] = {"max_updates": cell.max_updates, "max_seconds": cell.max_seconds}
        limits["precision"] = self.setup.precision
        method = create(cell.method, self.model(images), process_group=self.group, **limits, **settings)
        if cell.timed:  # the first batch of all pays for what is set up once; it leaves no trace
            method.warm_up(next(iter(batches)).x)
            method(next(iter(batches)).x)
            method.reset()
        done = 0

        def on_batch(record: Record, *_: Any) -> None:
            nonlocal done
            done += 1
            self.watch.batch(cell, record, done / len(batches))

        timing = {"timing": True} if cell.timed or self.setup.profile else {}
        with optimizer_apart(method.optimizer):
            records = evaluate(method, batches, cell.reset, on_batch=on_batch, **timing)
        return [self._described(cell, record, method.precision) for record in records]

    def _batches(self, cell: Cell) -> tuple[Any, Any]:
        """The stream, a list where it is small enough to keep, and the images it is made of."""
        images = self.images(cell.split, cell.data, cell.domains[0] if cell.domains[0] in KINDS else None)
        domains = self._domains(cell, images)
        if self._kept[0] != cell.stream:
            batches = stream(
                domains, batch_size=cell.batch_size, mixed=cell.mixed, seed=cell.seed,
                first=self.setup.images, device=self.setup.device, part=ranks_of(self.group).part,
            )  # fmt: skip
            size = sum(len(planned.rows) for planned in batches.plan) * domains[0].dataset[0][0].nbytes
            if size > self.stream_bytes:
                return batches, domains[0].dataset
            self._kept = cell.stream, list(batches)
        return self._kept[1], domains[0].dataset

    def _domains(self, cell: Cell, images: Any) -> list[Domain]:
        if cell.severity == 0:
            return [Domain(cell.domains[0], images)]
        published = isinstance(images, str)
        domains = corrupted(images, cell.domains, cell.severity, **(self._sizes if published else {}))
        if not published:
            return domains
        keys = [(images, name, cell.severity) for name in cell.domains]
        held = [self._sets.setdefault(k, Held(d.dataset, self.room)) for k, d in zip(keys, domains, strict=True)]
        return [dataclasses.replace(d, dataset=h) for d, h in zip(domains, held, strict=True)]

    def seen(self, cell: Cell) -> dict[str, str]:
        """What the cell reads from disk, as it is now."""
        if cell.data not in self._seen:
            self._seen[cell.data] = seen(self.setup, [cell])
        return self._seen[cell.data]

    def _described(self, cell: Cell, record: Record, precision: str) -> dict[str, Any]:
        model, training, known = self.model(), training_of(cell, self.setup), recipe_settings(cell.method)
        uses_generator = "generator" in known and (training is not None or "optimizer" not in known)
        own = known.get("generator") == Setup.generator
        on_the_fly = not isinstance(self.images(cell.split, cell.data), str)
        ours = f"mgtta, on the fly; frost: {frost_source()}" if on_the_fly else "as published"
        named = self.setup.generator if own else known.get("generator")
        generator = str(training) if training else named
        protocol = {
            "model": model.name,
            "checkpoint": self.setup.checkpoint,
            "weights": self.fingerprint,
            "mean": None if model.mean is None else model.mean.flatten().tolist(),
            "std": None if model.std is None else model.std.flatten().tolist(),
            "data": self.setup.data or "rendered characters",
            "validation": self.setup.validation or (None if self.setup.data else "other rendered characters"),
            "corruptions": ours if cell.severity else None,
            "images": record.images,
            "order": f"shuffled, seed {cell.seed}" + (", corruptions mixed within batches" if cell.mixed else ""),
            "reset": cell.reset,
            "seed": cell.seed,
            "source images": self.source.images if needs_source(cell.method) else None,
            "generator": generator if uses_generator else None,
            "mirror": self._mirrors if "mirror" in known else None,
            "hidden_size": training.hidden_size if training else None,
            "training_images": training.images if training else None,
            "chosen_from": list(cell.chosen_from) or None,
            "inputs": self.seen(cell),
            "device": _device_name(self.setup.device),
            "precision": "tf32" if self.setup.tf32 and precision == "fp32" else precision,
            "ranks": self.setup.ranks,
            "threads": torch.get_num_threads(),
            "versions": {"mgtta": __version__, "torch": torch.__version__, "timm": timm.__version__},
            "command": command(),
        }
        return {**record.to_dict(), **_asked(cell), "protocol": protocol}


def _known_source(setup: Setup) -> str | None:
    """The statistics that need not be taken: a file's, or the shipped ones of a shipped model."""
    ships = setup.model in shipped("sources") and setup.checkpoint is None
    return str(setup.source) if setup.source is not None else setup.model if ships else None


def training_of(cell: Cell, setup: Setup) -> Training | None:
    """How the cell's generator is trained; None where it needs none or is there already."""
    known = recipe_settings(cell.method)
    own = known.get("generator") == Setup.generator and "optimizer" not in known
    return cell.training or (Training() if own and setup.generator == TRAIN else None)


def run_experiment(
    name: str,
    options: Options,
    setup: Setup,
    store: Store,
    *,
    sweep: bool = False,
    workers: int = 0,
    watch: Watch | None = None,
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
) -> list[dict[str, Any]]:
    """The records of an experiment; with `sweep`, at learning rates chosen on the validation corruptions."""
    more: dict[str, Any] = {"workers": workers, "watch": watch, "process_group": process_group, "ray": ray}
    cells = experiment_cells(name, options)
    if sweep:
        tries = sweep_cells(cells)
        cells = tuned(cells, tries, run_cells(tries, setup, store, title="sweep", **more))
    return run_cells(cells, setup, store, title=name, **more)


def run_cells(
    cells: Sequence[Cell],
    setup: Setup,
    store: Store,
    workers: int = 0,
    watch: Watch | None = None,
    title: str = "",
    process_group: ProcessGroup | None = None,
    ray: str | None = None,
) -> list[dict[str, Any]]:
    """Run the cells that the store does not hold, and give the records of all of them, in the cells' order.

    Work that several experiments ask for is done once, and its records are stored for each of them.

    Args:
        workers: processes; 0 runs here, and then alone does `watch` see each batch. What is measured by the clock
            runs here, and what is `alone` in a process of its own, one at a time, in any case.
        process_group: of ranks that run every cell together, each with its share of every batch. The first one's
            store counts.
        ray: the address of a Ray cluster that runs the cells, or "auto". What is measured by the clock runs there
            one cell at a time, after all else.
    """
    watch, ranks = watch or Watch(), ranks_of(process_group)
    setup = dataclasses.replace(setup, ranks=ranks.size)
    cells = list(dict.fromkeys(cells))
    _check_engines(cells, ranks.size, workers, ray)
    _check_needs(cells, setup)
    works = {cell: cell.key(setup) for cell in cells}
    there = ranks.tell(lambda: _by_cell(store))
    check_unchanged([r["protocol"] for records in there.values() for r in records], setup, cells, store.path)
    done = {name.rpartition("/")[2]: records for name, records in there.items()}
    wanted: dict[str, list[Cell]] = {}  # work -> the cells that ask for it
    for cell in cells:
        wanted.setdefault(works[cell], []).append(cell)
    watch.start(title, len(cells), sum(len(asking) for work, asking in wanted.items() if work in done))

    def finish(work: str, records: list[dict[str, Any]], fresh: bool) -> None:
        for cell in wanted[work]:
            chosen_from = {"chosen_from": list(cell.chosen_from) or None}
            own = [
                {**r, **_asked(cell), **_remaining(cell, r), "protocol": {**r["protocol"], **chosen_from}}
                for r in map(_bare, records)
            ]
            if _name(cell, work) not in there and ranks.first:
                store.add(_name(cell, work), own)
            watch.cell(cell, own, fresh)

    for work in wanted:
        if work in done:
            finish(work, done[work], fresh=False)
    first_seen = {stream: i for i, stream in reversed(list(enumerate(cell.stream for cell in cells)))}
    todo = sorted((asking[0] for w, asking in wanted.items() if w not in done), key=lambda c: first_seen[c.stream])
    folder = store.path.parent
    if ray is None:
        ran = _run(todo, setup, folder, workers, watch, process_group)
    else:
        ran = _run_on_ray(todo, setup, folder, watch, ray)
    for cell, records in ran:
        finish(works[cell], records, fresh=True)
    found = ranks.tell(lambda: _by_cell(store))
    return [record for cell in cells for record in found[_name(cell, works[cell])]]


def _run(
    cells: Sequence[Cell], setup: Setup, folder: Path, workers: int, watch: Watch, group: ProcessGroup | None
) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    free = [cell for cell in cells if not cell.timed]
    here = [cell for cell in cells if cell.timed and not cell.alone]
    if workers:
        start = partial(_start, setup, folder, HELD_BYTES // workers, 1)
        done = spread(_tasks(free, setup), start, workers, kin=lambda t: t.stream if isinstance(t, Cell) else t)
        yield from ((task, records) for task, records in done if isinstance(task, Cell))
    else:
        here = free + here
    if here:
        lab = Lab(setup, folder, watch=watch, group=group)
        yield from ((cell, lab.run(cell)) for cell in here)
    for cell in cells:
        if cell.alone:
            watch.note(f"{cell.method} in a process of its own")
            yield from spread([cell], partial(_start, setup, folder, 0, torch.get_num_threads()), 1)


def _run_on_ray(
    cells: Sequence[Cell], setup: Setup, folder: Path, watch: Watch, address: str
) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    if not cells:
        return
    needs: dict[str, Any] = {"cpus": 1, "gpus": int(torch.device(setup.device).type == "cuda")}
    with connected(address) as cluster:
        watch.note(f"on Ray: {cluster}")
        held = HELD_BYTES // tasks_of_a_machine(**needs)
        start, bare = (partial(_start, setup, folder.resolve(), size, 1) for size in (held, 0))
        done = spread_on_ray(_tasks([c for c in cells if not c.timed], setup), start, **needs)
        yield from ((task, records) for task, records in done if isinstance(task, Cell))
        yield from spread_on_ray([c for c in cells if c.timed and not c.alone], start, **needs, at_once=1)
        yield from spread_on_ray([c for c in cells if c.alone], bare, **needs, at_once=1, fresh=True)


def _tasks(cells: Sequence[Cell], setup: Setup) -> list[Cell | Training]:
    """Each generator's training first, side by side, before all wait for the first; then the cells."""
    return [*dict.fromkeys(t for cell in cells if (t := training_of(cell, setup))), *cells]


def _check_needs(cells: Sequence[Cell], setup: Setup) -> None:
    """Before anything runs: is all there that some cell will ask for?"""
    source = _known_source(setup)
    if source is not None:
        load_source(source)
    for method in dict.fromkeys(cell.method for cell in cells if training_of(cell, setup) is None):
        known = recipe_settings(method)
        if "generator" in known and "optimizer" not in known:
            load_generator(setup.generator if known["generator"] == Setup.generator else known["generator"])
    for cell in cells if setup.data is not None and setup.validation is None else ():
        sourced = needs_source(cell.method) and source is None
        if cell.split == "validation" or training_of(cell, setup) is not None or sourced:
            raise ValueError(
                f"validation images are needed for {cell.method} ({cell.experiment}): --validation, some that are not "
                "among the test's"
            )


def _check_engines(cells: Sequence[Cell], ranks: int, workers: int, ray: str | None) -> None:
    if (ranks > 1) + bool(workers) + (ray is not None) > 1:
        raise ValueError("torchrun's ranks run each cell together, workers and Ray run cells apart: take one of them")
    if ranks > 1 and (alone := next((cell for cell in cells if cell.alone), None)):
        raise ValueError(f"{alone} ({alone.experiment}) is measured in a process of its own: run it without torchrun")


def _start(setup: Setup, folder: Path, held: int, threads: int) -> Callable[[Cell | Training], Any]:
    torch.set_num_threads(threads)
    lab = Lab(setup, folder, held)
    return lambda task: lab.run(task) if isinstance(task, Cell) else lab.trained(task)


def _name(cell: Cell, work: str) -> str:
    """What the store calls the cell; the work it asks for comes last."""
    return f"{digest(dataclasses.replace(cell, chosen_from=()))}/{work}"


def _remaining(cell: Cell, record: dict[str, Any]) -> dict[str, Any]:
    """For one who never learns: what is left after as many batches as another would have learned from."""
    if cell.method not in STILL or cell.max_updates is None or not record["curve"]:
        return {}
    hits, images = (sum(record[key][cell.max_updates :]) for key in ("curve", "sizes"))
    return {"remaining": 100 * hits / images if images else None}


def _bare(record: dict[str, Any]) -> dict[str, Any]:
    """The record as it was before a store gave it a place."""
    return {key: value for key, value in record.items() if key not in ("cell", "part", "parts")}


def _asked(cell: Cell) -> dict[str, Any]:
    """The cell's fields as they stand in a record."""
    return {**dataclasses.asdict(cell), "domains": list(cell.domains), "settings": dict(cell.settings)}


def _by_cell(store: Store) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in store.records():
        found.setdefault(record["cell"], []).append(record)
    return found


def time_table(records: Iterable[dict[str, Any]]) -> str:
    """Where the time of all records went, as markdown; empty where none of them says."""
    found = [record["profile"] for record in records if "profile" in record]
    if not found:
        return ""
    seconds = {name: sum(profile[name] for profile in found) for name in PARTS}
    total = sum(seconds.values())
    rows = [f"| {name} | {value:.2f} | {100 * value / total:.1f} |" for name, value in seconds.items()]
    return "\n".join(["| time | seconds | % |", "|---|---:|---:|", *rows])


def by_experiment(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record["experiment"], []).append(record)
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
