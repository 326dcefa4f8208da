"""What a section found, in words, and figures as they are printed."""

from collections.abc import Iterable, Sequence
from typing import Any

from mgtta.report.alarms import guard_words
from mgtta.report.paired import Difference, differences
from mgtta.report.summary import DIGITS, LOWER_IS_BETTER, MEAN, Figure, Record, Section, images_of, label, unique

FEWEST = 5  # domains, or seeds of one, for an interval that is worth a sentence
# figure -> its name, its unit, and the best of it
FIGURES = {
    "top1": ("accuracy in percent", "%", "is highest with"),
    "remaining": ("accuracy in percent on the images left", "%", "is highest with"),
    "milliseconds": ("milliseconds an image, to predict and to adapt", "ms an image", "is fastest with"),
    "megabytes": ("megabytes at most, on the GPU or, without one, of the process", "MB", "needs least memory with"),
}

SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "defocus_blur": "defoc",
    "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "brightness": "brit", "contrast": "contr",
    "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg", "seconds": "seconds for 50,000",
}  # fmt: skip


def footing_words(section: Section) -> str:
    """Model, data, images, batch and seeds of a section in one line."""
    records = section.records
    protocol = records[0].get("protocol") or {}

    def span(values: Iterable[Any]) -> str:
        found = sorted({v for v in values if v is not None})
        return f"{found[0]:,} to {found[-1]:,}" if len(found) > 1 else f"{found[0]:,}" if found else "unknown"

    data = ", ".join(unique(map(images_of, records)))
    seeds = len({record["seed"] for record in records})
    of_each = "" if len(section.domains) == 1 else f" of each {'visit' if section.visits else 'domain'}"
    visits = f" in {section.visits} visits" if section.visits else ""
    return (
        f"{protocol.get('model')} (weights {str(protocol.get('weights'))[:8]}) on {data}; "
        f"{many(len(section.domains), 'domain')}{visits}, "
        f"{span(r['images'] for r in records)} images{of_each}, severity {span(r.get('severity') for r in records)}, "
        f"batch {span(r.get('batch_size') for r in records)}, {many(seeds, 'seed')}"
    )


def headline(section: Section) -> list[str]:
    """What a section found, in sentences."""
    figures = section.figures()
    if not any(figures.values()):
        unknown = "No labels: accuracy is not known." if section.figure in ("top1", "remaining") else "Not measured."
        return [unknown]
    if section.axis != "domain":
        return [_best_column(section, figures)]
    column = MEAN if any(MEAN in cells for cells in figures.values()) else section.columns[0]
    ranked = {row: cells[column] for row, cells in figures.items() if column in cells}
    if not ranked:
        return ["No method has finished all domains yet."]
    where = f"on average over {len(section.domains)} domains" if column == MEAN else f"on {column}"
    top, found = _top(section, ranked)
    if len(ranked) == 1:
        words = [f"{top[0]} has {with_unit(section, found)} {where}."]
    elif len(top) > 1:
        better = "lower" if section.figure in LOWER_IS_BETTER else "higher"
        alike = f"{number(section, found.mean)} {unit(section)}"
        words = [f"{_and(top)} are alike at {alike} {where}, and none is {better}."]
    else:
        words = [f"{top[0]} {FIGURES[section.figure][2]} {with_unit(section, found)} {where}."]
    if len(ranked) < len(figures):
        words.append(f"{many(len(figures) - len(ranked), 'method')} of {len(figures)} not finished on all domains.")
    words += [sentence(d) for d in differences(section) if d.row in top and section.rows[d.against] == "noadapt"]
    return words


def _best_column(section: Section, figures: dict[str, dict[str, Figure]]) -> str:
    """Which row is best, and in which columns, where they are not domains."""
    columns = {row: _top(section, cells) for row, cells in figures.items() if cells}  # row -> its best columns
    top, found = _top(section, {row: f for row, (_, f) in columns.items()})
    if len(top) > 1:
        return f"The highest figures of {_and(top)} are alike, {number(section, found.mean)} {unit(section)}."
    where, there = sorted(columns[top[0]][0], key=section.columns.index), figures[top[0]]
    alike = 1 < len(where) == len(there)
    place = (
        f", whatever the {section.axis_name}" if alike else f" ({section.axis_name}: {', '.join(map(short, where))})"
    )
    if len(columns) > 1:
        return f"{top[0]} is highest with {with_unit(section, found)}{place}."
    return f"{top[0]} has {with_unit(section, found)}{' at most' if len(there) > len(where) else ''}{place}."


