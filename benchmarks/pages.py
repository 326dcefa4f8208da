"""What programs read and write: lines of JSON, tables in Markdown, and a page's text between two marks."""

import argparse
import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from mgtta._lib.files import atomic
from mgtta.bench.store import Store


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


def fill(words: str | None, with_tables: Callable[[str, Path], str]) -> None:
    """Run a program that takes a folder of records and a page, and writes the page with its tables.

    Args:
        words: what the program is, for --help.
        with_tables: takes the page's text and the folder, and returns the new text.
    """
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of records")
    parser.add_argument("page", type=Path, help="it has marks such as NAME:start and NAME:end around each table")
    args = parser.parse_args()
    text = with_tables(args.page.read_text(), args.folder)
    with atomic(args.page) as path:
        path.write_text(text)


def table(head: list[str], rows: Iterable[list[str]], right: bool = False) -> str:
    """Return a table.

    Args:
        right: all columns but the first to the right.
    """
    rule = ["---", *["---:" if right else "---"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def write_page(
    folder: Path, name: str, experiments: Collection[str], page: Callable[[list[dict[str, Any]]], str], verb: str
) -> None:
    """Write the page of a folder's records of these experiments to NAME in it, and print it.

    Args:
        verb: the command that makes such records, for the error if there are none.
    """
    records = [record for record in Store(folder).records() if record["experiment"] in experiments]
    if not records:
        raise SystemExit(f"{folder} has no records: `{verb}` makes them")
    text = page(records)
    with atomic(folder / name) as path:
        path.write_text(text)
    print(text)
