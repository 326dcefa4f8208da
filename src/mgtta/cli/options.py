"""Options that several commands have, and how their text is read."""

import ast
import math
from pathlib import Path
from typing import Annotated, Any

import typer

OWN_OPTIONS = {  # arguments of `mgtta.create` that --set does not take -> the option that gives them
    "guard": "--guard",
    "low_memory": "--low-memory",
    "norm_types": "mgtta.load_model(..., norm_types=...) in the function of --model package.module:build",
    "precision": "--precision",
    "process_group": "torchrun",
    "schedule": "--schedule",
    "source": "--source",
}
WORDS = {"inf": math.inf, "true": True, "false": False}  # that --set takes besides Python's values

Model = Annotated[
    str,
    typer.Option(
        help="A timm name; a small ViT that comes with the package: glyphs_vit, patterns_vit; or your own function, "
        "package.module:build."
    ),
]
Checkpoint = Annotated[Path | None, typer.Option(help="Weights: .safetensors, or .pth of plain tensors.")]
NumClasses = Annotated[
    int | None, typer.Option(min=1, help="Number of classes of the checkpoint, if it is not the model's default.")
]
Source = Annotated[str | None, typer.Option(help="Source statistics: a file, or the name of a shipped model.")]
Clean = Annotated[str | None, typer.Option(help="Clean images to compute the statistics from, instead of --source.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default the GPU if there is one.")]
Size = Annotated[int | None, typer.Option(min=1, help="Side of the images in pixels; by default the model's own.")]
Skip = Annotated[bool, typer.Option("--skip-unreadable", help="Skip and count unreadable images.")]
Classes = Annotated[
    Path | None, typer.Option(help="Text file of the model's classes in its order, one a line: the folders' names.")
]
Restrict = Annotated[bool, typer.Option("--restrict", help="Score only the classes that have a folder.")]
Resume = Annotated[Path | None, typer.Option(help="Checkpoint file; if it exists, the run resumes from it.")]
Methods = Annotated[str, typer.Option(help="Names, separated by commas; see `mgtta list`.")]
Corruptions = Annotated[str, typer.Option(help="Names, separated by commas; by default the 15 of ImageNet-C.")]
Precision = Annotated[
    str, typer.Option(help="fp32: exact; bf16, fp8: the fast path; auto: bf16 on a GPU where that works, else fp32.")
]
Timeout = Annotated[float, typer.Option(help="Under torchrun: seconds to wait for another rank.")]


def names(text: str) -> list[str]:
    """Return the names in a text that separates them by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def number(text: str, option: str) -> float:
    """Return the number in a text; the error names the option."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} takes numbers, separated by commas; {text!r} is not a number") from None


def settings(pairs: list[str]) -> dict[str, Any]:
    """Return the values of `--set name=value`: Python's numbers, lists and so on, WORDS, or the text itself."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value, not {pair!r}")
        if key in OWN_OPTIONS:
            raise ValueError(f"--set {key}: that is an option of its own, {OWN_OPTIONS[key]}")
        if value in WORDS:
            found[key] = WORDS[value]
            continue
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two: nested too deeply
            found[key] = value
    return found
