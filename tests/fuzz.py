"""Hostile input, in large numbers: every reader of files and arguments gets damaged, spliced and lying ones.

A case fails where anything but the documented errors comes out, where it takes more than some seconds or more memory
than the input justifies, where a file appears outside the working folder, or where code from the input runs.

python tests/fuzz.py --cases 100000             # mutations of golden files, seeded
python tests/fuzz.py --cases 100000 --atheris   # and the file readers guided by coverage, where atheris is installed
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load, save

import mgtta
from mgtta._lib.files import _digest, read_tree, read_weights
from mgtta.bench.store import Store
from mgtta.cli import app, options
from mgtta.data.datasets import open_dataset
from mgtta.data.images import decode
from mgtta.data.shards import samples
from mgtta.evaluation.record import checked
from mgtta.report import sections
from mgtta.report.tables import markdown_report

GOLDEN = Path(__file__).parent / "golden"
DOCUMENTED = (ValueError, TypeError, OSError, RuntimeError, ImportError)  # what the command line prints as a message
READERS = ("image", "tar", "tree", "state", "source", "fisher", "generator", "weights", "released", "records")
MEMORY = 3 * 2**30  # bytes beyond what the process has at the start
SECONDS = 20
TOKENS = [
    b"\xff" * 4,
    b"\0" * 8,
    b"\x80\0\0\0",
    b"99999999999999999999",
    b"-1",
    b"1e309",
    b"NaN",
    b"null",
    b"../../x",
    b"[" * 50,
    b'{"a":' * 50,
    b"\xff\xff\xff\x7f",
    b"F64",
    b"I8",
    b"__metadata__",
    b"cos\nsystem\n",
    b"\r\n",
]


class Canary:
    """An object whose unpickling would leave a trace."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


# --- what is called


def _file(folder: Path, data: bytes, name: str = "file") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def image(data: bytes, folder: Path) -> None:
    assert decode(data, name="x", size=8).shape == (3, 8, 8)


def tar(data: bytes, folder: Path) -> None:
    path = _file(folder, data, "x.tar")
    for sample in samples([str(path)])[:4]:
        sample.image.read()
    dataset = open_dataset(path, size=8, on_error="skip")
    list(dataset)


def tree(data: bytes, folder: Path) -> None:
    read_tree(_file(folder, data))


def state(data: bytes, folder: Path) -> None:
    before = METHOD.state_dict()
    try:
        mgtta.load_state(METHOD, _file(folder, data))
    except ValueError:
        after = METHOD.state_dict()
        assert all(torch.equal(after["method"]["params"][k], v) for k, v in before["method"]["params"].items())
        raise


def source(data: bytes, folder: Path) -> None:
    mgtta.load_source(_file(folder, data))


def fisher(data: bytes, folder: Path) -> None:
    mgtta.load_fisher(_file(folder, data))


def generator(data: bytes, folder: Path) -> None:
    mgtta.load_generator(_file(folder, data))


def weights(data: bytes, folder: Path) -> None:
    read_weights(_file(folder, data, "x.pth"))


def released(data: bytes, folder: Path) -> None:
    mgtta.import_released(_file(folder, data, "x.pth"))


def records(data: bytes, folder: Path) -> None:
    _file(folder, data, "records.jsonl")
    store = Store(folder)
    found = store.records()
    if found:
        markdown_report(sections(checked(found)))


def tree_of_images(data: bytes, folder: Path) -> None:
    """Folders and files with names and contents from the data."""
    root = folder / "images"
    root.mkdir()
    for part in data.split(b"|")[:6]:
        name = part[:12].replace(b"/", b"_").replace(b"\0", b"_") or b"x"
        with contextlib.suppress(OSError):
            place = os.path.join(os.fsencode(root), name) if part[-1:] < b"@" else os.fsencode(root)
            os.makedirs(place, exist_ok=True)
            with open(os.path.join(place, name + b".png"), "wb") as file:
                file.write(part if part[-2:-1] < b"@" else PICTURE)
    list(open_dataset(root, size=8, on_error="skip"))


def arguments(data: bytes, folder: Path) -> None:
    """The command line, with words that are names of commands, of options, paths, and rubbish."""
    words = data.decode(errors="replace").replace("\0", "?").split()[:8]
    if {"demo", "bench", "doctor"} & set(words):  # that work, and take long
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            app([word.replace("FOLDER", str(folder)) for word in words], standalone_mode=False)
        except (Exception, SystemExit) as error:
            if type(error).__module__.split(".")[0] not in ("click", "typer") and not isinstance(error, SystemExit):
                raise


def settings(data: bytes, folder: Path) -> None:
    options.settings([data.decode(errors="replace")])


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "image": image,
    "tar": tar,
    "tree": tree,
    "state": state,
    "source": source,
    "fisher": fisher,
    "generator": generator,
    "weights": weights,
    "released": released,
    "records": records,
    "folder": tree_of_images,
    "arguments": arguments,
    "settings": settings,
}


# --- what they are given


