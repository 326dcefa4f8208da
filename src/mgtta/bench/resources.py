"""The lab of a process: model, statistics, images and generators of a setup, and how a cell is run with them."""

import dataclasses
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mgtta import __version__
from mgtta._lib.files import command, locked
from mgtta._lib.profile import optimizer_apart, profiled
from mgtta._lib.ranks import ranks_of
from mgtta._lib.shipped import shipped
from mgtta.adaptation.wrapper import Adapting
from mgtta.bench.cells import Cell, Setup, Training, digest
from mgtta.bench.needs import (
    default_generator,
    needs_fisher,
    needs_source,
)
from mgtta.bench.protocol import described, device_name, training_of
from mgtta.bench.provenance import check_apart, seen
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.data.datasets import KINDS, is_cifar_c, is_imagenet_c, open_dataset, read_classes
from mgtta.data.embedded import images_for
from mgtta.data.glyphs import STAND_INS
from mgtta.data.rendered import TEST_SEED, VALIDATION_SEED, Rendered
from mgtta.data.stored import ImageStore, stamp
from mgtta.data.streams import Domain, corrupted, stream
from mgtta.evaluation.loop import OnBatch, evaluate
from mgtta.evaluation.record import Record
from mgtta.learned.files import save_generator
from mgtta.methods.create import create
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher, fisher_information, load_fisher, save_fisher
from mgtta.models.loading import load_model
from mgtta.models.source import SourceStatistics, load_source, source_statistics
from mgtta.training.meta import meta_train, shifted_images

IMAGES = 2048  # embedded images per domain, by default
SOURCE_IMAGES = 1000  # clean ones, for the statistics
FISHER_IMAGES = 2000  # clean ones, as in EATA's paper
HELD_BYTES = 4 * 2**30  # decoded images that all processes of a machine keep
STREAM_BYTES = 2**31  # a stream up to this size is kept for the cells that share it


class Listener:
    """Is told what happens, as it happens. This one does nothing with it."""

    def start(self, title: str, cells: int, finished: int) -> None: ...

    def grow(self, cells: int) -> None:
        """Hear that there are now so many cells in all."""

    def note(self, text: str) -> None: ...

    def batch(self, cell: Cell, record: Record, part: float) -> None: ...

    def cell(self, cell: Cell, records: list[dict[str, Any]], fresh: bool) -> None: ...


