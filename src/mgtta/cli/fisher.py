"""`mgtta fisher`: the Fisher information of a model, for EATA, by `mgtta.fisher_information`."""

from pathlib import Path
from typing import Annotated

import typer

from mgtta.cli.inputs import model_and_data
from mgtta.cli.options import Checkpoint, Device, Model, NumClasses, Size, Skip

Data = Annotated[str, typer.Argument(help="Clean images of the kind that the model was trained on, unlabelled.")]
Out = Annotated[Path, typer.Option(help="File for the Fisher information, .safetensors.")]
Images = Annotated[int, typer.Option(min=1, help="Number of images.")]


def fisher(
    data: Data,
    model: Model,
    out: Out = Path("fisher.safetensors"),
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    images: Images = 2000,
    size: Size = None,
    skip_unreadable: Skip = False,
    device: Device = None,
) -> None:
    """Compute the Fisher information that EATA needs from clean images, once, before the model is deployed."""
    import mgtta
    from mgtta._lib.files import writable
    from mgtta.data.streams import stream

    writable(out)
    classifier, dataset = model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device)
    found = mgtta.fisher_information(classifier, stream(dataset, first=images), max_images=images)
    mgtta.save_fisher(found, out)
    typer.echo(f"{found.images} images, {len(found.values)} parameters -> {out}")
