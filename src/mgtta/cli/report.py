"""`mgtta report`: records as tables and a page, by `mgtta.write_report`."""

from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of the records: --out of `mgtta bench`.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the report; by default the same folder.")]
Examples = Annotated[bool, typer.Option(help="Show images with predictions, if the data are embedded.")]


def report(runs: Runs, out: Out = None, examples: Examples = True) -> None:
    """Write the records as markdown, as LaTeX and as one HTML page that needs no network."""
    from mgtta.report import write_report

    typer.echo(write_report(runs, out, examples=examples))
