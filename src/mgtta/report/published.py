"""The paper's own figures, which ship as data, beside what was measured; and how the two differ in footing."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mgtta.data.corruptions import CORRUPTIONS
from mgtta.report.summary import MEAN, Figure, Record, Section, images_of, label, seconds_for, unique
from mgtta.report.words import chosen, many, tried

MODEL = "vit_base_patch16_224"  # how the name of the paper's model begins


@cache
def published() -> dict[str, Any]:
    """Return the paper's tables by experiment, method and column, each with its footing."""
    data = json.loads(resources.files("mgtta.report").joinpath("published.json").read_text(encoding="utf-8"))
    for table in data["tables"]:
        table["footing"] = {**data["footing"], **table["footing"]}
    return data


@dataclass(frozen=True)
class Beside:
    """A table of the paper with what was measured: row -> column -> figure."""

    table: str
    footing: dict[str, Any]
    columns: list[str]
    measured: dict[str, dict[str, Figure]]
    printed: dict[str, dict[str, float]]
    differs: list[str]
    notes: list[str]  # what is known of the published rows


def beside(section: Section) -> list[Beside]:
    """Return the paper's tables of the section's experiment, for the methods that were measured on a near footing."""
    tables = [table for table in published()["tables"] if table["experiment"] == section.experiment]
    close = [table for table in tables if _same_data(section, table) and near(section.records, table["footing"])]
    found = [_beside(section, table) for table in close]
    return [table for table in found if table is not None]


def near(records: Sequence[Record], paper: dict[str, Any]) -> bool:
    """Return whether the records are of the paper's model, batch size and severity, and not of rendered characters."""
    protocol = records[0].get("protocol") or {}
    if not str(protocol.get("model")).startswith(MODEL) or protocol.get("data") == "rendered characters":
        return False
    for key in ("batch_size", "severity"):
        values = {record.get(key) for record in records if record.get(key)}  # severity 0: images as they are
        if paper.get(key) is not None and values - {paper[key]}:
            return False
    return True


def _beside(section: Section, table: dict[str, Any]) -> Beside | None:
    rows = {row: table["rows"][_base(row)] for row in section.rows if _base(row) in table["rows"]}
    if table["columns"] not in ("figure", section.axis):
        return None
    measured = _costs(section) if table["columns"] == "figure" else section.figures()
    all_15 = set(section.domains) == set(CORRUPTIONS)
    if table["experiment"] == "ablation" and all_15:
        measured = {row: {**cells, "imagenet-c": cells[MEAN]} for row, cells in measured.items() if MEAN in cells}
    own = unique(column for row in rows.values() for column in row)
    shared = [c for c in own if any(c in measured.get(row, {}) for row in rows)]
    if table["columns"] == "domain" and set(own) - {MEAN} - set(section.domains):
        shared = [c for c in shared if c != MEAN]  # a mean over other domains
    if not shared:
        return None
    differs = footing_differs(section.records, table["footing"])
    if table["columns"] != "domain" and table["footing"]["data"] == "ImageNet-C" and not all_15:
        differs.insert(0, f"the means are over {many(len(section.domains), 'domain')}, the paper's over 15")
    if "seconds" in shared:
        sizes = ", ".join(f"{n:,}" for n in unique(record["images"] for record in section.records))
        differs.insert(0, f"the seconds were measured for {sizes} images, and scaled to the paper's 50,000")
    mine = {row: cells for row, cells in measured.items() if row in rows}
    return Beside(table["table"], table["footing"], shared, mine, rows, differs, _notes(table["experiment"], rows))


def _base(row: str) -> str:
    """Return the row's name in the paper, which has one set of settings: deyo for deyo@mgtta."""
    return re.sub(r"@\w+", "", row)


def _notes(experiment: str, rows: Iterable[str]) -> list[str]:
    """Return what is known of the published rows, in words."""
    bases = {_base(row).partition(",")[0] for row in rows}
    return [
        f"{note['row']}: {note['note']}"
        for note in published()["row_notes"]
        if note["row"] in bases and experiment in note.get("experiments", [experiment])
    ]


def _same_data(section: Section, table: dict[str, Any]) -> bool:
    """Return whether a table that the paper gives for several data sets is the one of the section's kind."""
    return (table["footing"]["data"] == "ImageNet-R") == (section.domains == ["imagenet-r"])


def _costs(section: Section) -> dict[str, dict[str, Figure]]:
    """Return each row's accuracy, seconds for 50,000 images, and megabytes."""
    costs: dict[str, dict[str, Figure]] = {}
    accuracy = section.figures("top1")
    for row in section.rows:
        records = section.of(row)
        seconds = [seconds_for(50_000, [r]) for r in records]
        cells = {"seconds": Figure.of([s for s in seconds if s is not None])}
        memory = [r["peak_memory"] / 1e6 for r in records if r.get("peak_memory")]
        if memory:
            cells["megabytes"] = Figure.of(memory)
        top1 = accuracy[row].get(MEAN if len(section.domains) > 1 else section.domains[0])
        if top1:
            cells["top1"] = top1
        costs[row] = cells
    return costs


def footing_differs(records: Sequence[Record], paper: dict[str, Any]) -> list[str]:
    """Return in words all that differs from a published table, or cannot be checked against it."""
    found = []
    protocol = records[0].get("protocol") or {}
    if not str(protocol.get("model")).startswith(MODEL):
        found.append(f"the model is {protocol.get('model')}, the paper's a ViT-Base trained on ImageNet-1k")
    data = ", ".join(unique(map(images_of, records)))
    if not data.lower().replace("_", "-").rstrip("/").endswith("imagenet-c") or paper["data"] != "ImageNet-C":
        found.append(f"the data are {data}, the paper's {paper['data']}")
    for key, name in (("images", "images per domain"), ("batch_size", "batch size"), ("severity", "severity")):
        values = unique(record.get(key) for record in records)
        if paper.get(key) is not None and values != [paper[key]]:
            theirs = f"{paper[key]:,}" if isinstance(paper[key], int) else paper[key]
            found.append(f"{name}: {', '.join(label(v, 'unknown') for v in values)}; the paper's: {theirs}")
    if protocol.get("mean") is not None:
        mean, std = (", ".join(f"{x:g}" for x in protocol.get(key) or []) for key in ("mean", "std"))
        found.append(f"normalisation: mean {mean}, std {std}; the paper does not state its own")
    for key, usual, theirs in (
        ("corruptions", "as published", "the paper's: as published"),
        ("precision", "fp32", "the paper does not state its own"),
    ):
        values = unique(label((record.get("protocol") or {}).get(key), usual) for record in records)
        if values != [usual]:
            found.append(f"{key}: {', '.join(values)}; {theirs}")
    found.append(
        f"{many(len({record['seed'] for record in records}), 'seed')}; the paper does not state its own number"
    )
    swept = chosen(records)
    if swept:
        names = ", ".join(unique(str(record["method"]) for record in swept))
        found.append(f"learning rates of {names}: each chosen from {tried(swept)} on the validation corruptions")
    if paper.get("device"):
        found.append(f"the device is {protocol.get('device')}, the paper's {paper['device']}")
    return found
