"""Reads and writes tensors: writes safetensors, reads safetensors and weights-only torch files.

A file is written whole or not at all.
"""

import fcntl
import hashlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

TREE = "tree"  # metadata key: the structure of a nested state, see write_tree
DIGEST = "sha256"  # metadata key: the hash of everything else in a nested state's file


@contextmanager
def atomic(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`: renamed to it when the block ends, removed if the block fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes it private
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: str | os.PathLike) -> Iterator[None]:
    """Hold a lock file; other processes that ask for the same one wait until the block ends."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def writable(*paths: str | os.PathLike | None) -> None:
    """Raise an error now, not after hours of work, if a file cannot be written; nothing is left behind."""
    for path in paths:
        if path is None:
            continue
        if Path(path).is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; name a file")
        folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; name another place") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_tensors(path: str | os.PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors and metadata as a safetensors file."""
    owned = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    with atomic(path) as temporary:
        save_file(owned, temporary, metadata=dict(metadata))


def read_tensors(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata."""
    path = _existing(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); it may be truncated, or have another format "
            "than its name says: write it again, or load a torch file by its own name (.pth)"
        ) from error


def read_weights(path: str | os.PathLike) -> dict[str, Any]:
    """Return a state dict that another program wrote: safetensors, or a torch file read with weights_only=True."""
    path = _existing(path)
    if _looks_like_safetensors(path) or path.suffix == ".safetensors":
        return read_tensors(path)[0]
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in many ways
        raise ValueError(
            f"{path} cannot be read as plain weights. Either it is damaged, or it holds Python objects, which "
            "are never unpickled here: in the program that made it, save only a dict of tensors; or, if you trust the "
            "file, convert it: found = torch.load(FILE, weights_only=False), then torch.save(found.state_dict(), "
            "'plain.pth') for a whole model, or torch.save(found['state_dict'], 'plain.pth') for a dict that has one"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"{path} holds a {type(state).__name__}; a dict of named tensors was expected")
    return state


def write_tree(path: str | os.PathLike, tree: Any, metadata: Mapping[str, str]) -> None:
    """Write nested dicts and lists of tensors and plain values as one safetensors file with its own hash."""
    tensors: dict[str, Tensor] = {}

    def plain(node: Any) -> Any:
        if isinstance(node, Tensor):
            tensors[str(len(tensors))] = node
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(node, Mapping):  # as pairs, since JSON turns integer keys into strings
            return {"dict": [[key, plain(value)] for key, value in node.items()]}
        if isinstance(node, list | tuple):
            return {type(node).__name__: [plain(value) for value in node]}
        return {"value": node}

    about = {**metadata, TREE: json.dumps(plain(tree))}
    write_tensors(path, tensors, {**about, DIGEST: _digest(tensors, about)})


def read_tree(path: str | os.PathLike) -> tuple[Any, dict[str, str]]:
    """Return what `write_tree` wrote, and the metadata."""
    tensors, metadata = read_tensors(path)
    if TREE not in metadata:
        raise ValueError(f"{path} holds no saved state (its metadata has no {TREE!r} entry)")
    if metadata.pop(DIGEST, None) != _digest(tensors, metadata):
        raise ValueError(f"{path} has changed since it was written: its hash does not match; save it again")

    def build(node: dict[str, Any]) -> Any:
        [(kind, content)] = node.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dict":
            return {key: build(value) for key, value in content}
        if kind in ("list", "tuple"):
            values = [build(value) for value in content]
            return values if kind == "list" else tuple(values)
        return content

    try:
        return build(json.loads(metadata[TREE])), metadata
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: the saved state in its header is damaged; save it again") from error


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_weights(what: str, taken: tuple[str, str], model: tuple[str, str], remedy: str) -> None:
    """Reject what was computed from other weights than the model's; both are given as (name, fingerprint)."""
    if taken[1] != model[1]:
        raise ValueError(
            f"{what} of other weights ({', '.join(taken)}) than the model's ({', '.join(model)}): compute it again "
            f"from this model, before it adapts, with {remedy}"
        )


def check_kind(metadata: Mapping[str, str], kind: str, version: int, path: str | os.PathLike, remedy: str) -> None:
    """Reject a file of another kind, or one that a newer release wrote."""
    if metadata.get("kind") != kind:
        raise ValueError(f"{path} is not a file of {kind}; {remedy}")
    if not metadata.get("version", "").isdigit() or int(metadata["version"]) > version:
        raise ValueError(f"{path} was written by a newer mgtta: upgrade to read it")


def command() -> str:
    """Return the command line of this process, quoted for a shell, for metadata and records."""
    program = Path(sys.argv[0])
    words = ["mgtta"]
    if program.suffix == ".py" and program.name != "__main__.py":  # a script that uses the package
        words = ["python", "/".join(program.parts[-2:])]
    return shlex.join([*words, *sys.argv[1:]])


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes and float32 values; it is the same on any device and in float64."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _existing(path: str | os.PathLike) -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return path


def _looks_like_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
