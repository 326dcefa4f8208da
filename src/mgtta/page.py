"""Records as one self-contained HTML page: no network, opens from disk; and the three files of a report.

All text from records reaches the page through Jinja's autoescape or, within charts and scripts, through `_plain` and
`tojson`; the page's policy lets no script run but its own two, which it names by their hashes, and loads nothing.
"""

import base64
import hashlib
import html
import io
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from PIL import Image
from plotly.offline import get_plotlyjs
from torch import Tensor

from mgtta import __version__, report
from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.data.streams import Batch, corrupted, stream
from mgtta.files import atomic
from mgtta.models import load_model
from mgtta.recipes import create, needs_source, recipe_settings
from mgtta.records import checked
from mgtta.report import MEAN, Record, Section, label, unique
from mgtta.source import load_source
from mgtta.store import Store

EMBEDDED = "glyphs_vit"

POINTS = 200  # of a curve, at most
# apart on white and on black, and for most eyes; the two that all others are compared with are always the same
COLOURS = {"noadapt": "#8a8f98", "mgtta": "#d1602a"}
PALETTE = ("#0a7cc4", "#159d74", "#b7609a", "#a8810c", "#7a6fd0", "#2ba6b8", "#c2475a", "#5f8f2f")
DASHES = ("solid", "dash", "dot", "dashdot")
CHARACTERS = "rendered characters"  # what bench calls the embedded data


@dataclass(frozen=True)
class Prediction:
    name: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class Example:
    """An image, clean and corrupted, as data URIs, with what was predicted before and after adaptation."""

    domain: str
    label: str
    clean: str
    corrupted: str
    before: Prediction
    after: Prediction


def write_report(
    runs: str | os.PathLike, out: str | os.PathLike | None = None, *, examples: bool | Sequence[Example] = True
) -> Path:
    """Write report.md, report.tex and report.html from a folder of records; gives the page's path.

    Args:
        runs: the folder that `mgtta bench` wrote.
        out: where to; the same folder unless given.
        examples: images for the page. True renders some where the records are of the embedded data and model, which
            takes some seconds.
    """
    folder = Path(runs)
    if not (folder / "records.jsonl").is_file():
        raise FileNotFoundError(f"no records in {folder}: name the folder that `mgtta bench` wrote (its --out)")
    records = Store(folder).records()
    if not records:
        raise ValueError(f"{folder / 'records.jsonl'} holds no finished records yet: let `mgtta bench` finish a cell")
    found = report.sections(checked(records))
    if isinstance(examples, bool):
        examples = embedded_examples(records) if examples else ()
    out = folder if out is None else Path(out)
    texts = {
        "report.md": report.markdown_report(found),
        "report.tex": report.latex_report(found),
        "report.html": page(found, examples),
    }
    for name, text in texts.items():
        with atomic(out / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return out / "report.html"


def page(found: Sequence[Section], examples: Sequence[Example] = (), title: str = "Test-time adaptation") -> str:
    """The page of the sections."""
    folder = resources.files("mgtta")
    script, style = (folder.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    library = get_plotlyjs()
    colours = _colours(found)
    charts: dict[str, Any] = {}
    shown = []
    for i, section in enumerate(found):
        mine = {f"s{i}-{name}": chart for name, chart in _charts(section, colours).items()}
        charts.update(mine)
        shown.append(_shown(section, f"s{i}", list(mine)))
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        short=report.short, signed=report.signed, interval=report.interval, label=label, printed=report.printed
    )
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title, policy=policy, library=library, script=script, style=style, charts=charts, sections=shown,
        examples=list(examples), paper=report.published()["paper"], paper_notes=report.published()["notes"],
        version=__version__, made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )  # fmt: skip


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _colours(found: Sequence[Section]) -> dict[str, str]:
    others = unique(method for section in found for method in section.rows.values() if method not in COLOURS)
    return {**COLOURS, **{method: PALETTE[i % len(PALETTE)] for i, method in enumerate(others)}}


# --- what the template shows of a section


