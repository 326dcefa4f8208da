"""`mgtta train`: a generator from a few unlabelled images, by `mgtta.meta_train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mgtta.cli.inputs import check_source, model_and_data, source_of
from mgtta.cli.options import Checkpoint, Clean, Device, Model, NumClasses, Resume, Size, Skip, Source

Data = Annotated[str, typer.Argument(help="Images to learn from, unlabelled: a folder, a tree, or tars.")]
Out = Annotated[Path, typer.Option(help="File for the generator, .safetensors.")]
Corrupt = Annotated[
    bool, typer.Option("--corrupt", help="The images are clean: shift them by the four validation corruptions.")
]
Images = Annotated[int, typer.Option(min=1, help="Number of images.")]
Steps = Annotated[int | None, typer.Option(help="Number of training steps: 2000, or 1200 with --streams.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images in a batch: 2, or 16 with --streams.")]
ModelRate = Annotated[
    float | None, typer.Option(help="Learning rate of the model during training: 1e-4, or 5e-3 with --streams.")
]
Streams = Annotated[
    bool, typer.Option("--streams", help="Train on short streams, as a deployed model sees them, not by the paper.")
]
Pull = Annotated[
    float | None,
    typer.Option(help="After each update, go this share of the distance to the source: 0, or 0.05 with --streams."),
]
Mirror = Annotated[bool, typer.Option("--mirror", help="See every image with its mirror image, as mgtta+ does.")]
GeneratorRate = Annotated[float, typer.Option(help="Learning rate of the generator.")]
HiddenSize = Annotated[int, typer.Option(help="Hidden size of the generator.")]
Memory = Annotated[str, typer.Option(help="Memory of the generator: gml, or lstm for the paper's ablation.")]
Seed = Annotated[int, typer.Option(help="Seed of the images, their order and the generator's first weights.")]

PAPER: dict[str, Any] = {"steps": 2000, "batch_size": 2, "lr": 1e-4, "pull": 0.0}
STREAMS: dict[str, Any] = {"steps": 1200, "batch_size": 16, "lr": 5e-3, "pull": 0.05, "episodes": "streams"}
MIRRORED: dict[str, Any] = {"mirror": True, "trade_off": 0.8}  # as mgtta+ deploys the generator


def train(
    data: Data,
    model: Model,
    out: Out = Path("generator.safetensors"),
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    clean: Clean = None,
    corrupt: Corrupt = False,
    images: Images = 128,
    streams: Streams = False,
    steps: Steps = None,
    batch_size: BatchSize = None,
    lr: ModelRate = None,
    pull: Pull = None,
    mirror: Mirror = False,
    outer_lr: GeneratorRate = 1e-2,
    hidden_size: HiddenSize = 8,
    memory: Memory = "gml",
    seed: Seed = 0,
    resume: Resume = None,
    size: Size = None,
    skip_unreadable: Skip = False,
    device: Device = None,
) -> None:
    """Train a generator, the learned optimizer, on a few unlabelled images (Algorithm 1)."""
    import mgtta
    from mgtta._lib.files import command, writable

    writable(out, resume)
    check_source(source, clean)
    classifier, dataset = model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device)
    statistics = source_of(classifier, source, clean, size)
    given = {"steps": steps, "batch_size": batch_size, "lr": lr, "pull": pull}
    chosen = dict(STREAMS if streams else PAPER)
    if mirror:
        chosen |= MIRRORED
    chosen |= {name: value for name, value in given.items() if value is not None}
    x = _domains(dataset, images, seed, corrupt) if streams else _shifted(dataset, images, seed, corrupt)
    generator = mgtta.meta_train(
        classifier,
        statistics,
        x,
        outer_lr=outer_lr,
        hidden_size=hidden_size,
        memory=memory,
        seed=seed,
        checkpoint=resume,
        **chosen,
    )
    mgtta.save_generator(generator, out, command=command())
    best = generator.about["best"]
    seen = generator.about["training"]["images"]
    found = f"best objective {-best['score']:.4f} at step {best['step']}"
    typer.echo(f"{seen} images, {chosen['steps']} steps; {found} -> {out}")


def _shifted(dataset: Any, images: int, seed: int, corrupt: bool) -> Any:
    """Return the images to train on: those of the data set, which are shifted already, or corrupted copies."""
    from mgtta.data.streams import stream
    from mgtta.training.meta import shifted_images

    if corrupt:
        return shifted_images(dataset, images, seed=seed)
    [batch] = stream(dataset, batch_size=images, first=images, seed=seed)
    return batch.x


def _domains(dataset: Any, images: int, seed: int, corrupt: bool) -> Any:
    """Return the images of each domain: of each validation corruption, or of the data set as the only domain."""
    from mgtta.training.meta import shifted_domains

    if corrupt:
        return shifted_domains(dataset, images, seed=seed)
    return [_shifted(dataset, images, seed, corrupt)]
