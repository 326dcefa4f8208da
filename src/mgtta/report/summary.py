"""Records in sections: mean and standard deviation over seeds, for each method and column.

A section is what can be compared: the records of one experiment on one footing (model, weights, data, images). Its
table has a row for each method and a column for each domain, or for each value of what the experiment varies.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from mgtta.data.corruptions import CORRUPTIONS
from mgtta.methods.registry import recipes

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
    "training_images": "{} training images", "hidden_size": "hidden size {}", "generator": "generator {}",
    "precision": "{}", "source images": "{} source images", "validation": "validation {}", "data": "images {}",
    "device": "on {}",
}  # fmt: skip
TOLD = {"generator": ("training_images", "hidden_size")}  # need not be named where these differ already
COSTS = {"runtime": "milliseconds", "memory": "megabytes"}  # experiment -> its figure, unless accuracy
LOWER_IS_BETTER = ("ece", "seconds", "peak_memory", *COSTS.values())
DIGITS = {"milliseconds": 2, "megabytes": 0}  # as printed, unless one
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
    """The records of one experiment on one footing; for each (row, column, domain, seed) those of one cell: one, or
    one for each visit, where a stream comes to a domain again."""

    experiment: str
    records: list[Record]
    axis: str = "domain"  # what the columns are: domains, or the entry of a record that the experiment varies
    repeated: int = 0  # records left out, because another had measured the same
    names: dict[int, str] = field(default_factory=dict)  # id of a record -> its row

    @property
    def title(self) -> str:
        title = TITLES.get(self.experiment, str(self.experiment))
        if self.experiment == "sweep":
            return f"{title}: {self.stream}"
        return f"{title}: {self.axis_name}" if len(AXES.get(self.experiment, ())) > 1 else title

    @property
    def stream(self) -> str:
        """In words, how domains follow each other, and in which batches."""
        first = self.records[0]
        order = "never reset" if first.get("reset") == "never" else "reset before each"
        sizes = sorted(unique(label(r.get("batch_size"), "unknown") for r in self.records), key=as_number)
        return f"{'mixed within each batch' if first.get('mixed') else order}, batch {' and '.join(sizes)}"

    @property
    def axis_name(self) -> str:
        return AXIS_NAMES.get(self.axis, self.axis)

    @cached_property
    def figure(self) -> str:
        """What the table shows: accuracy, or what it costs; where a model is frozen after some updates, accuracy on
        the images left."""
        left = self.experiment == "convergence" and any(r.get("remaining") is not None for r in self.records)
        return "remaining" if left else COSTS.get(self.experiment, "top1")

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
        known = list(recipes())
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

    @cached_property
    def last(self) -> list[Record]:
        """The shared records by which rows are compared in other figures; see `at_last`."""
        return self.at_last(self.shared)

    def at_last(self, records: list[Record]) -> list[Record]:
        """Those of the last column (the largest budget or size), where columns are no domains; none of rates."""
        if self.axis == "domain" or not records:
            return records
        last = max((self.column(r) for r in records), key=self.columns.index)
        return [r for r in records if self.column(r) == last and self.axis != "lr"]

    @cached_property
    def visits(self) -> int:
        """How often a stream comes to a domain, all its domains together; 0 where to none again."""
        streams = Counter(
            (self.names[id(r)], None if self.axis == "domain" else self.column(r), r["seed"]) for r in self.records
        )
        most = max(streams.values())
        return most if most > len(self.domains) else 0

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
        for row in self.rows:
            values: dict[str, dict[int, dict[str, list[float]]]] = {}  # column -> seed -> domain -> its visits
            for record in self.of(row):
                if (measured := measure(record, figure or self.figure)) is not None:
                    columns = [self.column(record)]
                    columns += [MEAN] if self.axis == "domain" and len(self.domains) > 1 else []
                    for column in columns:
                        by = values.setdefault(column, {}).setdefault(record["seed"], {})
                        by.setdefault(record["domain"], []).append(measured)
            cells = {}
            for column, seeds in values.items():
                needed = 1 if column in self.domains else len(self.domains)
                complete = [statistics.mean(chain(*by.values())) for by in seeds.values() if len(by) == needed]
                if complete:
                    cells[column] = Figure.of(complete)
            table[row] = cells
        return table

    def best(self, figures: dict[str, dict[str, Figure]], figure: str | None = None) -> set[tuple[str, str]]:
        """The rows and columns to be marked: the best rows of each column; of learning rates, the best of each row,
        since the same one means little to two methods."""
        figure = figure or self.figure
        if self.axis == "lr":
            turned = {c: {row: cells[c] for row, cells in figures.items() if c in cells} for c in self.columns}
            return {(row, column) for row in figures for column in best(turned, row, figure)}
        return {(row, column) for column in self.headings(figures) for row in best(figures, column, figure)}

    def spread(self, column: str) -> bool:
        """Whether a column's standard deviation is of interest: not that of one domain among many."""
        return column == MEAN or self.axis != "domain" or len(self.domains) == 1

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
    data = images_of(record) if corrupted else None  # images as they are: each domain is a data set of its own
    stream = bool(record.get("mixed")), label(record.get("reset"))
    before = label(record.get("domains")) if record.get("reset") == "never" else None  # what else the model has seen
    return (
        protocol.get("model"), protocol.get("weights"), data, corrupted, record.get("split", "test"), *stream, before
    )  # fmt: skip


