"""Adapt on a data set from start to end, with predictions, state and checkpoint on disk. `mgtta adapt` calls this."""

import hashlib
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.bars import progress_bar
from mgtta._lib.files import writable, write_tensors
from mgtta._lib.names import spelled
from mgtta._lib.ranks import Alone
from mgtta._lib.timm import timm
from mgtta.adaptation.wrapper import Adapting
from mgtta.data.datasets import open_dataset
from mgtta.data.streams import Batch, Stream, split_stream, stream
from mgtta.evaluation.loop import evaluate
from mgtta.evaluation.record import Record
from mgtta.models.loading import as_classifier
from mgtta.running.predictions import PredictionWriter, format_of, prediction_file
from mgtta.running.resume import Run, Totals, save_state

PathLike = str | os.PathLike
IMAGENET_CLASSES = 1000
LINE_SECONDS = 10.0  # between two lines of progress, if there is no terminal


@dataclass(frozen=True)
class StreamResult:
    """What `adapt_stream` did; under several ranks, each rank gets the result of all.

    Attributes:
        out: the file of predictions.
        totals: images, labelled images, correct predictions, updates, skipped batches.
        unreadable: (name, reason) of each image that could not be read.
        events: what a guard, recall or the normalisation did.
        speed: images a second, of the run since it last started.
    """

    out: Path
    totals: Totals
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    speed: float | None = None

    def __str__(self) -> str:
        parts = [str(self.totals)]
        if self.unreadable:
            parts.append(f"{len(self.unreadable)} images unreadable")
        if self.events:
            counts = Counter(str(event.get("action")) for event in self.events)
            parts.append(", ".join(f"{n} x {action}" for action, n in counts.items()))
        return f"{', '.join(parts)} -> {self.out}"


def adapt_stream(
    method: Adapting,
    data: Any,
    out: PathLike,
    *,
    batch_size: int = 64,
    images: int | None = None,
    shuffle: int | None = None,
    state: PathLike | None = None,
    export: PathLike | None = None,
    resume: PathLike | None = None,
    save_every: int = 32,
    protocol: Mapping[str, Any] | None = None,
    split_shards: bool = False,
    domain: str | None = None,
    compare: nn.Module | None = None,
    watch: Callable[[Batch, Tensor], None] | None = None,
    progress: bool = True,
) -> StreamResult:
    """Predict every image of a data set, adapting along the way, and write the predictions to a file.

    The method continues from where it is; it is not reset. Ranks that share batches (`create(...,
    process_group=...)`) call this together, and the first rank writes the files of all.

    Args:
        data: a data set, or the path of images for `open_dataset`. A path is opened at the model's input size, and an
            unreadable image raises an error: open the data set yourself to change either.
        out: predictions, .csv or .jsonl. The file gets its name when everything is written.
        images: only the first so many images.
        shuffle: seed of a random order; by default the images come in their own order.
        state: file for the adapted state, as `save_state` writes it.
        export: file for the adapted weights, .safetensors, of `method.export()`.
        resume: checkpoint file; if it exists, the run resumes from it. It is deleted when the run is complete.
        save_every: batches between two checkpoints.
        protocol: plain values of your own that must be the same when the run resumes, such as the learning rate.
        split_shards: each rank reads only its own tars of a path; a data set is taken to be this rank's own.
        domain: name of the stream; by default the name of the path.
        compare: a model, such as the source, whose predictions are written, too, for one more forward pass.
        watch: called with each batch and its logits, after the update; see mgtta.running.story.
        progress: show a progress bar, or lines if there is no terminal.
    """
    _check_resume(resume, shuffle, split_shards)
    check_outputs(method.ranks, out, state, export)
    if export is not None:
        if Path(export).suffix != ".safetensors":
            raise ValueError(f"the adapted weights are written as safetensors: name {export} with .safetensors")
        method.export()  # a method that cannot export says so now, not after hours of work
    dataset, name = _opened(method, data, split_shards, domain)
    planned = _planned(dataset, method.ranks, split_shards, shuffle, batch_size=batch_size, first=images, domain=name)
    run = None
    with ExitStack() as stack:
        bar = stack.enter_context(
            _Bar(f"{spelled(method.name)} on {name}", len(planned), progress and method.ranks.first)
        )
        if resume is not None:
            settings = _protocol(method, dataset, out, batch_size, images, protocol, compare)
            run = stack.enter_context(Run(Path(resume), method, Path(out), dataset, settings, batch_size, save_every))
            planned = planned.after(run.position)
            bar.skip(run.position)
        batches, classes = _labelled(method, dataset, planned)
        on_batch = stack.enter_context(_writing(Path(out), dataset, classes, method.ranks, run, bar, _source(compare)))
        on_batch = _both(on_batch, watch)
        began = time.perf_counter()
        records = evaluate(method, batches, reset="never", on_batch=on_batch)
        seconds = time.perf_counter() - began
        _save(method, state, export)
        if run is not None:
            run.finish()
    return _result(Path(out), method, dataset, records, run, seconds)


