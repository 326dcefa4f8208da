"""Which steps were compiled on this machine before: torch keeps their code on disk, and a second compilation is quick.

A step that was compiled before leaves an empty file, named by a hash, in torch's own folder of compiled code. So it is
forgotten together with the code.
"""

import getpass
import hashlib
import os
import tempfile
from pathlib import Path


def remember(step: str) -> None:
    """Note that a step was compiled; where nothing can be written, nothing is noted."""
    try:
        file = _file(step)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:
        return


def is_remembered(step: str) -> bool:
    """Return whether a step was compiled before, by this or by an earlier process."""
    return _file(step).exists()


def _file(step: str) -> Path:
    return _folder() / "mgtta" / hashlib.sha256(step.encode()).hexdigest()


def _folder() -> Path:
    """Return the folder in which torch keeps compiled code."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        return Path(given)
    return Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
