"""`mgtta doctor`: what is installed, and what is missing."""

import typer


def doctor() -> None:
    """Show versions, devices, memory and the time of a step; what is missing, and how to install it."""
    from rich.console import Console

    from mgtta.cli.health import health

    table, healthy = health()
    Console().print(table)
    raise typer.Exit(0 if healthy else 1)