def _top(section: Section, figures: dict[str, Figure]) -> tuple[list[str], Figure]:
    """Who is best, alike as printed, and the best figure."""
    choose = min if section.figure in LOWER_IS_BETTER else max
    found = choose(figures.values(), key=lambda f: f.mean)
    return [name for name, f in figures.items() if number(section, f.mean) == number(section, found.mean)], found


def notes(section: Section) -> str:
    """What a reader of the table must know."""
    words = [figure_words(section.figure)]
    if section.axis != "domain":
        by = f"by {section.axis_name}"
        of = "all visits of the domains" if section.visits else "domains"
        words.append(f"mean over {of}, {by}" if len(section.domains) > 1 else by)
    if any(f.std is not None for cells in section.figures().values() for f in cells.values()):
        words.append("± standard deviation over seeds")
    text = ", ".join(words)
    text = text[0].upper() + text[1:] + "."
    columns = section.headings(section.figures())
    if any(column not in cells for cells in section.figures().values() for column in columns):
        text += " –: not run, not finished on all domains, or without labels."
    if section.repeated:
        text += f" {many(section.repeated, 'record')} that repeat others' work are left out."
    return text + rates(section) + guard_words(section.records)


def rates(section: Section) -> str:
    """The learning rates that a sweep chose, in a sentence after a space; empty where it chose none."""
    words = []
    for row in section.rows:
        columns: dict[str, list[str]] = {}  # rate -> where
        for record in chosen(section.of(row)):
            columns.setdefault(label(record["settings"]["lr"]), []).append(short(section.column(record)))
        own = [
            r if len(columns) == 1 else f"{r} ({section.axis_name} {', '.join(unique(c))})" for r, c in columns.items()
        ]
        words += [f"{row} {' and '.join(own)}"] if own else []
    if not words:
        return ""
    several = len(words) > 1
    return (
        f" Learning rate{'s' if several else ''}: {', '.join(words)}, "
        f"{'each ' if several else ''}chosen from {tried(section.records)}."
    )


def chosen(records: Iterable[Record]) -> list[Record]:
    """Those whose learning rate was chosen from several."""
    return [r for r in records if r.get("chosen_from") and (r.get("settings") or {}).get("lr") is not None]


def tried(records: Iterable[Record]) -> str:
    """How many learning rates were tried for each."""
    return " or ".join(str(n) for n in sorted({len(r["chosen_from"]) for r in chosen(records)}))


def bold(section: Section) -> str:
    """What is marked in the table."""
    return "Bold: the best of a row." if section.axis == "lr" else "Bold: the best of a column, unless all are alike."


def sentence(d: Difference) -> str:
    if abs(d.mean) < 0.005:
        far = f"{d.row} lies less than 0.01 points from {d.against}"
    else:
        far = f"{d.row} lies {abs(d.mean):.2f} points {'above' if d.mean > 0 else 'below'} {d.against}"
    if d.low is None or d.high is None or d.units < FEWEST:
        return f"{far}; {'one pair is' if d.pairs == 1 else 'these pairs are'} too few for a confidence interval."
    sure = "" if d.low > 0 or d.high < 0 else ": these records cannot tell it from no difference"
    return f"{far} (95 % confidence interval {signed(d.low)} to {signed(d.high)}){sure}."


def figure_words(figure: str) -> str:
    return FIGURES.get(figure, (figure, "", ""))[0]


def unit(section: Section) -> str:
    return FIGURES[section.figure][1]


def number(section: Section, x: float) -> str:
    return decimals(x, section.figure)


def with_unit(section: Section, f: Figure) -> str:
    spread = "" if f.std is None else f" ± {number(section, f.std)}"
    return f"{number(section, f.mean)}{spread} {unit(section)}"


def decimals(x: float, figure: str) -> str:
    """A figure with as many digits as are worth printing."""
    return f"{x:,.{DIGITS.get(figure, 1)}f}"


def signed(x: float) -> str:
    text = f"{x:+.2f}"
    return text.replace("-", "−") if float(text) else "0.00"


def interval(d: Difference) -> str:
    return "–" if d.low is None or d.high is None else f"{signed(d.low)} to {signed(d.high)}"


def printed(x: float | None) -> str:
    """A published figure as the paper prints it."""
    return "–" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.1f}"


def many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def short(column: str) -> str:
    return SHORT.get(column, "∞" if column == "inf" else column)
