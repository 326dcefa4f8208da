"""`mgtta bench`: experiments of the paper, by `mgtta.bench.run.run_experiments`."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from mgtta.cli.inputs import device_of, process_group
from mgtta.cli.options import (
    Checkpoint,
    Classes,
    Corruptions,
    Device,
    Model,
    NumClasses,
    Precision,
    Restrict,
    Source,
    Timeout,
    names,
    number,
    settings,
)

EXPERIMENTS = (  # the names in mgtta.bench.experiments, which imports torch
    "corruptions",
    "budgets",
    "variants",
    "ablation",
    "runtime",
    "samples",
    "mixed",
    "small-batch",
    "memory",
    "hidden-size",
    "learning-rate",
    "convergence",
    "continual",
    "streams",
    "all",
)
ALL = "all"
SWEEP = "sweep"
BATCH_SIZE = 64
QUICK_IMAGES = 64  # per domain
STOPPED_CODE = 130  # 128 + SIGINT

Experiments = Annotated[list[str], typer.Argument(metavar="EXPERIMENT...", help=", ".join(EXPERIMENTS))]
Methods = Annotated[
    str, typer.Option(help="Names, separated by commas; see `mgtta list`. all: each that the network can run.")
]
Out = Annotated[Path, typer.Option(help="Folder for the records; if it has some, the run resumes from them.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds.")]
Data = Annotated[
    str | None, typer.Option(help="Test images: a tree, tars, or ImageNet-C; by default the model's embedded images.")
]
Validation = Annotated[str | None, typer.Option(help="Other images, for source statistics, sweeps and training.")]
Variant = Annotated[list[str], typer.Option(help="NAME=IMAGES, such as imagenet-r=FOLDER; repeatable.")]
Generator = Annotated[
    str, typer.Option(help="The generator of mgtta: a shipped one's name, a file, or `train` to train one.")
]
Images = Annotated[int | None, typer.Option(min=1, help="Images per domain; by default all.")]
Limit = Annotated[
    list[str],
    typer.Option(
        help="NAME=IMAGES: fewer images per domain for an experiment, `sweep`, a method, or EXPERIMENT/METHOD; 0: none."
    ),
]
Frost = Annotated[
    Path | None, typer.Option(help="Folder of images for frost, such as the published ones; by default generated.")
]
Constants = Annotated[
    str, typer.Option(help="Constants of the corruptions: imagenet, or cifar, those of CIFAR-10-C at 32 pixels.")
]
Cache = Annotated[
    Path | None, typer.Option(help="Folder that keeps corrupted images: made once, for all methods and runs.")
]
Seconds = Annotated[str, typer.Option(help="Time budgets of `budgets` in seconds, separated by commas.")]
Sweep = Annotated[bool, typer.Option("--sweep", help="Choose learning rates on validation images.")]
Workers = Annotated[int, typer.Option(min=0, help="Number of processes; 0: run in this one.")]
Ray = Annotated[
    str | None,
    typer.Option(metavar="[ADDRESS]", help="Run on a Ray cluster; without an address, on the one that is running."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Few images and small batches, to see whether it runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print events and records as lines of JSON, without bars.")]
Tf32 = Annotated[bool, typer.Option("--tf32", help="Faster matrix products on the GPU, rounded to TF32.")]
Set = Annotated[
    list[str],
    typer.Option("--set", help="Of `streams`, NAME=VALUE for all methods: pull, gather, recall; METHOD.NAME for one."),
]
Single = Annotated[int | None, typer.Option(min=1, help="Of `streams`: images per domain in batches of one.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Of `streams`: number of rounds.")]
Profile = Annotated[bool, typer.Option("--profile", help="Show where the time goes; waits for the GPU.")]


def bench(
    context: typer.Context,
    experiments: Experiments,
    out: Out = Path("runs"),
    methods: Methods = "noadapt,tent,mgtta",
    seeds: Seeds = 1,
    model: Model = "glyphs_vit",
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    classes: Classes = None,
    restrict: Restrict = False,
    data: Data = None,
    validation: Validation = None,
    variant: Variant = [],
    source: Source = None,
    generator: Generator = "imagenet",
    images: Images = None,
    limit: Limit = [],
    corruptions: Corruptions = "",
    frost_textures: Frost = None,
    constants: Constants = "imagenet",
    cache: Cache = None,
    seconds: Seconds = "",
    set_: Set = [],
    single: Single = None,
    rounds: Rounds = None,
    sweep: Sweep = False,
    workers: Workers = 0,
    ray: Ray = None,
    quick: Quick = False,
    json: Json = False,
    device: Device = None,
    tf32: Tf32 = False,
    precision: Precision = "fp32",
    profile: Profile = False,
    timeout: Timeout = 300.0,
) -> None:
    """Run experiments of the paper; write records to a folder, and print a table."""
    from mgtta._lib.ranks import ranks_of
    from mgtta.bench.experiments import Options, Setup
    from mgtta.bench.store import Store

    images = _images(images, quick)
    scored: dict[str, Any] = {"num_classes": num_classes, "classes": _text(classes), "restrict": restrict}
    scored |= {"frost_textures": _text(frost_textures), "constants": constants, "cache": _text(cache)}
    how: dict[str, Any] = {"device": _device(device, tf32), "tf32": tf32, "precision": precision, "profile": profile}
    weights = _text(checkpoint)
    setup = Setup(model, weights, data, validation, source, generator, images, **how, **scored)
    amount = _amount(quick, corruptions, seconds, images, data) | _of_streams(experiments, set_, single, rounds)
    amount["limits"] = [_limit(text) for text in limit]
    options = Options(_methods(methods, setup), seeds, _variants(variant, experiments, data), generator, **amount)
    store = Store(out)
    group = process_group(context, device, timeout)
    more = {"sweep": sweep, "workers": workers, "process_group": group, "ray": ray}
    first = ranks_of(group).first
    records = _run(experiments, options, setup, store, json, first, more)
    if first and not json:
        _print(records, profile, f"{len(records)} records of {', '.join(experiments)} are in {store.path}")


def _methods(text: str, setup: Any) -> list[str]:
    """Return the methods that are named; for `all`, each that the network can run, in each of its sets of settings."""
    if names(text) != [ALL]:
        return names(text)
    from mgtta.bench.needs import methods_for
    from mgtta.models.loading import load_model

    return methods_for(load_model(setup.model, setup.checkpoint, **setup.head))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _images(images: int | None, quick: bool) -> int | None:
    """Return the images per domain; None for all."""
    if images is None and quick:
        return QUICK_IMAGES
    return images


def _device(device: str | None, tf32: bool) -> str:
    """Return the device to use; raise if it has no TF32."""
    found = device_of(device)
    if tf32 and not found.startswith("cuda"):
        raise ValueError("--tf32 is for a GPU: leave it out, or name one by --device")
    return found


def _limit(text: str) -> tuple[str, int]:
    """Return name and images of NAME=IMAGES."""
    name, _, images = text.partition("=")
    if not name or not images.isdecimal() or (name == SWEEP and not int(images)):
        raise ValueError(f"--limit takes NAME=IMAGES, such as small-batch=96, not {text!r}")
    return name, int(images)


def _variants(variant: list[str], experiments: list[str], data: str | None) -> Sequence[tuple[str, str]]:
    """Return (name, images) of each variant; for the characters, those that the package renders."""
    from mgtta.bench.experiments import variant as named
    from mgtta.data.glyphs import STAND_INS

    found = [named(text) for text in variant]
    if not found and data is None:
        found = [(name, name) for name in STAND_INS]
    if not found and ALL in experiments:
        typer.echo("variants are left out: no --variant names their images", err=True)
    return found


def _amount(quick: bool, corruptions: str, seconds: str, images: int | None, data: str | None) -> dict[str, Any]:
    """Return how much is run: batch size, corruptions, time budgets, and the batches of a domain if known."""
    from mgtta.bench.experiments import QUICK
    from mgtta.bench.resources import IMAGES

    amount: dict[str, Any] = {"batch_size": BATCH_SIZE}
    if quick:
        amount |= QUICK
    if corruptions:
        amount["corruptions"] = tuple(names(corruptions))
    if seconds:
        amount["seconds"] = tuple(number(text, "--seconds") for text in names(seconds))
    if images is None and data is None:
        images = IMAGES
    if images is not None:
        amount["batches"] = -(-images // amount["batch_size"])  # rounded up
    return amount


def _of_streams(experiments: list[str], pairs: list[str], single: int | None, rounds: int | None) -> dict[str, Any]:
    """Return what was given for the experiment `streams`; an error if another one is asked for."""
    found = {"wrappers": tuple(settings(pairs).items()), "single": single, "rounds": rounds}
    given = {name: value for name, value in found.items() if value}
    if given and not {"streams", ALL}.intersection(experiments):
        raise ValueError("--set, --single and --rounds belong to `mgtta bench streams`: leave them out")
    return given


def _run(
    experiments: list[str], options: Any, setup: Any, store: Any, json: bool, first: bool, more: dict[str, Any]
) -> Any:
    """Return the records of experiments. The first rank shows how far it is; Ctrl-C ends it with a message."""
    from mgtta.bench.resources import Listener
    from mgtta.bench.run import run_experiments
    from mgtta.cli.progress import Lines, shown_progress

    out = store.path.parent
    shown: Any
    if not first:
        shown = nullcontext(Listener())
    elif json:
        shown = Lines(out)
    else:
        shown = shown_progress()
    try:
        with shown as watch:
            return run_experiments(experiments, options, setup, store, watch=watch, **more)
    except KeyboardInterrupt:
        done = len(store.cells())
        typer.echo(f"stopped: {done} finished cells are in {out}; the same command resumes", err=True)
        raise typer.Exit(STOPPED_CODE) from None


def _print(records: list[dict[str, Any]], profile: bool, last: str) -> None:
    from mgtta.bench.run import by_experiment, time_table
    from mgtta.report import markdown

    for name, found in by_experiment(records).items():
        typer.echo(f"{name}\n\n{markdown(found)}\n")
    if profile:
        typer.echo(f"{time_table(records)}\n")
    typer.echo(last)


def bare_ray(words: list[str]) -> list[str]:
    """Return the words with `--ray=auto` for a `--ray` that has no address.

    typer has no option whose value may be left out.
    """
    pairs = zip(words, [*words[1:], "-"], strict=False)  # without words there are no pairs
    return [f"{word}=auto" if word == "--ray" and following.startswith("-") else word for word, following in pairs]