def _both(
    first: Callable[[Record, Batch, Tensor], None], second: Callable[[Batch, Tensor], None] | None
) -> Callable[[Record, Batch, Tensor], None]:
    """Return what calls both after each batch."""
    if second is None:
        return first

    def on_batch(record: Record, batch: Batch, logits: Tensor) -> None:
        first(record, batch, logits)
        second(batch, logits)

    return on_batch


def check_outputs(ranks: Alone, out: PathLike, *files: PathLike | None) -> None:
    """Raise now, not after hours of work, if the predictions or another file cannot be written."""
    format_of(out)
    if ranks.first:
        writable(out, *files)


def _check_resume(resume: PathLike | None, shuffle: int | None, split_shards: bool) -> None:
    if resume is None:
        return
    if split_shards:
        raise ValueError("resume=... counts the batches of one stream: leave out split_shards=..., or resume=...")
    if shuffle is not None:
        raise ValueError("resume=... counts batches of images in their own order: leave out shuffle=..., or resume=...")


def _opened(method: Adapting, data: Any, split_shards: bool, domain: str | None) -> tuple[Any, str]:
    """Return the data set and the name of the stream."""
    if not isinstance(data, str | os.PathLike):
        return data, domain or "test"
    side, crop_pct = method.model.input_size
    part = method.ranks.part if split_shards else None
    return open_dataset(data, size=side, crop_pct=crop_pct, part=part), domain or Path(data).name


def _planned(dataset: Any, ranks: Alone, split_shards: bool, shuffle: int | None, **options: Any) -> Stream:
    """Return the stream of this rank's images; `options` are those of `stream`."""
    options |= {"shuffle": shuffle is not None, "seed": shuffle or 0}
    if split_shards and ranks.part is not None:
        return split_stream(dataset, ranks, **options)
    return stream(dataset, part=ranks.part, **options)


def _names(dataset: Any) -> Callable[[int], str]:
    """Return what names an image by its number: the data set's own names, or the numbers."""
    return getattr(dataset, "name", str)


def _protocol(
    method: Adapting,
    dataset: Any,
    out: PathLike,
    batch_size: int,
    images: int | None,
    more: Mapping[str, Any] | None,
    compare: nn.Module | None,
) -> dict[str, Any]:
    """Return what must be the same when the run resumes."""
    name = _names(dataset)
    names = [name(i) for i in range(len(dataset))][:images]
    compared = {} if compare is None else {"compare": as_classifier(compare).fingerprint()}
    return {
        "method": method.name,
        "precision": method.precision,
        "batch_size": batch_size,
        "size": getattr(dataset, "size", None),
        "suffix": format_of(out),
        "images": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
        **compared,
        **(more or {}),
    }


