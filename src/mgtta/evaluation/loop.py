"""THE loop: a method over a stream -> one record for each domain."""

import re
import resource
import time
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgtta._lib.errors import unknown
from mgtta._lib.profile import add
from mgtta.adaptation.wrapper import Adapting
from mgtta.evaluation.metrics import BINS, counts, expected_calibration_error
from mgtta.evaluation.record import Record

RESETS = ("domain", "never")


def evaluate(
    method: Adapting,
    stream: Iterable[Any],
    reset: str = "domain",
    *,
    on_batch: Callable[[Record, Any, Tensor], None] | None = None,
    timing: bool = False,
) -> list[Record]:
    """Run the method over the stream of Batch(x, y, domain, index).

    Ranks that share batches (`create(..., process_group=...)`) run it together, each over its share of the stream,
    and all get the records of the whole; times and memory are a rank's own.

    Args:
        reset: "domain", before each domain; or "never": goes on from where the method stands, the continual
            setting.
        on_batch: called after each batch with the record as it stands, the batch and its logits. How many updates
            there were, the record tells at the domain's end, and the method at any time, waiting for a GPU.
        timing: wait for the GPU at each reading of the clock, so that times are true; a little slower.
    """
    if reset not in RESETS:
        raise unknown("reset", reset, RESETS)
    records = []
    with _Clock(method, timing) as clock:
        for domain, batches in groupby(stream, key=lambda batch: batch.domain):
            if reset == "domain":
                method.reset()
            records.append(_evaluate_domain(method, domain, batches, on_batch, clock))
    return records


def _evaluate_domain(
    method: Adapting,
    domain: str,
    batches: Iterable[Any],
    on_batch: Callable[[Record, Any, Tensor], None] | None,
    clock: "_Clock",
) -> Record:
    record = Record(method.name, domain)
    hits5 = left = left_hits = 0
    before, events = (method.updates, method.skipped), len(method.events)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        spent = method.spent
        logits, predicting, adapting = clock(batch.x)
        images, labelled, hits, best5, *bins = method.ranks.total(_counts(logits, batch.y))
        record.images += int(images)
        record.batches += 1
        record.sizes.append(int(images))
        record.events = list(method.events[events:])
        add("predicting", predicting)
        add("adapting", adapting)
        record.predict_seconds += predicting
        record.adapt_seconds += adapting
        record.seconds = record.predict_seconds + record.adapt_seconds
        if labelled:
            record.labelled += int(labelled)
            record.curve.append(int(hits))
            hits5 += int(best5)
            total = torch.tensor(record.bins, dtype=torch.float64).flatten() + torch.tensor(bins, dtype=torch.float64)
            record.bins = total.view(BINS, 3).tolist()
            record.top1 = 100 * sum(record.curve) / record.labelled
            record.top5 = 100 * hits5 / record.labelled
            record.ece = expected_calibration_error(record.bins)
            if spent:
                left, left_hits = left + int(labelled), left_hits + record.curve[-1]
                record.remaining = 100 * left_hits / left
        if on_batch is not None:
            on_batch(record, batch, logits)
    record.updates, record.skipped = method.updates - before[0], method.skipped - before[1]  # waits for a GPU
    _note_memory(record, method)
    return record


def _note_memory(record: Record, method: Adapting) -> None:
    """What was held at most until the end of the domain; what CUDA graphs hold, torch does not count."""
    record.process_peak_memory = process_peak_memory()
    device = next(method.model.parameters()).device
    if device.type == "cuda":
        record.peak_memory = torch.cuda.max_memory_allocated(device) + method.engine.graph_bytes


def _counts(logits: Tensor, y: Tensor | None) -> list[float]:
    """Images, labelled images, right ones, those right among the best five, and the bins' counts, row by row."""
    if y is None or not len(y):
        return [float(len(logits)), 0.0, 0.0, 0.0, *[0.0] * (3 * BINS)]
    return [float(len(logits)), float(len(y)), *counts(logits, y)]


class _Clock:
    """Calls a method and says how long it took until the network had given its first logits, and from then on."""

    def __init__(self, method: Adapting, synchronise: bool):
        self.method, self.synchronise = method, synchronise and torch.cuda.is_available()
        self.first: float | None = None

    def __enter__(self) -> "_Clock":
        self.handle = self.method.model.net.register_forward_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _note(self, *_: object) -> None:
        if self.first is None:
            self.first = self._now()

    def _now(self) -> float:
        if self.synchronise:
            torch.cuda.synchronize()
        return time.perf_counter()

    def __call__(self, x: Tensor) -> tuple[Tensor, float, float]:
        self.first = None
        began = self._now()
        logits = self.method(x)
        ended = self._now()
        first = self.first or ended
        return logits, first - began, ended - first


def process_peak_memory() -> int:
    """Bytes of main memory that this process has held at most."""
    try:  # unlike ru_maxrss, it does not count what the parent held
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    return 1024 * (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
