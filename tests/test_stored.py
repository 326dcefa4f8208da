"""`mgtta bench --cache`: corrupted images on disk, bit for bit those that are made on the fly."""

import dataclasses
import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest
import torch
from small_bench import without_timing, write_tree
from typer.testing import CliRunner

from mgtta.bench.cells import Cell, Setup
from mgtta.bench.resources import Lab, Listener
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.cli.app import app
from mgtta.data import stored
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.datasets import open_dataset
from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.data.patterns import Patterns
from mgtta.data.stored import ImageStore, Stored, stamp
from mgtta.data.streams import Domain, corrupted, stream

SEVEN = 7  # images
LINEAR = Cell("corruptions", "eq7_sgd", ("fog", "contrast"), batch_size=3)


def domains_of(dataset, names=CORRUPTIONS):
    return corrupted(dataset, names)


def in_store(store, domains, seed=0, first=None, images="glyphs"):
    return [store.domain(domain, images, seed, first) for domain in domains]


def assert_same_batches(one, two):
    one, two = list(one), list(two)
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert torch.equal(a.index, b.index)
        assert a.domain == b.domain


@pytest.fixture
def made(monkeypatch):
    """The names of the files that were really made."""
    make, names = ImageStore._make, []
    monkeypatch.setattr(ImageStore, "_make", lambda *a: (names.append(a[1].name.rpartition("-")[0]), make(*a))[1])
    return names


# --- pixels


@pytest.mark.parametrize("kind", ["glyphs", "patterns", "folder"])
def test_stored_pixels_are_those_made_on_the_fly(tmp_path, tree, kind, monkeypatch):
    monkeypatch.setattr(stored, "BATCH", 2)  # other batches than the stream's
    dataset = {"glyphs": Glyphs, "patterns": Patterns}.get(kind, lambda n: open_dataset(tree, size=48))(SEVEN)
    plain = domains_of(dataset)
    kept = in_store(ImageStore(tmp_path / "cache"), plain, seed=3, images=kind)
    assert_same_batches(stream(kept, seed=3, batch_size=5), stream(plain, seed=3, batch_size=5))
    file = next((tmp_path / "cache").glob("fog-5-seed3-*.npy"))
    found = np.load(file, mmap_mode="r")
    assert found.dtype == np.uint8
    assert found.shape == (len(dataset), 3, 48, 48)


@pytest.mark.parametrize("order", [{"mixed": True}, {"imbalance": float("inf")}, {"first": 2}, {"part": (1, 2)}])
def test_every_order_of_a_stream_reads_the_same_files(tmp_path, made, order):
    plain = domains_of(Glyphs(SEVEN), ("fog", "snow", "frost"))
    kept = in_store(ImageStore(tmp_path), plain, seed=1, first=5)
    asked = {"seed": 1, "batch_size": 4, "first": 5, **order}
    assert_same_batches(stream(kept, **asked), stream(plain, **asked))
    in_store(ImageStore(tmp_path), plain, seed=1, first=5)
    assert made == ["clean-seed1", "fog-5-seed1", "snow-5-seed1", "frost-5-seed1"]


def test_a_stored_data_set_has_only_the_images_that_were_asked_for(tmp_path):
    dataset = Glyphs(SEVEN)
    [domain] = in_store(ImageStore(tmp_path), domains_of(dataset, ["fog"]), first=2)
    assert isinstance(domain.dataset, Stored)
    assert len(domain.dataset) == SEVEN
    assert domain.dataset.labels is dataset.labels
    readable = [i for i in range(SEVEN) if domain.dataset._rows[i] >= 0]
    assert len(readable) == 2
    other = next(i for i in range(SEVEN) if i not in readable)
    with pytest.raises(IndexError, match="not among the 2 that are stored"):
        domain.dataset[other]


def test_all_that_decides_the_pixels_has_a_file_of_its_own(tmp_path, tree):
    fog, frost = domains_of(Glyphs(2), ("fog", "frost"))
    store = ImageStore(tmp_path / "cache")
    textures = dataclasses.replace(frost, frost_textures=str(tree / CLASSES[Glyphs(1)[0][1]]))
    others = [
        (fog, ["glyphs"], 0),
        (fog, ["other glyphs"], 0),
        (fog, ["glyphs"], 1),
        (dataclasses.replace(fog, severity=3), ["glyphs"], 0),
        (dataclasses.replace(fog, constants="cifar"), ["glyphs"], 0),
        (frost, ["glyphs"], 0),
        (textures, ["glyphs"], 0),
    ]
    paths = [store._path(*asked) for asked in others]
    paths.append(ImageStore(tmp_path / "cache", made_with="another GPU")._path(*others[0]))
    assert len(set(paths)) == len(others) + 1
    same = dataclasses.replace(fog, frost_textures=textures.frost_textures, name="haze")
    assert store._path(same, ["glyphs"], 0) == paths[0]


