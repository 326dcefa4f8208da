"""Errors and warnings in the words of the command line."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

RENAMED = {  # (command, old option) -> its name now
    ("adapt", "--first"): "--images",
    ("train", "--run"): "--resume",
    ("corrupt", "--corruption"): "--corruptions, with names separated by commas",
}
COMMANDS = {  # what an error tells a Python program to call -> the same as a command
    "mgtta.source_statistics(model, clean_images)": "`mgtta source CLEAN_IMAGES --model NAME`",
    "mgtta.source_statistics": "`mgtta source`",
    "mgtta.fisher_information(model, clean_images)": "`mgtta fisher CLEAN_IMAGES --model NAME`",
    "mgtta.fisher_information": "`mgtta fisher`",
    "mgtta.calibrate(method, clean_images)": "`mgtta adapt --estimate CLEAN_IMAGES`",
    "mgtta.calibrate": "`mgtta adapt --estimate`",
    "mgtta.load_source": "--source",
    "mgtta.load_generator": "--generator",
    "mgtta.load_model(..., normalised=True)": "a model of your own in Python (mgtta.load_model)",
    "mgtta.save_state": "`mgtta adapt --state`",
    ", or pretrained=False for random weights": "",
    "meta_train writes": "`mgtta train --resume` writes",
}
ARGUMENTS = (  # that are options of the same name
    "checkpoint",
    "export",
    "guard",
    "low_memory",
    "num_classes",
    "precision",
    "restrict",
    "resume",
    "schedule",
    "shuffle",
    "source",
    "split_shards",
    "state",
)


def check_renamed(words: Sequence[str]) -> None:
    """Raise an error that gives the new name if an option is written by its old one."""
    for word in words:
        option = word.partition("=")[0]
        new = RENAMED.get((words[0], option))
        if new is not None:
            raise ValueError(f"mgtta {words[0]} has no option {option}: its name is now {new}")


def in_options(text: str) -> str:
    """Return an error's text with options and commands in place of Python arguments and functions."""
    for call, command in COMMANDS.items():
        text = text.replace(call, command)
    if text.startswith("cannot read "):
        text = f"{text}; --skip-unreadable skips and counts such images"
    names = "|".join(ARGUMENTS)
    text = re.sub(rf"\b({names})=\.\.\.", lambda found: _option(found[1]), text)
    return re.sub(rf"\b({names})='(\w+)'", lambda found: f"{_option(found[1])} {found[2]}", text)


def _option(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each of the package's own warnings as one line, without the file and the line that raised it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", module=r"mgtta\.")
        warnings.showwarning = lambda message, *_: typer.echo(f"warning: {in_options(str(message))}", err=True)
        yield
