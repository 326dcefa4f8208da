"""The state folder: one file for each stream, written whole or not at all."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from mgtta.running.resume import load_state, save_state
from mgtta.serve.stream import Stream

try:
    import fcntl
except ImportError:  # Windows: two services on one folder are not noticed there
    fcntl = None  # type: ignore[assignment]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SUFFIX = ".state.safetensors"
GENERATION = "@"  # before the number of a claim; it is in no name


def check_name(name: str) -> str:
    """Return the name of a stream; raise a ValueError if it is invalid."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"invalid stream name {name[:80]!r}: 1 to 64 letters, digits, dots, hyphens or underscores, "
            "with a letter or digit first"
        )
    return name


class StateFolder:
    """The saved states of all streams. Only one service may use a folder at a time.

    The processes of one service may share it. Then each that loads a stream claims it: the file gets a new number, the
    generation, and the newest generation is the stream. A process that had the stream before notices that its own file
    is gone. If it writes nevertheless, the older generation is never read.

    Args:
        shared: another process of the same service has locked the folder.
    """

    def __init__(self, folder: str | Path, shared: bool = False):
        self.folder = Path(folder)
        self.shared = shared
        self._lock = None
        if not shared:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder)
            for leftover in self.folder.glob(f".*{SUFFIX}.*"):  # a kill came while it was written
                leftover.unlink(missing_ok=True)
        self._generations = self._newest()  # in a shared folder: those that this process has claimed, and old ones

    def _newest(self) -> dict[str, int]:
        """Return the newest generation of each stream that was saved."""
        found: dict[str, int] = {}
        for path in self.folder.glob(f"*{SUFFIX}"):
            stem, _, generation = path.name.removesuffix(SUFFIX).partition(GENERATION)
            name = re.sub(r"\^(.)", lambda upper: upper[1].upper(), stem)
            if NAME.fullmatch(name) and (generation or "0").isdecimal():
                found[name] = max(found.get(name, 0), int(generation or 0))
        return found

    def names(self) -> list[str]:
        """Return the names of all streams that were saved."""
        return sorted(self._newest())

    def has(self, name: str) -> bool:
        """Return whether a stream was saved."""
        return name in self._newest()

    def path(self, name: str) -> Path:
        """Return the file of a stream; names that differ only in upper case have different files on any disk."""
        return self._path(name, self._generations.get(name, 0))

    def _path(self, name: str, generation: int) -> Path:
        stem = re.sub("[A-Z]", lambda found: f"^{found[0].lower()}", check_name(name))
        number = f"{GENERATION}{generation}" if generation else ""
        return self.folder / f"{stem}{number}{SUFFIX}"

    def claim(self, stream: Stream) -> None:
        """Take a stream from any other process of the service; a stream that was never saved is saved."""
        if not self.shared:
            return
        with _claiming(self.folder):
            newest = self._newest().get(stream.name)
            own = 1 if newest is None else newest + 1
            path = self._path(stream.name, own)
            if newest is None:
                save_state(stream.method, path, run=stream.counts())
            else:
                os.replace(self._path(stream.name, newest), path)
            self._generations[stream.name] = own

    def holds(self, name: str) -> bool:
        """Return False if another process has claimed a stream since this one did."""
        return not self.shared or self.path(name).exists()

    def save(self, stream: Stream) -> bool:
        """Write the state of a stream; return False if another process has it now."""
        if self.shared and self._newest().get(stream.name) != self._generations[stream.name]:
            return False
        save_state(stream.method, self.path(stream.name), run=stream.counts())
        stream.saved()
        return True

    def load(self, stream: Stream) -> bool:
        """Load the state of a stream; return False if there is none."""
        path = self.path(stream.name)
        if not path.exists():
            return False
        counts: dict[str, Any] = load_state(stream.method, path)
        stream.load_counts(counts)
        return True

    def close(self) -> None:
        """Let another service use the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


@contextmanager
def _claiming(folder: Path) -> Iterator[None]:
    """Wait until no other process claims a stream in the folder; let none do so in the block."""
    with open(folder / ".claims", "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _locked(folder: Path) -> IO[str] | None:
    """Return the open lock file of the folder; raise an error if another service has it."""
    if fcntl is None:
        return None
    file = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RuntimeError(f"another service uses the state folder {folder}: name another one with --state") from None
    return file
