"""`mgtta adapt`: the options of `mgtta.adapt_stream`, and of the method that it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mgtta.cli.errors import plain_warnings
from mgtta.cli.inputs import check_source, model_and_data, note_order, process_group, source_of
from mgtta.cli.options import (
    Checkpoint,
    Classes,
    Clean,
    Device,
    Model,
    NumClasses,
    Precision,
    Restrict,
    Resume,
    Size,
    Skip,
    Source,
    Timeout,
    settings,
)

Data = Annotated[str, typer.Argument(help="A folder of images, a tree of class folders, or WebDataset tars.")]
Out = Annotated[Path, typer.Option(help="Predictions: .csv or .jsonl.")]
Method = Annotated[str, typer.Option(help="See `mgtta list`; deyo@mgtta is deyo at the MGTTA paper's settings.")]
Setting = Annotated[
    list[str], typer.Option("--set", help="A setting of the method, such as lr=5e-3, pull=0.05, gather=16; repeatable.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
Images = Annotated[int | None, typer.Option(min=1, help="Number of images, from the first; by default all.")]
Shuffle = Annotated[
    int | None,
    typer.Option(metavar="SEED", min=0, help="Seed of a random order; by default by name, a tree class by class."),
]
State = Annotated[Path | None, typer.Option(help="File for the adapted state; see --start.")]
Start = Annotated[Path | None, typer.Option(help="State to start from, with its learning rate; see --state.")]
Export = Annotated[Path | None, typer.Option(help="File for the adapted weights, .safetensors, which timm loads.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Batches between two saves of --resume.")]
Guarded = Annotated[bool, typer.Option("--guard", help="Watch for collapse, and undo it.")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Write the source model's prediction, too: one more forward pass.")
]
LowMemory = Annotated[bool, typer.Option("--low-memory", help="On the fast path: keep few activations.")]
Schedule = Annotated[str, typer.Option(help="always; auto: learn mostly after a shift.")]
Lr = Annotated[float | None, typer.Option(help="Learning rate; by default the method's.")]
Generator = Annotated[str | None, typer.Option(help="Generator: a shipped name, or a file of `mgtta train`.")]
Json = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each batch, for programs.")]
Report = Annotated[
    Path | None,
    typer.Option(help="File for a page of your pictures before and after, .html; one more forward pass an image."),
]
Estimate = Annotated[
    str | None,
    typer.Option(metavar="CLEAN", help="Clean images, best in class folders: estimate the accuracy without labels."),
]
SplitShards = Annotated[bool, typer.Option("--split-shards", help="Under torchrun: each rank opens only its own tars.")]


def adapt(
    context: typer.Context,
    data: Data,
    model: Model,
    out: Out = Path("predictions.csv"),
    method: Method = "mgtta+",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    clean: Clean = None,
    setting: Setting = [],
    lr: Lr = None,
    generator: Generator = None,
    batch_size: BatchSize = 64,
    images: Images = None,
    shuffle: Shuffle = None,
    state: State = None,
    start: Start = None,
    export: Export = None,
    resume: Resume = None,
    save_every: SaveEvery = 32,
    json: Json = False,
    report: Report = None,
    estimate: Estimate = None,
    guard: Guarded = False,
    precision: Precision = "auto",
    low_memory: LowMemory = False,
    schedule: Schedule = "always",
    size: Size = None,
    classes: Classes = None,
    restrict: Restrict = False,
    compare: Compare = False,
    skip_unreadable: Skip = False,
    device: Device = None,
    split_shards: SplitShards = False,
    timeout: Timeout = 300.0,
) -> None:
    """Predict images while adapting to them; write the predictions, and the state if a file is named for it."""
    import mgtta
    from mgtta._lib.ranks import ranks_of
    from mgtta.methods.registry import SOURCE
    from mgtta.running.adapt import check_outputs

    group = process_group(context, device, timeout)
    ranks = ranks_of(group)
    check_outputs(ranks, out, state, export, report)
    setting = _with(setting, lr=lr, generator=generator)
    chosen = settings(setting)
    if start is not None and "lr" in chosen:
        raise ValueError("--start continues at the learning rate of its state: leave out --set lr and --lr")
    needs = _checked_needs(method, chosen, source, clean)
    part = ranks.part if split_shards else None
    classifier, dataset = model_and_data(
        model, checkpoint, num_classes, data, size, skip_unreadable, device, part, classes, restrict
    )
    if ranks.first:
        note_order(dataset, shuffle)
    if SOURCE in needs:
        chosen["source"] = source_of(classifier, source, clean, size)
    how: dict[str, Any] = {"precision": precision, "low_memory": low_memory, "schedule": schedule}
    order: dict[str, Any] = {"batch_size": batch_size, "images": images, "shuffle": shuffle, "domain": Path(data).name}
    files: dict[str, Any] = {"state": state, "export": export, "resume": resume, "save_every": save_every}
    with plain_warnings():
        adapting = mgtta.create(method, classifier, guard=guard, process_group=group, **how, **chosen)
        if start is not None:
            mgtta.load_state(adapting, start)
        same = {"settings": setting, "schedule": schedule}
        files["compare"] = classifier if compare else None
        story = _story(adapting, dataset, chosen, (json, report, estimate), (batch_size, size, images, classes))
        result = mgtta.adapt_stream(
            adapting, dataset, out, **order, **files, protocol=same, split_shards=split_shards, watch=story
        )
    _tell(story, ranks, result)


def _tell(story: Any, ranks: Any, result: Any) -> None:
    """Say what came of the run."""
    if story is not None:
        story.end(result)
    elif ranks.first:
        typer.echo(result)


def _with(setting: list[str], **options: Any) -> list[str]:
    """Return the settings of --set with those that have an option of their own."""
    found = list(setting)
    for name, value in options.items():
        if value is None:
            continue
        if any(pair.startswith(f"{name}=") for pair in setting):
            raise ValueError(f"--{name} and --set {name}=... name the same setting: leave out one")
        found.append(f"{name}={value}")
    return found


def _story(
    method: Any,
    dataset: Any,
    chosen: dict[str, Any],
    telling: tuple[bool, Path | None, str | None],
    reading: tuple[int, int | None, int | None, Path | None],
) -> Any:
    """Return what follows the run and speaks of it; None if several ranks share the batches.

    Args:
        telling: --json, --report and --estimate.
        reading: --batch-size, --size, --images and --classes.
    """
    from mgtta.adaptation.monitor import SHARE, Monitor
    from mgtta.running.story import Story

    lines, report, estimate = telling
    batch_size, size, images, classes = reading
    if method.ranks.size > 1:
        if lines or report or estimate:
            raise ValueError("--json, --report and --estimate follow one process: leave them out under torchrun")
        return None
    calibration = None if estimate is None else _calibration(method, estimate, batch_size, size, classes)
    share = SHARE if report is None else 1.0
    monitor = Monitor(method, source=chosen.get("source"), calibration=calibration, share=share)
    story = Story(monitor, lines, report, getattr(dataset, "name", str), _class_names(dataset, method))
    story.start(min(len(dataset), images or len(dataset)), size or method.model.input_size[0])
    return story


def _calibration(method: Any, estimate: str, batch_size: int, size: int | None, classes: Path | None) -> Any:
    """Return a calibration from the images of --estimate, with their labels if their folders are the classes."""
    import mgtta
    from mgtta.cli.inputs import labelled_images, open_images

    x, labels = labelled_images(open_images(estimate, method.model, size, classes=classes), method.model)
    return mgtta.calibrate(method, x, labels, batch_size=batch_size)


def _class_names(dataset: Any, method: Any) -> Any:
    """Return what names a class: the data set's names if they are the model's classes, else the numbers."""
    classes = getattr(dataset, "classes", None)
    if classes is None or len(classes) != method.model.num_classes:
        return str
    return classes.__getitem__


def _checked_needs(method: str, chosen: dict[str, Any], source: str | None, clean: str | None) -> tuple[str, ...]:
    """Return what the method needs; raise an error if an option for it is missing, before anything is loaded."""
    from mgtta.methods.registry import FISHER, SOURCE, recipe

    needs = recipe(method).needs
    if FISHER in needs and "fisher" not in chosen:
        raise ValueError(
            f"{method} needs Fisher information of clean images: --set fisher=FILE, which `mgtta fisher` writes; "
            "--method eta does without it"
        )
    if SOURCE in needs:
        check_source(source, clean)
    return needs
