"""Writes docs/commands.md, the reference of the command line, from the program itself: python docs/commands.py"""

import inspect
from pathlib import Path
from typing import Any

import typer

from mgtta.cli import app

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Command line

Written by `docs/commands.py` from the program. `mgtta COMMAND --help` prints the same.
"""


def page() -> str:
    """Return the whole page."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return "\n".join([HEAD, *(described(name, command) for name, command in commands.items())])


def described(name: str, command: Any) -> str:
    """Return a command: what it does, how it is called, and its arguments and options."""
    shown = [p for p in command.params if not p.hidden]
    given = [called(p) for p in shown if p.required]
    usage = " ".join(["mgtta", name, *given, "[OPTIONS]"])
    lines = [f"## mgtta {name}", "", inspect.cleandoc(command.help), "", "```", usage, "```", ""]
    if shown:
        lines += ["| argument or option | default | meaning |", "|---|---|---|", *map(row, shown), ""]
    return "\n".join(lines)


def called(parameter: Any) -> str:
    """Return how a required argument or option is typed."""
    value = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return value
    return f"{parameter.opts[0]} {value}"


def row(parameter: Any) -> str:
    """Return the parameter's row: its names, its default and its help."""
    names = " / ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{called(parameter)}`"
    words = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| {names} | {default(parameter)} | {words} |"


def default(parameter: Any) -> str:
    """Return the default value as it is typed; nothing where there is none."""
    if parameter.required:
        return "required"
    value = parameter.default
    if callable(value) or value is None or value is False or value in ((), [], ""):
        return ""
    if value is True:
        return f"`{parameter.opts[0]}`"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
