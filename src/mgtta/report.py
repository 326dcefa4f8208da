"""Records as tables: mean and standard deviation over seeds, the best in bold, paired differences, published figures.

A section is what can be compared: the records of one experiment on one footing (model, weights, data, images). Its
table has a row for each method and a column for each domain, or for each value of what the experiment varies.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any

from mgtta.alarms import guard_words
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.recipes import RECIPES

Record = dict[str, Any]

SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "defocus_blur": "defoc",
    "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "brightness": "brit", "contrast": "contr",
    "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip
TITLES = {
    "corruptions": "Corruptions, one after another, reset before each (Table 1)",
    "budgets": "Limited adaptation budgets (Table 2)",
    "variants": "Variants of ImageNet (Table 3)",
    "ablation": "Ablation of the generator (Table 4)",
    "runtime": "Runtime (Table 5)",
    "samples": "Images that the generator was trained on (Table 6)",
    "mixed": "Corruptions mixed within each batch (Table 7)",
    "small-batch": "Small batches (Table 8)",
    "memory": "Memory (appendix C.1)",
    "hidden-size": "Hidden size of the gradient memory (appendix C.2)",
    "learning-rate": "Learning rates on the test stream: for looking, not for choosing (appendix C.3)",
    "convergence": "Convergence (Figure 3)",
    "continual": "Corruptions one after another, never reset",
    "sweep": "Learning rates tried on the validation corruptions",
}
# experiment -> what its columns are, unless domains: one section each
AXES = {
    "budgets": ("max_updates", "max_seconds"),
    "convergence": ("max_updates",),
    "small-batch": ("batch_size",),
    "learning-rate": ("lr",),
    "sweep": ("lr",),
    "hidden-size": ("hidden_size",),
    "samples": ("training_images",),
}
AXIS_NAMES = {
    "max_updates": "updates at most", "max_seconds": "seconds at most", "batch_size": "batch size",
    "lr": "learning rate", "hidden_size": "hidden size", "training_images": "training images",
}  # fmt: skip
# what may tell two rows of a method apart, beside its settings
DISTINCT = {
    "max_updates": "{} updates", "max_seconds": "{} s", "batch_size": "batch {}", "severity": "severity {}",
    "reset": "reset {}", "generator": "generator {}",
}  # fmt: skip
REFERENCES = ("noadapt", "mgtta")
LOWER_IS_BETTER = ("ece", "seconds", "peak_memory")
MEAN = "mean"


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (None for one seed) over so many seeds."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Difference:
    """How far a row lies above the reference, in points, with a 95 % confidence interval where there can be one."""

    row: str
    column: str
    against: str
    mean: float
    low: float | None
    high: float | None
    pairs: int


@dataclass
class Section:
    """The records of one experiment on one footing; one for each (row, column, domain, seed)."""

    experiment: str
    records: list[Record]
    axis: str = "domain"  # what the columns are: domains, or the entry of a record that the experiment varies
    repeated: int = 0  # records left out, because another had measured the same
    names: dict[int, str] = field(default_factory=dict)  # id of a record -> its row

    @property
    def title(self) -> str:
        title = TITLES.get(self.experiment, str(self.experiment))
        return f"{title}: {self.axis_name}" if len(AXES.get(self.experiment, ())) > 1 else title

    @property
    def axis_name(self) -> str:
        return AXIS_NAMES.get(self.axis, self.axis)

    @cached_property
    def figure(self) -> str:
        """What the table shows: accuracy; where a model is frozen after some updates, that on the images left."""
        left = self.experiment == "convergence" and any(r.get("remaining") is not None for r in self.records)
        return "remaining" if left else "top1"

    @cached_property
    def domains(self) -> list[str]:
        known = [*CORRUPTIONS]
        found = unique(record["domain"] for record in self.records)
        return sorted(found, key=lambda d: known.index(d) if d in known else len(known))

    @cached_property
    def columns(self) -> list[str]:
        if self.axis == "domain":
            return self.domains
        return sorted(unique(self.column(record) for record in self.records), key=_as_number)

    @cached_property
    def rows(self) -> dict[str, str]:
        """Row -> method, in the order of the recipes."""
        found = {self.names[id(record)]: str(record["method"]) for record in self.records}
        known = list(RECIPES)
        return dict(sorted(found.items(), key=lambda rm: known.index(rm[1]) if rm[1] in known else len(known)))

    @cached_property
    def shared(self) -> list[Record]:
        """The records of the columns, domains and seeds that all rows have; all records, where there are none."""
        places: dict[str, set[tuple]] = {row: set() for row in self.rows}
        for record in self.records:
            places[self.names[id(record)]].add((self.column(record), record["domain"], record["seed"]))
        everywhere = set.intersection(*places.values())
        found = [r for r in self.records if (self.column(r), r["domain"], r["seed"]) in everywhere]
        return found or self.records

    def column(self, record: Record) -> str:
        if self.axis == "domain":
            return str(record["domain"])
        return label(value(record, self.axis), "inf")

    def of(self, row: str) -> list[Record]:
        return [record for record in self.records if self.names[id(record)] == row]

    def figures(self, figure: str | None = None) -> dict[str, dict[str, Figure]]:
        """Row -> column -> figure. Columns of an experiment's own are means over domains; so is `mean`, the last
        column where there are several domains. A mean that lacks a domain is left out."""
        table: dict[str, dict[str, Figure]] = {}
        figure = figure or self.figure
        for row in self.rows:
            values: dict[str, dict[int, dict[str, float]]] = {}  # column -> seed -> domain -> value
            for record in self.of(row):
                if record.get(figure) is not None:
                    columns = [self.column(record)]
                    columns += [MEAN] if self.axis == "domain" and len(self.domains) > 1 else []
                    for column in columns:
                        values.setdefault(column, {}).setdefault(record["seed"], {})[record["domain"]] = record[figure]
            cells = {}
            for column, seeds in values.items():
                needed = 1 if column in self.domains else len(self.domains)
                complete = [statistics.mean(by.values()) for by in seeds.values() if len(by) == needed]
                if complete:
                    cells[column] = Figure.of(complete)
            table[row] = cells
        return table

    def headings(self, figures: dict[str, dict[str, Figure]]) -> list[str]:
        return [*self.columns, *([MEAN] if any(MEAN in row for row in figures.values()) else [])]


def sections(records: Iterable[Record]) -> list[Section]:
    """The records by experiment and footing, in the paper's order."""
    found: dict[tuple, list[Record]] = {}
    for record in records:
        axes = AXES.get(record["experiment"], ("domain",))
        given = [axis for axis in axes if axis == "domain" or value(record, axis) is not None]
        for axis in given or axes:  # without any limit: the last column of each kind of budget
            found.setdefault((record["experiment"], axis, *footing(record)), []).append(record)
    order = list(TITLES)
    result = [
        _section(experiment, axis, part)
        for (experiment, axis, *_), group in sorted(
            found.items(), key=lambda kv: order.index(kv[0][0]) if kv[0][0] in order else len(order)
        )
        for part in _by_images(group)
    ]
    alone = {s.experiment for s in result if s.columns != ["inf"]}  # have columns beside that without any limit
    return [s for s in result if s.columns != ["inf"] or s.experiment not in alone]


