"""The README's figures, from results/streams.jsonl and results/speed.json.

    python benchmarks/headline.py                      # after benchmarks/streams.py or benchmarks/speed.py
    python benchmarks/headline.py results/imagenet     # also headline.md in that folder

Both write the table of gains, the table of streams (at most eight rows, the best first) and the cost between
their marks in README.md and docs/index.md. With folders of records of `mgtta bench`, headline.md there has all tables
with all rows; a table is also written to the README if that has its marks.
"""

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import between, read_lines, table

from mgtta._lib.files import atomic
from mgtta.bench.store import Store
from mgtta.report import Figure, Section, sections
from mgtta.report.streams import over_kinds
from mgtta.report.summary import MEAN, best, label, spelled
from mgtta.report.words import EDGE, at_edge, chosen, footing_words

Record = dict[str, Any]

ROOT = Path(__file__).parent.parent
ROWS = 8  # most of a table in the README
STREAMS_PAGE = "results/streams.md"  # has all rows of the table of streams
KIND_WORDS = {  # kind of stream -> what it is; the first one is the headline
    "continual": "15 corruptions one after another, never reset",
    "reset": "the same, reset before each",
    "rounds": "the same ten times, the last round",
    "mixed": "all corruptions mixed",
    "one": "one after another, image by image",
    "labels": "one after another, sorted by class",
    "gradual": "severity rising and falling",
    "clean": "clean images",
}
OTHERS = {  # title -> experiment, and column; None: the mean, or the only one
    "continual": ("continual", None),
    "mixed": ("mixed", None),
    "batches of 2": ("small-batch", "2"),
    "batches of 4": ("small-batch", "4"),
    "clean images": ("variants", "clean"),
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
    found = sections(_of_streams(records))
    several = len(found) > 1
    return [_streams(section, f"Streams: {footing_words(section)}", several) for section in found]


def _of_streams(records: Sequence[Record]) -> list[Record]:
    """Return the records of the experiment, of the kinds of stream that mgtta+ has run, if it has run any."""
    own = [r for r in records if r["experiment"] == "streams" and r.get("split", "test") == "test"]
    kinds = {r["kind"] for r in own if r["method"] == "mgtta_plus"}
    return [r for r in own if not kinds or r["kind"] in kinds]


def _streams(section: Section, title: str, several: bool) -> Ranked:
    accuracy = {row: over_kinds(section, row, "top1") for row in section.rows}
    errors = {row: over_kinds(section, row, "ece") for row in section.rows}
    columns = [MEAN, *section.columns]
    marked = {(row, column) for column in columns for row in best(accuracy, column)}
    names = _row_names(section)
    ranked = _ranked(accuracy, columns)
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


def _ranked(accuracy: dict[str, dict[str, Figure]], columns: Sequence[str]) -> list[str]:
    """Return the rows, the best first: by the mean, or, where rows lack it, by the first column that most rows have."""
    known = {column: sum(column in cells for cells in accuracy.values()) for column in columns}
    by = max(columns, key=known.__getitem__)
    last = Figure.of([-math.inf])
    return sorted(accuracy, key=lambda row: -accuracy[row].get(by, last).mean)


def gain(records: Sequence[Record]) -> str:
    """Return a table of what mgtta+ gains on each kind of stream, and Adam in the generator's place; and a caption."""
    [section] = sections(_of_streams(records))
    rows = {method: over_kinds(section, row, "top1") for row, method in section.rows.items()}
    found = [rows.get(name, {}) for name in ("noadapt", "mgtta_plus", "plus_adam")]
    kinds = [kind for kind in KIND_WORDS if all(kind in cells for cells in found[:2])]
    lines = [
        [KIND_WORDS[kind], *(_plus_minus(cells.get(kind), cells is found[1]) for cells in found)] for kind in kinds
    ]
    seeds = len({r["seed"] for r in section.records if r["kind"] == kinds[0] and r["method"] == "mgtta_plus"})
    caption = (
        "*Top-1 in percent, DeiT-Tiny on ImageNet images at severity 5; `plus_adam` has Adam in place of the learned\n"
        f"optimizer; {seeds} orders of the images where there is a spread. All methods: [streams]({STREAMS_PAGE}).*"
    )
    return table(["stream", "without", "`mgtta+`", "`plus_adam`"], lines, right=True) + f"\n\n{caption}"


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
    lines = []
    for section in sections(_of_streams(records)):
        for row, name in _row_names(section).items():
            given = section.of(row)[0].get("settings") or {}
            words = ", ".join(f"{key} {label(value)}" for key, value in given.items())
            lines.append(f"- {section.records[0]['protocol']['model']}, {name}: {words or 'defaults'}")
    return "\n".join(lines)


# --- the experiments of `mgtta bench`, each method with settings chosen for the experiment


def of_experiment(records: Iterable[Record], name: str) -> list[Section]:
    """Return the sections of an experiment on test images, the one with most images first."""
    found = sections(r for r in records if r["experiment"] == name and r.get("split", "test") == "test")
    return sorted(found, key=lambda section: -section.records[0]["images"])


def with_most_images(found: Sequence[Section]) -> list[Section]:
    """Return the sections that have as many images as the first one."""
    return [section for section in found if section.records[0]["images"] == found[0].records[0]["images"]]


def headline(section: Section) -> Ranked:
    """Return the table of the 15 corruptions, reset before each."""
    figures = section.figures()
    errors = section.figures("ece")
    names = _row_names(section)
    finished = [row for row in figures if MEAN in figures[row]]
    top = best({row: figures[row] for row in finished}, MEAN)
    rows = []
    for row in sorted(finished, key=lambda row: -figures[row][MEAN].mean):
        own = section.of(row)
        halves = [f"{part(own, first):.1f}" for first in (True, False)]
        worst = ""
        if names[row] != "noadapt":
            worst = _least_gain(figures[row], figures["noadapt"])
        mean = _plus_minus(figures[row][MEAN], row in top)
        rows.append([names[row], _rates(own), mean, *halves, worst, f"{errors[row][MEAN].mean:.1f}"])
    head = [
        "method",
        "learning rate",
        "top-1, %",
        "first half of batches",
        "second half",
        "worst against NoAdapt, points",
        "ECE, %",
    ]
    first = section.records[0]
    title = f"{first['protocol']['model']}: 15 corruptions of {first['images']:,} images, reset before each"
    return Ranked(title, head, rows)


def _least_gain(cells: dict[str, Figure], still: dict[str, Figure]) -> str:
    """Return the least gain on any corruption, in points, and the corruption."""
    least, where = min((cells[c].mean - still[c].mean, c) for c in cells if c != MEAN)
    return f"{least:+.1f} ({where.replace('_', ' ')})".replace("-", "−")


def _rates(records: Sequence[Record]) -> str:
    """Return the learning rate of a row, marked if it is at an edge of those that were tried."""
    rates = sorted({r["settings"]["lr"] for r in records if "lr" in r["settings"]})
    text = ", ".join(label(rate) for rate in rates)
    if any(map(at_edge, chosen(records))):
        text += f" {EDGE}"
    return text


def part(records: Sequence[Record], first: bool) -> float:
    """Return top-1 on the first or on the second half of the batches of each record."""
    hits = images = 0
    for r in records:
        half = len(r["curve"]) // 2
        batches = slice(half) if first else slice(half, None)
        hits += sum(r["curve"][batches])
        images += sum(r["sizes"][batches])
    return 100 * hits / images


def others(records: Sequence[Record]) -> Ranked:
    """Return top-1 on other streams, in each the methods with most images, sorted by the first stream."""
    columns: dict[str, dict[str, str]] = {}
    order: list[str] = []
    for title, (experiment, column) in OTHERS.items():
        found = of_experiment(records, experiment)
        if not found or column not in (None, *found[0].columns):
            continue
        section = found[0]
        figures = section.figures()
        name = column or section.headings(figures)[-1]
        top = best(figures, name)
        names = _row_names(section)
        ranked = sorted((row for row in figures if name in figures[row]), key=lambda row: -figures[row][name].mean)
        columns[title] = {names[row]: _marked(section, row, name, figures[row][name], row in top) for row in ranked}
        order += [names[row] for row in ranked if names[row] not in order]
    rows = [[name, *(cells.get(name, "") for cells in columns.values())] for name in order]
    return Ranked("Other streams, each with its own learning rates", ["method", *columns], rows)


def _marked(section: Section, row: str, column: str, figure: Figure, bold: bool) -> str:
    """Return a figure, with a dagger if its learning rate is at an edge of those that were tried."""
    own = [r for r in section.of(row) if column in (section.column(r), MEAN)]
    text = _plus_minus(figure, bold)
    if any(map(at_edge, chosen(own))):
        text += f" {EDGE}"
    return text


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


def cost() -> str:
    """Return what a step of each learned method costs, as a multiple of predicting, on a GPU and on a CPU."""
    steps = json.loads((ROOT / "results" / "speed.json").read_text())
    on_gpu = {key: part for key, part in steps.items() if part["gpu"]}
    gpu = [part for first in ("step", "plus") for key, part in on_gpu.items() if key.startswith(f"{first} vit_base")]
    cpu = [part for key, part in steps.items() if key.startswith("step deit_tiny") and not part["gpu"]]
    where = gpu[0]["where"].removeprefix("NVIDIA ")
    words = [
        f"**The cost**, in times of predicting: {_costs(gpu, 'bf16')} on an {where} (ViT-B/16, batches of",
        f"{gpu[0]['batch']}, bfloat16); {_costs(cpu, 'fp32')} on one CPU thread (DeiT-Tiny, batches of",
        f"{cpu[0]['batch']}). `mgtta+` sees each image twice; `mirror=False` halves its cost.",
    ]
    return textwrap.fill(" ".join(words), 120, break_on_hyphens=False)


def _costs(parts: Sequence[dict[str, Any]], precision: str) -> str:
    """Return the cost of each learned method beside NoAdapt's, both of the first part that measured it."""
    found = {}
    for part in parts:
        rows = {row["name"]: row.get("seconds") for row in part["rows"] if row["precision"] == precision}
        for name, method in {"MGTTA": "mgtta", "MGTTA+": "mgtta+"}.items():
            if rows.get(name) and rows.get("NoAdapt"):
                images = part["batch"] / rows[name]
                times = rows[name] / rows["NoAdapt"]
                found.setdefault(method, f"{times:.1f} for `{method}` ({images:,.0f} images/s)")
    return ", ".join(found.values())


# --- the pages


def tables(records: Sequence[Record]) -> dict[str, list[Ranked]]:
    """Return mark -> the tables between its marks, in the order of headline.md; without those that have no rows."""
    found = {
        "streams": streams(records),
        "headline": [headline(section) for section in with_most_images(of_experiment(records, "corruptions"))],
        "experiments": [others(records)],
    }
    filled = {mark: [one for one in ranked if one.rows] for mark, ranked in found.items()}
    return {mark: ranked for mark, ranked in filled.items() if ranked}


def in_readme(records: Sequence[Record], rest: str) -> dict[str, str]:
    """Return mark -> the text between its marks in the README.

    Args:
        rest: the README's link to headline.md.
    """
    return {mark: "\n\n".join(one.some(rest) for one in ranked) for mark, ranked in tables(records).items()}


ABOUT = """{model}, ImageNet validation images under each of the 15 corruptions at severity 5, mean and standard
deviation over {seeds} seeds (order of the stream and draw of the corruption). Every method that has a learning rate had
seven tries on other images under four other corruptions, and more if the best was the first or the last of them; {edge}
marks a rate that still is. `deyo@mgtta` is DeYO at the settings of the MGTTA paper. "worst" is the smallest gain of a
method on any corruption; ECE is the expected calibration error; eq7 is the objective of MGTTA, Eq. 7 of the paper, with
another optimizer. Images per corruption: {images}. Methods with fewer images than these stand in tables of their own in
report.md."""


def about(records: Sequence[Record]) -> str:
    """Return the protocol of the tables, in words."""
    corruptions = of_experiment(records, "corruptions")[0]
    images = []
    for name in ("corruptions", "continual", "mixed", "small-batch", "sweep"):
        found = [r for r in records if r["experiment"] == name]
        if found:
            words = {"sweep": "the tries"}.get(name, f"`{name}`")
            domains = [len(r["domains"]) if r["mixed"] else 1 for r in found]
            most = max(r["images"] // n for r, n in zip(found, domains, strict=True))
            images.append(f"{words} {most:,}")
    text = ABOUT.format(
        model=corruptions.records[0]["protocol"]["model"],
        seeds=len({r["seed"] for r in corruptions.records}),
        edge=EDGE,
        images=", ".join(images),
    )
    return textwrap.fill(" ".join(text.split()), 118)


def all_rows(records: Sequence[Record], command: str) -> str:
    """Return headline.md: every table with all its rows."""
    parts = ["# All rows", "Written from the records by", f"    {command}"]
    if of_experiment(records, "corruptions"):
        parts.append(about(records))
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


def written(page: str, texts: dict[str, str]) -> str:
    """Return the page with the texts between their marks, if it has these."""
    for mark, text in texts.items():
        if f"<!-- {mark}:start -->" in page:
            page = between(page, mark, text)
    return page


def marked(rest: str = STREAMS_PAGE) -> dict[str, str]:
    """Return mark -> the text between its marks, from results/streams.jsonl and results/speed.json.

    Args:
        rest: the link to all rows of the table.
    """
    records = read_lines(ROOT / "results" / "streams.jsonl")
    streams_table = in_readme(records, rest)["streams"]
    return {"gain": gain(records), "cost": cost(), "speed": speed(), "streams": streams_table}


def of_site(text: str) -> str:
    """Return a text of the README for a page of the site, which has no results: links to them become names."""
    return re.sub(r"\[[^]]*\]\((results/[^)]*)\)", r"`\1`", text)


def write_pages() -> None:
    """Write what `marked` returns into README and docs/index.md, where these have the marks."""
    for page, texts in pages().items():
        _write(page, written(page.read_text(), texts))


def pages() -> dict[Path, dict[str, str]]:
    """Return page -> mark -> text."""
    texts = marked()
    site = {mark: of_site(text) for mark, text in texts.items()}
    return {ROOT / "README.md": texts, ROOT / "docs" / "index.md": site}


def write(folder: Path) -> None:
    """Write headline.md beside the records, and their tables into the README if it has their marks."""
    records = Store(folder).records()
    name = f"results/{folder.name}"
    _write(folder / "headline.md", all_rows(records, f"python benchmarks/headline.py {name}"))
    readme = ROOT / "README.md"
    _write(readme, written(readme.read_text(), in_readme(records, f"{name}/headline.md")))


def _write(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text)


def main() -> None:
    write_pages()
    for name in sys.argv[1:]:
        write(Path(name))
        print(f"{name}/headline.md")


if __name__ == "__main__":
    main()
