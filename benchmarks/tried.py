"""The tables of docs/research.md that are made from lines of benchmarks/try_settings.py and benchmarks/turns.py.

    python benchmarks/tried.py results/research docs/research.md

reads betas/trials.jsonl (the running means of gradients), turns/trials.jsonl (how images are normalised where classes
come in turn), turns/changes.jsonl (what tells that) and alike/trials.jsonl (images that look alike) in the folder.
"""

import statistics
from pathlib import Path
from typing import Any

from pages import between, fill, read_lines, table
from stream_images import NETWORKS

from mgtta.methods.mgtta_plus import RESNETS
from mgtta.report.summary import spelled

BETA_KINDS = ("reset", "continual", "mixed", "labels", "classes", "one", "gradual", "clean")
TURN_KINDS = ("reset", "continual", "mixed", "labels", "classes")
DEFAULT_BETAS = {"mgtta_plus": (0.9, 0.99), "plus_adam": (0.9, 0.999)}
Record = dict[str, Any]
Cells = dict[str, dict[str, list[float]]]  # row -> kind -> top-1 of each order


def betas(records: list[Record]) -> str:
    """Return top-1 by the running means of gradients, on validation and on test streams."""
    found: Cells = {}
    for record in records:
        pair = record["settings"].get("betas") or DEFAULT_BETAS[record["method"]]
        row = f"{record['split']}, {spelled(record['method'])}, {pair[0]:g} and {pair[1]:g}"
        found.setdefault(row, {}).setdefault(record["kind"], []).append(record["top1"])
    return _table(found, BETA_KINDS)


def turns(records: list[Record]) -> str:
    """Return top-1 by how images are normalised."""
    found: Cells = {}
    for record in records:
        if record["split"] == "validation" and not record["settings"]:
            row = f"{NETWORKS[record['network']].words}, {record.get('way', 'by the present rule')}"
            found.setdefault(row, {}).setdefault(record["kind"], []).append(record["top1"])
    return _table(dict(sorted(found.items())), TURN_KINDS)


def changes(records: list[Record]) -> str:
    """Return how the mean prediction changes from batch to batch."""
    rows = []
    for record in records:
        title = f"{NETWORKS[record['network']].words}, {record['way']}, {record['kind']}"
        rows.append([title, *(f"{record[name]:.1f}" for name in ("lowest", "middle", "highest", "top1"))])
    return table(["network, normalised, stream", "lowest F", "middle F", "highest F", "top-1, %"], rows, right=True)


def alike(records: list[Record]) -> str:
    """Return top-1 by the shares of statistics, and by whether images that look alike count more."""
    found: Cells = {}
    for record in records:
        row = f"{record['split']}, {NETWORKS[record['network']].words}, "
        if record["method"] == "noadapt":
            row += spelled(record["method"])
        else:
            own = {"source_share": RESNETS["source_share"], "own_share": 0.0, "alike": False, **record["settings"]}
            row += f"{own['source_share']:g}, {own['own_share']:g}{', alike' if own['alike'] else ''}"
        found.setdefault(row, {}).setdefault(record["kind"], []).append(record["top1"])
    return _table(dict(sorted(found.items(), reverse=True)), TURN_KINDS)


def _table(found: Cells, kinds: tuple[str, ...]) -> str:
    rows = []
    for title, by_kind in found.items():
        cells = [f"{statistics.fmean(by_kind[kind]):.1f}" if kind in by_kind else "" for kind in kinds]
        rows.append([title, *cells])
    return table(["top-1, %", *kinds], rows, right=True)


def with_tables(page: str, folder: Path) -> str:
    """Return the page with all tables between their marks."""
    page = between(page, "betas", betas(read_lines(folder / "betas" / "trials.jsonl")))
    page = between(page, "turns", turns(read_lines(folder / "turns" / "trials.jsonl")))
    page = between(page, "changes", changes(read_lines(folder / "turns" / "changes.jsonl")))
    return between(page, "alike", alike(read_lines(folder / "alike" / "trials.jsonl")))


if __name__ == "__main__":
    fill(__doc__, with_tables)
