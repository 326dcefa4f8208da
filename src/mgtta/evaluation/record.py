"""The record of one method on one domain, and what a record on disk must look like."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

BINS = 15  # of confidence, for the calibration error
NUMBER = (int, float)
TEXTS = ("experiment", "method", "domain")
COUNTS = ("labelled", "batches", "updates", "skipped", "process_peak_memory")
FIGURES = ("top1", "top5", "ece", "remaining", "seconds", "predict_seconds", "adapt_seconds", "peak_memory")
LISTS = ("sizes", "curve")
MOST = 2**53  # whole numbers beyond it are no counts of anything


def empty_bins() -> list[list[float]]:
    """Return bins of confidence in which nothing was counted yet."""
    return [[0.0] * 3 for _ in range(BINS)]


@dataclass
class Record:
    """What one method did on one domain. Figures in percent, of labelled images alone; None without labels."""

    method: str
    domain: str
    images: int = 0
    labelled: int = 0
    batches: int = 0
    updates: int = 0  # at the domain's end
    skipped: int = 0  # at the domain's end
    seconds: float = 0.0  # in the method, predicting and adapting; on a GPU, true with evaluate's `timing` alone
    predict_seconds: float = 0.0  # of these, until the network has given its first logits of each batch
    adapt_seconds: float = 0.0  # and the rest
    peak_memory: int | None = None  # bytes that torch held on the GPU at most; at the domain's end
    process_peak_memory: int = 0  # bytes of main memory that the whole process has held at most; at the domain's end
    remaining: float | None = None  # top1 of the images that came after the method's budget was spent
    top1: float | None = None
    top5: float | None = None
    ece: float | None = None
    sizes: list[int] = field(default_factory=list)  # of each batch
    curve: list[int] = field(default_factory=list)  # correct predictions in each batch
    bins: list[list[float]] = field(default_factory=empty_bins)  # see metrics.reliability
    events: list[dict[str, Any]] = field(default_factory=list)  # what a guard did, see mgtta.adaptation.guarded

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def checked(records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The records themselves; a ValueError names the first that is none."""
    for i, record in enumerate(records):
        wrong = _wrong(record)
        if wrong:
            raise ValueError(
                f"record {i + 1} is damaged ({wrong}): remove its line from records.jsonl, and run it again"
            )
    return records


def _wrong(record: dict[str, Any]) -> str:
    for name in TEXTS:
        if not isinstance(record.get(name), str):
            return f"{name} is no text"
    for name in ("seed", "images"):
        if not _whole(record.get(name)):
            return f"{name} is no whole number"
    for name in COUNTS:
        if not _whole(record.get(name, 0)):
            return f"{name} is no count"
    for name in FIGURES:
        if record.get(name) is not None and not _number(record[name]):
            return f"{name} is no number"
    for name in LISTS:
        if not isinstance(record.get(name, []), list) or not all(map(_whole, record.get(name, []))):
            return f"{name} is no list of counts"
    bins = record.get("bins", [])
    if not isinstance(bins, list) or not all(
        isinstance(b, list) and len(b) == 3 and all(map(_number, b)) for b in bins
    ):
        return "bins are no triples of numbers"
    for name in ("settings", "protocol"):
        if not isinstance(record.get(name) or {}, dict):
            return f"{name} is no table of names and values"
    return ""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _number(value: Any) -> bool:
    return isinstance(value, NUMBER) and not isinstance(value, bool) and abs(value) < MOST and math.isfinite(value)
