"""Tables of trials on validation streams, for docs/research.md.

    python benchmarks/trials.py results/research/batchnorm docs/research.md

writes four tables: settings of mgtta+ on networks with BatchNorm, by what single images are normalised there and how
they are learned from, and smaller steps while a domain stays (`calm`), which were taken back. Each line of the folder's
trials.jsonl is the top-1 of a method at some settings on one kind of stream, each of single.jsonl that of single
images, with shares of statistics, and each of learned.jsonl that of single images with learning.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pages import between, fill, read_lines, table
from stream_images import NETWORKS

from mgtta.report.summary import spelled

BATCHNORM = ("resnet50", "cifar10")
BATCHNORM_KINDS = ("reset", "continual", "mixed", "labels", "classes", "one")
CALM_KINDS = ("reset", "continual", "rounds", "mixed", "long", "labels", "classes", "one", "gradual", "clean")
LEAST = 0.1  # of the steps, however long a domain stays; others made no difference
LAST = ("rounds", "long")  # kinds of which the last round counts
WORDS = {"lr": "lr {:g}", "pull": "pull {:g}", "source_share": "share {:g}", "calm": "calm {:g}"}
Record = dict[str, Any]


def batchnorm(records: list[Record]) -> str:
    """Return the rates and shares that were tried on networks with BatchNorm, without other changes."""
    own = {"lr", "source_share", "calm", "least"}
    chosen = [r for r in records if r["network"] in BATCHNORM and own >= set(r["settings"]) and r["kind"] != "long"]
    return shown((r for r in chosen if _plain_or_second(r)), BATCHNORM_KINDS)


def calm(records: list[Record]) -> str:
    """Return the trials of smaller steps on DeiT-Tiny, and on ResNet-50 the mixed stream eight times over."""
    chosen = [r for r in records if r["method"] in ("mgtta_plus", "plus_adam") and "class_mix" not in r["settings"]]
    chosen = [r for r in chosen if r["settings"].get("least", LEAST) == LEAST]
    wanted = [r for r in chosen if r["network"] == "deit_tiny" or (r["network"], r["kind"]) == ("resnet50", "long")]
    return shown(wanted, CALM_KINDS)


def _plain_or_second(record: Record) -> bool:
    """Return whether a record has no smaller steps, or is of the second visit, where all but one have them."""
    return "calm" not in record["settings"] or record["visit"] == 2


def shown(records: Iterable[Record], kinds: tuple[str, ...]) -> str:
    """Return a row for each network, method and settings."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        words = [text.format(record["settings"][key]) for key, text in WORDS.items() if key in record["settings"]]
        title = ", ".join([NETWORKS[record["network"]].words, spelled(record["method"]), *words])
        figure = record["last"] if record["kind"] in LAST else record["top1"]
        found.setdefault(title, {}).setdefault(record["kind"], []).append(figure)
    rows = []
    for title, by_kind in found.items():
        cells = [f"{statistics.fmean(by_kind[kind]):.1f}" if kind in by_kind else "" for kind in kinds]
        rows.append([title, *cells])
    return table(["top-1, %", *kinds], rows, right=True)


def single(records: list[Record]) -> str:
    """Return top-1 of single images by the shares of the stream's statistics and of an image's own."""
    rows = [
        [NETWORKS[r["network"]].words, str(r["images"]), f"{r['stream']:g}", f"{r['own']:g}", f"{r['top1']:.1f}"]
        for r in records
    ]
    return table(["network", "images of each corruption", "stream's share", "own share", "top-1, %"], rows, right=True)


def learned(records: list[Record]) -> str:
    """Return top-1 of single images by how they are learned from."""
    rows = [
        [
            f"{NETWORKS[r['network']].words}, order {r['seed']}",
            str(r["images"]),
            spelled(r["method"]),
            r["learning"],
            f"{r['stream']:g}",
            f"{r['own']:g}",
            f"{r['lr']:g}",
            f"{r['top1']:.1f}",
        ]
        for r in records
    ]
    head = ["network", "images of each corruption", "method", "learning", "stream", "own share", "rate", "top-1, %"]
    return table(head, rows, right=True)


def with_tables(page: str, folder: Path) -> str:
    """Return the page with all tables between their marks."""
    trials = read_lines(folder / "trials.jsonl")
    page = between(page, "batchnorm", batchnorm(trials))
    page = between(page, "single", single(read_lines(folder / "single.jsonl")))
    page = between(page, "learned", learned(read_lines(folder / "learned.jsonl")))
    return between(page, "calm", calm(trials))


if __name__ == "__main__":
    fill(__doc__, with_tables)
