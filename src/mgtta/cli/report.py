"""`mgtta report`: records as tables and a page, by `mgtta.write_report`."""

from pathlib import Path
from typing import Annotated

import typer

from mgtta.cli.options import Checkpoint, Clean, Source

Runs = Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of the records: --out of `mgtta bench`.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the report; by default the same folder.")]
Examples = Annotated[bool, typer.Option(help="Show images with predictions: embedded ones, or those of --data.")]
Data = Annotated[str | None, typer.Option(help="The images of the records, to show some before and after adaptation.")]


def report(
    runs: Runs,
    out: Out = None,
    examples: Examples = True,
    data: Data = None,
    checkpoint: Checkpoint = None,
    source: Source = None,
    clean: Clean = None,
) -> None:
    """Write the records as markdown, as LaTeX and as one HTML page that needs no network."""
    from mgtta.report import write_report

    pictures = {"checkpoint": checkpoint, "source": source, "clean": clean}
    typer.echo(write_report(runs, out, examples=examples, data=data, **pictures))
