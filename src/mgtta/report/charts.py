"""A section's charts as plain data, which draw.js draws as SVG.

A chart has a title, axes and views (name -> series), among which the page's menu chooses if there are several. A series
has a look: `best`, `second` and `still` are coloured, `other` is grey.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mgtta.report.gains import best_first, still
from mgtta.report.streams import by_round, is_streams
from mgtta.report.summary import MEAN, Figure, Record, Section, as_number, label, milliseconds, unique

Series = dict[str, Any]
Chart = dict[str, Any]

POINTS = 150  # most of a curve
FEWEST_BATCHES = 5  # of a moving window, where a stream has as many
WINDOWS = 12  # about as many lie beside each other in a stream
TICKS = 7  # on a logarithmic axis, about


def looks(section: Section) -> dict[str, str]:
    """Return each row's look: the best row, MGTTA or else the second best, and NoAdapt stand out."""
    found = dict.fromkeys(section.rows, "other")
    base = still(section)
    if base is not None:
        found[base] = "still"
    adapting = [row for row in best_first(section) if section.rows[row] != "noadapt"]
    first = adapting[:1]
    paper = [row for row in adapting[1:] if section.rows[row] == "mgtta"]
    for row in first:
        found[row] = "best"
    for row in [*paper, *adapting[1:]][:1]:
        found[row] = "second"
    return found


