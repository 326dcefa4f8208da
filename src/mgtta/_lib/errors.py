"""Errors that say what was wrong and what to do."""

from collections.abc import Iterable


def unknown(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """Return the error for a name that is not in the list of valid ones."""
    return ValueError(f"unknown {kind} {name!r}; valid: {', '.join(sorted(valid))}")
