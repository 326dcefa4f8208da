"""`mgtta source`: the source statistics of a model, by `mgtta.source_statistics`."""

from pathlib import Path
from typing import Annotated

import typer

from mgtta.cli.inputs import model_and_data
from mgtta.cli.options import Checkpoint, Device, Model, NumClasses, Size, Skip

Data = Annotated[str, typer.Argument(help="Clean images of the kind that the model was trained on, unlabelled.")]
Out = Annotated[Path, typer.Option(help="File for the statistics, .safetensors.")]
Images = Annotated[int, typer.Option(min=1, help="Number of images.")]


def source(
    data: Data,
    model: Model,
    out: Out = Path("source.safetensors"),
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    images: Images = 1000,
    size: Size = None,
    skip_unreadable: Skip = False,
    device: Device = None,
) -> None:
    """Compute the source statistics of a model from clean images, once, before it is deployed."""
    import mgtta
    from mgtta._lib.files import writable
    from mgtta.data.streams import stream

    writable(out)
    classifier, dataset = model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device)
    statistics = mgtta.source_statistics(classifier, stream(dataset, first=images))
    mgtta.save_source(statistics, out)
    typer.echo(f"{statistics.images} images, {len(statistics.mean)} layers -> {out}")
