"""Records on disk: one JSON line each, appended under a lock. A cell that a kill cut short does not count."""

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from mgtta.evaluation.record import complete_records


class Store:
    """A folder with `records.jsonl`. A cell is a unit of work; its lines carry its key and their number."""

    def __init__(self, folder: str | os.PathLike):
        self.path = Path(folder) / "records.jsonl"
        if Path(folder).is_file():
            raise NotADirectoryError(f"{folder} is a file: name a folder for the records")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._known: set[str] = set()  # keys of complete cells in the first bytes of the file
        self._known_bytes = 0

    def add(self, cell: str, records: list[dict[str, Any]]) -> bool:
        """Append a cell's records, all or none; return False if another run has written the cell already."""
        lines = [{"cell": cell, "part": i, "parts": len(records), **record} for i, record in enumerate(records)]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        with open(self.path, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            whole = self._look(file)
            if cell in self._known:
                return False
            if not whole:  # a kill has cut the last line short
                text = "\n" + text
            self._known_bytes += file.write(text.encode())
            self._known.add(cell)
            file.flush()
            os.fsync(file.fileno())
        return True

    def _look(self, file: IO[bytes]) -> bool:
        """Take in what others have written since the last look; return False if the last line has no end."""
        if file.seek(0, os.SEEK_END) < self._known_bytes:  # it is another file now
            self._known = set()
            self._known_bytes = 0
        file.seek(max(0, self._known_bytes - 1))
        content = file.read()
        self._known |= complete_records(content).keys()
        self._known_bytes = file.tell()
        return not content or content.endswith(b"\n")

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all complete cells."""
        if not self.path.exists():
            return []
        return [record for cell in complete_records(self.path.read_bytes()).values() for record in cell]

    def cells(self) -> set[str]:
        """Return the keys of all complete cells."""
        return {record["cell"] for record in self.records()}
