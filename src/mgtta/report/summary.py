"""Records in sections: mean and standard deviation over seeds, for each method and column.

A section is what can be compared: the records of one experiment on one footing (model, weights, data, images). Its
table has a row for each method and a column for each domain, or for each value of what the experiment varies.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mgtta.data.corruptions import CORRUPTIONS
from mgtta.recipes import RECIPES

Record = dict[str, Any]

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
        return sorted(unique(self.column(record) for record in self.records), key=as_number)

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


def as_number(text: str) -> tuple[float, str]:
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
