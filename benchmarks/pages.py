"""What programs read and write: lines of JSON, tables in Markdown, and a page's text between two marks."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines; none if it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


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
