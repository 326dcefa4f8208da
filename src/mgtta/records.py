"""What a record on the disk must look like: one that something else wrote is refused, with a word on what is wrong."""

import math
from collections.abc import Sequence
from typing import Any

NUMBER = (int, float)
TEXTS = ("experiment", "method", "domain")
COUNTS = ("labelled", "batches", "updates", "skipped", "process_peak_memory")
FIGURES = ("top1", "top5", "ece", "remaining", "seconds", "predict_seconds", "adapt_seconds", "peak_memory")
LISTS = ("sizes", "curve")
MOST = 2**53  # whole numbers beyond it are no counts of anything


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