def images_of(record: Record) -> str:
    """Where the images came from."""
    key = "validation" if record.get("split") == "validation" else "data"
    return label(value(record, key), "unknown")


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
    cells: dict[tuple, Any] = {}  # place -> the cell that counts there; its parts are visits
    for record in records:
        place = (section.names[id(record)], section.column(record), record["domain"], record["seed"])
        if cells.setdefault(place, record.get("cell")) == record.get("cell"):
            kept.setdefault((*place, record.get("part")), record)
    section.records, section.repeated = list(kept.values()), len(records) - len(kept)
    return section


def _tells_apart(section: Section, records: Sequence[Record], key: str) -> bool:
    """Whether records of the same column, domain and seed differ in it, and not in what tells the same."""
    found: dict[tuple, set[str]] = {}
    for record in records:
        told = (label(value(record, other)) for other in TOLD.get(key, ()))
        place = (section.column(record), record["domain"], record["seed"], *told)
        found.setdefault(place, set()).add(label(value(record, key)))
    return any(len(values) > 1 for values in found.values())


def value(record: Record, key: str) -> Any:
    """A record's own entry, a setting of its method, or an entry of its protocol."""
    for place in (record, record.get("settings") or {}, record.get("protocol") or {}):
        if place.get(key) is not None:
            return place[key]
    return None


def measure(record: Record, figure: str) -> float | None:
    """A record's figure: one of its entries, or what an image costs in time, or the run in memory."""
    if figure == "milliseconds":
        return milliseconds([record])
    if figure == "megabytes":
        memory = record.get("peak_memory") or record.get("process_peak_memory")
        return memory / 1e6 if memory else None
    return record.get(figure)


def seconds_for(images: int, records: Sequence[Record]) -> float | None:
    """What so many images take, to predict and to adapt, going by all of the records together; None without any."""
    measured = sum(r["images"] for r in records)
    return images * sum(r["seconds"] for r in records) / measured if measured else None


def milliseconds(records: Sequence[Record]) -> float | None:
    """What an image takes; as many as a thousand take seconds."""
    return seconds_for(1000, records)


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
    digits = DIGITS.get(figure, 1)
    shown = {row: round(cells[column].mean, digits) for row, cells in figures.items() if column in cells}
    if len(set(shown.values())) < 2:
        return set()
    top = (min if figure in LOWER_IS_BETTER else max)(shown.values())
    return {row for row, shown_value in shown.items() if shown_value == top}
