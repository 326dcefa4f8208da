"""Small helpers for errors that say what was wrong and what to do."""

from collections.abc import Iterable


def unknown(kind: str, name: object, valid: Iterable[str]) -> ValueError:
    """The error for a name that is not in the list."""
    return ValueError(f"unknown {kind} {name!r}; valid: {', '.join(sorted(valid))}")