def _shown(section: Section, name: str, charts: list[str]) -> dict[str, Any]:
    figures = section.figures()
    columns = sorted(section.headings(figures), key=lambda column: column != MEAN)  # the mean first: it is in sight
    return {
        "id": name,
        "title": section.title,
        "footing": report.footing_words(section),
        "headline": report.headline(section),
        "notes": report.notes(section),
        "columns": columns,
        "axis": section.axis_name,
        "rows": [
            {
                "name": row,
                "cells": [_cell(figures, row, column) for column in columns],
                "more": _more(section, row),
            }
            for row in section.rows
        ],
        "differences": report.differences(section),
        "beside": report.beside(section),
        "charts": charts,
        "events": _events(section),
        "protocol": _protocol(section),
        "commands": unique(c for c in ((r.get("protocol") or {}).get("command") for r in section.records) if c),
    }


def _cell(figures: dict[str, dict[str, report.Figure]], row: str, column: str) -> dict[str, Any]:
    found = figures[row].get(column)
    return {"figure": found, "best": row in report.best(figures, column), "mean": column == MEAN}


def _more(section: Section, row: str) -> list[dict[str, Any]]:
    """ECE, top-5, milliseconds an image and gigabytes: over what all rows have in common."""
    records = [r for r in section.shared if section.names[id(r)] == row]
    columns = [
        ("top-5", _mean([r.get("top5") for r in records]), ".1f"),
        ("ECE", _mean([r.get("ece") for r in records]), ".1f"),
        ("ms/image", _milliseconds(records), ".2f"),
        ("GB", _gigabytes(records), ".2f"),
        ("updates", _mean([r.get("updates") for r in records]), ".0f"),
    ]
    return [{"name": n, "value": v, "text": "–" if v is None else f"{v:{spec}}"} for n, v, spec in columns]


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


# --- charts: plain dicts of Plotly's schema, drawn by page.js, which adds the colours of light and dark


