"""The command line: each command a few lines over public functions. torch is imported by the commands alone."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Adapt an image classifier online, without labels, while it works on shifted data.",
)

EXPERIMENTS = (  # as in mgtta.bench.experiments, which imports torch
    "corruptions", "budgets", "variants", "ablation", "runtime", "samples", "mixed", "small-batch", "memory",
    "hidden-size", "learning-rate", "convergence", "continual", "all",
)  # fmt: skip

OPTIONS = {  # what `create` takes, and --set does not
    "guard": "--guard", "precision": "--precision", "low_memory": "--low-memory", "schedule": "--schedule",
    "source": "--source", "process_group": "torchrun",
}  # fmt: skip
SHIPPED = "A timm name, or one of the small ViTs that come along: glyphs_vit, glyphs_plain."
Model = Annotated[str, typer.Option(help=SHIPPED)]
Checkpoint = Annotated[Path | None, typer.Option(help="Weights: .safetensors, or .pth of plain tensors.")]
NumClasses = Annotated[int | None, typer.Option(min=1, help="Classes of the checkpoint, if not the model's default.")]
Source = Annotated[str | None, typer.Option(help="Source statistics: a file, or the name of a shipped model.")]
Clean = Annotated[str | None, typer.Option(help="Clean images to take the statistics from, if there are none yet.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the GPU if there is one.")]
Size = Annotated[int | None, typer.Option(min=1, help="Side of the images; by default the model's own.")]
Timeout = Annotated[float, typer.Option(help="Under torchrun: seconds to wait for another rank.")]
Precision = Annotated[str, typer.Option(help="fp32: exact; bf16, fp8: the fast path; auto: bf16 for a ViT on a GPU.")]
Skip = Annotated[bool, typer.Option("--skip-unreadable", help="Skip and count unreadable images.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("mgtta"))
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    pass


@app.command()
def adapt(
    context: typer.Context,
    data: Annotated[str, typer.Argument(help="A folder of images, a tree of class folders, or WebDataset tars.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="Predictions: .csv or .jsonl.")] = Path("predictions.csv"),
    method: Annotated[str, typer.Option(help="See `mgtta list`.")] = "mgtta",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    clean: Clean = None,
    setting: Annotated[list[str], typer.Option("--set", help="A setting of the method, such as lr=5e-3.")] = [],
    batch_size: int = 64,
    first: Annotated[int | None, typer.Option(help="Only the first so many images.")] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="In random order; else by name, a tree class by class.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Where to save the adapted state.")] = None,
    start: Annotated[Path | None, typer.Option(help="A saved state to go on from, its learning rate included.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A file that keeps the run, to go on from after a kill.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Batches between two saves of the run.")] = 32,
    guard: Annotated[bool, typer.Option("--guard", help="Watch for collapse, and undo it.")] = False,
    precision: Precision = "auto",
    low_memory: Annotated[bool, typer.Option("--low-memory", help="On the fast path: keep few activations.")] = False,
    schedule: Annotated[str, typer.Option(help="always; auto: learn most just after a shift.")] = "always",
    size: Size = None,
    skip_unreadable: Skip = False,
    device: Device = None,
    split_shards: Annotated[
        bool, typer.Option("--split-shards", help="Under torchrun: each rank opens its own of the tars alone.")
    ] = False,
    timeout: Timeout = 300.0,
) -> None:
    """Predict a folder or tar of images, adapting along the way; write the predictions and the state."""
    import mgtta
    from mgtta._lib.files import writable
    from mgtta._lib.ranks import ranks_of
    from mgtta.data.streams import split_stream, stream
    from mgtta.methods.create import needs_source, recipe_settings
    from mgtta.running.predictions import format_of
    from mgtta.running.resume import Run, Totals, load_state, save_state

    suffix = format_of(out)
    group = _joined(context, device, timeout)
    part = ranks_of(group).part if split_shards else None
    if resume is not None and split_shards:
        raise ValueError("--resume counts batches of one stream: leave out --split-shards, or --resume")
    if resume is not None and shuffle is not None:
        raise ValueError("--resume counts batches of images in their own order: leave out --shuffle, or --resume")
    settings = _settings(setting)
    if start is not None and "lr" in settings:
        raise ValueError("--start goes on at the learning rate of its state: leave out --set lr")
    if ranks_of(group).first:
        writable(out, state)
    classifier, images = _model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device, part)
    if needs_source(method):
        settings["source"] = _source(classifier, source, clean, size)
    if "fisher" in recipe_settings(method) and "fisher" not in settings:
        typer.echo(f"without Fisher information of clean images (--set fisher=FILE) {method} is ETA", err=True)
    ways: dict[str, Any] = {"precision": precision, "low_memory": low_memory, "schedule": schedule}
    adapted = mgtta.create(method, classifier, guard=guard, process_group=group, **ways, **settings)
    ranks = adapted.ranks
    if start is not None:
        load_state(adapted, start)
    name = Path(data).name
    options: dict[str, Any] = {"batch_size": batch_size, "first": first, "domain": name}
    options |= {"shuffle": shuffle is not None, "seed": shuffle or 0}
    batches: Any = (
        stream(images, part=ranks.part, **options) if part is None else split_stream(images, ranks, **options)
    )
    total, classes = len(batches), images.classes
    with ExitStack() as stack:
        run = None
        if resume is not None:
            protocol = {
                "method": method, "settings": setting, "batch_size": batch_size, "size": size, "suffix": suffix,
                "images": _hash(images.names[:first]), "precision": adapted.precision, "schedule": schedule,
            }  # fmt: skip
            run = stack.enter_context(Run(resume, adapted, out, images, protocol, batch_size, save_every))
            batches = batches.after(run.position)
        if classes is not None and len(classes) != classifier.num_classes:
            typer.echo(f"{len(classes)} class folders, {classifier.num_classes} classes: labels not used", err=True)
            batches, classes = (batch._replace(y=None) for batch in batches), None
        title = f"{method} on {name}"
        on_batch = stack.enter_context(_written(out, images.name, classes, ranks, run, title, total))
        records = mgtta.evaluate(adapted, batches, reset="never", on_batch=on_batch)
        if state is not None and ranks.first:
            save_state(adapted, state)
        if run is not None:
            run.finish()
    [unreadable] = ranks.total([len(images.skipped)])
    if ranks.first:
        done = run.totals if run is not None else Totals().plus(records[0]) if records else Totals()
        skipped = f", {unreadable:.0f} images unreadable" if unreadable else ""
        alarms = f", {len(adapted.events)} alarms" if adapted.events else ""
        typer.echo(f"{done}{skipped}{alarms} -> {out}")


@app.command()
def train(
    data: Annotated[str, typer.Argument(help="Images to learn from, unlabelled: a folder, tree or tar.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="The generator, .safetensors.")] = Path("generator.safetensors"),
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    source: Source = None,
    clean: Clean = None,
    corrupt: Annotated[
        bool,
        typer.Option("--corrupt", help="The images are clean: shift them by the four validation corruptions."),
    ] = False,
    images: Annotated[int, typer.Option(help="How many images.")] = 128,
    steps: int = 2000,
    batch_size: int = 2,
    lr: Annotated[float, typer.Option(help="The model's, while training.")] = 1e-4,
    outer_lr: Annotated[float, typer.Option(help="The generator's.")] = 1e-2,
    hidden_size: int = 8,
    memory: Annotated[str, typer.Option(help="gml, or lstm for the ablation.")] = "gml",
    seed: int = 0,
    run: Annotated[Path | None, typer.Option(help="A file that keeps the run, to go on after a kill.")] = None,
    size: Size = None,
    skip_unreadable: Skip = False,
    device: Device = None,
) -> None:
    """Train a generator, the learned optimizer, on a few unlabelled images (Algorithm 1)."""
    import mgtta
    from mgtta._lib.files import command, writable
    from mgtta.data.streams import stream
    from mgtta.training.meta import shifted_images

    writable(out)
    classifier, found = _model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device)
    statistics = _source(classifier, source, clean, size)
    if corrupt:
        x = shifted_images(found, images, seed=seed)
    else:
        [batch] = stream(found, batch_size=images, first=images, seed=seed)
        x = batch.x
    generator = mgtta.meta_train(
        classifier, statistics, x, steps=steps, batch_size=batch_size, lr=lr, outer_lr=outer_lr,
        hidden_size=hidden_size, memory=memory, seed=seed, checkpoint=run,
    )  # fmt: skip
    mgtta.save_generator(generator, out, command=command())
    best = generator.about["best"]
    typer.echo(f"{len(x)} images, {steps} steps; best objective {-best['score']:.4f} at step {best['step']} -> {out}")


@app.command()
def source(
    data: Annotated[str, typer.Argument(help="Clean, in-distribution images, unlabelled.")],
    model: Model,
    out: Annotated[Path, typer.Option(help="The statistics, .safetensors.")] = Path("source.safetensors"),
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    images: Annotated[int, typer.Option(help="How many images.")] = 1000,
    size: Size = None,
    skip_unreadable: Skip = False,
    device: Device = None,
) -> None:
    """Take the source statistics of a model from clean images, once, before it is deployed."""
    import mgtta
    from mgtta._lib.files import writable
    from mgtta.data.streams import stream

    writable(out)
    classifier, found = _model_and_data(model, checkpoint, num_classes, data, size, skip_unreadable, device)
    statistics = mgtta.source_statistics(classifier, stream(found, first=images))
    mgtta.save_source(statistics, out)
    typer.echo(f"{statistics.images} images, {len(statistics.mean)} layers -> {out}")


@app.command()
def corrupt(
    data: Annotated[Path, typer.Argument(metavar="IN", help="A folder or tree of clean images.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="<corruption>/<severity>/<class>/<name>.JPEG")],
    corruption: Annotated[list[str], typer.Option(help="Names; by default the 15 of the benchmark.")] = [],
    severity: Annotated[list[int], typer.Option(help="1 to 5; by default all.")] = [],
    size: Annotated[int, typer.Option(help="Side of the images.")] = 224,
    seed: int = 0,
) -> None:
    """Write a corrupted copy of an image tree, in the layout of ImageNet-C; goes on after a kill."""
    from mgtta.data.corruptions import CORRUPTIONS, SEVERITIES
    from mgtta.data.export import corrupt_folder

    report = corrupt_folder(
        data,
        out,
        corruptions=corruption or list(CORRUPTIONS),
        severities=severity or list(SEVERITIES),
        seed=seed,
        size=size,
    )
    typer.echo(str(report))


@app.command()
def bench(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help=", ".join(EXPERIMENTS))],
    out: Annotated[Path, typer.Option(help="The folder of the records; a run goes on where it stopped.")] = Path(
        "runs"
    ),
    methods: Annotated[str, typer.Option(help="Names, separated by commas; see `mgtta list`.")] = "noadapt,tent,mgtta",
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    model: Model = "glyphs_vit",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    data: Annotated[str | None, typer.Option(help="Test images: a tree, tars, or ImageNet-C; else characters.")] = None,
    validation: Annotated[str | None, typer.Option(help="Other images: statistics, sweeps, training.")] = None,
    variant: Annotated[list[str], typer.Option(help="NAME=IMAGES, such as imagenet-r=FOLDER; several.")] = [],
    source: Source = None,
    generator: Annotated[str, typer.Option(help="MGTTA's: a shipped one's name, a file, or `train`.")] = "imagenet",
    images: Annotated[int | None, typer.Option(min=1, help="Of each domain.")] = None,
    corruptions: Annotated[str, typer.Option(help="Names, separated by commas; by default the 15.")] = "",
    seconds: Annotated[str, typer.Option(help="The time budgets of `budgets`, separated by commas.")] = "",
    sweep: Annotated[bool, typer.Option("--sweep", help="Choose learning rates on validation images.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 runs in this one.")] = 0,
    ray: Annotated[
        str | None, typer.Option(metavar="[ADDRESS]", help="Run the cells on a Ray cluster; alone, on the one at hand.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few images, small batches: does it run?")] = False,
    json: Annotated[bool, typer.Option("--json", help="Events and records as lines of JSON, and no bars.")] = False,
    device: Device = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Faster matrix products on the GPU, rounded to TF32.")] = False,
    precision: Precision = "fp32",
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time goes; waits for the GPU.")] = False,
    timeout: Timeout = 300.0,
) -> None:
    """Run an experiment of the paper; records go to a folder, a table to the screen."""
    from mgtta._lib.ranks import ranks_of
    from mgtta.bench import experiments
    from mgtta.bench.resources import IMAGES, Watch
    from mgtta.bench.run import by_experiment, run_experiment, time_table
    from mgtta.bench.store import Store
    from mgtta.cli.progress import Bars, Lines
    from mgtta.data.glyphs import STAND_INS
    from mgtta.report import markdown

    if tf32 and not _device(device).startswith("cuda"):
        raise ValueError("--tf32 is for a GPU: leave it out, or name one by --device")
    images = images or (64 if quick else None)
    setup = experiments.Setup(
        model, None if checkpoint is None else str(checkpoint), data, validation, source, generator, images,
        _device(device), tf32, precision=precision, profile=profile, num_classes=num_classes,
    )  # fmt: skip
    named = [experiments.variant(text) for text in variant] or ([] if data else [(name, name) for name in STAND_INS])
    if experiment == "all" and not named:
        typer.echo("variants are left out: no --variant names their images", err=True)
    sizes: dict[str, Any] = {"batch_size": 64, **(experiments.QUICK if quick else {})}
    if corruptions:
        sizes["corruptions"] = tuple(_names(corruptions))
    if seconds:
        sizes["seconds"] = tuple(_number(text, "--seconds") for text in _names(seconds))
    known = images or (None if data else IMAGES)
    batches = None if known is None else -(-known // sizes["batch_size"])
    options = experiments.Options(_names(methods), seeds, named, generator, batches=batches, **sizes)
    store = Store(out)
    group = _joined(context, device, timeout)
    shown: Any = (Lines(out) if json else Bars()) if ranks_of(group).first else nullcontext(Watch())
    try:
        with shown as watch:
            records = run_experiment(
                experiment, options, setup, store,
                sweep=sweep, workers=workers, watch=watch, process_group=group, ray=ray,
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo(f"stopped: {len(store.cells())} finished cells are in {out}; the same command goes on", err=True)
        raise typer.Exit(130) from None
    if json or not ranks_of(group).first:
        return
    for name, found in by_experiment(records).items():
        typer.echo(f"{name}\n\n{markdown(found)}\n")
    if profile:
        typer.echo(f"{time_table(records)}\n")
    typer.echo(f"{len(records)} records of {experiment} are in {store.path}")


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of the records: --out of `mgtta bench`.")],
    out: Annotated[Path | None, typer.Option(help="Where to write; by default the same folder.")] = None,
    examples: Annotated[bool, typer.Option(help="Images with predictions, where the data are the characters.")] = True,
) -> None:
    """Write the records as markdown, as LaTeX and as one HTML page that needs no network."""
    from mgtta.report import write_report

    typer.echo(write_report(runs, out, examples=examples))


@app.command("list")
def list_() -> None:
    """The methods with their settings, the generators, models and corruptions."""
    from mgtta.cli.listing import tables

    _print(*tables())


@app.command()
def doctor() -> None:
    """Versions, devices, and what is missing and how to get it."""
    from mgtta.cli.listing import health

    table, well = health()
    _print(table)
    raise typer.Exit(0 if well else 1)


@app.command()
def demo(
    images: Annotated[int, typer.Option(help="Images of each corruption.")] = 512,
    methods: Annotated[str, typer.Option(help="Names, separated by commas; see `mgtta list`.")] = "noadapt,mgtta",
    out: Annotated[Path, typer.Option(help="The folder of records and report; OUT-2, ... where it has some.")] = Path(
        "runs/demo"
    ),
    device: Device = None,
) -> None:
    """Rendered characters under 15 corruptions: a small ViT as it is, and adapting. Needs no download."""
    from mgtta.bench.demo import run, table
    from mgtta.cli.progress import Bars
    from mgtta.report import write_report

    with Bars() as watch:
        folder = run(images, _names(methods), out, _device(device), watch)
    _print(table(folder))
    typer.echo(f"report: {write_report(folder)}")


def main() -> None:
    """Errors that say what was wrong and what to do are printed without a trace (MGTTA_TRACE=1 shows it)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    try:
        app(_bare_ray(sys.argv[1:]))
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if os.environ.get("MGTTA_TRACE"):
            raise
        typer.secho(f"{_rank()}error: {error}", fg="red", err=True)
        sys.exit(2)