def footing(record: Record) -> tuple:
    """What must agree for two records to be compared."""
    protocol = record.get("protocol") or {}
    corrupted = bool(record.get("severity", 5))
    data = protocol.get("data") if corrupted else None  # images as they are: each domain is a data set of its own
    return (protocol.get("model"), protocol.get("weights"), data, corrupted, record.get("split", "test"))


def _by_images(records: list[Record]) -> list[list[Record]]:
    """Apart, where the same domain was measured on different numbers of images."""
    sizes: dict[str, set[int]] = {}
    for record in records:
        sizes.setdefault(record["domain"], set()).add(record["images"])
    if all(len(size) == 1 for size in sizes.values()):
        return [records]
    return [[r for r in records if r["images"] == n] for n in sorted(set().union(*sizes.values()), reverse=True)]


def _section(experiment: str, axis: str, records: list[Record]) -> Section:
    section = Section(experiment, records, axis)
    for method in unique(record["method"] for record in records):
        mine = [record for record in records if record["method"] == method]
        keys = [*unique(key for record in mine for key in record.get("settings") or {}), *DISTINCT]
        telling = [key for key in unique(keys) if key != axis and _tells_apart(section, mine, key)]
        for record in mine:
            parts = [
                DISTINCT.get(key, f"{key.replace('_', ' ')} {{}}").format(label(value(record, key)))
                for key in telling
                if value(record, key) is not None
            ]
            section.names[id(record)] = ", ".join([str(method), *parts])
    kept: dict[tuple, Record] = {}
    for record in records:
        kept.setdefault((section.names[id(record)], section.column(record), record["domain"], record["seed"]), record)
    section.records, section.repeated = list(kept.values()), len(records) - len(kept)
    return section


