"""A run that survives a kill: a checkpoint file holds the whole adaptation, a second file the predictions so far.

The checkpoint holds the length and the hash of the predictions that belong to it. On resume, anything written after
that length is cut off, and the run continues bit for bit. Predictions are on the disk before a checkpoint names them.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mgtta._lib.files import check_kind, read_tree, write_tree
from mgtta.adaptation.wrapper import Adapting
from mgtta.evaluation.record import Record
from mgtta.running.predictions import GrowingFile

KIND = "mgtta state"
VERSION = 1


def save_state(method: Adapting, path: str | os.PathLike, run: Mapping[str, Any] | None = None) -> None:
    """Write everything that adaptation has changed, and torch's random state, to one safetensors file with a hash.

    Args:
        run: plain values of your own, such as the position in the stream; load_state returns them.
    """
    tree = {"method": method.state_dict(), "random": torch.get_rng_state(), "run": dict(run or {})}
    write_tree(path, tree, {"kind": KIND, "version": str(VERSION)})


def load_state(method: Adapting, path: str | os.PathLike) -> dict[str, Any]:
    """Continue exactly where save_state was called, and return its `run`. An invalid file changes nothing."""
    tree, metadata = read_tree(path)
    check_kind(metadata, KIND, VERSION, path, "mgtta.save_state writes one")
    complete = isinstance(tree, dict) and tree.keys() == {"method", "random", "run"}
    random = tree["random"] if complete else None
    now = torch.get_rng_state()
    if not isinstance(random, torch.Tensor) or (random.dtype, random.shape) != (now.dtype, now.shape):
        raise ValueError(f"{path}: a damaged state, or one of another version of torch; save it again")
    method.load_state_dict(tree["method"])
    torch.set_rng_state(random)
    return tree["run"]


@dataclass
class Totals:
    """What a run did in all its parts together.

    Attributes:
        images: images predicted.
        labelled: images that have a label.
        right: labelled images that were predicted correctly.
        updates: updates of the model.
        skipped: batches that were predicted but not learned from.
    """

    images: int = 0
    labelled: int = 0
    right: int = 0
    updates: int = 0
    skipped: int = 0

    def plus(self, record: Record) -> "Totals":
        """Return these totals and those of a record together."""
        return Totals(
            self.images + record.images,
            self.labelled + record.labelled,
            self.right + sum(record.curve),
            self.updates + record.updates,
            self.skipped + record.skipped,
        )

    def __str__(self) -> str:
        accuracy = f", {100 * self.right / self.labelled:.1f} % right" if self.labelled else ""
        updates = "1 update" if self.updates == 1 else f"{self.updates} updates"
        return f"{self.images} images{accuracy}; {updates}, {self.skipped} skipped"


class Run:
    """Predictions of a data set in order, with a checkpoint in `path`. If `path` exists, the run resumes from it.

    Ranks that share every batch hold the same state, so the first rank saves for all.

    Args:
        images: the data set.
        protocol: plain values that must be the same when the run resumes.
        every: batches between two checkpoints.
    """

    def __init__(
        self,
        path: Path,
        method: Adapting,
        out: Path,
        images: Any,
        protocol: Mapping[str, Any],
        batch_size: int,
        every: int,
    ):
        self.path = path
        self.method = method
        self.images = images
        self.ranks = method.ranks
        self.protocol = dict(protocol)
        self.batch_size = batch_size
        self.every = every
        self.position = 0  # batches that are done
        self.finished = False
        self.before = Totals()  # of the parts of the run before this one
        offset, digest = self._resume() if path.exists() else (0, "")
        self.updates_before = method.updates
        self.skipped_before = method.skipped
        self.record = Record(method.name, "")  # of the batches since then; `evaluate` fills it
        self.file: Any
        if self.ranks.first:
            self.file = GrowingFile(out, offset, digest, finished=self.finished)
        else:
            self.file = open(os.devnull, "w")  # noqa: SIM115

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def totals(self) -> Totals:
        """The totals up to now. The method counts updates at any time, a record only at the end of a domain."""
        updates = self.method.updates - self.updates_before
        skipped = self.method.skipped - self.skipped_before
        return self.before.plus(replace(self.record, updates=updates, skipped=skipped))

    def note(self, record: Record, batch: Any) -> None:
        """Count a batch whose predictions are written, and save a checkpoint every so many batches."""
        self.record = record
        if len(batch.index):  # a rank's share of a batch may be empty
            self.position = int(batch.index[-1]) // self.batch_size + 1  # the data set is read in its own order
        if record.batches % self.every == 0:
            self._save()

    def finish(self) -> None:
        """Give the predictions their final name and delete the checkpoint."""
        self.finished = True
        self._save()
        if self.ranks.first:
            self.file.finish()
            self.path.unlink()

    def _resume(self) -> tuple[int, str]:
        """Load the checkpoint; return the length and the hash of the predictions that belong to it."""
        run = load_state(self.method, self.path)
        if run.get("protocol") != self.protocol:
            raise ValueError(
                f"{self.path} belongs to a run with other settings or images; name another file, or delete it"
            )
        self.position = run["position"]
        self.finished = run["finished"]
        self.before = Totals(**run["totals"])
        for i, reason in run["unreadable"]:
            self.images.skip(i, reason)
        return run["offset"], run["digest"]

    def _save(self) -> None:
        self.position = int(self.ranks.most(self.position))
        mine = getattr(self.images, "_skipped", {})  # number of an unreadable image -> reason
        unreadable = self.ranks.gather(list(mine.items()))
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
            "unreadable": sorted(set(unreadable)),
        }
        save_state(self.method, self.path, run)