def seeds(canary: Path) -> dict[str, list[bytes]]:
    """Sound input and known lies, for each target."""
    golden = {p.stem: p.read_bytes() for p in sorted(GOLDEN.glob("0.1/*.*"))}
    states = [golden[name] for name in ("state", "training", "source", "fisher", "generator")]
    pickles = [_torch({"model_state_dict": {"a": torch.zeros(2)}}), _zip(pickle.dumps(Canary(str(canary))))]
    pickles += [pickle.dumps(Canary(str(canary))), pickle.dumps({"a": 1}), *states[2:]]
    return {
        "image": [*_images(), _huge_png()],
        "tar": [golden["images"], *_tars()],
        "tree": states,
        "state": states,
        "source": states[2:],
        "fisher": states[2:],
        "generator": states[2:],
        "weights": pickles,
        "released": [*pickles, _released()],
        "records": [golden["records"], golden["records"] * 3],
        "folder": [b"cat|dog@|n01440764|0|1|..|" + PICTURE, b"a|b|c", b".hidden|" + b"\xff\xfe" * 3],
        "arguments": [
            b"adapt FOLDER --model glyphs_vit --out FOLDER/p.csv",
            b"source FOLDER --model nothing",
            b"report FOLDER",
            b"list",
            b"corrupt FOLDER FOLDER/out --severity 9",
            b"--help",
            b"train FOLDER --model x",
            b"adapt FOLDER --model glyphs_vit --set lr=1 --resume FOLDER/r --batch-size -1 --out x",
        ],
        "settings": [b"lr=1e-3", b"a=[1,2,{'b': (3,)}]", b"x=" + b"(" * 400, b"x='" + b"a" * 100, b"x=-" + b"-" * 5000],
    }


