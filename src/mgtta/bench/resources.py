"""The model, the statistics, the images and the generators of a setup, and how a cell is run with them."""

import dataclasses
import fcntl
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from mgtta import __version__
from mgtta._lib.files import command
from mgtta._lib.profile import optimizer_apart, profiled
from mgtta._lib.ranks import ranks_of
from mgtta._lib.shipped import shipped
from mgtta._lib.timm import timm
from mgtta.bench.experiments import Cell, Setup, Training, digest
from mgtta.bench.provenance import check_apart, seen
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, frost_source
from mgtta.data.datasets import KINDS, is_imagenet_c, open_dataset, synsets
from mgtta.data.glyphs import STAND_INS, TEST_SEED, VALIDATION_SEED, Glyphs
from mgtta.data.streams import Domain, corrupted, stream
from mgtta.evaluation.loop import evaluate
from mgtta.evaluation.record import Record
from mgtta.learned.files import save_generator
from mgtta.methods.create import create, needs_source, recipe_settings
from mgtta.models.classifier import Classifier
from mgtta.models.fisher import Fisher, fisher_information
from mgtta.models.loading import load_model
from mgtta.models.source import SourceStatistics, load_source, source_statistics
from mgtta.training.meta import meta_train, shifted_images

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
            loaded = load_model(self.setup.model, self.setup.checkpoint, classes=classes, **self.setup.head)
            self._models[key] = loaded.to(self.setup.device)
            if classes is not None:
                self.watch.note(f"images of {len(classes)} classes are scored over these alone")
        model, names = self._models[key], getattr(images, "classes", None)
        if names is not None and len(names) != model.num_classes and not set(names) <= synsets().keys():
            raise ValueError(
                f"the images have {len(names)} classes, {model.name} has {model.num_classes}: name a --checkpoint for "
                "these classes with --num-classes, or add the folders that are missing, empty"
            )
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
        if (known := known_source(self.setup)) is not None:
            return load_source(known)
        return source_statistics(self.model(), stream(self._clean, first=1000, device=self.setup.device))

    @cached_property
    def fisher(self) -> Fisher:
        """From up to 2,000 clean validation images, as EATA's paper does."""
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
        if images.labels is None and not cell.timed:
            which = "--validation, by which --sweep chooses," if cell.split == "validation" else "--data"
            raise ValueError(
                f"the images of {which} have no labels, so there is no accuracy: name others, in class folders; "
                "`mgtta adapt` predicts without labels"
            )
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
        on_the_fly = not isinstance(self.images(cell.split, cell.data), str)
        ours = f"mgtta, on the fly; frost: {frost_source()}" if on_the_fly else "as published"
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
            "generator": str(training) if training and "generator" in known else generator_of(cell, self.setup),
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
        return {**record.to_dict(), **asked(cell), "protocol": protocol}


def known_source(setup: Setup) -> str | None:
    """The statistics that need not be taken: a file's, or the shipped ones of a shipped model."""
    ships = setup.model in shipped("sources") and setup.checkpoint is None
    return str(setup.source) if setup.source is not None else setup.model if ships else None


def training_of(cell: Cell, setup: Setup) -> Training | None:
    """How the cell's generator is trained; None where it needs none or is there already."""
    known = recipe_settings(cell.method)
    own = known.get("generator") == Setup.generator and "optimizer" not in known
    return cell.training or (Training() if own and setup.generator == TRAIN else None)


def generator_of(cell: Cell, setup: Setup) -> str | None:
    """The name or the file of the cell's generator; None where it needs none, or one that is trained."""
    known = recipe_settings(cell.method)
    if "generator" not in known or "optimizer" in known or training_of(cell, setup) is not None:
        return None
    return setup.generator if known["generator"] == Setup.generator else known["generator"]


def asked(cell: Cell) -> dict[str, Any]:
    """The cell's fields as they stand in a record."""
    return {**dataclasses.asdict(cell), "domains": list(cell.domains), "settings": dict(cell.settings)}


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
