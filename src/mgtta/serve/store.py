"""The state folder: one file for each stream, written whole or not at all."""

import re
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

    Args:
        shared: another process of the same service has locked the folder.
    """

    def __init__(self, folder: str | Path, shared: bool = False):
        self.folder = Path(folder)
        self._lock = None
        if shared:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        for leftover in self.folder.glob(f".*{SUFFIX}.*"):  # a kill came while it was written
            leftover.unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the names of all streams that were saved."""
        stems = [path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}")]
        names = [re.sub(r"\^(.)", lambda found: found[1].upper(), stem) for stem in stems]
        return sorted(name for name in names if NAME.fullmatch(name))

    def has(self, name: str) -> bool:
        """Return whether a stream was saved."""
        return bool(NAME.fullmatch(name)) and self.path(name).exists()

    def path(self, name: str) -> Path:
        """Return the file of a stream; names that differ only in upper case have different files on any disk."""
        stem = re.sub("[A-Z]", lambda found: f"^{found[0].lower()}", check_name(name))
        return self.folder / f"{stem}{SUFFIX}"

    def save(self, stream: Stream) -> None:
        """Write the state of a stream."""
        save_state(stream.method, self.path(stream.name), run=stream.counts())
        stream.saved()

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