def _charts(section: Section, colours: dict[str, str]) -> dict[str, dict[str, Any]]:
    styles: dict[str, dict[str, str]] = {}
    for row, method in section.rows.items():
        dash = DASHES[sum(section.rows[other] == method for other in styles) % len(DASHES)]
        styles[row] = {"color": colours[method], "dash": dash}
    charts = {
        "axis": _axis_chart(section, styles),
        "curve": _curve_chart(section, styles),
        "runtime": _cost_chart(section, styles, "runtime", "milliseconds an image", _milliseconds),
        "memory": _cost_chart(section, styles, "memory", "GB of GPU memory at most", _gigabytes),
        "reliability": _reliability_chart(section, styles),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def _axis_chart(section: Section, styles: dict[str, dict[str, str]]) -> dict[str, Any] | None:
    """Accuracy by what the experiment varies: budgets, rates, sizes."""
    if section.axis == "domain":
        return None
    traces = []
    for row, cells in section.figures().items():
        there = [c for c in section.columns if c in cells and c != "inf"]
        numeric = all(report._as_number(c)[0] < float("inf") for c in there)
        trace = _trace(row, styles[row], [float(c) if numeric else _plain(c) for c in there],
                       [cells[c].mean for c in there])  # fmt: skip
        if any(cells[c].std is not None for c in there):
            trace["error_y"] = {"type": "data", "array": [cells[c].std or 0 for c in there], "thickness": 1}
        traces.append({**trace, "mode": "lines+markers"})
    if not any(trace["x"] for trace in traces):
        return None
    axis: dict[str, Any] = {"title": {"text": section.axis_name}}
    numbers = sorted({x for trace in traces for x in trace["x"]}, key=str)
    if all(isinstance(x, float) and x > 0 for x in numbers):
        axis |= {"type": "log", "tickvals": numbers, "ticktext": [label(x) for x in numbers]}
    return _chart(f"Accuracy by {section.axis_name}", traces, axis, "accuracy, %")


def _curve_chart(section: Section, styles: dict[str, dict[str, str]]) -> dict[str, Any] | None:
    """Accuracy over batches so far: the mean over domains and seeds, and each domain for the page's menu."""
    if section.axis != "domain":
        return None
    continual = all(r.get("reset") == "never" for r in section.records) and len(section.domains) > 1
    views: dict[str, list[dict[str, Any]]] = {}
    choices = {
        "all domains": set(section.domains),
        **({} if len(section.domains) == 1 else {d: {d} for d in section.domains}),
    }
    for choice, domains in {"all domains": set(section.domains)}.items() if continual else choices.items():
        traces = []
        for row in section.rows:
            mine = [r for r in section.shared if section.names[id(r)] == row]
            chosen = [r for r in mine if r["domain"] in domains and _labelled(r)]
            if continual:  # one long stream a seed
                chosen = [_joined([r for r in chosen if r["seed"] == s]) for s in unique(r["seed"] for r in chosen)]
            if chosen:
                xs, ys = running_accuracy(chosen)
                traces.append({**_trace(row, styles[row], xs, ys), "mode": "lines" if len(xs) > 1 else "markers"})
        if traces:
            views[choice] = traces
    if not views:
        return None
    first, *_ = views.values()
    batches = max(trace["x"][-1] for trace in first)
    axis = {"title": {"text": "batch"}, "tickformat": ",d", **({"dtick": 1} if batches <= 10 else {})}
    chart = _chart("Accuracy so far, over batches", first, axis, "accuracy, %")
    return {**chart, "views": views if len(views) > 1 else {}, "layout": {**chart["layout"], "hovermode": "x unified"}}


def _labelled(record: Record) -> bool:
    return bool(record.get("curve")) and len(record["curve"]) == len(record["sizes"])


def _joined(records: Sequence[Record]) -> Record:
    return {"curve": [c for r in records for c in r["curve"]], "sizes": [s for r in records for s in r["sizes"]]}


def running_accuracy(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Batch numbers, and accuracy of all predictions up to each in percent, the mean over records that reach it."""
    curves = []
    for record in records:
        hits = seen = 0
        curve = []
        for right, size in zip(record["curve"], record["sizes"], strict=True):
            hits, seen = hits + right, seen + size
            curve.append(100 * hits / seen)
        curves.append(curve)
    length = min(map(len, curves))
    step = -(-length // POINTS)
    chosen = sorted({*range(0, length, step), length - 1})
    return [i + 1 for i in chosen], [round(statistics.mean(c[i] for c in curves), 2) for i in chosen]


def _milliseconds(records: Sequence[Record]) -> float | None:
    images = sum(r["images"] for r in records)
    return 1000 * sum(r["seconds"] for r in records) / images if images else None


def _gigabytes(records: Sequence[Record]) -> float | None:
    memory = [r["peak_memory"] for r in records if r.get("peak_memory")]
    return max(memory) / 1e9 if memory else None


def _cost_chart(
    section: Section, styles: dict[str, dict[str, str]], name: str, axis: str, cost: Any
) -> dict[str, Any] | None:
    if section.axis not in ("domain", "batch_size"):
        return None
    figures = section.figures()
    traces: list[dict[str, Any]] = []
    for row, style in styles.items():
        for column in [None] if section.axis == "domain" else section.columns:
            records = [r for r in section.of(row) if column in (None, section.column(r))]
            found = figures[row].get(column or (MEAN if len(section.domains) > 1 else section.domains[0]))
            x = cost(records)
            if x is not None and found is not None:
                shown = f"{row}, {column}" if column else row
                trace = {**_trace(shown, style, [x], [found.mean]), "mode": "markers"}
                trace["marker"] = {"color": style["color"], "size": 12, "symbol": _symbol(len(traces))}
                trace["error_y"] = {"type": "data", "array": [found.std or 0], "thickness": 1}
                traces.append(trace)
    if not traces:
        return None
    return _chart(f"Accuracy against {name}", traces, {"title": {"text": axis}, "rangemode": "tozero"}, "accuracy, %")


def _symbol(i: int) -> str:
    return ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")[i % 8]


def _reliability_chart(section: Section, styles: dict[str, dict[str, str]]) -> dict[str, Any] | None:
    """Accuracy within each bin of confidence, all domains and seeds together (Guo et al., ICML 2017)."""
    if section.axis != "domain":
        return None
    traces = []
    for row, style in styles.items():
        mine = [r for r in section.shared if section.names[id(r)] == row]
        bins = [r["bins"] for r in mine if r.get("bins") and r.get("top1") is not None]
        if not bins:
            continue
        sums = [[sum(b[k][j] for b in bins) for j in range(3)] for k in range(len(bins[0]))]
        filled = [s for s in sums if s[0]]
        trace = _trace(row, style, [s[1] / s[0] for s in filled], [100 * s[2] / s[0] for s in filled])
        texts = [f"{s[0]:,.0f} predictions" for s in filled]
        traces.append({**trace, "mode": "lines+markers", "text": texts})
    if not traces:
        return None
    diagonal = {"x": [0, 1], "y": [0, 100], "mode": "lines", "name": "perfect", "hoverinfo": "skip",
                "line": {"color": "#888888", "dash": "dot", "width": 1}}  # fmt: skip
    axis = {"title": {"text": "confidence"}, "range": [0, 1.02], "tickformat": ".0%"}
    return _chart("Reliability", [diagonal, *traces], axis, "accuracy, %")


def _trace(row: str, style: dict[str, str], x: list[Any], y: list[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": _plain(row),
        "x": x,
        "y": [round(v, 3) for v in y],
        "line": {**style, "width": 2},
    }


def _chart(title: str, traces: list[dict[str, Any]], x: dict[str, Any], y: str) -> dict[str, Any]:
    return {"title": title, "traces": traces, "views": {}, "layout": {"xaxis": x, "yaxis": {"title": {"text": y}}}}


def _plain(text: str) -> str:
    """Text for Plotly, which would take some HTML for markup."""
    return html.escape(text, quote=False)


# --- examples


def embedded_examples(records: Sequence[Record], domains: int = 3, images: int = 192) -> list[Example]:
    """Characters with predictions of the embedded model as it is and adapted, where the records are of these two.

    In each of some domains the method, MGTTA if it is among the records, adapts to `images` images as the records'
    protocol says; of its last batch up to one image is taken that it set right, one that it spoiled, and one that
    stayed as it was.
    """
    own = [
        r
        for r in records
        if (r.get("protocol") or {}).get("model") == EMBEDDED
        and r["protocol"].get("data") == CHARACTERS
        and r["experiment"] == "corruptions"
    ]
    methods = sorted({r["method"] for r in own} - {"noadapt"}, key=lambda m: (m != "mgtta", m))
    if not methods:
        return []
    mine = [r for r in own if r["method"] == methods[0]]
    names = unique(r["domain"] for r in mine)
    model, like = load_model(EMBEDDED), mine[0]
    settings = dict(like.get("settings") or {})
    if needs_source(like["method"]):
        settings["source"] = load_source(EMBEDDED)
    if "generator" in recipe_settings(like["method"]) and like["protocol"].get("generator"):
        settings.setdefault("generator", like["protocol"]["generator"])
    method = create(like["method"], model, **settings)
    characters = Glyphs(min(images, like["images"]))
    found = []
    for domain in names[:: max(1, len(names) // domains)][:domains]:
        batches = stream(
            corrupted(characters, [domain], like["severity"]), batch_size=like["batch_size"], seed=like["seed"]
        )
        method.reset()
        for batch in batches:
            after = method(batch.x)
        found += _examples(domain, characters, batch, model(batch.x).detach(), after)
    return found


def _examples(domain: str, clean: Glyphs, batch: Batch, before: Tensor, after: Tensor) -> list[Example]:
    labels = torch.as_tensor(batch.y)
    was, now = before.argmax(1).eq(labels), after.argmax(1).eq(labels)
    kinds = (~was & now, was & ~now, was == now)  # set right, spoiled, as it was

    def prediction(logits: Tensor, i: int) -> Prediction:
        confidence, k = logits[i].softmax(0).max(0)
        return Prediction(CLASSES[int(k)], float(confidence), int(k) == int(labels[i]))

    return [
        Example(
            domain,
            CLASSES[int(labels[i])],
            data_uri(clean[int(batch.index[i])][0]),
            data_uri(batch.x[i]),
            prediction(before, i),
            prediction(after, i),
        )
        for i in (int(kind.nonzero()[0]) for kind in kinds if kind.any())
    ]


def data_uri(image: Tensor) -> str:
    """An image (3, H, W), uint8 or float in [0, 1], as a PNG that a page can hold."""
    if image.is_floating_point():
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image.cpu().permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
