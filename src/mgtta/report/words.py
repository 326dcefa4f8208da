"""What a table does not say by itself: its footing, its notes and its best row; and figures as they are printed."""

from collections.abc import Iterable
from typing import Any

from mgtta.report.alarms import guard_words
from mgtta.report.paired import Difference, differences
from mgtta.report.streams import is_streams, left_out, over_kinds
from mgtta.report.summary import DIGITS, LOWER_IS_BETTER, MEAN, Figure, Record, Section, images_of, label, unique

EDGE = "†"  # marks rows whose learning rate was chosen at an edge
FEWEST = 5  # domains, or seeds of one domain, for an interval in a headline
# figure -> its name, its unit, and the word for the best of it
FIGURES = {
    "top1": ("accuracy in percent", "%", "Highest"),
    "remaining": ("accuracy in percent on the images left", "%", "Highest"),
    "milliseconds": ("milliseconds per image, to predict and to adapt", "ms per image", "Fastest"),
    "megabytes": ("peak megabytes, of the GPU or, without one, of the process", "MB", "Least memory"),
}

SHORT = {
    "gaussian_noise": "gauss",
    "shot_noise": "shot",
    "impulse_noise": "impul",
    "defocus_blur": "defoc",
    "glass_blur": "glass",
    "motion_blur": "motion",
    "zoom_blur": "zoom",
    "brightness": "brit",
    "contrast": "contr",
    "elastic_transform": "elast",
    "pixelate": "pixel",
    "jpeg_compression": "jpeg",
    "seconds": "seconds for 50,000",
    "inf": "∞",
}


def footing_words(section: Section) -> str:
    """Return model, data, images, batch and seeds of a section in one line."""
    records = section.records
    protocol = records[0].get("protocol") or {}
    data = ", ".join(unique(map(images_of, records)))
    domains = many(len(section.domains), "domain")
    if is_streams(section):
        domains = f"{section.axis_name}: {', '.join(section.columns)}"
    images = f"{_span(r['images'] for r in records)} images"
    if section.visits:
        domains += f" in {section.visits} visits"
    if len(section.domains) > 1:
        images += " per visit" if section.visits else " per domain"
    return (
        f"{protocol.get('model')} (weights {str(protocol.get('weights'))[:8]}) on {data}; {domains}, {images}, "
        f"severity {_span(r.get('severity') for r in records)}, batch {_span(r.get('batch_size') for r in records)}, "
        f"{many(len({record['seed'] for record in records}), 'seed')}"
    )


def _span(values: Iterable[Any]) -> str:
    found = sorted({v for v in values if v is not None})
    if not found:
        return "unknown"
    if len(found) == 1:
        return f"{found[0]:,}"
    return f"{found[0]:,} to {found[-1]:,}"


def headline(section: Section) -> list[str]:
    """Return the best rows of a section and, where rows are compared, how far they lie from NoAdapt."""
    figures = section.figures()
    if not any(figures.values()):
        if section.figure in ("top1", "remaining"):
            return ["No labels: accuracy is not known."]
        return ["Not measured."]
    if is_streams(section):
        return [_best_of_kinds(section)]
    if section.axis != "domain":
        return [_best_column(section, figures)]
    column = section.columns[0]
    where = f"on {column}"
    if any(MEAN in cells for cells in figures.values()):
        column = MEAN
        where = f"on average over {len(section.domains)} domains"
    ranked = {row: cells[column] for row, cells in figures.items() if column in cells}
    if not ranked:
        return ["No method has finished all domains yet."]
    top, found = _top(section, ranked)
    words = [f"{_best(section, top, found)} {where}."]
    if len(ranked) < len(figures):
        words.append(f"{many(len(figures) - len(ranked), 'method')} of {len(figures)} not finished on all domains.")
    words += [sentence(d) for d in differences(section) if d.row in top and section.rows[d.against] == "noadapt"]
    return words


def _best_column(section: Section, figures: dict[str, dict[str, Figure]]) -> str:
    """Return which rows are best, and in which columns, where these are not domains."""
    columns = {row: _top(section, cells) for row, cells in figures.items() if cells}  # row -> its best columns
    top, found = _top(section, {row: figure for row, (_, figure) in columns.items()})
    there = {column for row in top for column in columns[row][0]}
    names = ", ".join(short(column) for column in section.columns if column in there)
    return f"{_best(section, top, found)} ({section.axis_name}: {names})."


def _best_of_kinds(section: Section) -> str:
    """Return the rows with the highest mean over the kinds of stream, of those that ran all kinds."""
    by_kind = {row: over_kinds(section, row, section.figure) for row in section.rows}
    means = {row: cells[MEAN] for row, cells in by_kind.items() if MEAN in cells}
    if not means:
        return "No method has finished all kinds of stream yet."
    top, found = _top(section, means)
    return f"{_best(section, top, found)} on average over {len(section.columns)} kinds of stream."


