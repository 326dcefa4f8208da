"""`mgtta corrupt`: a corrupted copy of an image tree or of tars, by `mgtta.data.export.corrupt_folder`."""

from pathlib import Path
from typing import Annotated

import typer

from mgtta.cli.options import Corruptions, names

Data = Annotated[str, typer.Argument(metavar="IN", help="A folder or tree of clean images, or WebDataset tars.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="<corruption>/<severity>/<class>/<name>.JPEG")]
Severity = Annotated[list[int], typer.Option(help="1 to 5, repeatable; by default all.")]
Size = Annotated[int, typer.Option(help="Side of the images in pixels.")]
Seed = Annotated[int, typer.Option(help="Seed of the corruptions.")]


def corrupt(
    data: Data,
    out: Out,
    corruptions: Corruptions = "",
    severity: Severity = [],
    size: Size = 224,
    seed: Seed = 0,
) -> None:
    """Write a corrupted copy of an image tree, in the layout of ImageNet-C; after a kill, it resumes."""
    from mgtta.data.corruptions import CORRUPTIONS, SEVERITIES
    from mgtta.data.export import corrupt_folder

    report = corrupt_folder(
        data,
        out,
        corruptions=names(corruptions) or list(CORRUPTIONS),
        severities=severity or list(SEVERITIES),
        seed=seed,
        size=size,
    )
    typer.echo(str(report))
