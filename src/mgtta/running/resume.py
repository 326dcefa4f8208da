"""A run that a kill does not undo: all of a running adaptation in one file, its predictions in another that grows.

The state says how much of the predictions is its own, and with which hash: what was written after it is cut off, and
goes on from there bit for bit. Both are on the disk before the state names them.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mgtta._lib.files import check_kind, read_tree, write_tree
from mgtta.adaptation.method import Method
from mgtta.evaluation.record import Record
from mgtta.running.predictions import GrowingFile

KIND = "mgtta state"
VERSION = 1


def save_state(method: Method, path: str | os.PathLike, run: Mapping[str, Any] | None = None) -> None:
    """Write all that adaptation has changed, and torch's random state, to one safetensors file with a hash.

    Args:
        run: plain values of your own, such as where the stream stands; load_state gives them back.
    """
    tree = {"method": method.state_dict(), "random": torch.get_rng_state(), "run": dict(run or {})}
    write_tree(path, tree, {"kind": KIND, "version": str(VERSION)})


def load_state(method: Method, path: str | os.PathLike) -> dict[str, Any]:
    """Go on exactly where save_state was called; gives its `run`. A file that does not fit changes nothing."""
    tree, metadata = read_tree(path)
    check_kind(metadata, KIND, VERSION, path, "mgtta.save_state writes one")
    random = tree.get("random") if isinstance(tree, dict) and tree.keys() == {"method", "random", "run"} else None
    now = torch.get_rng_state()
    if not isinstance(random, torch.Tensor) or (random.dtype, random.shape) != (now.dtype, now.shape):
        raise ValueError(f"{path}: a damaged state, or one of another torch; save it again")
    method.load_state_dict(tree["method"])
    torch.set_rng_state(random)
    return tree["run"]


@dataclass
class Totals:
    """What all parts of a run did together."""

    images: int = 0
    labelled: int = 0
    right: int = 0
    updates: int = 0
    skipped: int = 0

    def plus(self, record: Record) -> "Totals":
        return Totals(
            self.images + record.images,
            self.labelled + record.labelled,
            self.right + sum(record.curve),
            self.updates + record.updates,
            self.skipped + record.skipped,
        )

    def __str__(self) -> str:
        accuracy = f", {100 * self.right / self.labelled:.1f} % right" if self.labelled else ""
        return f"{self.images} images{accuracy}; {self.updates} updates, {self.skipped} skipped"


class Run:
    """Predictions of a data set in order, kept from batch to batch in `path`, and gone on from where that exists.

    Ranks that share every batch are alike but for their images, so the first one's state is that of all.

    Args:
        images: the data set.
        protocol: what must be the same when the run goes on; plain values.
        every: batches between two saves.
    """

    def __init__(
        self,
        path: Path,
        method: Method,
        out: Path,
        images: Any,
        protocol: Mapping[str, Any],
        batch_size: int,
        every: int,
    ):
        self.path, self.method, self.images, self.ranks = path, method, images, method.ranks
        self.protocol, self.batch_size, self.every = dict(protocol), batch_size, every
        self.position, self.finished, self.before, offset, digest = 0, False, Totals(), 0, ""
        if path.exists():
            run = load_state(method, path)
            if run.get("protocol") != self.protocol:
                raise ValueError(
                    f"{path} belongs to a run with other settings or images; name another file, or delete it"
                )
            self.position, self.finished, self.before = run["position"], run["finished"], Totals(**run["totals"])
            offset, digest = run["offset"], run["digest"]
            for i, reason in run["unreadable"]:
                images.skip(i, reason)
        self.start = method.updates, method.skipped
        self.record = Record(method.name, "")  # of the batches since, which `evaluate` goes on with
        self.file: Any = (
            GrowingFile(out, offset, digest, finished=self.finished) if self.ranks.first else open(os.devnull, "w")  # noqa: SIM115
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def totals(self) -> Totals:
        """Up to now; the method says how many updates it made, since a record does so at a domain's end alone."""
        updates, skipped = self.method.updates - self.start[0], self.method.skipped - self.start[1]
        return self.before.plus(replace(self.record, updates=updates, skipped=skipped))

    def note(self, record: Record, batch: Any) -> None:
        """Called after each batch and its predictions; saves now and then."""
        self.record = record
        if len(batch.index):  # the data set's order is the stream's; a rank's share of a batch may be empty
            self.position = int(batch.index[-1]) // self.batch_size + 1
        if record.batches % self.every == 0:
            self._save()

    def finish(self) -> None:
        """The predictions under their name; nothing is left to go on from."""
        self.finished = True
        self._save()
        if self.ranks.first:
            self.file.finish()
            self.path.unlink()

    def _save(self) -> None:
        self.position = int(self.ranks.most(self.position))
        unreadable = self.ranks.gather([[i, reason] for i, reason in self.images._skipped.items()])
        if not self.ranks.first:
            return
        self.file.sync()
        run = {
            "protocol": self.protocol,
            "position": self.position,
            "finished": self.finished,
            "totals": asdict(self.totals),
            "offset": self.file.offset,
            "digest": self.file.digest,
            "unreadable": sorted(set(map(tuple, unreadable))),
        }
        save_state(self.method, self.path, run)
