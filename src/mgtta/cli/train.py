"""`mgtta train`: a generator from a few unlabelled images, by `mgtta.meta_train`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mgtta.cli.inputs import model_and_data, source_of
from mgtta.cli.options import Checkpoint, Clean, Device, Model, NumClasses, Resume, Size, Skip, Source

Data = Annotated[str, typer.Argument(help="Images to learn from, unlabelled: a folder, a tree, or tars.")]
Out = Annotated[Path, typer.Option(help="File for the generator, .safetensors.")]
Corrupt = Annotated[
    bool, typer.Option("--corrupt", help="The images are clean: shift them by the four validation corruptions.")
]
Images = Annotated[int, typer.Option(help="Number of images.")]
Steps = Annotated[int, typer.Option(help="Number of training steps.")]
BatchSize = Annotated[int, typer.Option(help="Images in a batch.")]
ModelRate = Annotated[float, typer.Option(help="Learning rate of the model during training.")]
GeneratorRate = Annotated[float, typer.Option(help="Learning rate of the generator.")]
HiddenSize = Annotated[int, typer.Option(help="Hidden size of the generator.")]
Memory = Annotated[str, typer.Option(help="Memory of the generator: gml, or lstm for the paper's ablation.")]
Seed = Annotated[int, typer.Option(help="Seed of the images, their order and the generator's first weights.")]


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
    steps: Steps = 2000,
    batch_size: BatchSize = 2,
    lr: ModelRate = 1e-4,
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
    classifier, dataset = model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device)
    statistics = source_of(classifier, source, clean, size)
    x = _shifted(dataset, images, seed, corrupt)
    generator = mgtta.meta_train(
        classifier,
        statistics,
        x,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        outer_lr=outer_lr,
        hidden_size=hidden_size,
        memory=memory,
        seed=seed,
        checkpoint=resume,
    )
    mgtta.save_generator(generator, out, command=command())
    best = generator.about["best"]
    typer.echo(f"{len(x)} images, {steps} steps; best objective {-best['score']:.4f} at step {best['step']} -> {out}")


def _shifted(dataset: Any, images: int, seed: int, corrupt: bool) -> Any:
    """Return the images to train on: those of the data set, which are shifted already, or corrupted copies."""
    from mgtta.data.streams import stream
    from mgtta.training.meta import shifted_images

    if corrupt:
        return shifted_images(dataset, images, seed=seed)
    [batch] = stream(dataset, batch_size=images, first=images, seed=seed)
    return batch.x