def _tells_apart(section: Section, records: Sequence[Record], key: str) -> bool:
    """Whether records of the same column, domain and seed differ in it."""
    found: dict[tuple, set[str]] = {}
    for record in records:
        place = (section.column(record), record["domain"], record["seed"])
        found.setdefault(place, set()).add(label(value(record, key)))
    return any(len(values) > 1 for values in found.values())


def value(record: Record, key: str) -> Any:
    """A record's own entry, a setting of its method, or an entry of its protocol."""
    for place in (record, record.get("settings") or {}, record.get("protocol") or {}):
        if place.get(key) is not None:
            return place[key]
    return None


def label(value: Any, none: str = "") -> str:
    if value is None:
        return none
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _as_number(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def best(figures: dict[str, dict[str, Figure]], column: str, figure: str = "top1") -> set[str]:
    """The rows that are best in a column as printed; none where all are alike."""
    shown = {row: round(cells[column].mean, 1) for row, cells in figures.items() if column in cells}
    if len(set(shown.values())) < 2:
        return set()
    top = (min if figure in LOWER_IS_BETTER else max)(shown.values())
    return {row for row, shown_value in shown.items() if shown_value == top}


# --- paired differences


def differences(section: Section) -> list[Difference]:
    """Every row against NoAdapt and against MGTTA, paired over domain and seed; for columns of an experiment's own,
    in each of them.

    The interval is Student's, at 95 %, over domains, each the mean over its seeds, since seeds of one domain are not
    independent of each other; with one domain it is over seeds. One pair has none.
    """
    found = []
    figure = section.figure
    for column in [MEAN] if section.axis == "domain" else section.columns:
        values: dict[str, dict[tuple[str, int], float]] = {row: {} for row in section.rows}
        for record in section.records:
            if record.get(figure) is not None and column in (MEAN, section.column(record)):
                values[section.names[id(record)]][record["domain"], record["seed"]] = record[figure]
        for method in REFERENCES:
            for against in [row for row, its in section.rows.items() if its == method]:
                for row in section.rows:
                    pairs = {key: v - values[against][key] for key, v in values[row].items() if key in values[against]}
                    if row != against and pairs:
                        found.append(_difference(row, column, against, pairs))
    return found


def _difference(row: str, column: str, against: str, pairs: dict[tuple[str, int], float]) -> Difference:
    by_domain: dict[str, list[float]] = {}
    for (domain, _), d in pairs.items():
        by_domain.setdefault(domain, []).append(d)
    units = [statistics.mean(ds) for ds in by_domain.values()]
    if len(units) == 1:
        units = list(pairs.values())
    mean = statistics.mean(units)
    if len(units) < 2:
        return Difference(row, column, against, mean, None, None, len(pairs))
    half = t_quantile(len(units) - 1) * statistics.stdev(units) / math.sqrt(len(units))
    return Difference(row, column, against, mean, mean - half, mean + half, len(pairs))


@cache
def t_quantile(df: int, confidence: float = 0.95) -> float:
    """t with P(|T| < t) = confidence for Student's T with `df` degrees of freedom."""
    low, high = 0.0, 1.0
    while _t_within(high, df) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, df) < confidence else (low, middle)
    return (low + high) / 2


