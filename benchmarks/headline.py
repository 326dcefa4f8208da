"""The README's figures, from the records of `mgtta bench` and from results/speed.json.

    python benchmarks/headline.py results/imagenet

writes them between their marks in README.md and docs/index.md, at most eight rows a table; all rows into headline.md
beside the records; and docs/headline.svg. A table whose marks are not in the README is only in headline.md. Several
folders can be given: each writes the tables that it has records for.
"""

import json
import statistics
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawing import curves_svg
from pages import between, table

from mgtta._lib.files import atomic
from mgtta.bench.store import Store
from mgtta.report import Figure, Section, sections
from mgtta.report.streams import over_kinds
from mgtta.report.summary import MEAN, best, label, spelled
from mgtta.report.words import footing_words

Record = dict[str, Any]

ROOT = Path(__file__).parent.parent
ROWS = 8  # most of a table in the README
DRAWN = ("mgtta+", "mgtta", "eq7_adam", "eq7_sgd", "roid", "eata", "foa", "tent", "noadapt")
LOOKS = {"mgtta+": "best", "mgtta": "second", "noadapt": "still"}
WINDOW = 5  # batches
OTHERS = {  # title -> what its records have
    "continual": {"experiment": "continual"},
    "mixed": {"experiment": "mixed"},
    "batches of 2": {"experiment": "small-batch", "batch_size": 2},
    "batches of 4": {"experiment": "small-batch", "batch_size": 4},
    "clean images": {"experiment": "variants", "domain": "clean"},
}


@dataclass(frozen=True)
class Ranked:
    """A table whose best row comes first."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def all(self) -> str:
        """Return the table with all its rows."""
        return table(self.head, self.rows)

    def some(self, rest: str) -> str:
        """Return the table with its best rows and NoAdapt, and a link to the rest if there is one."""
        if len(self.rows) <= ROWS:
            return self.all()
        still = [row for row in self.rows if row[0] == "noadapt"]
        first = [row for row in self.rows if row[0] != "noadapt"][: ROWS - len(still)]
        shown = [row for row in self.rows if row in first or row in still]
        more = len(self.rows) - len(shown)
        text = table(self.head, shown)
        if rest:
            text += f"\n\n[All {len(self.rows)} rows]({rest}): {more} more."
        return text


# --- the experiment `streams`


def streams(records: Sequence[Record]) -> list[Ranked]:
    """Return a table of methods and kinds of stream for each footing (model, weights, images) of the records."""
    own = [r for r in records if r["experiment"] == "streams" and r.get("split", "test") == "test"]
    found = sections(own)
    several = len(found) > 1
    return [_streams(section, f"Streams: {footing_words(section)}", several) for section in found]


def _streams(section: Section, title: str, several: bool) -> Ranked:
    accuracy = {row: over_kinds(section, row, "top1") for row in section.rows}
    errors = {row: over_kinds(section, row, "ece") for row in section.rows}
    columns = [MEAN, *section.columns]
    marked = {(row, column) for column in columns for row in best(accuracy, column)}
    names = _row_names(section)
    ranked = sorted(section.rows, key=lambda row: -_level(accuracy[row]))
    rows = []
    for row in ranked:
        cells = [_plus_minus(accuracy[row].get(c), (row, c) in marked) for c in columns]
        ece = errors[row].get(MEAN)
        error = ""
        if ece is not None:
            error = f"{ece.mean:.1f}"
        rows.append([names[row], cells[0], error, *cells[1:]])
    heads = [{"rounds": "rounds (last)"}.get(kind, kind) for kind in section.columns]
    first = "method"
    if several:
        first = str(section.records[0]["protocol"]["model"])
    return Ranked(title, [first, "mean", "ECE", *heads], rows)


def _level(cells: dict[str, Figure]) -> float:
    """Return the mean over kinds, by which rows are sorted; a row that lacks a kind comes last."""
    if MEAN not in cells:
        return -1.0
    return cells[MEAN].mean


def _row_names(section: Section) -> dict[str, str]:
    """Return row -> its method, or the whole name where a method has several rows."""
    methods = list(section.rows.values())
    return {row: spelled(m) if methods.count(m) == 1 else row for row, m in section.rows.items()}


def _plus_minus(figure: Figure | None, bold: bool) -> str:
    if figure is None:
        return ""
    text = f"{figure.mean:.1f}"
    if figure.std is not None:
        text += f" ± {figure.std:.1f}"
    return f"**{text}**" if bold else text


def settings(records: Sequence[Record]) -> str:
    """Return a line for each row of `streams` with the settings it had on all kinds."""
    own = [r for r in records if r["experiment"] == "streams" and r.get("split", "test") == "test"]
    lines = []
    for section in sections(own):
        for row, name in _row_names(section).items():
            given = section.of(row)[0].get("settings") or {}
            words = ", ".join(f"{key} {label(value)}" for key, value in given.items())
            lines.append(f"- {section.records[0]['protocol']['model']}, {name}: {words or 'defaults'}")
    return "\n".join(lines)


# --- the corruptions, and other streams with settings of their own


def by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of the experiment `corruptions` by method."""
    found = defaultdict(list)
    for record in records:
        if record["experiment"] == "corruptions":
            found[spelled(record["method"])].append(record)
    return dict(found)


