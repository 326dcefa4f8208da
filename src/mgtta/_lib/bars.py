"""The progress bar of every command: what runs, how much is done, how long the rest takes."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def progress_bar(
    *more: ProgressColumn, description: str = "{task.description}", compact: bool = False, **options: Any
) -> Progress:
    """Return a progress bar that writes to standard error.

    Args:
        more: columns at the end.
        options: rich's; `console` changes where the bar is written.
    """
    remaining = TimeRemainingColumn(compact=compact)
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), remaining, *more)
    return Progress(*columns, **{"console": Console(stderr=True), **options})
