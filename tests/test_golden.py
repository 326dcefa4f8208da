"""Files that a release wrote keep loading; those of a newer one are refused with a word on what to do."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import mgtta
from mgtta._lib.files import _digest
from mgtta.bench.store import Store
from mgtta.data.datasets import open_dataset
from mgtta.report import sections
from mgtta.report.tables import markdown_report

HOME = Path(__file__).parent / "golden"
sys.path.insert(0, str(HOME))
import make as golden  # noqa: E402


@pytest.fixture(params=sorted(p for p in HOME.iterdir() if p.is_dir() and p.name[0].isdigit()), ids=lambda p: p.name)
def folder(request):
    return request.param


def train(folder, checkpoint):
    model = mgtta.load_model(golden.net())
    source = mgtta.load_source(folder / "source.safetensors")
    return mgtta.meta_train(
        model, source, golden.images(), generator=golden.generator(), steps=4, checkpoint=checkpoint, progress=False
    )


LOADERS = {
    "source": lambda folder, file: mgtta.load_source(file),
    "fisher": lambda folder, file: mgtta.load_fisher(file),
    "generator": lambda folder, file: mgtta.load_generator(file),
    "state": lambda folder, file: mgtta.load_state(golden.method(folder), file),
    "training": train,
}


def test_statistics_and_generator(folder):
    model = mgtta.load_model(golden.net())
    source = mgtta.load_source(folder / "source.safetensors")
    source.check(model.name, model.fingerprint())
    expected = mgtta.source_statistics(model, golden.images())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(source.mean, expected.mean, strict=True))
    mgtta.load_fisher(folder / "fisher.safetensors").check(model.name, model.fingerprint())
    generator = mgtta.load_generator(folder / "generator.safetensors")
    assert generator.about["note"] == "golden"
    assert all(torch.equal(a, b) for a, b in zip(generator.parameters(), golden.generator().parameters(), strict=True))


def test_a_running_adaptation_goes_on(folder):
    method = golden.method(folder)
    assert mgtta.load_state(method, folder / "state.safetensors") == {"position": 1}
    expected = torch.tensor(json.loads((folder / "expected.json").read_text())["logits"])
    torch.testing.assert_close(method(golden.images()), expected, atol=1e-4, rtol=1e-4)


def test_training_goes_on(folder, tmp_path):
    (tmp_path / "run").write_bytes((folder / "training.safetensors").read_bytes())
    assert train(folder, tmp_path / "run").about["training"]["steps"] == 4


def test_records_and_images(folder):
    records = Store(folder).records()
    assert records[0]["top1"] == 50.0
    assert "fog" in markdown_report(sections(records))
    image, label = open_dataset(folder / "images.tar", size=8)[0]
    assert (tuple(image.shape), label) == ((3, 8, 8), 1)


@pytest.mark.parametrize("name", LOADERS)
def test_a_newer_file_is_refused(folder, name, tmp_path):
    with safe_open(folder / f"{name}.safetensors", "pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata())  # noqa: SIM118
    metadata["version"] = "99"
    if metadata.pop("sha256", None):
        metadata["sha256"] = _digest(tensors, metadata)
    save_file(tensors, tmp_path / "newer", metadata)
    with pytest.raises(ValueError, match="written by a newer mgtta: upgrade to read it"):
        LOADERS[name](folder, tmp_path / "newer")
