"""THE loop: a method over a stream -> one record for each domain."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from mgtta.errors import unknown
from mgtta.methods.base import Method
from mgtta.metrics import BINS, correct, expected_calibration_error, reliability

RESETS = ("domain", "never")


@dataclass
class Record:
    """What one method did on one domain. Figures in percent, of labelled images alone; None without labels."""

    method: str
    domain: str
    images: int = 0
    labelled: int = 0
    batches: int = 0
    updates: int = 0
    skipped: int = 0
    seconds: float = 0.0  # in the method, predicting and adapting
    peak_memory: int | None = None  # bytes that torch held on the GPU at most
    top1: float | None = None
    top5: float | None = None
    ece: float | None = None
    sizes: list[int] = field(default_factory=list)  # of each batch
    curve: list[int] = field(default_factory=list)  # correct predictions in each batch
    bins: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(BINS)])  # see metrics.reliability

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    method: Method,
    stream: Iterable[Any],
    reset: str = "domain",
    *,
    on_batch: Callable[[Record, Any, Tensor], None] | None = None,
) -> list[Record]:
    """Run the method over the stream of Batch(x, y, domain, index).

    Args:
        reset: "domain", before each domain; or "never": goes on from where the method stands, the continual
            setting.
        on_batch: called after each batch with the record as it stands, the batch and its logits.
    """
    if reset not in RESETS:
        raise unknown("reset", reset, RESETS)
    records: list[Record] = []
    hits5 = 0
    for batch in stream:
        if not records or records[-1].domain != batch.domain:
            if reset == "domain":
                method.reset()
            records.append(Record(method.name, batch.domain))
            hits5 = 0
            before = method.updates, method.skipped, method.seconds
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        record = records[-1]
        logits = method(batch.x)
        record.images += len(logits)
        record.batches += 1
        record.sizes.append(len(logits))
        record.updates, record.skipped = method.updates - before[0], method.skipped - before[1]
        record.seconds = method.seconds - before[2]
        if logits.is_cuda:
            record.peak_memory = torch.cuda.max_memory_allocated(logits.device)
        if batch.y is not None:
            record.labelled += len(logits)
            record.curve.append(correct(logits, batch.y))
            hits5 += correct(logits, batch.y, k=5)
            record.bins = (torch.tensor(record.bins, dtype=torch.float64) + reliability(logits, batch.y)).tolist()
            record.top1 = 100 * sum(record.curve) / record.labelled
            record.top5 = 100 * hits5 / record.labelled
            record.ece = expected_calibration_error(record.bins)
        if on_batch is not None:
            on_batch(record, batch, logits)
    return records
