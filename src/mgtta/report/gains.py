"""What a section gains: its rows from the best down, bars with intervals, a heat map, and the page's first card."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mgtta.report.paired import Difference, differences, paired_difference
from mgtta.report.streams import by_kind_and_seed, is_streams, over_kinds
from mgtta.report.summary import LOWER_IS_BETTER, MEAN, Figure, Section
from mgtta.report.words import FEWEST, FIGURES, decimals, footing_words, interval, many, named, signed

ACCURACIES = ("top1", "remaining")
LAST_ROUND = "rounds (last)"
FULL_COLOUR = 20.0  # points at which a cell of the heat map has its full colour


@dataclass(frozen=True)
class Bar:
    """A row as a bar: from `start` over `width`, with whiskers, all in percent of the chart's width."""

    name: str
    words: str  # its figure
    gain: str  # over NoAdapt; empty without one
    start: float
    width: float
    low: float | None
    high: float | None
    look: str  # gain, loss or plain


@dataclass(frozen=True)
class Bars:
    title: str
    note: str
    zero: float  # where zero lies, in percent of the width
    bars: list[Bar]
    gains: bool  # True for gains over NoAdapt


@dataclass(frozen=True)
class Heat:
    """Gain over NoAdapt in points: row -> a cell for each column, None where it is not known."""

    against: str
    columns: list[str]
    rows: dict[str, list[float | None]]


@dataclass(frozen=True)
class Card:
    """The page's first lines: the best method of its main section, and how far it lies from NoAdapt."""

    section: str  # its title
    method: str
    before: str
    after: str
    gain: str
    gains: bool  # True for a gain, False for a loss
    interval: str
    facts: list[tuple[str, str]]
    footing: str


def still(section: Section) -> str | None:
    """Return the first row of NoAdapt; None without one."""
    return next((row for row, method in section.rows.items() if method == "noadapt"), None)


def levels(section: Section) -> dict[str, Figure]:
    """Return the figure by which rows are ranked, the best first; rows that lack it are left out.

    It is the mean over domains or kinds of stream, or the only domain; of learning rates the row's best; of other
    columns the last.
    """
    column = section.columns[-1]
    if is_streams(section) or (section.axis == "domain" and len(section.columns) > 1):
        column = MEAN
    figures = shown_figures(section)
    if section.axis == "lr":
        found = {row: max(cells.values(), key=lambda f: f.mean) for row, cells in figures.items() if cells}
    else:
        found = {row: cells[column] for row, cells in figures.items() if column in cells}
    lower = section.figure in LOWER_IS_BETTER
    return dict(sorted(found.items(), key=lambda item: item[1].mean if lower else -item[1].mean))


def shown_figures(section: Section) -> dict[str, dict[str, Figure]]:
    """Return row -> column -> figure; of a stream in rounds the figure of the last round, and the mean over kinds."""
    if is_streams(section):
        return {row: over_kinds(section, row, section.figure) for row in section.rows}
    return section.figures()


def best_first(section: Section) -> list[str]:
    """Return all rows, the best first, and those that are not ranked last."""
    ranked = list(levels(section))
    return [*ranked, *(row for row in section.rows if row not in ranked)]


def against_still(section: Section) -> dict[str, Difference]:
    """Return row -> its paired difference from NoAdapt, over all domains or kinds of stream; else empty."""
    base = still(section)
    if base is None:
        return {}
    if not is_streams(section):
        return {d.row: d for d in differences(section) if d.column == MEAN and d.against == base}
    found = {}
    before = by_kind_and_seed(section, base, section.figure)
    for row in section.rows:
        after = by_kind_and_seed(section, row, section.figure)
        pairs = {stream: after[stream] - before[stream] for stream in after if stream in before}
        if row != base and pairs:
            found[row] = paired_difference(row, MEAN, base, pairs)
    return found


def bars(section: Section) -> Bars | None:
    """Return the rows as bars, the best first: gains over NoAdapt or, without it or for costs, the figure itself."""
    ranked = levels(section)
    if len(ranked) < 2 or (section.axis != "domain" and not is_streams(section)):
        return None
    base = still(section)
    if section.figure in ACCURACIES and base in ranked:
        return _gain_bars(section, ranked, base)
    return _plain_bars(section, ranked)


def _gain_bars(section: Section, ranked: dict[str, Figure], base: str) -> Bars:
    paired = against_still(section)
    spans: dict[str, tuple[float, float | None, float | None]] = {}  # row -> gain, low, high
    for row, figure in ranked.items():
        spans[row] = (figure.mean - ranked[base].mean, None, None)
        difference = paired.get(row)
        if difference is not None:
            spans[row] = (difference.mean, difference.low, difference.high)
    left, right = _reach([x for span in spans.values() for x in span if x is not None])

    def place(x: float) -> float:
        return 100 * (x - left) / (right - left)

    made = []
    for row, (gain, low, high) in spans.items():
        look = "gain" if gain >= 0 else "loss"
        start = place(min(gain, 0.0))
        width = place(max(gain, 0.0)) - start
        words = f"{decimals(ranked[row].mean, section.figure)} %"
        ends = [None if x is None else place(x) for x in (low, high)]
        text = "" if row == base else signed(gain, 1)
        made.append(Bar(named(section, row), words, text, start, width, ends[0], ends[1], look))
    note = "Gain over NoAdapt in points, and accuracy."
    if is_streams(section):
        note += " The mean over kinds of stream, of rounds the last."
    if any(bar.low is not None for bar in made):
        note += " Whiskers: 95 % intervals of the paired differences."
    return Bars("Gain over NoAdapt", note, place(0.0), made, gains=True)