class Lab:
    """Holds the model, the statistics, the images and the generators of a setup, and runs cells.

    Args:
        folder: for trained generators.
        held: bytes of decoded images, and of streams, to keep for other cells.
        group: of ranks that run every cell together.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        held: int = HELD_BYTES,
        watch: Listener | None = None,
        group: ProcessGroup | None = None,
    ):
        check_apart(setup.data, setup.validation)
        if torch.device(setup.device).type == "cuda":
            torch.set_float32_matmul_precision("high" if setup.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = setup.tf32
        self.setup = setup
        self.folder = folder
        self.watch = watch or Listener()
        self.group = group
        self.room = Room(held)
        self.stream_bytes = min(held, STREAM_BYTES)
        self.store: ImageStore | None = None
        if setup.cache is not None:
            made_with = [device_name(setup.device), setup.tf32]
            self.store = ImageStore(setup.cache, setup.device, made_with, self.watch.note)
        self._stamps: dict[str, str] = {}
        self._models: dict[Any, Classifier] = {}
        self._sets: dict[Any, Any] = {}
        self._kept_stream: Any = None  # a cell's `stream`
        self._kept_batches: list[Any] = []
        self._kept_method: tuple[Any, Adapting] | None = None  # how it was made, and the method
        self._seen: dict[Any, dict[str, str]] = {}
        self.fingerprint = self.model().fingerprint()

    def model(self, images: Any = None) -> Classifier:
        """Return the classifier over the classes in which the images are scored."""
        classes = getattr(images, "class_indices", None)
        names = getattr(images, "classes", None)
        key = tuple(classes or ())
        if key not in self._models:
            loaded = load_model(self.setup.model, self.setup.checkpoint, classes=classes, **self.setup.head)
            self._models[key] = loaded.to(self.setup.device)
            if classes is not None:
                self.watch.note(f"images of {len(classes)} classes are scored over these classes only")
        model = self._models[key]
        if names is not None and len(names) != model.num_classes:
            raise ValueError(
                f"the images have {len(names)} classes, {model.name} has {model.num_classes}: name a --checkpoint for "
                "these classes with --num-classes, or the model's classes with --classes"
            )
        return model

    def images(self, split: str = "test", data: str | None = None, kind: str | None = None) -> Any:
        """Return the data set, held in memory; or the folder of ImageNet-C as published."""
        if (split, data) not in self._sets:
            self._sets[split, data] = self._open(split, data, kind)
        return self._sets[split, data]

    def _open(self, split: str, data: str | None, kind: str | None) -> Any:
        count = self.setup.images or IMAGES
        if data in STAND_INS:
            return Held(STAND_INS[data](count), self.room)
        path = self._path(split, data)
        if path is None and self.setup.data is None:
            return Held(_embedded(self.setup.model, split, count), self.room)
        if path is None:
            raise ValueError("validation images are needed: name them with --validation, other images than the test's")
        if Path(path).is_dir() and (is_cifar_c(Path(path)) or is_imagenet_c(Path(path))):
            return path
        options = self._sizes
        if self.setup.classes is not None:
            options["classes"] = read_classes(self.setup.classes)
        restrict = self.setup.restrict and (split == "test" or Path(path).is_dir())
        return Held(open_dataset(path, kind=kind, restrict=restrict, **options), self.room)

    def _path(self, split: str, data: str | None) -> str | None:
        """Return the images that are named for a split, or for a cell; None for the embedded ones."""
        of_split = self.setup.data if split == "test" else self.setup.validation
        return data or of_split

    @property
    def _sizes(self) -> dict[str, Any]:
        side, crop = self.model().input_size
        return {"size": side, "crop_pct": crop}

    @property
    def _clean(self) -> Any:
        images = self.images("validation")
        if isinstance(images, str):
            raise ValueError(f"clean images are needed: {images} is ImageNet-C, name others with --validation")
        return images

    @cached_property
    def source(self) -> SourceStatistics:
        """The statistics that are named, the shipped ones, or those of clean validation images."""
        known = known_source(self.setup)
        if known is not None:
            return load_source(known)
        return source_statistics(self.model(), stream(self._clean, first=SOURCE_IMAGES, device=self.setup.device))

    @cached_property
    def fisher(self) -> Fisher:
        """The Fisher information, from clean validation images; with a cache, one process takes it for all."""
        if self.setup.cache is None:
            return self._take_fisher()
        validation = self._path("validation", None)
        images = None if validation is None else stamp(validation)
        how = [FISHER_IMAGES, device_name(self.setup.device), self.setup.tf32, torch.__version__, __version__]
        name = digest([self.setup.model, self.fingerprint, self.setup.images, images, how])
        path = Path(self.setup.cache) / f"fisher-{name}.safetensors"
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                save_fisher(self._take_fisher(), path)
        return load_fisher(path)

    def _take_fisher(self) -> Fisher:
        return fisher_information(self.model(), stream(self._clean, first=FISHER_IMAGES, device=self.setup.device))

    def trained(self, training: Training) -> Path:
        """Return the file of a generator; the first process that asks trains it, and others wait for it."""
        setup = self.setup
        parts = [training, training.judges, self.fingerprint, setup.data is None, setup.validation, self.source.images]
        if setup.constants != Setup.constants:
            parts.append(setup.constants)
        path = self.folder / "generators" / f"{digest(parts)}.safetensors"
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                self._train(training, path)
        return path

    def _train(self, training: Training, path: Path) -> None:
        self.watch.note(f"a generator is {training}")
        images = self.images("validation")
        how = self._corrupting(images)
        x = shifted_images(images, training.images, seed=training.seed, device=self.setup.device, **how)
        if len(x) < training.images:
            raise ValueError(f"training needs {training.images} validation images, and there are {len(x)}")
        checkpoint = path.with_suffix(".part")  # a training that was stopped resumes from here
        generator = meta_train(
            self.model(),
            self.source,
            x,
            hidden_size=training.hidden_size,
            memory=training.memory,
            steps=training.steps,
            validation=self._judges(training),
            seed=training.seed,
            checkpoint=checkpoint,
            progress=False,
        )
        save_generator(generator, path, command=command())
        checkpoint.unlink(missing_ok=True)

    def _judges(self, training: Training) -> list[Any] | None:
        """Return validation batches, if their labels are the model's classes; else None."""
        images = self.images("validation")
        names = getattr(images, "classes", None)
        if getattr(images, "class_indices", None) is not None:
            return None
        if names is not None and len(names) != self.model().num_classes:
            return None
        domains = corrupted(images, VALIDATION_CORRUPTIONS, **self._corrupting(images))
        batches = list(stream(domains, first=training.judges, device=self.setup.device))
        if batches[0].y is None:
            return None
        return batches

    def run(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the cell's records, one for each domain; with `profile`, the first one has the profile of all."""
        if not self.setup.profile:
            return self._run(cell)
        with profiled() as found:
            records = self._run(cell)
        records[0]["profile"] = found
        return records

    def _run(self, cell: Cell) -> list[dict[str, Any]]:
        batches, images = self._batches(cell)
        if images.labels is None and not cell.timed:
            which = "--validation, by which --sweep chooses," if cell.split == "validation" else "--data"
            raise ValueError(
                f"the images of {which} have no labels, so there is no accuracy: name others, in class folders; "
                "`mgtta adapt` predicts without labels"
            )
        method = self._fresh_method(cell, images)
        if cell.timed:  # the first batch pays for what is set up once; the reset removes its trace
            method.warm_up(next(iter(batches)).x)
            method(next(iter(batches)).x)
            method.reset()
        on_batch = None
        if type(self.watch) is not Listener:  # else nobody looks at a batch
            on_batch = self._on_batch(cell, len(batches))
        timing = cell.timed or self.setup.profile
        with optimizer_apart(method.optimizer):
            records = evaluate(method, batches, cell.reset, on_batch=on_batch, timing=timing)
        if not cell.timed:
            self._kept_method = (self._made_as(cell, images), method)
        return [described(self, cell, record, method.precision) for record in records]

    def _on_batch(self, cell: Cell, batches: int) -> OnBatch:
        done = 0

        def on_batch(record: Record, *_: Any) -> None:
            nonlocal done
            done += 1
            self.watch.batch(cell, record, done / batches)

        return on_batch

    def _fresh_method(self, cell: Cell, images: Any) -> Adapting:
        """Return the cell's method, as new; if it is the last one, that after a reset, which keeps its CUDA graphs."""
        kept = self._kept_method
        self._kept_method = None  # until the cell is finished
        if kept is None or cell.timed or kept[0] != self._made_as(cell, images):
            return self._method(cell, images)
        kept[1].reset()
        return kept[1]

    def _made_as(self, cell: Cell, images: Any) -> Any:
        """Return the same for cells that have the same method."""
        return (cell.method, cell.settings, cell.training, cell.max_updates, id(self.model(images)))

    def _method(self, cell: Cell, images: Any) -> Adapting:
        settings = dict(cell.settings)
        if needs_source(cell.method):
            settings["source"] = self.source
        if needs_fisher(cell.method):
            settings["fisher"] = self.fisher
        training = training_of(cell, self.setup)
        if training is not None:
            settings["generator"] = self.trained(training)
        elif default_generator(cell.method) == Setup.generator:
            settings.setdefault("generator", self.setup.generator)
        return create(
            cell.method,
            self.model(images),
            max_updates=cell.max_updates,
            max_seconds=cell.max_seconds,
            precision=self.setup.precision,
            process_group=self.group,
            **settings,
        )

    def _batches(self, cell: Cell) -> tuple[Any, Any]:
        """Return the stream, as a list where it is small enough to keep, and the images it is made of."""
        kind = None
        if cell.domains[0] in KINDS:
            kind = cell.domains[0]
        if cell.sets:
            domains = [Domain(name, self.images(cell.split, path)) for name, path in cell.sets]
        else:
            domains = self._domains(cell, self.images(cell.split, cell.data, kind))
        images = domains[0].dataset
        if self._kept_stream == cell.stream:
            return self._kept_batches, images
        batches = stream(
            [self._stored(domain, cell) for domain in domains],
            batch_size=cell.batch_size,
            mixed=cell.mixed,
            imbalance=math.inf if cell.by_class else None,
            seed=cell.seed,
            first=min(filter(None, (cell.limit, self.setup.images)), default=None),
            device=self.setup.device,
            part=ranks_of(self.group).part,
        )
        size = sum(len(planned.rows) for planned in batches.plan) * images[0][0].nbytes
        if size > self.stream_bytes:
            return batches, images
        self._kept_batches = list(batches)
        self._kept_stream = cell.stream
        return self._kept_batches, images

    def _domains(self, cell: Cell, images: Any) -> list[Domain]:
        if cell.severity == 0:
            if isinstance(images, str):
                raise ValueError(f"clean images are needed: {images} is ImageNet-C, name others with --data")
            return [Domain(cell.domains[0], images)]
        found = {name: self._domain(name, cell.severity, images) for name in dict.fromkeys(cell.domains)}
        return [found[name] for name in cell.domains]

    def _domain(self, name: str, severity: int, images: Any) -> Domain:
        """Return the domain of a corruption, or of one at its own severity: "fog" or "fog/3"."""
        corruption, _, own = name.partition("/")
        if own:
            severity = int(own)
        [domain] = corrupted(images, [corruption], severity, **self._corrupting(images))
        if isinstance(images, str):
            held = self._sets.setdefault((images, corruption, severity), Held(domain.dataset, self.room))
            domain = dataclasses.replace(domain, dataset=held)
        return dataclasses.replace(domain, name=name)

    def draw(self, cell: Cell) -> None:
        """Corrupt the images that a cell sees, for the cache."""
        for domain in self._domains(cell, self.images(cell.split, cell.data)):
            self._stored(domain, cell)

    def _stored(self, domain: Domain, cell: Cell) -> Domain:
        """Return the domain with its corrupted images from the cache, if there is one."""
        if self.store is None or domain.corruption is None:
            return domain
        return self.store.domain(domain, self._identity(cell, domain.dataset), cell.seed, self.setup.images)

    def _identity(self, cell: Cell, images: Any) -> str:
        """Return what tells a cell's clean images from others."""
        path = self._path(cell.split, cell.data)
        if path is None:
            return images.name(0)  # of rendered images, it tells kind and seed
        if path not in self._stamps:
            self._stamps[path] = stamp(path)
        return f"{self._stamps[path]} {self._sizes}"

    def _corrupting(self, images: Any) -> dict[str, Any]:
        """Return the options of `corrupted`: for published files their size, else how images are corrupted."""
        if isinstance(images, str):
            return self._sizes
        return {"frost_textures": self.setup.frost_textures, "constants": self.setup.constants}

    def seen(self, cell: Cell) -> dict[str, str]:
        """Return hashes of what the cell reads from disk, as it is now."""
        named = (cell.data, cell.sets)
        if named not in self._seen:
            self._seen[named] = seen(self.setup, [cell])
        return self._seen[named]


def known_source(setup: Setup) -> str | None:
    """Return the statistics that need not be taken: a file, or the shipped ones of a shipped model."""
    if setup.source is not None:
        return str(setup.source)
    if setup.model in shipped("sources") and setup.checkpoint is None:
        return setup.model
    return None


def _embedded(model: str, split: str, count: int) -> Rendered:
    """Return the images of a split that come with the package, of the kind that the model is for."""
    kind = images_for(model)
    if split == "test":
        return kind(count, TEST_SEED)
    return kind(max(count, IMAGES), VALIDATION_SEED)
