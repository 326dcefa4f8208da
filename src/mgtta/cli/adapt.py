"""`mgtta adapt`: the options of `mgtta.adapt_stream`, and of the method that it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mgtta.cli.errors import plain_warnings
from mgtta.cli.inputs import model_and_data, process_group, source_of
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
BatchSize = Annotated[int, typer.Option(help="Images in a batch.")]
Images = Annotated[int | None, typer.Option(help="Number of images, from the first; by default all.")]
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
SplitShards = Annotated[bool, typer.Option("--split-shards", help="Under torchrun: each rank opens only its own tars.")]


def adapt(
    context: typer.Context,
    data: Data,
    model: Model,
    out: Out = Path("predictions.csv"),
    method: Method = "mgtta",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    clean: Clean = None,
    setting: Setting = [],
    batch_size: BatchSize = 64,
    images: Images = None,
    shuffle: Shuffle = None,
    state: State = None,
    start: Start = None,
    export: Export = None,
    resume: Resume = None,
    save_every: SaveEvery = 32,
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
    from mgtta.running.adapt import check_outputs

    group = process_group(context, device, timeout)
    ranks = ranks_of(group)
    check_outputs(ranks, out, state, export)
    chosen = settings(setting)
    if start is not None and "lr" in chosen:
        raise ValueError("--start continues at the learning rate of its state: leave out --set lr")
    part = ranks.part if split_shards else None
    classifier, dataset = model_and_data(
        model, checkpoint, num_classes, data, size, skip_unreadable, device, part, classes, restrict
    )
    chosen |= _needed(method, classifier, chosen, source, clean, size)
    how: dict[str, Any] = {"precision": precision, "low_memory": low_memory, "schedule": schedule}
    order: dict[str, Any] = {"batch_size": batch_size, "images": images, "shuffle": shuffle, "domain": Path(data).name}
    files: dict[str, Any] = {"state": state, "export": export, "resume": resume, "save_every": save_every}
    with plain_warnings():
        adapting = mgtta.create(method, classifier, guard=guard, process_group=group, **how, **chosen)
        if start is not None:
            mgtta.load_state(adapting, start)
        same = {"settings": setting, "schedule": schedule}
        files["compare"] = classifier if compare else None
        result = mgtta.adapt_stream(adapting, dataset, out, **order, **files, protocol=same, split_shards=split_shards)
    if ranks.first:
        typer.echo(result)


def _needed(
    method: str, classifier: Any, chosen: dict[str, Any], source: str | None, clean: str | None, size: int | None
) -> dict[str, Any]:
    """Return the source statistics as a setting, if the method needs them; raise if it lacks Fisher information."""
    from mgtta.methods.registry import FISHER, SOURCE, recipe

    needs = recipe(method).needs
    if FISHER in needs and "fisher" not in chosen:
        raise ValueError(
            f"{method} needs Fisher information of clean images: --set fisher=FILE, which mgtta.fisher_information "
            "and mgtta.save_fisher write; --method eta does without it"
        )
    if SOURCE not in needs:
        return {}
    return {"source": source_of(classifier, source, clean, size)}