def test_other_numbers_of_images_have_files_of_their_own(tmp_path, made):
    store = ImageStore(tmp_path)
    for count, first in ((3, None), (3, 2), (4, 2), (3, 3)):
        in_store(store, domains_of(Glyphs(count), ["fog"]), first=first)
    assert made == ["clean-seed0", "fog-5-seed0"] * 3


def test_a_stamp_tells_changed_images_from_those_of_before(tree):
    before = stamp(str(tree))
    assert stamp(str(tree)) == before
    file = next(tree.rglob("*.JPEG"))
    later = os.stat(file).st_mtime_ns + 10**9
    os.utime(file, ns=(later, later))
    touched = stamp(str(tree))
    shutil.copy(file, file.with_name("more.JPEG"))
    assert len({before, touched, stamp(str(tree))}) == 3
    assert stamp("https://host/a.tar") != stamp("https://host/b.tar")


# --- files


def test_no_file_is_left_where_the_making_fails(tmp_path, monkeypatch):
    fog = domains_of(Glyphs(4), ["fog"])
    monkeypatch.setattr(stored, "BATCH", 2)
    monkeypatch.setattr(stored, "REPORT", 2)

    def breaks(text):
        if text.startswith("fog-5-seed0: 2 of 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_store(ImageStore(tmp_path, say=breaks), fog)
    assert not list(tmp_path.glob("*fog*.npy*"))
    said: list[str] = []
    in_store(ImageStore(tmp_path, say=said.append), fog)
    assert said == [f"fog-5-seed0: {n} of 4 images are stored" for n in (2, 4)]


def test_what_a_killed_process_left_is_removed(tmp_path):
    fog = domains_of(Glyphs(2), ["fog"])
    in_store(ImageStore(tmp_path), fog)
    [file] = tmp_path.glob("fog-*.npy")
    file.rename(tmp_path / f".{file.name}.abc")  # killed before the rename
    in_store(ImageStore(tmp_path), fog)
    assert [found.name for found in tmp_path.glob("*fog*.npy*")] == [file.name]


def test_a_full_disk_is_named_with_the_bytes_that_are_needed(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    needed = 2 * 3 * 48 * 48
    with pytest.raises(
        OSError, match=rf"{tmp_path} has no room .* needs {needed:,} bytes, and 1,000 are free.*--cache"
    ):
        in_store(ImageStore(tmp_path), domains_of(Glyphs(2), ["fog"]))


def test_a_disk_that_fills_up_meanwhile_is_named_too(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(OSError, match=r"has no room for clean-seed0-.*needs 13,824 bytes"):
        in_store(ImageStore(tmp_path), domains_of(Glyphs(2), ["fog"]))
    assert not list(tmp_path.glob("*.npy*"))


def test_images_that_are_not_bytes_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"only uint8 images are stored, and these are torch\.float32"):
        ImageStore(tmp_path).domain(Domain("grey", [(torch.zeros(3, 48, 48), 0)]), "grey", seed=0)
    assert not list(tmp_path.glob("*.npy*"))


def test_a_damaged_file_is_named(tmp_path):
    fog = domains_of(Glyphs(2), ["fog"])
    in_store(ImageStore(tmp_path), fog)
    [file] = tmp_path.glob("fog-*.npy")
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=rf"{file.name} is damaged .*: remove it"):
        in_store(ImageStore(tmp_path), fog)


class Slow(Glyphs):
    """Images that take a while, and count who asks for them."""

    def __getitem__(self, i):
        time.sleep(0.05)
        with open(os.environ["ASKED"], "a") as file:
            file.write(f"{i}\n")
        return super().__getitem__(i)


def ask(folder, answers):
    [domain] = in_store(ImageStore(folder), domains_of(Slow(4), ["fog"]))
    answers.put(torch.stack([domain.dataset[i][0] for i in range(4)]).sum().item())


def test_of_two_processes_one_makes_a_file_and_the_other_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    both = [context.Process(target=ask, args=(tmp_path / "cache", answers)) for _ in range(2)]
    for process in both:
        process.start()
    first, second = answers.get(timeout=60), answers.get(timeout=60)
    for process in both:
        process.join()
    assert first == second > 0
    asked = (tmp_path / "asked").read_text().split()
    assert len(asked) == 5  # each image once, and the first one's shape


# --- records


@pytest.mark.parametrize("named", [False, True])
def test_records_are_the_same_with_and_without_a_cache(tmp_path, tree, named, made):
    plain = Setup(images=6, data=str(tree) if named else None, source="glyphs_vit")
    cached = dataclasses.replace(plain, cache=str(tmp_path / "cache"))
    cells = [
        LINEAR,
        dataclasses.replace(LINEAR, method="tent", mixed=True),
        dataclasses.replace(LINEAR, method="tent", by_class=True, reset="never", limit=4),
        dataclasses.replace(LINEAR, method="noadapt", domains=("fog/2", "fog/5", "fog/2")),
    ]
    assert [cell.key(plain) for cell in cells] == [cell.key(cached) for cell in cells]
    without = run_cells(cells, plain, Store(tmp_path / "without"))
    with_cache = run_cells(cells, cached, Store(tmp_path / "with"))
    assert without_timing(with_cache) == without_timing(without)
    assert sorted(made) == ["clean-seed0", "contrast-5-seed0", "fog-2-seed0", "fog-5-seed0"]
    ignored = ("threads", "command")
    for one, two in zip(with_cache, without, strict=True):
        protocols = [{k: v for k, v in r["protocol"].items() if k not in ignored} for r in (one, two)]
        assert protocols[0] == protocols[1]


def test_a_run_goes_on_with_or_without_a_cache(tmp_path, monkeypatch):
    cached = Setup(images=4, cache=str(tmp_path / "cache"))
    cells = [LINEAR, dataclasses.replace(LINEAR, method="noadapt")]
    run_cells(cells[:1], cached, Store(tmp_path / "run"))
    ran = []
    run = Lab.run
    monkeypatch.setattr(Lab, "run", lambda lab, cell: (ran.append(cell), run(lab, cell))[1])
    run_cells(cells, dataclasses.replace(cached, cache=None), Store(tmp_path / "run"))
    assert ran == cells[1:]


def test_later_methods_make_no_image(tmp_path, monkeypatch):
    cached = Setup(images=4, cache=str(tmp_path / "cache"))
    run_cells([LINEAR], cached, Store(tmp_path / "one"))

    def never(*_, **__):
        raise AssertionError("an image was corrupted again")

    monkeypatch.setattr("mgtta.data.streams.corrupt", never)
    notes: list[str] = []

    class Listening(Listener):
        def note(self, text):
            notes.append(text)

    records = run_cells(
        [dataclasses.replace(LINEAR, method="tent")], cached, Store(tmp_path / "two"), watch=Listening()
    )
    assert [r["images"] for r in records] == [4, 4]
    assert notes == []


def test_images_as_they_are_and_published_ones_are_not_stored(tmp_path, made):
    write_tree(tmp_path / "c" / "fog" / "5", lambda label: f"{label:02}", n=3)
    for label in range(len(CLASSES)):
        (tmp_path / "c" / "fog" / "5" / f"{label:02}").mkdir(exist_ok=True)
    published = Setup(data=str(tmp_path / "c"), cache=str(tmp_path / "cache"))
    [record] = Lab(published, tmp_path).run(Cell("corruptions", "noadapt", ("fog",)))
    assert record["images"] == 3
    clean = Setup(images=3, cache=str(tmp_path / "cache"))
    [record] = Lab(clean, tmp_path).run(Cell("streams", "noadapt", ("clean",), severity=0))
    assert record["images"] == 3
    assert made == []


def test_the_command_line_takes_a_cache(tmp_path):
    few = ["--quick", "--images", "4", "--methods", "noadapt", "--corruptions", "fog"]
    words = ["bench", "corruptions", *few, "--device", "cpu", "--cache", str(tmp_path / "cache")]
    found = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "one")])
    assert found.exit_code == 0, found.output
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".lock", ".lock", ".npy", ".npy"]


def test_a_domain_without_a_corruption_can_be_stored(tmp_path):
    clean = Domain("clean", Glyphs(SEVEN))
    kept = ImageStore(tmp_path).domain(clean, "glyphs", seed=0)
    assert_same_batches(stream(kept), stream(clean))