def _t_within(t: float, df: int) -> float:
    """P(|T| < t), the finite sums of Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(df))
    sin, cos = math.sin(theta), math.cos(theta)
    odd = df % 2
    total, term = 0.0, cos if odd else 1.0
    for k in range(1, df // 2 + 1):
        total += term
        term *= cos**2 * (2 * k / (2 * k + 1) if odd else (2 * k - 1) / (2 * k))
    return (theta + sin * total) * 2 / math.pi if odd else sin * total


# --- published figures


@cache
def published() -> dict[str, Any]:
    """The paper's tables by experiment, method and column, each with its footing."""
    data = json.loads(resources.files("mgtta").joinpath("published.json").read_text(encoding="utf-8"))
    for table in data["tables"]:
        table["footing"] = {**data["footing"], **table["footing"]}
    return data


@dataclass(frozen=True)
class Beside:
    """A table of the paper with what was measured: row -> column -> figure."""

    table: str
    footing: dict[str, Any]
    columns: list[str]
    measured: dict[str, dict[str, Figure]]
    printed: dict[str, dict[str, float]]
    differs: list[str]


def beside(section: Section) -> list[Beside]:
    """The paper's tables of the section's experiment, for the methods that were measured."""
    found = []
    for table in published()["tables"]:
        rows = {row: table["rows"][row] for row in section.rows if row in table["rows"]}
        if table["experiment"] != section.experiment or not rows:
            continue
        if table["columns"] not in ("figure", section.axis) or not _same_data(section, table):
            continue
        measured = _costs(section) if table["columns"] == "figure" else section.figures()
        all_15 = set(section.domains) == set(CORRUPTIONS)
        if table["experiment"] == "ablation" and all_15:
            measured = {row: {**cells, "imagenet-c": cells[MEAN]} for row, cells in measured.items() if MEAN in cells}
        own = unique(column for row in rows.values() for column in row)
        shared = [c for c in own if any(c in measured.get(row, {}) for row in rows)]
        if table["columns"] == "domain" and set(own) - {MEAN} - set(section.domains):
            shared = [c for c in shared if c != MEAN]  # a mean over other domains
        if not shared:
            continue
        differs = footing_differs(section.records, table["footing"])
        if table["columns"] != "domain" and table["footing"]["data"] == "ImageNet-C" and not all_15:
            differs.insert(0, f"the means are over {_many(len(section.domains), 'domain')}, the paper's over 15")
        chosen = {row: cells for row, cells in measured.items() if row in rows}
        found.append(Beside(table["table"], table["footing"], shared, chosen, rows, differs))
    return found


def _same_data(section: Section, table: dict[str, Any]) -> bool:
    """Whether a table that the paper gives for several data sets is the one of the section's kind."""
    return (table["footing"]["data"] == "ImageNet-R") == (section.domains == ["imagenet-r"])


def _costs(section: Section) -> dict[str, dict[str, Figure]]:
    """Row -> accuracy, seconds for 50,000 images, and megabytes."""
    costs: dict[str, dict[str, Figure]] = {}
    accuracy = section.figures()
    for row in section.rows:
        records = section.of(row)
        cells = {"seconds": Figure.of([50_000 * r["seconds"] / r["images"] for r in records if r["images"]])}
        memory = [r["peak_memory"] / 1e6 for r in records if r.get("peak_memory")]
        if memory:
            cells["megabytes"] = Figure.of(memory)
        top1 = accuracy[row].get(MEAN if len(section.domains) > 1 else section.domains[0])
        costs[row] = {**cells, **({"top1": top1} if top1 else {})}
    return costs


