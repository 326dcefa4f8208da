"""`mgtta list`: what the package has."""


def list_() -> None:
    """Show the methods with their settings, the generators, models, data sets and corruptions."""
    from mgtta.cli.listing import show, tables

    show(*tables())
