"""The files that come with the package."""

from importlib import resources
from pathlib import Path


def shipped(kind: str) -> dict[str, Path]:
    """Name -> file of the "models", "sources" or "generators"."""
    folder = Path(str(resources.files("mgtta"))) / "weights" / kind
    return {path.stem: path for path in sorted(folder.glob("*.safetensors"))}
