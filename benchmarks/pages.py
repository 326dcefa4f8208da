"""Markdown that programs write: tables, and a page's text between two marks."""

from collections.abc import Iterable


def between(page: str, name: str, text: str) -> str:
    """Return the page with `text` between <!-- NAME:start --> and <!-- NAME:end -->."""
    start = f"<!-- {name}:start -->"
    end = f"<!-- {name}:end -->"
    before, rest = page.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{text}\n{end}{after}"


def table(head: list[str], rows: Iterable[list[str]], right: bool = False) -> str:
    """Return a table.

    Args:
        right: all columns but the first to the right.
    """
    rule = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])
