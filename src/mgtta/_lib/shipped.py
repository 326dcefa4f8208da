"""The files that come with the package."""

from importlib import resources
from pathlib import Path


def shipped(kind: str) -> dict[str, Path]:
    """Return the file of each shipped "models", "sources" or "generators", by name."""
    folder = Path(str(resources.files("mgtta"))) / "weights" / kind
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}
