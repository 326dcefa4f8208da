"""Sections as one self-contained HTML page: no network, opens from disk.

All text from records reaches the page through Jinja's autoescape or, within charts and scripts, through
`charts._plain` and `tojson`; the page's policy lets no script run but its own two, which it names by their hashes, and
loads nothing.
"""

import base64
import hashlib
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from mgtta import __version__
from mgtta.report.charts import charts, colours_of, gigabytes, milliseconds
from mgtta.report.examples import Example
from mgtta.report.paired import differences
from mgtta.report.published import beside, published
from mgtta.report.summary import COSTS, MEAN, Section, label, unique
from mgtta.report.words import bold, decimals, footing_words, headline, interval, notes, printed, short, signed


def page(found: Sequence[Section], examples: Sequence[Example] = (), title: str = "Test-time adaptation") -> str:
    """The page of the sections."""
    folder = resources.files("mgtta.report")
    script, style = (folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    library = get_plotlyjs()
    colours = colours_of(found)
    drawn: dict[str, Any] = {}
    shown = []
    for i, section in enumerate(found):
        mine = {f"s{i}-{name}": chart for name, chart in charts(section, colours).items()}
        drawn.update(mine)
        shown.append(_shown(section, f"s{i}", list(mine)))
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        short=short, signed=signed, interval=interval, label=label, printed=printed, decimals=decimals
    )
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title, policy=policy, library=library, script=script, style=style, charts=drawn, sections=shown,
        examples=list(examples), paper=published()["paper"], paper_notes=published()["notes"],
        version=__version__, made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )  # fmt: skip


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _shown(section: Section, name: str, charts: list[str]) -> dict[str, Any]:
    figures = section.figures()
    marked = section.best(figures)
    columns = sorted(section.headings(figures), key=lambda column: column != MEAN)  # the mean first: it is in sight
    return {
        "id": name,
        "title": section.title,
        "footing": footing_words(section),
        "headline": headline(section),
        "notes": notes(section),
        "bold": bold(section),
        "figure": section.figure,
        "columns": columns,
        "axis": section.axis_name,
        "rows": [
            {
                "name": row,
                "cells": [{"figure": figures[row].get(c), "best": (row, c) in marked} for c in columns],
                "more": _more(section, row),
            }
            for row in section.rows
        ],
        "differences": differences(section),
        "beside": beside(section),
        "charts": charts,
        "events": _events(section),
        "protocol": _protocol(section),
        "commands": unique(c for c in ((r.get("protocol") or {}).get("command") for r in section.records) if c),
    }


def _more(section: Section, row: str) -> list[dict[str, Any]]:
    """ECE, top-5, milliseconds an image and gigabytes: over what all rows have in common, in the last column where
    columns are no domains; nothing of learning rates."""
    if not section.last:
        return []
    records = [r for r in section.last if section.names[id(r)] == row]
    at = "" if section.axis == "domain" else f" at {short(section.column(section.last[0]))}"
    columns = [
        *([("top-1", _mean([r.get("top1") for r in records]), ".1f")] if section.experiment in COSTS else []),
        ("top-5", _mean([r.get("top5") for r in records]), ".1f"),
        ("ECE", _mean([r.get("ece") for r in records]), ".1f"),
        ("ms/image", milliseconds(records), ".2f"),
        ("GB", gigabytes(records), ".2f"),
        ("updates", _mean([r.get("updates") for r in records]), ".0f"),
    ]
    return [{"name": n + at, "value": v, "text": "–" if v is None else f"{v:{spec}}"} for n, v, spec in columns]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known else None


def _events(section: Section) -> list[dict[str, Any]]:
    """Where the guard held a method back: batches predicted but not learned from."""
    return [
        {"row": section.names[id(r)], "domain": r["domain"], "seed": r["seed"], "skipped": r["skipped"],
         "batches": r.get("batches")}
        for r in section.records
        if r.get("skipped")
    ]  # fmt: skip


def _protocol(section: Section) -> list[tuple[str, str]]:
    """Each entry of the protocols, and the settings, with all the values that occur."""
    entries: dict[str, list[str]] = {}
    for record in section.records:
        settings = ", ".join(f"{k} {label(v)}" for k, v in (record.get("settings") or {}).items())
        facts: dict[str, Any] = {
            **{k: v for k, v in (record.get("protocol") or {}).items() if k != "command"},
            "images of a domain": record["images"],
            **{k.replace("_", " "): record.get(k) for k in ("batch_size", "severity", "reset", "mixed", "split")},
            "seed": record["seed"],
            "settings": f"{section.names[id(record)]}: {settings}" if settings else None,
        }
        for key, fact in facts.items():
            if fact is not None:
                entries.setdefault(key, []).append(_words(fact))
    return [(key, "; ".join(unique(values))) for key, values in entries.items()]


def _words(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{k} {_words(v)}" for k, v in fact.items())
    if isinstance(fact, list):
        return ", ".join(map(_words, fact))
    return {True: "yes", False: "no"}.get(fact, label(fact)) if isinstance(fact, bool) else label(fact)
