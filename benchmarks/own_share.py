"""The tables "Images' own statistics in batches" of docs/research.md: shares of what BatchNorm layers normalise by.

    python benchmarks/own_share.py results/research/own_share docs/research.md

reads FOLDER/NETWORK/*.jsonl: validation streams, and test streams of the shares that were chosen on them. They are by

    python benchmarks/streams.py run --network NETWORK --methods mgtta_plus,noadapt --seeds 1 \
        --kinds labels,classes,mixed,continual,reset --out FOLDER/NETWORK ... \
        [--streams validation] [--set source_share=0.8,own_share=0.1]
"""

import statistics
from pathlib import Path
from typing import Any

from pages import between, fill, read_lines, table
from stream_images import NETWORKS

from mgtta.methods.mgtta_plus import RESNETS

KINDS = ("reset", "continual", "mixed", "labels", "classes")
SPLITS = ("validation", "test")
Shares = tuple[float, float]  # of the source and of an image; (1, 0): NoAdapt


def compared(folder: Path, split: str) -> str:
    """Return a row for each network and each pair of shares."""
    rows = []
    for network, about in NETWORKS.items():
        found: dict[Shares, dict[str, list[float]]] = {}
        for path in sorted((folder / network).glob("*.jsonl")):
            for record in read_lines(path):
                if record["split"] == split:
                    by_kind = found.setdefault(shares(record), {})
                    by_kind.setdefault(record["kind"], []).append(record["top1"])
        for (source, own), by_kind in sorted(found.items()):
            means = [f"{statistics.fmean(by_kind[kind]):.1f}" if kind in by_kind else "" for kind in KINDS]
            words = "NoAdapt" if source == 1 else f"mgtta+, {source:g}, {abs(round(1 - source - own, 2)):g}, {own:g}"
            rows.append([f"{about.words}, {words}", *means])
    return table(["top-1, %, by the shares of source, batch and image", *KINDS], rows, right=True)


def shares(record: dict[str, Any]) -> Shares:
    """Return the shares of the source and of each image by which a record's method normalises."""
    if record["method"] == "noadapt":
        return 1.0, 0.0
    settings = record["settings"]
    if record["method"] != "mgtta_plus" or not settings.keys() <= {"source_share", "own_share"}:
        raise ValueError(f"only NoAdapt and mgtta+ with other shares belong here, not {record}")
    return settings.get("source_share", RESNETS["source_share"]), settings.get("own_share", 0.0)


def with_tables(page: str, folder: Path) -> str:
    """Return the page with both tables between their marks."""
    for split in SPLITS:
        page = between(page, f"own_share_{split}", compared(folder, split))
    return page


if __name__ == "__main__":
    fill(__doc__, with_tables)
