"""The progress bar that every command shows: what runs, how far it is, how long it will take."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bar(
    *more: ProgressColumn, description: str = "{task.description}", compact: bool = False, **options: Any
) -> Progress:
    """On the standard error unless `options`, which are rich's, say otherwise; `more` columns stand at the end."""
    left = TimeRemainingColumn(compact=compact)
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), left, *more)
    return Progress(*columns, **{"console": Console(stderr=True), **options})
