"""Predictions of a stream as CSV or JSON lines, one row for each image, written whole or not at all."""

import csv
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from mgtta._lib.errors import unknown
from mgtta._lib.files import atomic
from mgtta._lib.ranks import ALONE, Alone

FORMATS = (".csv", ".jsonl")
COLUMNS = ("image", "prediction", "class", "confidence", "label")


class PredictionWriter:
    """Args:
    names: data set number -> name of the image.
    classes: names of the scored classes, where known.
    ranks: those who have a share of each batch; every rank's rows are written, in the order of the ranks.
    """

    def __init__(
        self,
        file: "IO[str] | GrowingFile",
        suffix: str,
        names: Any,
        classes: Sequence[str] | None,
        ranks: Alone = ALONE,
    ):
        self.file, self.names, self.classes, self.ranks = file, names, classes, ranks
        self.table = csv.DictWriter(file, COLUMNS) if suffix == ".csv" else None
        if self.table and not (isinstance(file, GrowingFile) and file.offset):
            self.table.writeheader()

    def write(self, batch: Any, logits: Tensor) -> None:
        for row in self.ranks.gather(self.rows(batch, logits)):
            if self.table:
                self.table.writerow(row)
            else:
                self.file.write(json.dumps(row) + "\n")

    def rows(self, batch: Any, logits: Tensor) -> list[dict[str, Any]]:
        confidence, prediction = logits.softmax(1).max(1)
        labels = [None] * len(logits) if batch.y is None else batch.y.tolist()
        rows = zip(batch.index.tolist(), prediction.tolist(), confidence.tolist(), labels, strict=True)
        return [
            {
                "image": self.names(index),
                "prediction": predicted,
                "class": self.classes[predicted] if self.classes else None,
                "confidence": round(sure, 6) if sure == sure else None,  # NaN is no JSON
                "label": label,
            }
            for index, predicted, sure, label in rows
        ]


class GrowingFile:
    """Text that is there, up to some place, whatever kills the program: NAME.part until `finish` names it NAME.

    Args:
        offset, digest: of what is known to be written already; anything after it is cut off.
        finished: whether it was about to be renamed, or is already.
    """

    def __init__(self, path: str | os.PathLike, offset: int = 0, digest: str = "", finished: bool = False):
        self.path = Path(path)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.hash = hashlib.sha256()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if finished and not self.part.exists() and self.path.exists():
            os.replace(self.path, self.part)
        if offset and not self.part.exists():
            raise FileNotFoundError(f"{self.part}, the predictions so far, is gone: delete the run, and begin anew")
        self.file = open(self.part, "r+b" if offset else "w+b")  # noqa: SIM115
        self.hash.update(self.file.read(offset))
        if offset and (self.digest != digest or self.file.tell() != offset):
            self.close()
            raise ValueError(f"{self.part} is not what the run wrote: delete the run and it, and begin anew")
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
        """Return when all that was written is on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def finish(self) -> None:
        self.sync()
        self.close()
        os.replace(self.part, self.path)


def format_of(path: str | os.PathLike) -> str:
    """The suffix of a file of predictions; refused where there is no such format."""
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise unknown("format of predictions", suffix or str(path), FORMATS)
    return suffix


@contextmanager
def prediction_file(
    path: str | os.PathLike, names: Any, classes: Sequence[str] | None = None, ranks: Alone = ALONE
) -> Iterator[PredictionWriter]:
    """A writer to a file that appears under its name when all is written; the first rank's holds all."""
    suffix = format_of(path)
    place: Any = atomic(path) if ranks.first else nullcontext(os.devnull)
    with place as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        yield PredictionWriter(file, suffix, names, classes, ranks)
