"""The record of one method on one domain, and the check of records that were read from a file."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

BINS = 15  # of confidence, for the calibration error
LARGEST_NUMBER = 2**53  # a larger one cannot be a count, and floats do not hold it exactly


def empty_bins() -> list[list[float]]:
    """Return bins of confidence in which nothing was counted yet."""
    return [[0.0] * 3 for _ in range(BINS)]


@dataclass
class Record:
    """What one method did on one domain. Figures are in percent of the labelled images; None without labels."""

    method: str
    domain: str
    images: int = 0
    labelled: int = 0
    batches: int = 0
    updates: int = 0  # at the domain's end
    skipped: int = 0  # at the domain's end
    seconds: float = 0.0  # in the method, predicting and adapting; on a GPU, only true with evaluate's `timing`
    predict_seconds: float = 0.0  # of these, until the network has given its first logits of each batch
    adapt_seconds: float = 0.0  # and the rest
    peak_memory: int | None = None  # most bytes that torch held on the GPU; at the domain's end
    process_peak_memory: int = 0  # most bytes of main memory that the whole process has held; at the domain's end
    remaining: float | None = None  # top1 of the images that came after the method's budget was spent
    top1: float | None = None
    top5: float | None = None
    ece: float | None = None
    sizes: list[int] = field(default_factory=list)  # of each batch
    curve: list[int] = field(default_factory=list)  # correct predictions in each batch
    bins: list[list[float]] = field(default_factory=empty_bins)  # see metrics.reliability
    events: list[dict[str, Any]] = field(default_factory=list)  # what a guard, recall or the normalisation did

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class StoredRecord(Record):
    """A record as `mgtta bench` stores it, with what a report reads of its cell."""

    experiment: str = ""
    seed: int = 0
    settings: dict[str, Any] | None = None
    protocol: dict[str, Any] | None = None

    @staticmethod
    def problem(values: dict[str, Any]) -> str:
        """Return what is wrong with the values of a stored record; empty if nothing is.

        Older records lack some fields, so that only a few are required. Further fields are not looked at.
        """
        for name, kind in FIELDS.items():
            if name not in values and name in REQUIRED:
                return f"{name} is missing"
            if name in values and not kind.fits(values[name]):
                return f"{name} is not {kind.words}"
        return ""


REQUIRED = ("experiment", "method", "domain", "seed", "images")


def checked(records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the records; a ValueError names the first invalid one."""
    for i, record in enumerate(records):
        problem = StoredRecord.problem(record)
        if problem:
            raise ValueError(
                f"record {i + 1} is damaged ({problem}): remove its line from records.jsonl, and run it again"
            )
    return records


def complete_records(content: bytes) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each complete cell in the content of a records.jsonl.

    A line that a kill has cut short is skipped. A cell is complete if all its lines are there.
    """
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in content.splitlines():
        try:
            record = json.loads(line)
            cell = record["cell"]
            part = int(record["part"])
            found[cell][part] = record
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    return {
        cell: [parts[i] for i in sorted(parts)]
        for cell, parts in found.items()
        if len(parts) == next(iter(parts.values())).get("parts")
    }


@dataclass(frozen=True)
class _Kind:
    """The values that a field's type allows, and their name."""

    fits: Callable[[Any], bool]
    words: str


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < LARGEST_NUMBER and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_bin(value: Any) -> bool:
    return _is_list(value, _is_number) and len(value) == 3


_NUMBER = _Kind(_is_number_or_none, "a number")
KINDS: dict[Any, _Kind] = {
    str: _Kind(lambda value: isinstance(value, str), "a text"),
    int: _Kind(_is_count, "a count"),
    float: _NUMBER,
    float | None: _NUMBER,
    int | None: _NUMBER,
    list[int]: _Kind(lambda value: _is_list(value, _is_count), "a list of counts"),
    list[list[float]]: _Kind(lambda value: _is_list(value, _is_bin), "a list of three numbers each"),
    list[dict[str, Any]]: _Kind(
        lambda value: _is_list(value, lambda each: isinstance(each, dict)), "a list of names and values"
    ),
    dict[str, Any] | None: _Kind(lambda value: value is None or isinstance(value, dict), "a table of names and values"),
}
FIELDS = {name: KINDS[kind] for name, kind in get_type_hints(StoredRecord).items()}