def footing_differs(records: Sequence[Record], paper: dict[str, Any]) -> list[str]:
    """In words, all that is known to differ from, or cannot be checked against, a published table."""
    found = []
    protocol = records[0].get("protocol") or {}
    if not str(protocol.get("model")).startswith("vit_base_patch16_224"):
        found.append(f"the model is {protocol.get('model')}, the paper's a ViT-Base trained on ImageNet-1k")
    data = str(protocol.get("data"))
    if not data.lower().replace("_", "-").rstrip("/").endswith("imagenet-c") or paper["data"] != "ImageNet-C":
        found.append(f"the data are {data}, the paper's {paper['data']}")
    for key, name in (("images", "images of each domain"), ("batch_size", "batch size"), ("severity", "severity")):
        values = unique(record.get(key) for record in records)
        if paper.get(key) is not None and values != [paper[key]]:
            theirs = f"{paper[key]:,}" if isinstance(paper[key], int) else paper[key]
            found.append(f"{name}: {', '.join(label(v, 'unknown') for v in values)}; the paper's: {theirs}")
    if protocol.get("mean") is not None:
        mean, std = (", ".join(f"{x:g}" for x in protocol.get(key) or []) for key in ("mean", "std"))
        found.append(f"normalisation: mean {mean}, std {std}; the paper does not state its own")
    if paper.get("device"):
        found.append(f"the device is {protocol.get('device')}, the paper's {paper['device']}")
    return found


# --- words


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
        f"{_many(len(section.domains), 'domain')}, "
        f"{span(r['images'] for r in records)} images{of_each}, severity {span(r.get('severity') for r in records)}, "
        f"batch {span(r.get('batch_size') for r in records)}, {_many(seeds, 'seed')}"
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
        words.append(f"{_many(len(figures) - len(ranked), 'method')} of {len(figures)} not finished on all domains.")
    words += [sentence(d) for d in differences(section) if d.row in top and section.rows[d.against] == "noadapt"]
    return words


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


def printed(x: float | None) -> str:
    """A published figure as the paper prints it."""
    return "–" if x is None else f"{x:,}" if isinstance(x, int) else f"{x:.1f}"


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def short(column: str) -> str:
    return SHORT.get(column, "∞" if column == "inf" else column)


# --- markdown and LaTeX


def markdown(records: Sequence[Record], figure: str | None = None) -> str:
    """The tables of the records, one for each section: one row a method, one column a domain, and the mean."""
    return "\n\n".join(_markdown_table(section, figure) for section in sections(records))


def _markdown_table(section: Section, figure: str | None = None) -> str:
    figures = section.figures(figure)
    figure = figure or section.figure
    columns = section.headings(figures)
    lines = [_row(["method", *map(short, columns)]), "|---" * (len(columns) + 1) + "|"]
    tops = {column: best(figures, column, figure) for column in columns}
    for row, cells in figures.items():
        texts = [_cell(cells.get(c), c == MEAN or section.axis != "domain", "{:.1f} ± {:.1f}") for c in columns]
        bold = (f"**{text}**" if row in tops[c] else text for c, text in zip(columns, texts, strict=True))
        lines.append(_row([row, *bold]))
    return "\n".join(lines)


def _cell(f: Figure | None, spread: bool, both: str) -> str:
    if f is None:
        return "–"
    return both.format(f.mean, f.std) if spread and f.std is not None else f"{f.mean:.1f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_markdown(cell) for cell in cells)} |"


def _markdown(text: str) -> str:
    """Text that stays text within a table's cell, bold aside."""
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " "), ("\r", " ")):
        text = text.replace(character, safe)
    return text


