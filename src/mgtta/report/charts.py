"""A section's charts: plain dicts of Plotly's schema, drawn by page.js, which adds the colours of light and dark."""

import html
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mgtta.report.summary import MEAN, Figure, Record, Section, as_number, label, milliseconds, unique

Style = dict[str, dict[str, Any]]

POINTS = 200  # most of a curve
TICKS = 7  # on a logarithmic axis, about
# distinct on white and on black, and for most eyes; the two that others are compared with are always the same
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
        """Return the looks of all methods of a page: those in most sections come first, and differ by colour."""
        methods = Counter(m for section in found for m in unique(section.rows.values()) if m not in COLOURS)
        others = [method for method, _ in methods.most_common()]
        return cls(
            {**COLOURS, **{method: PALETTE[i % len(PALETTE)] for i, method in enumerate(others)}},
            {**dict.fromkeys(COLOURS, 0), **{method: i // len(PALETTE) for i, method in enumerate(others)}},
        )

    def styles(self, section: Section) -> dict[str, Style]:
        """Return each row's line and marker; a method's first row looks the same in every section."""
        styles: dict[str, Style] = {}
        for row, method in section.rows.items():
            before = sum(section.rows[other] == method for other in styles)
            i = self.rounds[method] + before * (1 + max(self.rounds.values()))
            line = {"color": self.colours[method], "dash": DASHES[i % len(DASHES)], "width": 2}
            styles[row] = {"line": line, "marker": {"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 7}}
        return styles


def charts(section: Section, looks: Looks) -> dict[str, dict[str, Any]]:
    """Return the section's charts by name."""
    styles = looks.styles(section)
    found = {
        "axis": _axis_chart(section, styles),
        "curve": _curve_chart(section, styles),
        "runtime": _cost_chart(section, styles, RUNTIME, timed(section.shared)),
        "memory": _cost_chart(section, styles, MEMORY, section.records),
        "reliability": _reliability_chart(section, styles),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


@dataclass(frozen=True)
class Cost:
    """What accuracy is drawn against."""

    title: str
    axis: str
    of: Callable[[Sequence[Record]], float | None]


def _axis_chart(section: Section, styles: dict[str, Style]) -> dict[str, Any] | None:
    """Return accuracy by what the experiment varies: budgets, rates, sizes."""
    if section.axis == "domain":
        return None
    traces = []
    for row, cells in section.figures().items():
        there = [c for c in section.columns if c in cells and c != "inf"]
        numeric = all(as_number(c)[0] < float("inf") for c in there)
        x = list(map(float if numeric else _plain, there))
        trace = _trace(row, styles[row], x, [cells[c].mean for c in there])
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
    """Return numbers that leave room for each other on a logarithmic axis."""
    least = (numbers[-1] / numbers[0]) ** (1 / TICKS)
    shown = numbers[:1]
    for x in numbers[1:]:
        if x >= 0.999 * least * shown[-1]:
            shown.append(x)
    return shown


def _curve_chart(section: Section, styles: dict[str, Style]) -> dict[str, Any] | None:
    """Return accuracy over batches so far: the mean over domains and seeds, and each domain for the page's menu."""
    if section.axis != "domain":
        return None
    several = len(section.domains) > 1
    continual = several and all(r.get("reset") == "never" for r in section.records)
    choices = {"all domains": set(section.domains)}
    if several and not continual:
        choices |= {domain: {domain} for domain in section.domains}
    views = {}
    for choice, domains in choices.items():
        traces = _curves(section, styles, domains, continual)
        if traces:
            views[choice] = traces
    if not views:
        return None
    first, *others = views.values()
    axis: dict[str, Any] = {"title": {"text": "batch"}, "tickformat": ",d"}
    if max(trace["x"][-1] for trace in first) <= 10:
        axis["dtick"] = 1
    chart = _chart("Accuracy so far, over batches", first, axis, "accuracy, %")
    chart["layout"]["hovermode"] = "x unified"
    if others:
        chart["views"] = views
    return chart


def _curves(section: Section, styles: dict[str, Style], domains: set[str], continual: bool) -> list[dict[str, Any]]:
    traces = []
    for row in section.rows:
        mine = [r for r in section.shared if section.names[id(r)] == row]
        chosen = [r for r in mine if r["domain"] in domains and _labelled(r)]
        if continual:  # one long stream a seed
            chosen = [_joined([r for r in chosen if r["seed"] == s]) for s in unique(r["seed"] for r in chosen)]
        if chosen:
            xs, ys = running_accuracy(chosen)
            mode = "lines" if len(xs) > 1 else "markers"
            traces.append({**_trace(row, styles[row], xs, ys), "mode": mode})
    return traces


def _labelled(record: Record) -> bool:
    return bool(record.get("curve")) and len(record["curve"]) == len(record["sizes"])


def _joined(records: Sequence[Record]) -> Record:
    return {"curve": [c for r in records for c in r["curve"]], "sizes": [s for r in records for s in r["sizes"]]}


def running_accuracy(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Return batch numbers, and the accuracy in percent of all predictions up to each, the mean over records."""
    curves = []
    for record in records:
        hits = 0
        seen = 0
        curve = []
        for right, size in zip(record["curve"], record["sizes"], strict=True):
            hits += right
            seen += size
            curve.append(100 * hits / seen)
        curves.append(curve)
    length = min(map(len, curves))
    step = -(-length // POINTS)
    chosen = sorted({*range(0, length, step), length - 1})
    return [i + 1 for i in chosen], [round(statistics.mean(c[i] for c in curves), 2) for i in chosen]


def timed(records: Sequence[Record]) -> list[Record]:
    """Return the records that had their device to themselves while the clock ran, of the most frequent device."""
    devices: dict[str | None, list[Record]] = {}
    for record in records:
        if record.get("alone") or record.get("max_seconds") is not None:
            devices.setdefault((record.get("protocol") or {}).get("device"), []).append(record)
    return max(devices.values(), key=len, default=[])


def gigabytes(records: Sequence[Record]) -> float | None:
    """Return the peak of GPU memory; None without any."""
    memory = [r["peak_memory"] for r in records if r.get("peak_memory")]
    if not memory:
        return None
    return max(memory) / 1e9


RUNTIME = Cost("Accuracy against runtime", "milliseconds per image", milliseconds)
MEMORY = Cost("Accuracy against memory", "peak GB of GPU memory", gigabytes)


def _cost_chart(
    section: Section, styles: dict[str, Style], cost: Cost, records: Sequence[Record]
) -> dict[str, Any] | None:
    """Return accuracy against what it costs: a point for each row, or for each of its batch sizes."""
    if section.axis not in ("domain", "batch_size"):
        return None
    traces: list[dict[str, Any]] = []
    for row, cells in section.figures("top1").items():
        points = _cost_points(section, [r for r in records if section.names[id(r)] == row], cost, cells)
        if points:
            xs, ys, texts = zip(*points, strict=True)
            trace = _trace(row, styles[row], list(xs), [y.mean for y in ys])
            trace["marker"] = {**trace["marker"], "size": 11}
            trace["error_y"] = {"type": "data", "array": [y.std or 0 for y in ys], "thickness": 1}
            trace["mode"] = "lines+markers" if len(points) > 1 else "markers"
            trace["text"] = texts
            traces.append(trace)
    if not traces:
        return None
    return _chart(cost.title, traces, {"title": {"text": cost.axis}, "rangemode": "tozero"}, "accuracy, %")


def _cost_points(
    section: Section, records: Sequence[Record], cost: Cost, cells: dict[str, Figure]
) -> list[tuple[float, Figure, str]]:
    """Return the cost, the accuracy and the text of each point of a row."""
    if section.axis == "domain":
        mean = MEAN if len(section.domains) > 1 else section.domains[0]
        groups = {mean: list(records)}
    else:
        groups = {column: [r for r in records if section.column(r) == column] for column in section.columns}
    points = []
    for column, mine in groups.items():
        x = cost.of(mine)
        y = cells.get(column)
        text = ""
        if section.axis != "domain":
            text = _plain(f"{section.axis_name} {column}")
        if x is not None and y is not None:
            points.append((x, y, text))
    return points


def _reliability_chart(section: Section, styles: dict[str, Style]) -> dict[str, Any] | None:
    """Return accuracy within each bin of confidence, all domains and seeds together (Guo et al., ICML 2017)."""
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
    diagonal = {
        "x": [0, 1],
        "y": [0, 100],
        "mode": "lines",
        "name": "perfect",
        "hoverinfo": "skip",
        "line": {"color": "#888888", "dash": "dot", "width": 1},
    }
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
    """Return text for Plotly, which would take some HTML for markup."""
    return html.escape(text, quote=False)
