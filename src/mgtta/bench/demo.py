"""The demonstration: the embedded ViT on rendered characters under 15 corruptions, as it is and adapting.

It is `mgtta bench corruptions` with small batches, in a folder of its own, and the report at its end.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mgtta.bench.cells import Options, Setup
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.resources import Watch
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.report import sections
from mgtta.report.summary import MEAN, best

BATCH_SIZE = 16


def run(images: int, methods: Sequence[str], out: Path, device: str = "cpu", watch: Watch | None = None) -> Path:
    """Run each method on `images` of each corruption at severity 5, reset before each; gives the records' folder.

    The folder is `out`, or `out-2`, `out-3`, ... where that holds records already: a demonstration shows what it has
    just measured and nothing else.
    """
    if images < 1:
        raise ValueError(f"images must be at least 1, not {images}")
    cells = experiment_cells("corruptions", Options(methods, batch_size=BATCH_SIZE))
    folder = _fresh(out)
    run_cells(cells, Setup(images=images, device=device), Store(folder), watch=watch, title="demo")
    return folder


def table(folder: Path) -> Table:
    """Accuracy by corruption, one column a method, the best in bold."""
    [section] = sections(Store(folder).records())
    figures, like = section.figures(), section.records[0]
    shown = Table(
        "corruption",
        title=f"accuracy, %: {like['images']} images of each corruption, severity {like['severity']}, "
        f"batch {like['batch_size']}, reset before each",
    )
    for method in figures:
        shown.add_column(method, justify="right")
    for column in section.headings(figures):
        if column == MEAN:
            shown.add_section()
        top = best(figures, column)
        shown.add_row(column, *(_cell(cells[column].mean, method in top) for method, cells in figures.items()))
    return shown


def _cell(value: float, bold: bool) -> str:
    return f"[bold]{value:.1f}[/]" if bold else f"{value:.1f}"


def _fresh(out: Path) -> Path:
    others = (out.with_name(f"{out.name}-{n}") for n in itertools.count(2))
    return next(folder for folder in itertools.chain([out], others) if _claimed(folder))


def _claimed(folder: Path) -> bool:
    """Whether the folder had no records; from now on it has a file of them, so that another demo goes elsewhere."""
    try:
        Store(folder).path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
