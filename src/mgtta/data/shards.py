"""Lists the samples of WebDataset shards, local or by URL: where each one's bytes are, without reading them.

The webdataset library expands the list of shards, opens URLs and groups members into samples. Here it groups not the
bytes of the members but their places in the shard. So images are read in any order, by any process, and none is kept
in memory. A shard by URL is fetched once and kept on disk.
"""

import glob
import hashlib
import importlib
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlparse

import webdataset
from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys

from mgtta._lib.errors import unknown
from mgtta._lib.files import atomic
from mgtta.data.images import EXTENSIONS, MAX_BYTES, OTHER_EXTENSIONS, ImageError, left_out, warn_left_out

SCHEMES = ("http", "https", "ftps", "sftp", "scp", "gs", "hf", "ais")  # "pipe:" would run a shell command


class Place(NamedTuple):
    """The place of a member's bytes."""

    path: str
    offset: int
    length: int
    name: str

    def read(self) -> bytes:
        if self.length > MAX_BYTES:
            raise ImageError(f"cannot read {self.name}: {self.length:,} bytes, more than {MAX_BYTES:,}")
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if len(data) < self.length:
            raise ImageError(f"cannot read {self.name}: the tar ends in the middle of it")
        return data


class Sample(NamedTuple):
    """An image, and its label if the shard has one."""

    key: str
    image: Place
    label: int | None


def is_tar(path: str) -> bool:
    """Return whether a path or URL names a shard."""
    url = urlparse(path)
    return bool(url.netloc) or url.path.endswith((".tar", ".tar.gz", ".tgz"))


def expand(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
    """Return the local files and URLs, with braces and then globs expanded."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    shards = []
    for path in paths:
        for url in expand_urls(os.fspath(path).removeprefix("file://")):
            if _is_remote(url):
                shards.append(url)
                continue
            found = sorted(glob.glob(os.path.expanduser(url))) or [url]
            if not os.path.isfile(found[0]):
                raise FileNotFoundError(f"there is no tar {found[0]}; looked for WebDataset shards")
            shards.extend(found)
    return shards


def files_of(name: str) -> Iterator[str]:
    """Yield the local files that a name means: tars, a file, or all files of a folder, in a fixed order."""
    if is_tar(name):
        yield from filter(os.path.isfile, expand(name))  # not URLs
    elif os.path.isfile(name):
        yield name
    for folder, below, names in os.walk(os.path.expanduser(name)):
        below.sort()
        yield from (os.path.join(folder, each) for each in sorted(names))


def split(shards: Sequence[str], part: tuple[int, int] | None) -> list[str]:
    """Return the shards of one rank, part being (rank, ranks): each shard goes to one rank, evenly up to one shard."""
    if not shards:
        raise ValueError("no shards were named")
    rank, ranks = part or (0, 1)
    return list(shards[rank::ranks])


def samples(shards: Sequence[str], cache_dir: str | os.PathLike | None = None) -> list[Sample]:
    """Return every KEY.jpg (or another image) of the shards, with the number in KEY.cls beside it."""
    pipeline = webdataset.DataPipeline(
        webdataset.SimpleShardList(shards), lambda urls: _members(urls, cache_dir), group_by_keys
    )
    found = []
    others: list[str] = []
    for sample in pipeline:
        image = next((sample[e] for e in EXTENSIONS if e in sample), None)
        if image is not None:
            label = _label(sample["cls"]) if "cls" in sample else None
            found.append(Sample(sample["__key__"], image, label))
        else:
            others.extend(f"{sample['__key__']}.{e}" for e in OTHER_EXTENSIONS if e in sample)
    if not found:
        raise ValueError(f"no KEY.jpg (or {', '.join(EXTENSIONS[1:])}) in {', '.join(shards)}{left_out(others)}")
    warn_left_out(others, shards[0])
    return found


def _members(shards: Iterable[dict], cache_dir: str | os.PathLike | None) -> Iterator[dict]:
    for url in (shard["url"] for shard in shards):
        path = _fetch(url, cache_dir) if _is_remote(url) else url
        try:
            with tarfile.open(path, mode="r:") as tar:
                for member in tar:
                    _check(member, url)
                    if member.isreg():
                        place = Place(path, member.offset_data, member.size, f"{url}: {member.name}")
                        yield {"fname": member.name, "data": place, "__url__": url}
                    tar.members = []  # type: ignore[attr-defined]  # else it keeps them all
                _check_end(path, tar.offset)
        except tarfile.TarError as error:
            if path != url:
                os.unlink(path)
            raise ValueError(
                f"{url} is not a whole, uncompressed tar ({error}); fetch it again, or gunzip it"
            ) from error
        yield {}  # samples do not reach across shards


def _check(member: tarfile.TarInfo, url: str) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{url}: member {member.name!r} lies outside the archive; rejected")
    if not (member.isreg() or member.isdir()) or member.issparse():
        raise ValueError(f"{url}: member {member.name!r} is a link, a device or sparse, not a plain file; rejected")


def _check_end(path: str, offset: int) -> None:
    """Reject a shard that breaks off; tarfile takes any damaged header but the first for the end."""
    with open(path, "rb") as file:
        file.seek(offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"damaged or cut off at byte {offset:,}")


def _label(place: Place) -> int:
    text = place._replace(length=min(place.length, 32)).read().strip()
    if not text.isdigit():
        raise ValueError(f"{place.name} should hold a class number; it holds {text!r}")
    return int(text)


def _is_remote(url: str) -> bool:
    scheme, colon, _ = url.partition(":")
    if not colon or os.path.exists(url):
        return False
    if scheme not in SCHEMES:
        raise unknown("scheme of a URL", scheme, SCHEMES)
    return True


def _fetch(url: str, cache_dir: str | os.PathLike | None) -> str:
    """Return the path of the shard's copy in the cache; fetch it if it is not there."""
    if cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        cache_dir = Path(home, "mgtta", "shards")
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    copy = Path(cache_dir) / f"{digest}-{PurePosixPath(urlparse(url).path).name}"
    if not copy.exists():
        gopen = importlib.import_module("webdataset.gopen").gopen  # the package hides the module of that name
        try:
            with atomic(copy) as temporary, open(temporary, "wb") as file, gopen(url) as remote:
                shutil.copyfileobj(remote, file, 2**20)
        except OSError as error:
            raise OSError(f"could not fetch {url}: {error}") from error
    return os.fspath(copy)
