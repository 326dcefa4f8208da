"""The demo: an embedded ViT on rendered patterns under 15 corruptions, as it is and adapting.

It is `mgtta bench corruptions` with small batches, in a new folder.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.table import Table

from mgtta.bench.cells import Options, Setup
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.resources import Listener
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.report import sections
from mgtta.report.summary import MEAN, Figure, best

MODEL = "patterns_vit"
BATCH_SIZE = 16


def run(images: int, methods: Sequence[str], out: Path, device: str = "cpu", watch: Listener | None = None) -> Path:
    """Run each method on `images` images per corruption, and return the folder of the records.

    The severity is 5, and the method is reset before each corruption. The folder is `out`, or `out-2`, `out-3`, ... if
    that has records already: a demo shows only what it has just measured.
    """
    if images < 1:
        raise ValueError(f"images must be at least 1, not {images}")
    cells = experiment_cells("corruptions", Options(methods, batch_size=BATCH_SIZE))
    folder = _new_folder(out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a model, more threads cost more than they give
    try:
        run_cells(cells, Setup(MODEL, images=images, device=device), Store(folder), watch=watch, title="demo")
    finally:
        torch.set_num_threads(threads)
    return folder


def table(folder: Path) -> Table:
    """Return the table of accuracy by corruption, one column for each method, the best in bold."""
    [section] = sections(Store(folder).records())
    figures = section.figures()
    first = section.records[0]
    shown = Table(
        "corruption",
        title=f"accuracy, %: {first['images']} images per corruption, severity {first['severity']}, "
        f"batch {first['batch_size']}, reset before each",
    )
    for method in figures:
        shown.add_column(method, justify="right")
    for column in section.headings(figures):
        if column == MEAN:
            shown.add_section()
        top = best(figures, column)
        shown.add_row(column, *(_cell(cells[column].mean, method in top) for method, cells in figures.items()))
    return shown


def summary(folder: Path) -> list[str]:
    """Return a sentence on each method's gain over the first one, and one on the corruptions that it makes worse."""
    [section] = sections(Store(folder).records())
    figures = section.figures()
    first, *others = figures
    return [line for method in others for line in _gain(method, figures[method], first, figures[first])]


def _gain(name: str, ours: Mapping[str, Figure], other: str, theirs: Mapping[str, Figure]) -> list[str]:
    changes = {column: ours[column].mean - theirs[column].mean for column in ours if column != MEAN}
    worse = sorted((column for column in changes if changes[column] < 0), key=changes.__getitem__)
    mean = sum(changes.values()) / len(changes)
    texts = [f"{column} ({changes[column]:+.1f})" for column in worse]
    return [
        f"{name}: {mean:+.1f} points over {other} on the mean of {len(changes)} corruptions",
        f"{name} makes worse: {', '.join(texts) or 'none of them'}",
    ]


def _cell(value: float, bold: bool) -> str:
    return f"[bold]{value:.1f}[/]" if bold else f"{value:.1f}"


def _new_folder(out: Path) -> Path:
    """Return the first of `out`, `out-2`, `out-3`, ... that had no records, and claim it."""
    others = (out.with_name(f"{out.name}-{n}") for n in itertools.count(2))
    return next(folder for folder in itertools.chain([out], others) if _claimed(folder))


def _claimed(folder: Path) -> bool:
    """Return whether the folder had no records. It then has an empty file of them, so another demo uses another."""
    try:
        Store(folder).path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