def mean_over_domains(records: list[Record]) -> dict[int, float]:
    """Return top-1 of each seed, the mean over the corruptions."""
    seeds = sorted({r["seed"] for r in records})
    return {seed: statistics.mean(r["top1"] for r in records if r["seed"] == seed) for seed in seeds}


def gain(records: list[Record], still: list[Record]) -> tuple[float, str]:
    """Return the least gain over `still` on any corruption, in points, and the corruption."""

    def means(found: list[Record]) -> dict[str, float]:
        return {d: statistics.mean(r["top1"] for r in found if r["domain"] == d) for d in {r["domain"] for r in found}}

    before = means(still)
    after = means(records)
    return min((after[d] - before[d], d) for d in after)


def part(records: list[Record], batches: slice) -> float:
    """Return top-1 on some of the batches of full streams."""
    hits, images = (sum(sum(r[key][batches]) for r in records) for key in ("curve", "sizes"))
    return 100 * hits / images


def headline(methods: dict[str, list[Record]]) -> Ranked:
    """Return the table of the 15 corruptions, reset before each."""
    rows = []
    for name, records in methods.items():
        mean, shown = _mean_and_spread(records)
        least, where = gain(records, methods["noadapt"])
        rate = records[0]["settings"].get("lr", "")
        ece = statistics.mean(r["ece"] for r in records)
        worst = "" if name == "noadapt" else f"{least:+.1f} ({where.replace('_', ' ')})".replace("-", "−")
        ends = [f"{part(records, batches):.1f}" for batches in (slice(10), slice(-10, None))]
        rows.append((mean, [name, str(rate), shown, *ends, worst, f"{ece:.1f}"]))
    rows.sort(key=lambda row: -row[0])
    rows[0][1][2] = f"**{rows[0][1][2]}**"
    head = [
        "method",
        "learning rate",
        "top-1, %",
        "first 10 batches",
        "last 10",
        "worst against NoAdapt, points",
        "ECE, %",
    ]
    first = methods["noadapt"][0]
    title = f"{first['protocol']['model']}: 15 corruptions of {first['images']:,} images, reset before each"
    return Ranked(title, head, [cells for _, cells in rows])


def others(records: Iterable[Record]) -> Ranked:
    """Return top-1 on streams that have learning rates of their own, sorted by the first of them."""
    known = list(records)
    columns: dict[str, dict[str, tuple[float, str]]] = {}
    for title, asked in OTHERS.items():
        found = defaultdict(list)
        for r in known:
            if all(r[key] == value for key, value in asked.items()):
                found[spelled(r["method"])].append(r)
        if found:
            columns[title] = {name: _mean_and_spread(its) for name, its in found.items()}
    first = next(iter(columns.values()), {})
    best_of = [max(column.values()) for column in columns.values()]
    rows = []
    for name in sorted(first, key=first.__getitem__, reverse=True):
        cells = [column.get(name, (0.0, "")) for column in columns.values()]
        marked = [f"**{c[1]}**" if c == top else c[1] for c, top in zip(cells, best_of, strict=True)]
        rows.append([name, *marked])
    return Ranked("Other streams, each with its own learning rates", ["method", *columns], rows)


def _mean_and_spread(records: list[Record]) -> tuple[float, str]:
    scores = list(mean_over_domains(records).values())
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return statistics.mean(scores), f"{statistics.mean(scores):.1f}{spread}"


def speed() -> str:
    """Return a sentence on the cost of a step of ViT-B on a GPU."""
    steps = json.loads((ROOT / "results" / "speed.json").read_text())
    [part] = [part for key, part in steps.items() if key.startswith("step vit_base") and part["gpu"]]
    rows = {(row["name"], row["precision"]): row for row in part["rows"]}
    fast = rows["MGTTA", "bf16"]
    exact = rows["MGTTA", "fp32"]
    low = rows["MGTTA, low memory", "bf16"]
    seconds = fast["seconds"]
    batch = part["batch"]
    words = [
        f"On an {part['where'].removeprefix('NVIDIA ')}, MGTTA takes {1e3 * seconds:.1f} ms for {batch} images with",
        f"ViT-B/16 in bfloat16: {seconds / rows['NoAdapt', 'bf16']['seconds']:.2f} times the forward pass alone,",
        f"50,000 images in {seconds * 50000 / batch:.1f} s, in {fast['peak'] / 1e6:,.0f} MB",
        f"({low['peak'] / 1e6:,.0f} MB at {low['seconds'] / seconds:.2f} times the time).",
        f"With gradients in 8 bits it takes {1e3 * rows['MGTTA', 'fp8']['seconds']:.1f} ms, in exact float32",
        f"{1e3 * exact['seconds']:.0f} ms.",
    ]
    more = [part for key, part in steps.items() if key.startswith("plus vit_base") and part["gpu"]]
    found = {row["name"]: row for part in more for row in part["rows"] if "seconds" in row}
    plus = found.get("MGTTA+")
    alone = found.get("MGTTA+ without twins")
    if plus and alone:
        words += [
            f"MGTTA+ takes {1e3 * plus['seconds']:.1f} ms, and without mirrored twins {1e3 * alone['seconds']:.1f} ms.",
        ]
    words.append("[Speed](docs/speed.md) says how, and [results/speed.md](results/speed.md) how it was measured.")
    return textwrap.fill(" ".join(words), 120)


