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

from mgtta._lib.names import spelled
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.streams import STREAM_KINDS
from mgtta.methods.registry import recipes

Record = dict[str, Any]

TITLES = {
    "streams": "Eight kinds of stream, one setting of each method for all",
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
    "learning-rate": "Learning rates on the test stream: to compare, not to choose (appendix C.3)",
    "convergence": "Convergence (Figure 3)",
    "continual": "Corruptions one after another, never reset",
    "sweep": "Learning rates tried on the validation corruptions",
}
# experiment -> what its columns are, if not domains: one section each
AXES = {
    "budgets": ("max_updates", "max_seconds"),
    "convergence": ("max_updates",),
    "small-batch": ("batch_size",),
    "learning-rate": ("lr",),
    "sweep": ("lr",),
    "hidden-size": ("hidden_size",),
    "samples": ("training_images",),
    "streams": ("kind",),
}
AXIS_NAMES = {
    "max_updates": "maximum updates",
    "max_seconds": "maximum seconds",
    "batch_size": "batch size",
    "lr": "learning rate",
    "hidden_size": "hidden size",
    "training_images": "training images",
    "kind": "kind of stream",
}
# what may tell two rows of a method apart, besides its settings
DISTINCT = {
    "max_updates": "{} updates",
    "max_seconds": "{} s",
    "batch_size": "batch {}",
    "severity": "severity {}",
    "training_images": "{} training images",
    "hidden_size": "hidden size {}",
    "generator": "generator {}",
    "precision": "{}",
    "source images": "{} source images",
    "validation": "validation {}",
    "data": "images {}",
    "device": "on {}",
}
TOLD = {"generator": ("training_images", "hidden_size")}  # is not named where these differ already
WRAPPERS = ("pull", "gather", "recall")  # always named in a row, if given
COSTS = {"runtime": "milliseconds", "memory": "megabytes"}  # experiment -> its figure, if not accuracy
LOWER_IS_BETTER = ("ece", "seconds", "peak_memory", *COSTS.values())
DIGITS = {"milliseconds": 2, "megabytes": 0}  # after the point; 1 for other figures
MEAN = "mean"


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation (None for one seed) over so many seeds."""

    mean: float
    std: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        std = None
        if len(values) > 1:
            std = statistics.stdev(values)
        return cls(statistics.mean(values), std, len(values))


@dataclass
class Section:
    """The records of one experiment on one footing.

    For each (row, column, domain, seed) there are those of one cell: one, or one for each visit, where a stream comes
    to a domain again.
    """

    experiment: str
    records: list[Record]
    axis: str = "domain"  # what the columns are: domains, or the entry of a record that the experiment varies
    repeated: int = 0  # records left out, because another had measured the same
    names: dict[int, str] = field(default_factory=dict)  # id of a record -> its row

    @property
    def title(self) -> str:
        title = TITLES.get(self.experiment, str(self.experiment))
        if self.experiment == "sweep":
            kind = self.records[0].get("kind")
            return f"{title}: {kind or self.stream}"
        if len(AXES.get(self.experiment, ())) > 1:
            return f"{title}: {self.axis_name}"
        return title

    @property
    def name(self) -> str:
        """A short title."""
        name = str(self.experiment).replace("-", " ").capitalize()
        if self.experiment == "sweep":
            return f"{name}: {self.records[0].get('kind') or self.stream}"
        if len(AXES.get(self.experiment, ())) > 1:
            return f"{name}: {self.axis_name}"
        return name

    @property
    def stream(self) -> str:
        """How domains follow each other, and in which batches, in words."""
        first = self.records[0]
        order = "reset before each"
        if first.get("mixed"):
            order = "mixed within each batch"
        elif first.get("reset") == "never":
            order = "never reset"
        sizes = sorted(unique(label(r.get("batch_size"), "unknown") for r in self.records), key=as_number)
        return f"{order}, batch {' and '.join(sizes)}"

    @property
    def axis_name(self) -> str:
        return AXIS_NAMES.get(self.axis, self.axis)

    @cached_property
    def figure(self) -> str:
        """What the table shows: accuracy, a cost, or the accuracy after a model was frozen."""
        if self.experiment == "convergence" and any(r.get("remaining") is not None for r in self.records):
            return "remaining"
        return COSTS.get(self.experiment, "top1")

    @cached_property
    def domains(self) -> list[str]:
        found = unique(record["domain"] for record in self.records)
        return sorted(found, key=lambda domain: place(CORRUPTIONS, domain))

    @cached_property
    def columns(self) -> list[str]:
        if self.axis == "domain":
            return self.domains
        if self.axis == "kind":
            return sorted(unique(map(self.column, self.records)), key=lambda kind: place(STREAM_KINDS, kind))
        return sorted(unique(self.column(record) for record in self.records), key=as_number)

    @cached_property
    def rows(self) -> dict[str, str]:
        """Row -> method, in the order of the recipes; one that has two sets of settings stands twice."""
        found = {self.names[id(record)]: str(record["method"]) for record in self.records}
        order = list(recipes())
        return dict(sorted(found.items(), key=lambda item: (place(order, item[1].partition("@")[0]), item[1])))

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
        """Return the records of the last column, the largest budget or size; of domains all, of rates, kinds none."""
        if self.axis == "domain" or not records:
            return records
        if self.axis in ("lr", "kind"):
            return []
        last = max((self.column(r) for r in records), key=self.columns.index)
        return [r for r in records if self.column(r) == last]

    @cached_property
    def visits(self) -> int:
        """How often a stream comes to a domain, all its domains together; 0 if it comes to each once."""
        streams: Counter[tuple] = Counter()
        for record in self.records:
            column = None
            if self.axis != "domain":
                column = self.column(record)
            streams[self.names[id(record)], column, record["seed"]] += 1
        most = max(streams.values())
        if most <= len(self.domains):
            return 0
        return most

    def column(self, record: Record) -> str:
        if self.axis == "domain":
            return str(record["domain"])
        return label(value(record, self.axis), "inf")

    def of(self, row: str) -> list[Record]:
        return [record for record in self.records if self.names[id(record)] == row]

    def figures(self, figure: str | None = None) -> dict[str, dict[str, Figure]]:
        """Return row -> column -> figure.

        Columns that are not domains are means over domains; so is `mean`, the last column where there are several
        domains. A mean that lacks a domain is left out.
        """
        return {row: self._cells(row, figure or self.figure) for row in self.rows}

    def _cells(self, row: str, figure: str) -> dict[str, Figure]:
        values: dict[str, dict[int, dict[str, list[float]]]] = {}  # column -> seed -> domain -> its visits
        for record in self.of(row):
            measured = measure(record, figure)
            if measured is None:
                continue
            columns = [self.column(record)]
            if self.axis == "domain" and len(self.domains) > 1:
                columns.append(MEAN)
            for column in columns:
                by_domain = values.setdefault(column, {}).setdefault(record["seed"], {})
                by_domain.setdefault(record["domain"], []).append(measured)
        cells = {}
        for column, seeds in values.items():
            needed = self._needed(column)
            complete = [statistics.mean(chain(*by.values())) for by in seeds.values() if len(by) == needed]
            if complete:
                cells[column] = Figure.of(complete)
        return cells

    def _needed(self, column: str) -> int:
        """Return how many domains a figure of this column is the mean of."""
        if self.axis == "kind":
            return len({record["domain"] for record in self.records if self.column(record) == column})
        return 1 if column in self.domains else len(self.domains)

    def best(self, figures: dict[str, dict[str, Figure]], figure: str | None = None) -> set[tuple[str, str]]:
        """Return the rows and columns to mark: the best rows of each column; of learning rates, the best of each row.

        The same learning rate means little to two methods.
        """
        figure = figure or self.figure
        if self.axis == "lr":
            turned = {c: {row: cells[c] for row, cells in figures.items() if c in cells} for c in self.columns}
            return {(row, column) for row in figures for column in best(turned, row, figure)}
        return {(row, column) for column in self.headings(figures) for row in best(figures, column, figure)}

    def spread(self, column: str) -> bool:
        """Return whether a column's standard deviation is shown: not that of one domain among many."""
        return column == MEAN or self.axis != "domain" or len(self.domains) == 1

    def headings(self, figures: dict[str, dict[str, Figure]]) -> list[str]:
        """Return the columns, and the mean where any row has it."""
        if any(MEAN in row for row in figures.values()):
            return [*self.columns, MEAN]
        return self.columns


