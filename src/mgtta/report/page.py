"""Sections as one HTML page that needs no other file and no network.

All text from records reaches the page through Jinja's autoescape or, within charts, through `tojson`; draw.js writes it
as text. The page's policy loads nothing, and runs only the page's own script, which it names by its hash.
"""

import base64
import hashlib
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from itertools import accumulate, groupby
from typing import Any

from jinja2 import Environment, StrictUndefined

from mgtta import __version__
from mgtta.report.charts import charts, gigabytes, timed
from mgtta.report.examples import Example
from mgtta.report.gains import bars, best_first, card, heat, shade
from mgtta.report.paired import differences
from mgtta.report.published import beside, published
from mgtta.report.summary import COSTS, MEAN, Record, Section, label, milliseconds, unique
from mgtta.report.words import bold, decimals, footing_words, headline, interval, named, notes, printed, short, signed

SHOWN_CHARACTERS = 300  # of an entry of the protocol; the rest is folded
SCRIPTS = ("draw.js", "page.js")
MAIN_CHARTS = ("curve", "rounds", "axis")  # beside the bars; the others are folded


def page(found: Sequence[Section], examples: Sequence[Example] = (), title: str = "Test-time adaptation") -> str:
    """Return the page of the sections."""
    folder = resources.files("mgtta.report")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    drawn: dict[str, Any] = {}
    shown = []
    for i, section in enumerate(found):
        mine = {f"s{i}-{name}": chart for name, chart in charts(section).items()}
        drawn.update(mine)
        shown.append(_shown(section, f"s{i}", list(mine)))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    template = _environment().from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        policy=policy,
        script=script,
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        charts=drawn,
        card=card(found),
        sections=shown,
        examples=_by_domain(found, examples),
        paper=published()["paper"],
        paper_notes=published()["notes"],
        version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        short=short, signed=signed, interval=interval, label=label, printed=printed, decimals=decimals, shade=shade
    )
    return environment


def _by_domain(found: Sequence[Section], examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Return the examples of each domain, with the gain of their method there, if the first section knows it."""
    known = heat(found[0]) if found else None
    groups = []
    for (method, domain), mine in groupby(examples, key=lambda e: (e.method, e.domain)):
        gain = None
        if known is not None and domain in known.columns and method in known.rows:
            gain = known.rows[method][known.columns.index(domain)]
        groups.append({"method": method, "domain": domain, "gain": gain, "examples": list(mine)})
    return groups


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _shown(section: Section, name: str, charts: list[str]) -> dict[str, Any]:
    figures = section.figures()
    marked = section.best(figures)
    columns = sorted(section.headings(figures), key=lambda column: column != MEAN)  # the mean first: it is in sight
    return {
        "id": name,
        "name": section.name,
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
                "label": named(section, row),
                "cells": [{"figure": figures[row].get(c), "best": (row, c) in marked} for c in columns],
            }
            for row in best_first(section)
        ],
        "bars": bars(section),
        "heat": heat(section),
        "more": _more(section),
        "differences": differences(section),
        "beside": beside(section),
        "charts": [chart for chart in charts if chart.partition("-")[2] in MAIN_CHARTS],
        "more_charts": [chart for chart in charts if chart.partition("-")[2] not in MAIN_CHARTS],
        "events": _events(section),
        "protocol": _protocol(section),
        "commands": unique(c for c in ((r.get("protocol") or {}).get("command") for r in section.records) if c),
    }


def _more(section: Section) -> list[dict[str, Any]]:
    """Return top-5, ECE, milliseconds per image and gigabytes, where any row has them.

    They are over the records that all rows have in common; where columns are not domains, over the last column. There
    are none for learning rates.
    """
    last = section.last
    clock = section.at_last(timed(section.shared))
    columns: list[tuple[str, list[Record], Callable[[Sequence[Record]], float | None], str]] = []
    if section.experiment in COSTS:
        columns.append(("top-1", last, _mean_of("top1"), "%.1f"))
    columns += [
        ("top-5", last, _mean_of("top5"), "%.1f"),
        ("ECE", last, _mean_of("ece"), "%.1f"),
        ("ms/image", clock, milliseconds, "%.2f"),
        ("GB", last, gigabytes, "%.2f"),
        ("updates", last, _mean_of("updates"), "%.0f"),
    ]
    found = []
    for name, records, figure, spec in columns:
        values = {row: figure([r for r in records if section.names[id(r)] == row]) for row in section.rows}
        if any(value is not None for value in values.values()):
            if section.axis != "domain":
                name += f" at {short(section.column(records[0]))}"
            found.append({"name": name, "values": values, "spec": spec})
    return found


def _mean_of(key: str) -> Callable[[Sequence[Record]], float | None]:
    def mean(records: Sequence[Record]) -> float | None:
        known = [r[key] for r in records if r.get(key) is not None]
        if not known:
            return None
        return statistics.mean(known)

    return mean


def _events(section: Section) -> list[dict[str, Any]]:
    """Return where a method skipped batches: it predicted them, and did not learn from them."""
    return [
        {
            "row": section.names[id(record)],
            "domain": record["domain"],
            "seed": record["seed"],
            "skipped": record["skipped"],
            "batches": record.get("batches"),
        }
        for record in section.records
        if record.get("skipped")
    ]


def _protocol(section: Section) -> list[tuple[str, str, list[str]]]:
    """Return each entry of the protocols, and the settings, with all values: those that are shown, and the rest."""
    entries: dict[str, list[str]] = {}
    for record in section.records:
        settings = ", ".join(f"{k} {label(v)}" for k, v in (record.get("settings") or {}).items())
        facts: dict[str, Any] = {
            **{k: v for k, v in (record.get("protocol") or {}).items() if k != "command"},
            "images per domain": record["images"],
            **{k.replace("_", " "): record.get(k) for k in ("batch_size", "severity", "reset", "mixed", "split")},
            "seed": record["seed"],
            "settings": f"{section.names[id(record)]}: {settings}" if settings else None,
        }
        for key, fact in facts.items():
            if fact is not None:
                entries.setdefault(key, []).append(_words(fact))
    return [(key, *_some(unique(values))) for key, values in entries.items()]


def _some(values: list[str]) -> tuple[str, list[str]]:
    """Return what fits into some lines, at least the first value, and the rest."""
    ends = accumulate(len(value) + 2 for value in values)
    n = max(1, sum(end <= SHOWN_CHARACTERS for end in ends))
    return "; ".join(values[:n]), values[n:]


def _words(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{k} {_words(v)}" for k, v in fact.items())
    if isinstance(fact, list):
        return ", ".join(map(_words, fact))
    if isinstance(fact, bool):
        return "yes" if fact else "no"
    return label(fact)
