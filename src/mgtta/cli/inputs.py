"""What the options name: devices, ranks, models, data sets, source statistics."""

from pathlib import Path
from typing import Any

import typer

CLEAN_IMAGES = 1000  # of --clean, for source statistics
CHECKED_IMAGES = 64  # clean images whose labels are compared with predictions


def device_of(device: str | None) -> str:
    """Return the device to use: the one named, or the GPU if there is one, or the CPU."""
    import torch

    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError:
        raise ValueError(f"torch has no device {device!r}: --device cpu, cuda, or cuda:1") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch finds no GPU for --device {device}: use --device cpu, or a CUDA build of torch")
    if device:
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def process_group(context: typer.Context, device: str | None, timeout: float) -> Any:
    """Return the process group of torchrun's ranks, which lasts until the command ends; None for one process."""
    from mgtta._lib.ranks import joined

    return context.with_resource(joined(device_of(device), timeout))


def model_and_data(
    model: str,
    checkpoint: Path | None,
    num_classes: int | None,
    data: str,
    size: int | None,
    skip: bool,
    device: str | None,
    part: tuple[int, int] | None = None,
    classes: Path | None = None,
    restrict: bool = False,
) -> tuple[Any, Any]:
    """Return the Classifier on its device, and the data set; with `restrict`, the model scores its classes only."""
    import mgtta

    arguments: dict[str, Any] = {}
    if num_classes is not None:
        arguments["num_classes"] = num_classes
    classifier = mgtta.load_model(model, checkpoint=checkpoint, **arguments)
    images = open_images(data, classifier, size, skip, part, classes, restrict)
    if images.class_indices is not None:
        few = len(images.class_indices)
        total = classifier.num_classes
        typer.echo(f"{few} class folders: scored over those {few} of the model's {total} classes", err=True)
        classifier = mgtta.load_model(model, checkpoint=checkpoint, classes=images.class_indices, **arguments)
    return classifier.to(device_of(device)), images


def open_images(
    data: str,
    classifier: Any,
    size: int | None,
    skip: bool = False,
    part: tuple[int, int] | None = None,
    classes: Path | None = None,
    restrict: bool = False,
) -> Any:
    """Return the data set at a path, in the size that the model takes unless another is named."""
    from mgtta.data.datasets import open_dataset, read_classes

    side, crop_pct = classifier.input_size
    options: dict[str, Any] = {"size": size or side, "crop_pct": crop_pct, "part": part, "restrict": restrict}
    options["classes"] = _shipped_classes(classifier.name, data) if classes is None else read_classes(classes)
    if classes is not None and len(options["classes"]) != classifier.num_classes:
        raise ValueError(
            f"{classes} names {len(options['classes'])} classes, but the model has {classifier.num_classes}: name all "
            "of the model's classes, one on each line, in its order"
        )
    return open_dataset(data, on_error="skip" if skip else "raise", **options)


def _shipped_classes(model: str, data: str) -> tuple[str, ...] | None:
    """Return the classes of a model that comes with the package, if the class folders have their names."""
    from mgtta.data.embedded import EMBEDDED

    if model not in EMBEDDED or not Path(data).is_dir():
        return None
    names = tuple(EMBEDDED[model].classes)
    folders = {entry.name for entry in Path(data).iterdir() if entry.is_dir()}
    return names if folders <= set(names) else None


def note_order(images: Any, shuffle: int | None) -> None:
    """Say so if images come class by class."""
    labels = getattr(images, "labels", None)
    if shuffle is not None or labels is None:
        return
    changes = int((labels[1:] != labels[:-1]).sum())
    classes = len(labels.unique())
    if 0 < changes == classes - 1 < len(labels) - 1:
        typer.echo("images come class by class, which is hard to adapt on: --shuffle 0 mixes them", err=True)


def labelled_images(images: Any, classifier: Any, most: int = 128) -> tuple[Any, Any]:
    """Return the first images of a data set as one tensor, and their labels if its classes seem to be the model's.

    Folders may be as many as the model's classes and in another order. Then most predictions on clean images are wrong.
    """
    import torch

    from mgtta.data.streams import stream

    batches = list(stream(images, first=most))
    x = torch.cat([batch.x for batch in batches])
    classes = getattr(images, "classes", None)
    found = [batch.y for batch in batches if batch.y is not None]
    if not found or classes is None or len(classes) != classifier.num_classes:
        return x, None
    labels = torch.cat(found)
    with torch.no_grad():
        sureness, predictions = classifier(x[:CHECKED_IMAGES]).softmax(1).max(1)
    right = float((predictions.cpu() == labels[:CHECKED_IMAGES]).double().mean())
    if right < float(sureness.mean()) / 2:
        typer.echo(
            f"warning: {100 * right:.0f} % of the clean images are predicted as their folders say, so the labels are "
            "not used; --classes FILE says which folder is which class",
            err=True,
        )
        return x, None
    return x, labels


def check_source(source: str | None, clean: str | None) -> None:
    """Raise an error unless one of --source and --clean is given, and what it names can be read."""
    from mgtta._lib.shipped import shipped

    if source is not None and clean is not None:
        raise ValueError("--source names source statistics and --clean computes new ones: leave out one")
    if source is None and clean is None:
        raise ValueError(
            "source statistics are needed: --source FILE, which `mgtta source` writes, "
            "or --clean FOLDER of clean images"
        )
    if source is not None and source not in shipped("sources") and not Path(source).is_file():
        known = ", ".join(shipped("sources"))
        raise FileNotFoundError(f"--source {source}: no such file, and not one of {known}; `mgtta source` writes one")


def source_of(classifier: Any, source: str | None, clean: str | None, size: int | None) -> Any:
    """Return the source statistics in the file of --source, or those of the images of --clean."""
    import mgtta
    from mgtta.data.streams import stream

    check_source(source, clean)
    if source is not None:
        return mgtta.load_source(source)
    assert clean is not None
    images = open_images(clean, classifier, size)
    return mgtta.source_statistics(classifier, stream(images, first=CLEAN_IMAGES))