def sections(records: Iterable[Record]) -> list[Section]:
    """Return the records by experiment and footing, in the paper's order."""
    found: dict[tuple, list[Record]] = {}
    for record in records:
        axes = AXES.get(record["experiment"], ("domain",))
        given = [axis for axis in axes if axis == "domain" or value(record, axis) is not None]
        for axis in given or axes:  # without any limit: the last column of each kind of budget
            found.setdefault((record["experiment"], axis, *footing(record)), []).append(record)
    result = []
    for (experiment, axis, *_), group in sorted(found.items(), key=lambda item: place(TITLES, item[0][0])):
        result += [_section(experiment, axis, records) for records in _by_images(group)]
    limited = {s.experiment for s in result if s.columns != ["inf"]}
    return [s for s in result if s.columns != ["inf"] or s.experiment not in limited]


def footing(record: Record) -> tuple:
    """Return what must agree for two records to be compared."""
    protocol = record.get("protocol") or {}
    corrupted = bool(record.get("severity", 5))
    data = None  # images as they are: each domain is a data set of its own
    if corrupted:
        data = images_of(record)
    if record.get("experiment") == "streams":  # all kinds stand in one table
        return (protocol.get("model"), protocol.get("weights"), images_of(record), record.get("split", "test"))
    before = None  # what else the model has seen
    if record.get("reset") == "never":
        before = label(record.get("domains"))
    return (
        protocol.get("model"),
        protocol.get("weights"),
        data,
        corrupted,
        record.get("split", "test"),
        bool(record.get("mixed")),
        label(record.get("reset")),
        before,
        record.get("kind"),
    )


