"""`mgtta doctor`: what is installed, and what is missing."""

import typer


def doctor() -> None:
    """Show versions, devices, memory and the time of a step; what is missing, and how to install it."""
    from mgtta.cli.health import health
    from mgtta.cli.listing import show

    table, healthy = health()
    show(table)
    raise typer.Exit(0 if healthy else 1)
