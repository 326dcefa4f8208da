"""Predictions of a stream as CSV or JSON lines, one row for each image. A file is written completely or not at all."""

import csv
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from mgtta._lib.errors import unknown
from mgtta._lib.files import atomic
from mgtta._lib.ranks import ALONE, Alone

FORMATS = (".csv", ".jsonl")
COLUMNS = ("image", "prediction", "class", "confidence", "label")
SOURCE_COLUMNS = ("source_prediction", "source_class", "source_confidence")
DIGITS = 6  # of a confidence, after the decimal point


class PredictionWriter:
    """Write one row for each image of a batch.

    Args:
        file: an open text file.
        suffix: one of FORMATS.
        names: number of an image in its data set -> its name.
        classes: names of the scored classes, where they are known.
        ranks: the ranks that share each batch. The rows of all ranks are written, in the order of the ranks.
        source: returns the logits of another model, such as the source, whose predictions are written beside.
    """

    def __init__(
        self,
        file: "IO[str] | GrowingFile",
        suffix: str,
        names: Callable[[int], str],
        classes: Sequence[str] | None,
        ranks: Alone = ALONE,
        source: Callable[[Tensor], Tensor] | None = None,
    ):
        self.file = file
        self.names = names
        self.classes = classes
        self.ranks = ranks
        self.source = source
        columns = COLUMNS if source is None else (*COLUMNS, *SOURCE_COLUMNS)
        self.table = csv.DictWriter(file, columns) if suffix == ".csv" else None
        resumed = isinstance(file, GrowingFile) and file.offset > 0
        if self.table and not resumed:
            self.table.writeheader()

    def write(self, batch: Any, logits: Tensor) -> None:
        """Write the rows of a batch, of all ranks."""
        for row in self.ranks.gather(self.rows(batch, logits)):
            if self.table:
                self.table.writerow(row)
            else:
                self.file.write(json.dumps(row) + "\n")

    def rows(self, batch: Any, logits: Tensor) -> list[dict[str, Any]]:
        """Return this rank's rows of a batch; a confidence that is NaN, which JSON does not have, is None."""
        labels = [None] * len(logits) if batch.y is None else batch.y.tolist()
        rows = []
        for index, found, label in zip(batch.index.tolist(), self._predictions(logits), labels, strict=True):
            rows.append({"image": self.names(index), **found, "label": label})
        if self.source is not None:
            for row, found in zip(rows, self._predictions(self.source(batch.x)), strict=True):
                row |= {f"source_{name}": value for name, value in found.items()}
        return rows

    def _predictions(self, logits: Tensor) -> list[dict[str, Any]]:
        """Return number, name and confidence of the predicted class, for each image."""
        confidences, predictions = logits.softmax(1).max(1)
        found = []
        for prediction, confidence in zip(predictions.tolist(), confidences.tolist(), strict=True):
            one = {
                "prediction": prediction,
                "class": self.classes[prediction] if self.classes else None,
                "confidence": None if math.isnan(confidence) else round(confidence, DIGITS),
            }
            found.append(one)
        return found


class GrowingFile:
    """A text file that survives a kill up to a known offset. It is NAME.part until `finish` renames it to NAME.

    Args:
        offset, digest: length and hash of what the checkpoint says is written. Anything after it is cut off.
        finished: True if the checkpoint was saved just before the file was renamed.
    """

    def __init__(self, path: str | os.PathLike, offset: int = 0, digest: str = "", finished: bool = False):
        self.path = Path(path)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.hash = hashlib.sha256()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if finished and not self.part.exists() and self.path.exists():
            os.replace(self.path, self.part)
        if offset and not self.part.exists():
            raise FileNotFoundError(
                f"{self.part}, which holds the predictions so far, is missing: delete the checkpoint and start again"
            )
        self.file = open(self.part, "r+b" if offset else "w+b")  # noqa: SIM115
        self.hash.update(self.file.read(offset))
        if offset and (self.digest != digest or self.file.tell() != offset):
            self.close()
            raise ValueError(f"{self.part} is not what the run wrote: delete it and the checkpoint, and start again")
        self.file.truncate()

    @property
    def offset(self) -> int:
        return self.file.tell()

    @property
    def digest(self) -> str:
        return self.hash.hexdigest()

    def write(self, text: str) -> int:
        data = text.encode()
        self.hash.update(data)
        return self.file.write(data)

    def sync(self) -> None:
        """Return when everything written so far is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def finish(self) -> None:
        """Close the file and give it its final name."""
        self.sync()
        self.close()
        os.replace(self.part, self.path)


def format_of(path: str | os.PathLike) -> str:
    """Return the suffix of a file of predictions; raise a ValueError if it is not one of FORMATS."""
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise unknown("format of predictions", suffix or str(path), FORMATS)
    return suffix


@contextmanager
def prediction_file(
    path: str | os.PathLike,
    names: Callable[[int], str],
    classes: Sequence[str] | None = None,
    ranks: Alone = ALONE,
    source: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[PredictionWriter]:
    """Give a writer to a file that gets its name when everything is written. The first rank's file holds all rows."""
    suffix = format_of(path)
    place: Any = atomic(path) if ranks.first else nullcontext(os.devnull)
    with place as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        yield PredictionWriter(file, suffix, names, classes, ranks, source)