def images_of(record: Record) -> str:
    """Return where the images came from."""
    key = "validation" if record.get("split") == "validation" else "data"
    return label(value(record, key), "unknown")


def _by_images(records: list[Record]) -> list[list[Record]]:
    """Return groups of records in which a domain has one number of images."""
    sizes: dict[tuple, set[int]] = {}
    for record in records:
        sizes.setdefault((record.get("kind"), record["domain"]), set()).add(record["images"])
    if all(len(size) == 1 for size in sizes.values()):
        return [records]
    return [[r for r in records if r["images"] == n] for n in sorted(set().union(*sizes.values()), reverse=True)]


def _section(experiment: str, axis: str, records: list[Record]) -> Section:
    section = Section(experiment, records, axis)
    for method in unique(record["method"] for record in records):
        mine = [record for record in records if record["method"] == method]
        keys = [*unique(key for record in mine for key in record.get("settings") or {}), *DISTINCT]
        others = [key for key in unique(keys) if key != axis]
        telling = [key for key in others if key in WRAPPERS or _tells_apart(section, mine, key)]
        for record in mine:
            parts = [
                DISTINCT.get(key, f"{key.replace('_', ' ')} {{}}").format(label(value(record, key)))
                for key in telling
                if value(record, key) is not None
            ]
            section.names[id(record)] = ", ".join([spelled(method), *parts])
    kept: dict[tuple, Record] = {}
    cells: dict[tuple, Any] = {}  # place -> the cell that counts there; its parts are visits
    for record in records:
        where = (section.names[id(record)], section.column(record), record["domain"], record["seed"])
        if cells.setdefault(where, record.get("cell")) == record.get("cell"):
            kept.setdefault((*where, record.get("part")), record)
    section.records = list(kept.values())
    section.repeated = len(records) - len(kept)
    return section


def _tells_apart(section: Section, records: Sequence[Record], key: str) -> bool:
    """Return whether records of the same column, domain and seed differ in the key, and not in what tells the same."""
    found: dict[tuple, set[str]] = {}
    for record in records:
        told = (label(value(record, other)) for other in TOLD.get(key, ()))
        where = (section.column(record), record["domain"], record["seed"], *told)
        found.setdefault(where, set()).add(label(value(record, key)))
    return any(len(values) > 1 for values in found.values())


def value(record: Record, key: str) -> Any:
    """Return a record's own entry, a setting of its method, or an entry of its protocol."""
    for entries in (record, record.get("settings") or {}, record.get("protocol") or {}):
        if entries.get(key) is not None:
            return entries[key]
    return None


def measure(record: Record, figure: str) -> float | None:
    """Return a record's figure: one of its entries, the time of an image, or the memory of the run."""
    if figure == "milliseconds":
        return milliseconds([record])
    if figure == "megabytes":
        memory = record.get("peak_memory") or record.get("process_peak_memory")
        if not memory:
            return None
        return memory / 1e6
    return record.get(figure)


def seconds_for(images: int, records: Sequence[Record]) -> float | None:
    """Return the seconds of so many images, to predict and to adapt, by all records together; None without any."""
    measured = sum(r["images"] for r in records)
    if not measured:
        return None
    return images * sum(r["seconds"] for r in records) / measured


def milliseconds(records: Sequence[Record]) -> float | None:
    """Return the milliseconds of an image: as many as the seconds of a thousand."""
    return seconds_for(1000, records)


def label(value: Any, none: str = "") -> str:
    """Return a value as it is printed."""
    if value is None:
        return none
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return str(value)


def place(order: Iterable[str], name: str) -> int:
    """Return where a name stands in an order; unknown names come last."""
    known = list(order)
    if name in known:
        return known.index(name)
    return len(known)


def unique(items: Iterable[Any]) -> list[Any]:
    """Return the items without repeats, in their order."""
    return list(dict.fromkeys(items))


def as_number(text: str) -> tuple[float, str]:
    """Return a key that sorts numbers by value, before other texts."""
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def best(figures: dict[str, dict[str, Figure]], column: str, figure: str = "top1") -> set[str]:
    """Return the rows that are best in a column as printed; none where all are alike."""
    digits = DIGITS.get(figure, 1)
    shown = {row: round(cells[column].mean, digits) for row, cells in figures.items() if column in cells}
    if len(set(shown.values())) < 2:
        return set()
    choose = min if figure in LOWER_IS_BETTER else max
    top = choose(shown.values())
    return {row for row, shown_value in shown.items() if shown_value == top}