def _top(section: Section, figures: dict[str, Figure]) -> tuple[list[str], Figure]:
    """Return the names of the best, all that are printed alike, and the best figure."""
    choose = min if section.figure in LOWER_IS_BETTER else max
    found = choose(figures.values(), key=lambda figure: figure.mean)
    printed_best = decimals(found.mean, section.figure)
    return [name for name, figure in figures.items() if decimals(figure.mean, section.figure) == printed_best], found


def _best(section: Section, names: list[str], found: Figure) -> str:
    _, unit, word = FIGURES[section.figure]
    figure = decimals(found.mean, section.figure)
    if found.std is not None and len(names) == 1:
        figure += f" ± {decimals(found.std, section.figure)}"
    return f"{word}: {' and '.join(names)}, {figure} {unit}"


def sentence(d: Difference) -> str:
    """Return a difference in words; without an interval where it is over too few domains or seeds."""
    words = f"{d.row} against {d.against}: {signed(d.mean)} points"
    if d.low is None or d.high is None or d.units < FEWEST:
        return f"{words}, too few pairs for a 95 % interval."
    words += f", 95 % interval {interval(d)}"
    if d.low <= 0 <= d.high:
        words += ": no clear difference"
    return f"{words}."


def notes(section: Section) -> str:
    """Return what a reader of the table must know."""
    figures = section.figures()
    words = [figure_words(section.figure)]
    if section.axis != "domain":
        if len(section.domains) > 1:
            words.append("mean over all visits of the domains" if section.visits else "mean over domains")
        words.append(f"by {section.axis_name}")
    if any(figure.std is not None for cells in figures.values() for figure in cells.values()):
        words.append("± standard deviation over seeds")
    text = ", ".join(words)
    text = text[0].upper() + text[1:] + "."
    if any(column not in cells for cells in figures.values() for column in section.headings(figures)):
        text += " –: not run, not finished on all domains, or without labels."
    if section.repeated:
        text += f" {many(section.repeated, 'record')} that repeat others' work are left out."
    return text + rates(section) + left_out(section) + guard_words(section.records)


def rates(section: Section) -> str:
    """Return the learning rates that a sweep chose, in a sentence after a space; empty where it chose none."""
    words = []
    for row in section.rows:
        columns: dict[str, list[str]] = {}  # rate -> where
        for record in chosen(section.of(row)):
            columns.setdefault(label(record["settings"]["lr"]), []).append(short(section.column(record)))
        own = list(columns)
        if len(columns) > 1:
            own = [f"{rate} ({section.axis_name} {', '.join(unique(where))})" for rate, where in columns.items()]
        if own:
            words.append(f"{row} {' and '.join(own)}")
    if not words:
        return ""
    text = f" Learning rates, each chosen from {tried(section.records)}: {', '.join(words)}."
    if any(at_edge(record) for record in chosen(section.records)):
        text += f" {EDGE}: chosen at an edge of the tried rates, so that a rate beyond it may do better."
    return text


def chosen(records: Iterable[Record]) -> list[Record]:
    """Return the records whose learning rate was chosen from several."""
    return [r for r in records if r.get("chosen_from") and (r.get("settings") or {}).get("lr") is not None]


def at_edge(record: Record) -> bool:
    """Return whether the record's learning rate is the first or the last of those it was chosen from."""
    grid = record.get("chosen_from") or ()
    return len(grid) > 1 and record["settings"].get("lr") in (min(grid), max(grid))


def named(section: Section, row: str) -> str:
    """Return the row's name, with a dagger if one of its learning rates is at an edge of its grid."""
    if any(at_edge(record) for record in chosen(section.of(row))):
        return f"{row} {EDGE}"
    return row


def tried(records: Iterable[Record]) -> str:
    """Return how many learning rates were tried for each."""
    return " or ".join(str(n) for n in sorted({len(r["chosen_from"]) for r in chosen(records)}))


def bold(section: Section) -> str:
    """Return what is marked in the table."""
    if section.axis == "lr":
        return "Bold: the best of a row."
    return "Bold: the best of a column, unless all are alike."


def figure_words(figure: str) -> str:
    """Return the name of a figure."""
    return FIGURES.get(figure, (figure, "", ""))[0]


def decimals(x: float, figure: str) -> str:
    """Return a figure with as many digits as are worth printing."""
    return f"{x:,.{DIGITS.get(figure, 1)}f}"


def signed(x: float, digits: int = 2) -> str:
    """Return a difference with its sign."""
    text = f"{x:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", "−")


def interval(d: Difference) -> str:
    """Return a confidence interval."""
    if d.low is None or d.high is None:
        return "–"
    return f"{signed(d.low)} to {signed(d.high)}"


def printed(x: float | None) -> str:
    """Return a published figure as the paper prints it."""
    if x is None:
        return "–"
    if isinstance(x, int):
        return f"{x:,}"
    return f"{x:.1f}"


def many(n: int, what: str) -> str:
    """Return a number of things."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def short(column: str) -> str:
    """Return a column's heading."""
    return SHORT.get(column, column)
