"""`mgtta list`: what the package has."""

from typing import Annotated

import typer

What = Annotated[str, typer.Argument(help="methods, generators, models or data; by default all, in short.")]


def list_(what: What = "") -> None:
    """Show the methods with kind, cost and needs, the generators, models and data; `list methods` adds settings."""
    from mgtta.cli.listing import listed

    typer.echo(listed(what))
