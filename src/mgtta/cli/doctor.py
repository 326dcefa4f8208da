"""`mgtta doctor`: what is installed, and what is missing."""

import typer


def doctor() -> None:
    """Show versions and devices, what is missing, and how to install it."""
    from mgtta.cli.listing import health, show

    table, healthy = health()
    show(table)
    raise typer.Exit(0 if healthy else 1)