def _labelled(method: Adapting, dataset: Any, planned: Stream) -> tuple[Iterable[Batch], Sequence[str] | None]:
    """Return the batches and the names of their classes; without labels and names if the model has other classes."""
    classes = getattr(dataset, "classes", None)
    if classes is None or len(classes) == method.model.num_classes:
        return planned, classes or _imagenet_names(method)
    if method.ranks.first:
        warnings.warn(
            f"{len(classes)} class folders, but the model has {method.model.num_classes} classes: the labels are not "
            "used; a file of the model's classes says which folder is which (--classes)",
            stacklevel=3,
        )
    return (batch._replace(y=None) for batch in planned), _imagenet_names(method)


def _imagenet_names(method: Adapting) -> list[str] | None:
    """Return ImageNet's names of the classes, for a timm model with the 1000 classes of ImageNet; else None."""
    config = getattr(method.model.net, "pretrained_cfg", None) or {}
    if config.get("num_classes") != IMAGENET_CLASSES or method.model.num_classes != IMAGENET_CLASSES:
        return None
    info = timm.data.ImageNetInfo()
    return [info.index_to_description(i) for i in range(IMAGENET_CLASSES)]


def _source(model: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    """Return what gives the logits of a model that does not adapt."""
    if model is None:
        return None
    classifier = as_classifier(model)

    def logits(x: Tensor) -> Tensor:
        with torch.no_grad():
            return classifier(x)

    return logits


class _Bar:
    """A progress bar over the batches of a run; without a terminal, a line on standard error now and then."""

    def __init__(self, title: str, batches: int, shown: bool):
        terminal = sys.stderr.isatty()
        self.bar = progress_bar(transient=True, disable=not (shown and terminal))
        self.task = self.bar.add_task(title, total=batches)
        self.lines = shown and not terminal
        self.title = title
        self.batches = batches
        self.done = 0
        self.said_at = time.monotonic()

    def __enter__(self) -> "_Bar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def skip(self, batches: int) -> None:
        self.bar.advance(self.task, batches)
        self.done += batches

    def advance(self) -> None:
        self.bar.advance(self.task)
        self.done += 1
        now = time.monotonic()
        if self.lines and now - self.said_at > LINE_SECONDS:
            self.said_at = now
            print(f"{self.title}: {self.done} of {self.batches} batches", file=sys.stderr, flush=True)


@contextmanager
def _writing(
    out: Path,
    dataset: Any,
    classes: Sequence[str] | None,
    ranks: Alone,
    run: Run | None,
    bar: _Bar,
    source: Callable[[Tensor], Tensor] | None,
) -> Iterator[Callable[[Record, Batch, Tensor], None]]:
    """Give what `evaluate` calls after each batch: it writes predictions, saves checkpoints, and moves the bar."""
    names = _names(dataset)
    place: Any
    if run is None:
        place = prediction_file(out, names, classes, ranks, source)
    else:
        place = nullcontext(PredictionWriter(run.file, format_of(out), names, classes, ranks, source))
    with place as writer:

        def on_batch(record: Record, batch: Batch, logits: Tensor) -> None:
            writer.write(batch, logits)
            if run is not None:
                run.note(record, batch)
            bar.advance()

        yield on_batch


def _save(method: Adapting, state: PathLike | None, export: PathLike | None) -> None:
    if not method.ranks.first:
        return
    if state is not None:
        save_state(method, state)
    if export is not None:
        write_tensors(export, method.export().state_dict(), {"format": "pt"})


def _result(
    out: Path, method: Adapting, dataset: Any, records: list[Record], run: Run | None, seconds: float
) -> StreamResult:
    totals = Totals()
    if run is not None:
        totals = run.totals
    elif records:
        totals = totals.plus(records[0])
    unreadable = method.ranks.gather(list(getattr(dataset, "skipped", [])))
    speed = sum(record.images for record in records) / seconds if records else None
    return StreamResult(out, totals, list(dict.fromkeys(unreadable)), list(method.events), speed)
