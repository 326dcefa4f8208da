"""Records on disk: one JSON line each, appended under a lock; what a kill cut short is as if it had never begun."""

import fcntl
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any


class Store:
    """A folder with `records.jsonl`. A cell is a unit of work; its lines carry its key and how many they are."""

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder) / "records.jsonl"
        if Path(folder).is_file():
            raise NotADirectoryError(f"{folder} is a file: name a folder for the records")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, cell: str, records: list[dict[str, Any]]) -> bool:
        """Append a cell's records, all or none; False where another run has written the cell already."""
        lines = [{"cell": cell, "part": i, "parts": len(records), **record} for i, record in enumerate(records)]
        with open(self.path, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content = file.read()
            if cell in _cells(content):
                return False
            torn = b"" if not content or content.endswith(b"\n") else b"\n"
            file.write(torn + "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        return True

    def records(self) -> list[dict[str, Any]]:
        """The records of all complete cells."""
        if not self.path.exists():
            return []
        return [record for cell in _cells(self.path.read_bytes()).values() for record in cell]

    def cells(self) -> set[str]:
        """The keys of all complete cells."""
        return {record["cell"] for record in self.records()}


def _cells(content: bytes) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in content.splitlines():
        try:
            record = json.loads(line)
            cell, part = record["cell"], int(record["part"])
            found[cell][part] = record
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # torn by a kill
            continue
    return {
        cell: [parts[i] for i in sorted(parts)]
        for cell, parts in found.items()
        if len(parts) == next(iter(parts.values())).get("parts")
    }