def charts(section: Section) -> dict[str, Chart]:
    """Return the section's charts by name."""
    found = {
        "curve": _curve_chart(section),
        "rounds": _rounds_chart(section),
        "axis": _axis_chart(section),
        "reliability": _reliability_chart(section),
        "runtime": _cost_chart(section, RUNTIME, timed(section.shared)),
        "memory": _cost_chart(section, MEMORY, section.records),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


@dataclass(frozen=True)
class Cost:
    """What accuracy is drawn against."""

    title: str
    axis: str
    of: Callable[[Sequence[Record]], float | None]


# --- over the stream


def _curve_chart(section: Section) -> Chart | None:
    """Return accuracy over the stream: the mean over domains and seeds, and each domain for the page's menu."""
    if section.axis != "domain":
        return None
    several = len(section.domains) > 1
    continual = several and all(r.get("reset") == "never" for r in section.records)
    choices = {"all domains": set(section.domains)}
    if several and not continual:
        choices |= {domain: {domain} for domain in section.domains}
    views = {}
    window = 1
    for choice, domains in choices.items():
        series, batches = _curves(section, domains, continual)
        if series:
            window = max(window, window_of(batches))
            views[choice] = series
    if not views:
        return None
    last = "batch" if window == 1 else f"{window} batches"
    chart = _chart(f"Accuracy over the stream, of the last {last}", {"title": "batch"}, [])
    return {**chart, "views": views}


def _curves(section: Section, domains: set[str], continual: bool) -> tuple[list[Series], int]:
    """Return a curve for each row, and the number of batches of the shortest."""
    look = looks(section)
    series = []
    shortest = []
    for row in section.rows:
        mine = [r for r in section.shared if section.names[id(r)] == row]
        chosen = [r for r in mine if r["domain"] in domains and _labelled(r)]
        if continual:  # one long stream a seed
            chosen = [_joined([r for r in chosen if r["seed"] == s]) for s in unique(r["seed"] for r in chosen)]
        if chosen:
            xs, ys = moving_accuracy(chosen)
            shortest.append(min(len(r["curve"]) for r in chosen))
            series.append(_series(row, look[row], xs, ys, dots=len(xs) == 1))
    return series, min(shortest, default=0)


def _labelled(record: Record) -> bool:
    return bool(record.get("curve")) and len(record["curve"]) == len(record["sizes"])


def _joined(records: Sequence[Record]) -> Record:
    return {"curve": [c for r in records for c in r["curve"]], "sizes": [s for r in records for s in r["sizes"]]}


def window_of(batches: int) -> int:
    """Return how many batches a moving window has."""
    return max(1, min(batches, max(FEWEST_BATCHES, batches // WINDOWS)))


def moving_accuracy(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Return batch numbers, and the accuracy in percent in the window that ends there, over all records together."""
    length = min(len(r["curve"]) for r in records)
    window = window_of(length)
    hits = [sum(r["curve"][i] for r in records) for i in range(length)]
    images = [sum(r["sizes"][i] for r in records) for i in range(length)]
    ends = range(window, length + 1)
    step = -(-len(ends) // POINTS)
    chosen = sorted({*ends[::step], ends[-1]})
    return chosen, [100 * sum(hits[e - window : e]) / sum(images[e - window : e]) for e in chosen]


def _rounds_chart(section: Section) -> Chart | None:
    """Return accuracy by round, where a stream of the experiment `streams` comes to its domains again."""
    if not is_streams(section):
        return None
    look = looks(section)
    series = [
        _series(row, look[row], list(range(1, len(rounds) + 1)), [f.mean for f in rounds], dots=True)
        for row, rounds in by_round(section).items()
    ]
    if not series:
        return None
    return _chart("Accuracy of each round", {"title": "round"}, series)


# --- by what the experiment varies


def _axis_chart(section: Section) -> Chart | None:
    """Return accuracy by budgets, rates or sizes."""
    if section.axis == "domain" or is_streams(section):
        return None
    columns = [c for c in section.columns if c != "inf"]
    numeric = all(as_number(c)[0] < float("inf") for c in columns)
    position = {c: float(c) if numeric else float(i) for i, c in enumerate(columns)}
    look = looks(section)
    series = []
    for row, cells in section.figures().items():
        there = [c for c in columns if c in cells]
        if there:
            errors = [cells[c].std or 0.0 for c in there]
            xs = [position[c] for c in there]
            series.append(_series(row, look[row], xs, [cells[c].mean for c in there], errors, dots=True))
    if not series:
        return None
    axis: dict[str, Any] = {"title": section.axis_name}
    numbers = sorted(position.values())
    if numeric and numbers[0] > 0:
        axis |= {"log": True, "ticks": [[x, label(x)] for x in apart(numbers)]}
    else:
        axis["ticks"] = [[x, c] for c, x in position.items()]
    return _chart(f"Accuracy by {section.axis_name}", axis, series)


def apart(numbers: list[float]) -> list[float]:
    """Return numbers that leave room for each other on a logarithmic axis."""
    least = (numbers[-1] / numbers[0]) ** (1 / TICKS)
    shown = numbers[:1]
    for x in numbers[1:]:
        if x >= 0.999 * least * shown[-1]:
            shown.append(x)
    return shown


# --- calibration and cost


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


def _cost_chart(section: Section, cost: Cost, records: Sequence[Record]) -> Chart | None:
    """Return accuracy against what it costs: a point for each row, or for each of its batch sizes."""
    if section.axis not in ("domain", "batch_size"):
        return None
    look = looks(section)
    series = []
    for row, cells in section.figures("top1").items():
        points = _cost_points(section, [r for r in records if section.names[id(r)] == row], cost, cells)
        if points:
            xs, ys, texts = zip(*points, strict=True)
            one = _series(row, look[row], list(xs), [y.mean for y in ys], [y.std or 0.0 for y in ys], dots=True)
            series.append({**one, "text": list(texts)})
    if not series:
        return None
    return {**_chart(cost.title, {"title": cost.axis, "zero": True}, series), "points": True}


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
            text = f"{section.axis_name} {column}"
        if x is not None and y is not None:
            points.append((x, y, text))
    return points


def _reliability_chart(section: Section) -> Chart | None:
    """Return accuracy within each bin of confidence, all domains and seeds together (Guo et al., ICML 2017)."""
    if section.axis != "domain":
        return None
    series = []
    for row, look in looks(section).items():
        mine = [r for r in section.shared if section.names[id(r)] == row]
        bins = [r["bins"] for r in mine if r.get("bins") and r.get("top1") is not None]
        if bins:
            sums = [[sum(b[k][j] for b in bins) for j in range(3)] for k in range(len(bins[0]))]
            filled = [s for s in sums if s[0]]
            xs = [100 * s[1] / s[0] for s in filled]
            one = _series(row, look, xs, [100 * s[2] / s[0] for s in filled])
            series.append({**one, "text": [f"{s[0]:,.0f} predictions" for s in filled]})
    if not series:
        return None
    ideal = _series("", "ideal", [0, 100], [0, 100])
    axis = {"title": "confidence, %", "ticks": [[x, str(x)] for x in range(0, 101, 20)]}
    return _chart("Reliability: accuracy by confidence", axis, [ideal, *series])


def _series(
    row: str, look: str, x: list[Any], y: list[float], error: Sequence[float] = (), dots: bool = False
) -> Series:
    one: Series = {"name": row, "look": look, "x": [_short(v) for v in x], "y": [round(v, 2) for v in y]}
    if any(error):
        one["error"] = [round(e, 2) for e in error]
    if dots:
        one["dots"] = True
    return one


def _short(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.4g}")
    return x


def _chart(title: str, x: dict[str, Any], series: list[Series]) -> Chart:
    return {"title": title, "x": x, "y": "accuracy, %", "views": {"all": series}}
