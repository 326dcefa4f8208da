"""What a section found, in words, and figures as they are printed."""

from collections.abc import Iterable, Sequence
from typing import Any

from mgtta.alarms import guard_words
from mgtta.report.paired import Difference, differences
from mgtta.report.summary import MEAN, Figure, Section, unique

SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "defocus_blur": "defoc",
    "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "brightness": "brit", "contrast": "contr",
    "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip


def footing_words(section: Section) -> str:
    """Model, data, images, batch and seeds of a section in one line."""
    records = section.records
    protocol = records[0].get("protocol") or {}

    def span(values: Iterable[Any]) -> str:
        found = sorted({v for v in values if v is not None})
        return f"{found[0]:,} to {found[-1]:,}" if len(found) > 1 else f"{found[0]:,}" if found else "unknown"

    data = ", ".join(unique(str((r.get("protocol") or {}).get("data")) for r in records))
    seeds = len({record["seed"] for record in records})
    of_each = "" if len(section.domains) == 1 else " of each domain"
    return (
        f"{protocol.get('model')} (weights {str(protocol.get('weights'))[:8]}) on {data}; "
        f"{many(len(section.domains), 'domain')}, "
        f"{span(r['images'] for r in records)} images{of_each}, severity {span(r.get('severity') for r in records)}, "
        f"batch {span(r.get('batch_size') for r in records)}, {many(seeds, 'seed')}"
    )


def headline(section: Section) -> list[str]:
    """What a section found, in sentences."""
    figures = section.figures()
    if not any(figures.values()):
        return ["No labels: accuracy is not known."]
    if section.axis != "domain":
        tops = {
            row: max(cells.items(), key=lambda kv: kv[1].mean) for row, cells in figures.items() if cells
        }  # row -> (column, figure)
        row = max(tops, key=lambda r: tops[r][1].mean)
        alike = [r for r in tops if f"{tops[r][1].mean:.1f}" == f"{tops[row][1].mean:.1f}"]
        if len(alike) > 1:
            return [f"The highest figures of {_and(alike)} are alike, {tops[row][1].mean:.1f} %."]
        where = f"{section.axis_name}: {short(tops[row][0])}"
        return [f"{row} is highest with {percent(tops[row][1])} ({where})."]
    column = MEAN if any(MEAN in cells for cells in figures.values()) else section.columns[0]
    ranked = sorted(
        ((cells[column], row) for row, cells in figures.items() if column in cells), key=lambda fr: -fr[0].mean
    )
    if not ranked:
        return ["No method has finished all domains yet."]
    where = f"on average over {len(section.domains)} domains" if column == MEAN else f"on {column}"
    top = [row for f, row in ranked if f"{f.mean:.1f}" == f"{ranked[0][0].mean:.1f}"]
    if len(ranked) == 1:
        words = [f"{top[0]} has {percent(ranked[0][0])} {where}."]
    elif len(top) > 1:
        words = [f"{_and(top)} are alike at {ranked[0][0].mean:.1f} % {where}, and none is higher."]
    else:
        words = [f"{top[0]} is highest with {percent(ranked[0][0])} {where}."]
    if len(ranked) < len(figures):
        words.append(f"{many(len(figures) - len(ranked), 'method')} of {len(figures)} not finished on all domains.")
    words += [sentence(d) for d in differences(section) if d.row in top and section.rows[d.against] == "noadapt"]
    return words


def notes(section: Section) -> str:
    """What a reader of the table must know."""
    words = ["Accuracy in percent" + (" on the images left" if section.figure == "remaining" else "")]
    if section.axis != "domain":
        by = f"by {section.axis_name}"
        words.append(f"mean over domains, {by}" if len(section.domains) > 1 else by)
    if any(f.std is not None for cells in section.figures().values() for f in cells.values()):
        words.append("± standard deviation over seeds")
    text = ", ".join(words) + "."
    columns = section.headings(section.figures())
    if any(column not in cells for cells in section.figures().values() for column in columns):
        text += " –: not run, not finished on all domains, or without labels."
    if section.repeated:
        text += f" {many(section.repeated, 'record')} that repeat others' work are left out."
    return text + guard_words(section.records)


def sentence(d: Difference) -> str:
    if abs(d.mean) < 0.005:
        far = f"{d.row} lies less than 0.01 points from {d.against}"
    else:
        far = f"{d.row} lies {abs(d.mean):.2f} points {'above' if d.mean > 0 else 'below'} {d.against}"
    if d.low is None or d.high is None:
        return f"{far}; one pair gives no confidence interval."
    sure = "" if d.low > 0 or d.high < 0 else ": these records cannot tell it from no difference"
    return f"{far} (95 % confidence interval {signed(d.low)} to {signed(d.high)}){sure}."


def percent(f: Figure) -> str:
    return f"{f.mean:.1f} %" if f.std is None else f"{f.mean:.1f} ± {f.std:.1f} %"


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
