"""THE loop: a method over a stream -> one record for each domain."""

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from torch import Tensor

from mgtta._lib.errors import unknown
from mgtta._lib.profile import add
from mgtta.adaptation.wrapper import Adapting
from mgtta.evaluation.batches import as_batches, check_labels
from mgtta.evaluation.metrics import HELD_IMAGES, Tally
from mgtta.evaluation.record import Record
from mgtta.evaluation.timing import Clock, peak_memory, process_peak_memory, reset_peak_memory

RESETS = ("domain", "never")
OnBatch = Callable[[Record, Any, Tensor], None]


def evaluate(
    method: Adapting,
    stream: Iterable[Any],
    reset: str = "domain",
    *,
    on_batch: OnBatch | None = None,
    timing: bool = False,
) -> list[Record]:
    """Run the method over a stream, and return a record of each domain.

    A stream gives batches: those of `mgtta.data.streams`, or a DataLoader's, or pairs (images, labels), or images. What
    names no domain is one domain, "test".

    Ranks that share batches (`create(..., process_group=...)`) run it together, each over its share of the stream,
    and all get the records of the whole; times and memory are a rank's own.

    Args:
        reset: "domain" resets the method before each domain; "never" goes on from its present state, the continual
            setting.
        on_batch: called after each batch with the record so far, the batch and its logits. The numbers of updates
            are in the record only at the domain's end; the method knows them at any time, and waits for a GPU.
        timing: wait for the GPU at each reading of the clock, so that times are true; a little slower.
    """
    if reset not in RESETS:
        raise unknown("reset", reset, RESETS)
    records = []
    with Clock(method, wait=timing) as clock:
        for domain, batches in groupby(as_batches(stream), key=lambda batch: batch.domain):
            if reset == "domain":
                method.reset()
            records.append(_evaluate_domain(method, domain, batches, on_batch, clock))
    return records


def _evaluate_domain(
    method: Adapting, domain: str, batches: Iterable[Any], on_batch: OnBatch | None, clock: Clock
) -> Record:
    at_once = on_batch is not None or method.ranks.size > 1  # ranks sum their counts batch by batch, in step
    tally = Tally(held=0 if at_once else HELD_IMAGES, total=method.ranks.total)
    record = Record(method.name, domain, sizes=tally.sizes, curve=tally.curve, bins=tally.bins)
    updates = method.updates
    skipped = method.skipped
    known_events = len(method.events)
    reset_peak_memory()
    for batch in batches:
        late = method.spent
        logits, predicting, adapting = clock(batch.x)
        add("predicting", predicting)
        add("adapting", adapting)
        record.batches += 1
        record.predict_seconds += predicting
        record.adapt_seconds += adapting
        check_labels(batch.y, logits.shape[1])
        labels = None if batch.y is None else batch.y.to(logits.device, non_blocking=True)
        tally.update(logits, labels, late)
        if on_batch is not None:
            _bring_up_to_date(record, tally, method, known_events)
            on_batch(record, batch, logits)
    _bring_up_to_date(record, tally, method, known_events)
    record.updates = method.updates - updates  # waits for a GPU
    record.skipped = method.skipped - skipped
    record.peak_memory = peak_memory(method)
    record.process_peak_memory = process_peak_memory()
    return record


def _bring_up_to_date(record: Record, tally: Tally, method: Adapting, known_events: int) -> None:
    """Write the figures so far into the record, whose lists are the tally's own."""
    figures = tally.figures()
    record.images = tally.images
    record.labelled = tally.labelled
    record.seconds = record.predict_seconds + record.adapt_seconds
    record.top1 = figures["top1"]
    record.top5 = figures["top5"]
    record.ece = figures["ece"]
    record.remaining = figures["remaining"]
    record.events += method.events[known_events + len(record.events) :]