def _images() -> list[bytes]:
    found = []
    picture = Image.effect_noise((16, 12), 80)
    for kind, mode in (("PNG", "RGBA"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("BMP", "RGB"), ("GIF", "P"), ("PPM", "RGB")):
        buffer = io.BytesIO()
        picture.convert(mode).save(buffer, kind)
        found.append(buffer.getvalue())
    return found


def _huge_png() -> bytes:
    """16 x 12 pixels that claim to be 100,000 x 100,000."""
    data = bytearray(_images()[0])
    data[16:24] = struct.pack(">II", 100_000, 100_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def _tars() -> Iterator[bytes]:
    for name, kind, size in (
        ("../out.png", tarfile.REGTYPE, 4),
        ("/out.png", tarfile.REGTYPE, 4),
        ("link.png", tarfile.SYMTYPE, 0),
        ("huge.png", tarfile.REGTYPE, 2**40),
        ("device.png", tarfile.CHRTYPE, 0),
        ("a" * 300 + ".png", tarfile.REGTYPE, 4),
    ):
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname = kind, size, "/etc/passwd"
        yield member.tobuf(tarfile.GNU_FORMAT) + b"data".ljust(512, b"\0") + bytes(1024)


def _torch(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _zip(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def _released() -> bytes:
    from mgtta.learned.files import _RELEASED, _RELEASED_PREFIX

    own = mgtta.MetaGradientGenerator(8).state_dict()
    return _torch({"model_state_dict": {_RELEASED_PREFIX + theirs: own[ours] for theirs, ours in _RELEASED.items()}})


PICTURE = _images()[0]


def mutated(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """The data with a few changes: of bits, bytes, numbers, lengths, order; or of a safetensors header's claims."""
    if data[8:9] == b"{" and draw.random() < 0.5:
        data = draw.choice((_lying_header, _lying_tree))(data, draw)
    elif data[:1] == b"{" and draw.random() < 0.5:
        return json.dumps(_lie(json.loads(data.splitlines()[0]), draw)).encode() + b"\n"
    content = bytearray(data)
    for _ in range(draw.choice((0, 1, 1, 2, 4, 16))):
        i, j = (draw.randrange(len(content) + 1) for _ in range(2))
        kind = draw.randrange(9)
        if kind == 0 and i < len(content):
            content[i] ^= 1 << draw.randrange(8)
        elif kind == 1 and i < len(content):
            content[i] = draw.randrange(256)
        elif kind == 2:
            del content[min(i, j) : max(i, j)]
        elif kind == 3:
            content[i:i] = content[min(i, j) : min(max(i, j), min(i, j) + 4096)]
        elif kind == 4:
            del content[i:]
        elif kind == 5:
            token = draw.choice(TOKENS)
            content[i : i + draw.choice((0, len(token)))] = token
        elif kind == 6:
            other = draw.choice(others)
            k = draw.randrange(len(other) + 1)
            content[i:] = other[k : k + 8192]
        elif kind == 7:
            content[i:i] = draw.randbytes(draw.choice((1, 4, 64)))
        else:
            content[i : i + 8] = struct.pack("<Q", draw.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))
    return bytes(content[: 2**16])


def _lying_header(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    try:
        header = json.loads(data[8 : 8 + length])
        name = draw.choice(list(header))
        entry = header[name]
        key = draw.choice(list(entry))
        lies: list[object] = [2**62, -1, [2**40, 2**40], [0, 2**62], [], None, "F64", "", {}, [1, 1, 1], "[" * 30, 1.5]
        if name == "__metadata__" and draw.random() < 0.7:
            text = entry[key]
            i = draw.randrange(len(text) + 1)
            entry[key] = text[:i] + draw.choice(("0", "999999999999", "null", '"', "[]", "-", "tensor")) + text[i + 1 :]
        else:
            entry[key] = draw.choice(lies)
    except (ValueError, IndexError, TypeError, AttributeError):
        return data
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + data[8 + length :]


def _lying_tree(data: bytes, draw: random.Random) -> bytes:
    """A state with another entry somewhere, and a hash that is right all the same."""
    try:
        tensors = load(data)
        (length,) = struct.unpack("<Q", data[:8])
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        metadata.pop("sha256")
        metadata["tree"] = json.dumps(_lie(json.loads(metadata["tree"]), draw))
        if draw.random() < 0.3:
            name = draw.choice(list(tensors))
            lies = [torch.zeros(0), torch.zeros(3), torch.full((2, 2), float("nan")), torch.zeros(1, dtype=torch.int8)]
            tensors[name] = draw.choice([*lies, tensors[name].double(), tensors[name] * float("inf")])
    except (SafetensorError, KeyError, ValueError, IndexError):
        return data
    return save(tensors, {**metadata, "sha256": _digest(tensors, metadata)})


def _lie(node: Any, draw: random.Random) -> Any:
    """The same nested values with one of them changed."""
    if isinstance(node, dict | list) and node and draw.random() < 0.95:
        key = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node[key] = _lie(node[key], draw)
        return node
    return draw.choice(
        [None, -1, 2**62, 1.5, 1e308, "", "x", [], {}, [[]], True, {"tensor": "0"}, {"value": "a"}, "<b>|"]
    )


# --- the judgement


class TooSlow(BaseException):
    """A case took too long."""


def check(name: str, data: bytes, folder: Path) -> str:
    """ "read" or "refused"; raises where a case fails."""
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TARGETS[name](data, folder)
        return "read"
    except DOCUMENTED as error:
        if isinstance(error, RecursionError | NotImplementedError) or not str(error):
            raise
        return "refused"
    finally:
        signal.alarm(0)


def _too_slow(*_: object) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def fuzz(names: list[str], cases: int, seed: int, verbose: bool = True) -> dict[str, dict[str, int]]:
    """So many cases over the targets in turn; stops at the first that fails and says how to repeat it."""
    draw = random.Random(seed)
    found: dict[str, dict[str, int]] = {name: {"read": 0, "refused": 0} for name in names}
    with tempfile.TemporaryDirectory() as place:
        outer, canary = Path(place), Path(place) / "canary"
        corpus = seeds(canary)
        home = os.getcwd()
        os.chdir(outer)
        try:
            for case in range(cases):
                name = names[case % len(names)]
                data = draw.choice(corpus[name])
                data = data if case < 8 * len(names) else mutated(data, corpus[name], draw)
                with tempfile.TemporaryDirectory(dir=place) as inner:
                    try:
                        found[name][check(name, data, Path(inner))] += 1
                        assert not canary.exists(), "code from the input ran"
                    except BaseException:
                        kept = Path(home) / f"fuzz-{name}-{case}.bin"
                        kept.write_bytes(data)
                        print(f"{name}: case {case} of seed {seed} fails; its input is kept in {kept}", flush=True)
                        raise
                if set(os.listdir(place)) - {"canary"}:
                    raise AssertionError(f"{name} left {os.listdir(place)} outside its folder")
                if verbose and case % 10_000 == 9_999:
                    print(f"{case + 1:,} cases", flush=True)
        finally:
            os.chdir(home)
    return found


def limit_memory() -> None:
    """From here on, an allocation that no input justifies fails, as a MemoryError, which no reader may raise."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


METHOD = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--atheris", action="store_true", help="the file readers once more, guided by coverage")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare()
    limit_memory()
    began = time.monotonic()
    try:
        found = fuzz(args.targets.split(","), args.cases, args.seed)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    for name, counts in found.items():
        print(f"{name:10} {counts['read']:8,} read {counts['refused']:8,} refused")
    print(f"{args.cases:,} cases, none failed, {time.monotonic() - began:.0f} s")
    if args.atheris:
        runs = args.cases // 10
        for name in READERS:
            began = time.monotonic()
            command = [sys.executable, str(Path(__file__).with_name("guided.py")), name, str(runs)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stdout[-3000:], done.stderr[-3000:])
                sys.exit(f"{name} fails under atheris")
            print(f"atheris: {name}, {runs:,} runs, none failed, {time.monotonic() - began:.0f} s", flush=True)


def prepare() -> None:
    """The method that states are loaded into."""
    global METHOD
    sys.path.insert(0, str(GOLDEN))
    import make

    METHOD = make.method(GOLDEN / "0.1")
    METHOD(make.images())


if __name__ == "__main__":
    main()