def latex(records: Sequence[Record], figure: str | None = None) -> str:
    """The same tables in LaTeX; they need the package booktabs."""
    return "\n\n".join(_latex_table(section, figure) for section in sections(records))


def _latex_table(section: Section, figure: str | None = None) -> str:
    figures = section.figures(figure)
    figure = figure or section.figure
    columns = section.headings(figures)
    tops = {column: best(figures, column, figure) for column in columns}
    by = "" if section.axis == "domain" else f" by {section.axis_name}"
    caption = _latex(f"{section.title}: accuracy (%){by}. {footing_words(section)}.")
    lines = [
        r"\begin{table}[t]", r"\centering", f"\\caption{{{caption}}}",
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule",
        " & ".join(["method", *(_latex(short(c)) for c in columns)]) + r" \\", r"\midrule",
    ]  # fmt: skip
    for row, cells in figures.items():
        texts = [_cell(cells.get(c), c == MEAN or section.axis != "domain", r"{:.1f} $\pm$ {:.1f}") for c in columns]
        bold = (
            f"\\textbf{{{t}}}" if row in tops[c] else t.replace("–", "--") for c, t in zip(columns, texts, strict=True)
        )
        lines.append(" & ".join([_latex(row), *bold]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "∞": r"$\infty$",
        "−": "--", "<": r"\textless{}", ">": r"\textgreater{}", "\n": " ", "\r": " ",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }  # fmt: skip
    return "".join(special.get(c, c) for c in text)


def markdown_report(found: Sequence[Section]) -> str:
    """All sections: summary, table, differences, published figures, protocol."""
    parts = ["# Report of mgtta", ""]
    for section in found:
        parts += [f"## {section.title}", "", _markdown(footing_words(section)), ""]
        parts += [f"- {_markdown(words)}" for words in headline(section)] + [""]
        parts += [_markdown_table(section), "", notes(section), ""]
        parts += _markdown_differences(section)
        for table in beside(section):
            parts += [f"Published, Table {table.table}" if table.table[0].isdigit() else f"Published, {table.table}"]
            parts += ["", "Not on the same footing: " + _markdown("; ".join(table.differs)) + ".", ""]
            parts += [*_markdown_beside(table), ""]
        commands = unique((record.get("protocol") or {}).get("command") for record in section.records)
        parts += ["To repeat it:", "", *(f"    {str(c).replace(chr(10), ' ')}" for c in commands if c), ""]
    return "\n".join(parts)


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
        text += f" {_many(section.repeated, 'record')} that repeat others' work are left out."
    return text + guard_words(section.records)


def _markdown_differences(section: Section) -> list[str]:
    found = differences(section)
    if not found:
        return []
    lines = ["Paired differences in points (Student's t over domains, seeds averaged within each):", ""]
    lines += ["| method | column | against | difference | 95 % interval | pairs |", "|---|---|---|---|---|---|"]
    lines += [_row([d.row, short(d.column), d.against, signed(d.mean), interval(d), str(d.pairs)]) for d in found]
    return [*lines, ""]


def interval(d: Difference) -> str:
    return "–" if d.low is None or d.high is None else f"{signed(d.low)} to {signed(d.high)}"


def _markdown_beside(table: Beside) -> list[str]:
    lines = [_row(["method", "", *map(short, table.columns)]), "|---" * (len(table.columns) + 2) + "|"]
    for row, own in table.printed.items():
        measured = table.measured.get(row, {})
        lines.append(_row([row, "measured", *(_cell(measured.get(c), False, "") for c in table.columns)]))
        lines.append(_row(["", "published", *(printed(own.get(c)) for c in table.columns)]))
    return lines


def latex_report(found: Sequence[Section]) -> str:
    """All sections' tables, to be included in a document."""
    return "% needs \\usepackage{booktabs}\n\n" + "\n\n".join(_latex_table(section) for section in found) + "\n"
