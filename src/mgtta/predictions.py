"""Predictions of a stream as CSV or JSON lines, one row for each image, written whole or not at all."""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from mgtta.distributed import ALONE, Alone
from mgtta.errors import unknown
from mgtta.files import atomic

FORMATS = (".csv", ".jsonl")
COLUMNS = ("image", "prediction", "class", "confidence", "label")


class PredictionWriter:
    """Args:
    names: data set number -> name of the image.
    classes: names of the scored classes, where known.
    ranks: those who have a share of each batch; every rank's rows are written, in the order of the ranks.
    """

    def __init__(self, file: IO[str], suffix: str, names: Any, classes: Sequence[str] | None, ranks: Alone = ALONE):
        self.file, self.names, self.classes, self.ranks = file, names, classes, ranks
        self.table = csv.DictWriter(file, COLUMNS) if suffix == ".csv" else None
        if self.table:
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


@contextmanager
def prediction_file(
    path: str | os.PathLike, names: Any, classes: Sequence[str] | None = None, ranks: Alone = ALONE
) -> Iterator[PredictionWriter]:
    """A writer to a file that appears under its name when all is written; the first rank's holds all."""
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise unknown("format of predictions", suffix or str(path), FORMATS)
    place: Any = atomic(path) if ranks.first else nullcontext(os.devnull)
    with place as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        yield PredictionWriter(file, suffix, names, classes, ranks)