# --- the picture


def curve(records: list[Record]) -> list[float]:
    """Return accuracy in windows of batches, the mean over corruptions and seeds."""
    full = [r for r in records if len(r["curve"]) > WINDOW]
    length = min(len(r["curve"]) for r in full)
    hits = [sum(r["curve"][i] for r in full) for i in range(length)]
    images = [sum(r["sizes"][i] for r in full) for i in range(length)]
    starts = range(length - WINDOW + 1)
    return [100 * sum(hits[i : i + WINDOW]) / sum(images[i : i + WINDOW]) for i in starts]


def picture(methods: dict[str, list[Record]]) -> str:
    """Return the curves of some methods as an SVG."""
    return curves_svg(
        {name: curve(methods[name]) for name in DRAWN if name in methods},
        LOOKS,
        WINDOW,
        "15 corruptions at severity 5, reset before each, mean over seeds",
        f"batches of 64 seen (windows of {WINDOW})",
        "accuracy, %",
    )


# --- the pages


def tables(records: Sequence[Record]) -> dict[str, list[Ranked]]:
    """Return mark -> the tables between its marks, in the order of headline.md; without those that have no rows."""
    corruptions = by_method(records)
    found = {"streams": streams(records), "headline": [], "others": [others(records)]}
    if corruptions:
        found["headline"] = [headline(corruptions)]
    filled = {mark: [one for one in ranked if one.rows] for mark, ranked in found.items()}
    return {mark: ranked for mark, ranked in filled.items() if ranked}


def in_readme(records: Sequence[Record], rest: str) -> dict[str, str]:
    """Return mark -> the text between its marks in the README.

    Args:
        rest: the README's link to headline.md.
    """
    return {mark: "\n\n".join(one.some(rest) for one in ranked) for mark, ranked in tables(records).items()}


def all_rows(records: Sequence[Record], command: str) -> str:
    """Return headline.md: every table with all its rows."""
    parts = ["# All rows of the README's tables", "Written from the records by", f"    {command}"]
    for mark, ranked in tables(records).items():
        for one in ranked:
            parts += [f"## {one.title}", one.all()]
        if mark == "streams":
            parts += [
                "Accuracy in percent ± standard deviation over seeds; ECE, expected calibration error, is the mean\n"
                "over kinds. `rounds (last)` shows the last round, and the mean counts it as one kind. Settings:",
                settings(records),
            ]
    return "\n\n".join(parts) + "\n"


def in_docs(records: Sequence[Record], folder: str) -> str:
    """Return the first table that the records fill, for the first page of the site."""
    [first, *_] = [one for ranked in tables(records).values() for one in ranked]
    sentence = f"Figures from `{folder}/records.jsonl`, which hold their protocol; all rows are in `headline.md` there."
    return f"**{first.title}**\n\n{first.some('')}\n\n{sentence}"


def written(page: str, texts: dict[str, str]) -> str:
    """Return the page with the texts between their marks, if it has these."""
    for mark, text in texts.items():
        if f"<!-- {mark}:start -->" in page:
            page = between(page, mark, text)
    return page


def write(folder: Path) -> None:
    """Write headline.md beside the records, the tables into README and docs/index.md, and docs/headline.svg."""
    records = Store(folder).records()
    name = f"results/{folder.name}"
    corruptions = by_method(records)
    files = {folder / "headline.md": all_rows(records, f"python benchmarks/headline.py {name}")}
    if corruptions:
        files[ROOT / "docs" / "headline.svg"] = picture(corruptions)
    texts = {**in_readme(records, f"{name}/headline.md"), "speed": speed(), "numbers": in_docs(records, name)}
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        files[page] = written(page.read_text(), texts)
    for path, text in files.items():
        with atomic(path) as temporary:
            temporary.write_text(text)


def main() -> None:
    for name in sys.argv[1:]:
        write(Path(name))
        print(f"{name}/headline.md")


if __name__ == "__main__":
    main()
