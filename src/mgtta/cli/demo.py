"""`mgtta demo`: a small benchmark that needs no download, by `mgtta.bench.demo`."""

from pathlib import Path
from typing import Annotated

import typer

from mgtta.cli.inputs import device_of
from mgtta.cli.options import Device, Methods, names

Images = Annotated[int, typer.Option(help="Images per corruption.")]
Out = Annotated[Path, typer.Option(help="Folder for records and report; OUT-2, ... if it has records already.")]


NEXT = """next:
  open {report} in a browser
  mgtta bench continual --model patterns_vit --images {images} --methods {methods}
  mgtta source CLEAN --model MODEL --out source.safetensors     MODEL: any timm name
  mgtta adapt IMAGES --model MODEL --source source.safetensors"""


def demo(
    images: Images = 512,
    methods: Methods = "noadapt,mgtta+",
    out: Out = Path("runs/demo"),
    device: Device = None,
) -> None:
    """Run a small ViT on rendered patterns under 15 corruptions, as it is and adapting. Needs no download."""
    from mgtta.bench.demo import run, summary, table
    from mgtta.cli.listing import show
    from mgtta.cli.progress import shown_progress
    from mgtta.report import write_report

    with shown_progress() as watch:
        folder = run(images, names(methods), out, device_of(device), watch)
    show(table(folder))
    for line in summary(folder):
        typer.echo(line)
    typer.echo(NEXT.format(report=write_report(folder), images=images, methods=methods))
