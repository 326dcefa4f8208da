"""`mgtta tune`: choose a method and its learning rate without labels, by `mgtta.running.tune.tune`."""

from typing import Annotated, Any

import typer

from mgtta.cli.errors import plain_warnings
from mgtta.cli.inputs import labelled_images, model_and_data, open_images, source_of
from mgtta.cli.options import Checkpoint, Classes, Device, Model, NumClasses, Size, Skip, Source, names, number

Data = Annotated[str, typer.Argument(help="Images of the shifted stream, without labels.")]
Clean = Annotated[str, typer.Option(help="Clean images of the kind that the model was trained on; best class folders.")]
Methods = Annotated[str, typer.Option(help="Methods to try, separated by commas; see `mgtta list`.")]
Paces = Annotated[str, typer.Option(help="Factors on each method's own learning rate, separated by commas.")]
Images = Annotated[int, typer.Option(min=1, help="Number of images of the sample, from the first.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images in a batch; best that of the stream.")]


def tune(
    data: Data,
    model: Model,
    clean: Clean,
    methods: Methods = "mgtta,mgtta+,tent",
    paces: Paces = "0.2,1,5",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    images: Images = 256,
    batch_size: BatchSize = 64,
    size: Size = None,
    classes: Classes = None,
    skip_unreadable: Skip = False,
    device: Device = None,
) -> None:
    """Choose a method and its learning rate without labels, and say how sure the choice is."""
    import torch

    from mgtta.data.streams import stream
    from mgtta.running.tune import CLEAN_IMAGES, default_candidates, tune

    classifier, dataset = model_and_data(
        model, checkpoint, num_classes, data, size, skip_unreadable, device, classes=classes
    )
    sample = torch.cat([batch.x for batch in stream(dataset, first=images, shuffle=False)])
    x, labels = labelled_images(open_images(clean, classifier, size, classes=classes), classifier, CLEAN_IMAGES)
    statistics = source_of(classifier, source, None if source else clean, size)
    candidates = default_candidates(classifier, names(methods), [number(text, "--paces") for text in names(paces)])

    def tell(candidate: Any) -> None:
        typer.echo(f"{candidate.accuracy:5.1f} %  {candidate}", err=True)

    with plain_warnings():
        found = tune(
            classifier,
            sample,
            x,
            labels,
            source=statistics,
            candidates=candidates,
            batch_size=batch_size,
            on_candidate=tell,
        )
    typer.echo(found)
