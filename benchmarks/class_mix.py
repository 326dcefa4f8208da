"""The table "Classes in turn" of docs/research.md: mgtta+ with and without class_mix on validation streams.

    python benchmarks/class_mix.py results/research/class_mix docs/research.md

reads FOLDER/NETWORK/validation.jsonl and validation_without_class_mix.jsonl, which are made by

    python benchmarks/streams.py run --streams validation --network NETWORK --methods mgtta_plus,noadapt --rounds none \
        --kinds one,continual,mixed,labels,classes,reset,clean --out FOLDER/NETWORK ... [--without class_mix]
"""

import statistics
from pathlib import Path
from typing import Any

from pages import between, fill, read_lines, table
from stream_images import NETWORKS

KINDS = ("reset", "continual", "mixed", "one", "labels", "classes", "clean")


def top1(records: list[dict[str, Any]], method: str, kind: str) -> str:
    """Return the mean over domains and seeds."""
    return f"{statistics.fmean(r['top1'] for r in records if (r['method'], r['kind']) == (method, kind)):.1f}"


def compared(folder: Path) -> str:
    """Return a row for each network, without adaptation, without class_mix, and with it."""
    rows = []
    for network in NETWORKS:
        with_mix = read_lines(folder / network / "validation.jsonl")
        without = read_lines(folder / network / "validation_without_class_mix.jsonl")
        if not with_mix or not without:
            continue
        words = f"{NETWORKS[network].words}, {NETWORKS[network].validation}"
        for what, records, method in (
            ("NoAdapt", with_mix, "noadapt"),
            ("without", without, "mgtta_plus"),
            ("with class_mix", with_mix, "mgtta_plus"),
        ):
            rows.append([f"{words}: {what}", *(top1(records, method, kind) for kind in KINDS)])
    return table(["top-1, %", *KINDS], rows, right=True)


def with_tables(page: str, folder: Path) -> str:
    """Return the page with the table between its marks."""
    return between(page, "class_mix", compared(folder))


if __name__ == "__main__":
    fill(__doc__, with_tables)
