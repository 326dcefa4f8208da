"""A section's charts: plain dicts of Plotly's schema, drawn by page.js, which adds the colours of light and dark."""

import html
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mgtta.report.summary import MEAN, Record, Section, as_number, label, milliseconds, unique

Style = dict[str, dict[str, Any]]

POINTS = 200  # of a curve, at most
TICKS = 7  # on a logarithmic axis, about
# apart on white and on black, and for most eyes; the two that all others are compared with are always the same
COLOURS = {"noadapt": "#8a8f98", "mgtta": "#d1602a"}
PALETTE = ("#0a7cc4", "#159d74", "#b7609a", "#a8810c", "#7a6fd0", "#2ba6b8", "#c2475a", "#5f8f2f")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "hexagon")  # not as many as dashes: more pairs


@dataclass(frozen=True)
class Looks:
    """A colour for each method, and how many methods had the same before it: they differ in dash and marker."""

    colours: dict[str, str]
    rounds: dict[str, int]

    @classmethod
    def of(cls, found: Sequence[Section]) -> "Looks":
        """Of all methods of a page: those in most sections come first, and are told apart by colour alone."""
        methods = Counter(m for section in found for m in unique(section.rows.values()) if m not in COLOURS)
        others = [method for method, _ in methods.most_common()]
        return cls(
            {**COLOURS, **{method: PALETTE[i % len(PALETTE)] for i, method in enumerate(others)}},
            {**dict.fromkeys(COLOURS, 0), **{method: i // len(PALETTE) for i, method in enumerate(others)}},
        )

    def styles(self, section: Section) -> dict[str, Style]:
        """Row -> its line and marker; a method's first row looks the same in every section."""
        styles: dict[str, Style] = {}
        for row, method in section.rows.items():
            before = sum(section.rows[other] == method for other in styles)
            i = self.rounds[method] + before * (1 + max(self.rounds.values()))
            line = {"color": self.colours[method], "dash": DASHES[i % len(DASHES)], "width": 2}
            styles[row] = {"line": line, "marker": {"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 7}}
        return styles


def charts(section: Section, looks: Looks) -> dict[str, dict[str, Any]]:
    styles = looks.styles(section)
    found = {
        "axis": _axis_chart(section, styles),
        "curve": _curve_chart(section, styles),
        "runtime": _cost_chart(section, styles, "Accuracy against runtime", "milliseconds an image",
                               timed(section.shared), milliseconds),
        "memory": _cost_chart(section, styles, "Accuracy against memory", "GB of GPU memory at most",
                              section.records, gigabytes),
        "reliability": _reliability_chart(section, styles),
    }  # fmt: skip
    return {name: chart for name, chart in found.items() if chart is not None}


def _axis_chart(section: Section, styles: dict[str, Style]) -> dict[str, Any] | None:
    """Accuracy by what the experiment varies: budgets, rates, sizes."""
    if section.axis == "domain":
        return None
    traces = []
    for row, cells in section.figures().items():
        there = [c for c in section.columns if c in cells and c != "inf"]
        numeric = all(as_number(c)[0] < float("inf") for c in there)
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
        ticks = _apart(sorted(numbers))
        axis |= {"type": "log", "tickvals": ticks, "ticktext": [label(x) for x in ticks]}
    return _chart(f"Accuracy by {section.axis_name}", traces, axis, "accuracy, %")


def _apart(numbers: list[float]) -> list[float]:
    """Those that leave room for each other on a logarithmic axis."""
    least, shown = (numbers[-1] / numbers[0]) ** (1 / TICKS), numbers[:1]
    for x in numbers[1:]:
        if x >= 0.999 * least * shown[-1]:
            shown.append(x)
    return shown


def _curve_chart(section: Section, styles: dict[str, Style]) -> dict[str, Any] | None:
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


def timed(records: Sequence[Record]) -> list[Record]:
    """Those that had their device to themselves while the clock ran, of the device that has most of them."""
    devices: dict[str | None, list[Record]] = {}
    for record in records:
        if record.get("alone") or record.get("max_seconds") is not None:
            devices.setdefault((record.get("protocol") or {}).get("device"), []).append(record)
    return max(devices.values(), key=len, default=[])


def gigabytes(records: Sequence[Record]) -> float | None:
    memory = [r["peak_memory"] for r in records if r.get("peak_memory")]
    return max(memory) / 1e9 if memory else None


def _cost_chart(
    section: Section,
    styles: dict[str, Style],
    title: str,
    axis: str,
    records: Sequence[Record],
    cost: Callable[[Sequence[Record]], float | None],
) -> dict[str, Any] | None:
    """Accuracy against what it costs: a point for each row, or for each of its batch sizes."""
    if section.axis not in ("domain", "batch_size"):
        return None
    mean = MEAN if len(section.domains) > 1 else section.domains[0]
    traces: list[dict[str, Any]] = []
    for row, cells in section.figures("top1").items():
        points = []
        for column in [None] if section.axis == "domain" else section.columns:
            mine = [r for r in records if section.names[id(r)] == row and column in (None, section.column(r))]
            x, y = cost(mine), cells.get(column or mean)
            if x is not None and y is not None:
                points.append((x, y, _plain(f"{section.axis_name} {column}") if column else ""))
        if points:
            xs, ys, texts = zip(*points, strict=True)
            trace = _trace(row, styles[row], list(xs), [y.mean for y in ys])
            trace["marker"] = {**trace["marker"], "size": 11}
            trace["error_y"] = {"type": "data", "array": [y.std or 0 for y in ys], "thickness": 1}
            traces.append({**trace, "mode": "lines+markers" if len(points) > 1 else "markers", "text": texts})
    if not traces:
        return None
    return _chart(title, traces, {"title": {"text": axis}, "rangemode": "tozero"}, "accuracy, %")


def _reliability_chart(section: Section, styles: dict[str, Style]) -> dict[str, Any] | None:
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


def _trace(row: str, style: Style, x: list[Any], y: list[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": _plain(row),
        "x": x,
        "y": [round(v, 3) for v in y],
        **style,
    }


def _chart(title: str, traces: list[dict[str, Any]], x: dict[str, Any], y: str) -> dict[str, Any]:
    return {"title": title, "traces": traces, "views": {}, "layout": {"xaxis": x, "yaxis": {"title": {"text": y}}}}


def _plain(text: str) -> str:
    """Text for Plotly, which would take some HTML for markup."""
    return html.escape(text, quote=False)