def _plain_bars(section: Section, ranked: dict[str, Figure]) -> Bars:
    name, unit, _ = FIGURES.get(section.figure, (section.figure, "", ""))
    longest = max(figure.mean + (figure.std or 0.0) for figure in ranked.values()) or 1.0
    made = []
    for row, figure in ranked.items():
        low = high = None
        if figure.std is not None:
            low = 100 * max(0.0, figure.mean - figure.std) / longest
            high = 100 * (figure.mean + figure.std) / longest
        words = f"{decimals(figure.mean, section.figure)} {unit}"
        made.append(Bar(named(section, row), words, "", 0.0, 100 * figure.mean / longest, low, high, "plain"))
    note = f"{name[0].upper()}{name[1:]}."
    if any(bar.low is not None for bar in made):
        note += " Whiskers: standard deviation over seeds."
    return Bars("From the best down", note, 0.0, made, gains=False)


def _reach(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis that holds all values and zero."""
    left = min(0.0, *values)
    right = max(0.0, *values)
    if left == right:
        return -1.0, 1.0
    return left, right


def heat(section: Section) -> Heat | None:
    """Return the gain over NoAdapt of each row in each column, the best row first.

    There is none for costs, for learning rates, for one column, or without NoAdapt.
    """
    base = still(section)
    if section.figure not in ACCURACIES or section.axis == "lr" or base is None or len(section.columns) < 2:
        return None
    figures = shown_figures(section)
    columns = section.headings(figures)
    rows = {}
    for row in best_first(section):
        if section.rows[row] != "noadapt":
            rows[named(section, row)] = [_gain(figures[row].get(c), figures[base].get(c)) for c in columns]
    if not rows:
        return None
    if is_streams(section):
        columns = [LAST_ROUND if column == "rounds" else column for column in columns]
    return Heat(base, columns, rows)


def _gain(figure: Figure | None, base: Figure | None) -> float | None:
    if figure is None or base is None:
        return None
    return figure.mean - base.mean


def shade(gain: float) -> str:
    """Return how strongly a gain is coloured, from 0 to 1, as CSS takes it."""
    return f"{min(1.0, abs(gain) / FULL_COLOUR):.2f}"


def card(found: Sequence[Section]) -> Card | None:
    """Return the card of the first section in which a method is compared with NoAdapt; None without one."""
    for section in found:
        base = still(section)
        ranked = levels(section)
        others = [row for row in ranked if row != base and section.rows[row] != "noadapt"]
        compared = section.axis == "domain" or is_streams(section)
        if section.figure in ACCURACIES and compared and base in ranked and others:
            return _card(section, others[0], base, ranked)
    return None


def _card(section: Section, row: str, base: str, ranked: dict[str, Figure]) -> Card:
    gain = ranked[row].mean - ranked[base].mean
    difference = against_still(section).get(row)
    words = ""
    if difference is not None:
        gain = difference.mean
        if difference.low is not None and difference.units >= FEWEST:
            words = f"95 % interval {interval(difference)}"
    return Card(
        section=section.title,
        method=row,
        before=decimals(ranked[base].mean, section.figure),
        after=decimals(ranked[row].mean, section.figure),
        gain=signed(gain, 1),
        gains=gain >= 0,
        interval=words,
        facts=_facts(section, row, base),
        footing=footing_words(section),
    )


def _facts(section: Section, row: str, base: str) -> list[tuple[str, str]]:
    figures = shown_figures(section)
    gains = {
        column: figures[row][column].mean - figures[base][column].mean
        for column in section.columns
        if column in figures[row] and column in figures[base]
    }
    facts = []
    if len(gains) > 1:
        most = max(gains, key=gains.__getitem__)
        least = min(gains, key=gains.__getitem__)
        what = "stream" if is_streams(section) else "domain"
        losses = sum(x < 0 for x in gains.values())
        facts.append((f"largest gain: {_words(most)}", f"{signed(gains[most], 1)} points"))
        facts.append((f"smallest gain: {_words(least)}", f"{signed(gains[least], 1)} points"))
        facts.append(("made worse", f"{losses} of {many(len(gains), what)}"))
    errors = [_mean_error(section, name) for name in (base, row)]
    if None not in errors:
        facts.append(("calibration error (ECE)", f"{errors[0]:.1f} → {errors[1]:.1f} %"))
    return facts


def _words(column: str) -> str:
    return column.replace("_", " ")


def _mean_error(section: Section, row: str) -> float | None:
    known = [r["ece"] for r in section.of(row) if r.get("ece") is not None]
    if not known:
        return None
    return statistics.mean(known)