def _bare_ray(words: list[str]) -> list[str]:
    """`--ray` without an address is the cluster at hand: typer knows no option with a value that may be left out."""
    pairs = zip(words, [*words[1:], "-"], strict=True)
    return [f"{word}=auto" if word == "--ray" and following.startswith("-") else word for word, following in pairs]


def _model_and_data(
    model: str,
    checkpoint: Path | None,
    num_classes: int | None,
    data: str,
    size: int | None,
    skip: bool,
    device: str | None,
    part: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    import mgtta

    arguments: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    classifier = mgtta.load_model(model, checkpoint=checkpoint, **arguments)
    images = _open(data, classifier, size, skip, part)
    if images.class_indices is not None:
        few, all_ = len(images.class_indices), classifier.num_classes
        typer.echo(f"{few} class folders: scored over those {few} of the model's {all_} classes", err=True)
        classifier = mgtta.load_model(model, checkpoint=checkpoint, classes=images.class_indices, **arguments)
    return classifier.to(_device(device)), images


def _open(data: str, classifier: Any, size: int | None, skip: bool = False, part: tuple[int, int] | None = None) -> Any:
    from mgtta.data.datasets import open_dataset

    side, crop = classifier.input_size
    on_error: Any = "skip" if skip else "raise"
    return open_dataset(data, size=size or side, crop_pct=crop, on_error=on_error, part=part)


def _source(classifier: Any, source: str | None, clean: str | None, size: int | None) -> Any:
    import mgtta
    from mgtta.data.streams import stream

    if source is not None and clean is not None:
        raise ValueError("--source names statistics and --clean takes them anew: leave out one")
    if source is not None:
        return mgtta.load_source(source)
    if clean is not None:
        return mgtta.source_statistics(classifier, stream(_open(clean, classifier, size), first=1000))
    raise ValueError("source statistics are needed: --source FILE, or --clean FOLDER of clean images")


@contextmanager
def _written(
    out: Path, names: Any, classes: list[str] | None, ranks: Any, run: Any, title: str, batches: int
) -> Iterator[Callable[..., None]]:
    """What `evaluate` calls after each batch: predictions are written, to the run's file if there is a run, and a bar
    moves along."""
    from mgtta._lib.bars import progress_bar
    from mgtta.running.predictions import PredictionWriter, format_of, prediction_file

    place: Any = (
        prediction_file(out, names, classes, ranks)
        if run is None
        else nullcontext(PredictionWriter(run.file, format_of(out), names, classes, ranks))
    )
    with progress_bar(transient=True, disable=not ranks.first) as progress, place as file:
        task = progress.add_task(title, total=batches, completed=0 if run is None else run.position)

        def on_batch(record: Any, batch: Any, logits: Any) -> None:
            file.write(batch, logits)
            if run is not None:
                run.note(record, batch)
            progress.advance(task)

        yield on_batch


def _hash(names: list[str]) -> str:
    import hashlib

    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} takes numbers, separated by commas; {text!r} is none") from None


def _settings(pairs: list[str]) -> dict[str, Any]:
    import ast

    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, not {pair!r}")
        if key in OPTIONS:
            raise ValueError(f"--set {key}: that is an option of its own, {OPTIONS[key]}")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two: nested too deeply
            settings[key] = value
    return settings


def _device(device: str | None) -> str:
    import torch

    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError:
        raise ValueError(f"torch knows no device {device!r}: --device cpu, cuda, or cuda:1") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch finds no GPU for --device {device}: use --device cpu, or a CUDA build of torch")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _joined(context: typer.Context, device: str | None, timeout: float) -> Any:
    """The process group of torchrun's ranks, until the command ends; None for one process."""
    from mgtta._lib.ranks import joined

    return context.with_resource(joined(_device(device), timeout))


def _print(*tables: Any) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)


def _rank() -> str:
    """Who speaks, where torchrun has started several."""
    return f"rank {os.environ['RANK']}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""


if __name__ == "__main__":
    main()
