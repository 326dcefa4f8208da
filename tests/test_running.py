"""adapt_stream, and runs saved and resumed: the same predictions bit for bit, never from a damaged file."""

import csv
import json
from pathlib import Path

import pytest
import torch
from conftest import confident_vit, images
from PIL import Image
from safetensors.torch import load_file, save_file
from test_cli import ARCHITECTURE, options, run, write_images  # noqa: F401
from test_methods import make, same
from torch.utils.data import TensorDataset

import mgtta
from mgtta._lib.files import write_tree
from mgtta._lib.timm import timm
from mgtta.adaptation.method import Method
from mgtta.data.datasets import open_dataset
from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.running import resume as running

ROOT = Path(__file__).parent.parent


@pytest.fixture
def method(model):
    method = make("mgtta", model, guard=True)
    method(images(4))
    return method


def test_save_state_keeps_everything(method, model, tmp_path):
    torch.manual_seed(5)
    mgtta.save_state(method, tmp_path / "s", {"position": 7})
    expected = torch.rand(3), method(images(4, seed=1))
    other = make("mgtta", model, guard=True)
    assert mgtta.load_state(other, tmp_path / "s") == {"position": 7}
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(other(images(4, seed=1)), expected[1])


def test_load_state_rejects_a_damaged_file(method, tmp_path):
    mgtta.save_state(method, tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    before = method.state_dict()
    step = max(1, len(whole) // 60)
    for place in range(0, len(whole), step):
        half = whole[:place]
        flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        for content in (half, flipped):
            (tmp_path / "s").write_bytes(content)
            with pytest.raises(ValueError):
                mgtta.load_state(method, tmp_path / "s")
    assert same(method.state_dict(), before)


def test_load_state_rejects_other_kinds_and_newer_versions(method, tmp_path):
    tree = {"method": method.state_dict(), "random": torch.get_rng_state(), "run": {}}
    write_tree(tmp_path / "s", tree, {"kind": running.KIND, "version": "99"})
    with pytest.raises(ValueError, match="newer mgtta: upgrade"):
        mgtta.load_state(method, tmp_path / "s")
    write_tree(tmp_path / "s", tree, {"kind": "something", "version": "1"})
    with pytest.raises(ValueError, match="not a file of mgtta state"):
        mgtta.load_state(method, tmp_path / "s")
    write_tree(tmp_path / "s", {**tree, "random": torch.zeros(3)}, {"kind": running.KIND, "version": "1"})
    with pytest.raises(ValueError, match="damaged state"):
        mgtta.load_state(method, tmp_path / "s")


def test_adapt_resumes_after_kills_with_the_same_predictions(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kill

    found = kill.measure(tmp_path, kills=5, images=40)
    assert found["identical"]
    assert found["kills"] >= 5


@pytest.fixture
def pictures(tmp_path):
    (tmp_path / "images").mkdir()
    for i in range(8):
        Image.effect_noise((48, 48), 60).convert("RGB").save(tmp_path / "images" / f"{i}.png")
    (tmp_path / "images" / "3.png").write_bytes(b"no image")
    return tmp_path / "images"


def test_adapt_resume_counts_images_and_checks_settings_and_predictions(run, pictures, tmp_path, monkeypatch):  # noqa: F811
    common = ["adapt", pictures, "--skip-unreadable"]
    common += options(model="glyphs_vit", method="tent", batch_size=1, device="cpu")
    common += options(resume=tmp_path / "run", save_every=1)
    out = tmp_path / "p.jsonl"
    note = running.Run.note
    monkeypatch.setattr(running.Run, "note", lambda self, record, batch: note(self, record, batch) or _stop(record))
    assert run(*common, "--out", out)[0] == 130
    assert not out.exists()
    monkeypatch.setattr(running.Run, "note", note)
    part = tmp_path / "p.jsonl.part"
    code, _, err = run(*common, "--out", out, "--set", "lr=0.5")
    assert code == 2
    assert "other settings" in err
    content = part.read_bytes()
    part.write_bytes(b"?" + content[1:])
    code, _, err = run(*common, "--out", out)
    assert code == 2
    assert "not what the run wrote" in err
    part.write_bytes(content + b"after the save")
    code, said, err = run(*common, "--out", out)
    assert code == 0, err
    assert "7 images; 7 updates, 0 skipped, 1 images unreadable" in said
    assert len(out.read_text().splitlines()) == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "p.jsonl"]


def _stop(record):
    if record.batches == 5:
        raise KeyboardInterrupt


# --- adapt_stream


def tent(**settings):
    return mgtta.create("tent", mgtta.load_model("glyphs_vit"), **settings)


@pytest.fixture
def tree(tmp_path):
    """150 characters in the 30 folders of their classes."""
    return write_images(tmp_path / "images", lambda i, label: CLASSES[label], n=150)


def test_adapt_stream_and_the_adapt_command_write_the_same_files(run, tree, tmp_path):  # noqa: F811
    command = ["adapt", tree, "--model", "glyphs_vit", "--method", "tent", "--device", "cpu", "--images", 40]
    outputs = ["--out", tmp_path / "command.csv", "--state", tmp_path / "command.state"]
    code, said, err = run(*command, *outputs, "--batch-size", 16)
    assert code == 0, err
    method = tent()
    result = mgtta.adapt_stream(
        method, tree, tmp_path / "function.csv", images=40, batch_size=16, state=tmp_path / "function.state"
    )
    assert (tmp_path / "function.csv").read_bytes() == (tmp_path / "command.csv").read_bytes()
    assert str(result).partition(" -> ")[0] == said.partition(" -> ")[0]
    from_command = tent()
    mgtta.load_state(from_command, tmp_path / "command.state")
    x = Glyphs(4).tensors()[0]
    assert torch.equal(from_command.model(x), method.model(x))


def test_adapt_stream_returns_totals_unreadable_images_and_events(tree, tmp_path):
    (tree / CLASSES[0] / "broken.png").write_bytes(b"no image")
    data = open_dataset(tree, size=48, on_error="skip")
    method = tent(lr=10.0, guard=True)  # far too high a rate
    result = mgtta.adapt_stream(method, data, tmp_path / "p.jsonl", batch_size=16, shuffle=0, progress=False)
    rows = [json.loads(line) for line in result.out.read_text().splitlines()]
    assert result.totals.images == result.totals.labelled == len(rows) == 150
    assert result.totals.right == sum(row["prediction"] == row["label"] for row in rows)
    assert result.totals.updates == method.updates
    [(name, reason)] = result.unreadable
    assert name == f"{CLASSES[0]}/broken.png"
    assert "broken.png" in reason
    assert result.events
    assert "% right" in str(result)
    assert f"1 images unreadable, {len(result.events)} x " in str(result)


def test_adapt_stream_takes_a_data_set_without_names(tmp_path):
    class Plain:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return Glyphs(5)[i][0], None

    result = mgtta.adapt_stream(tent(), Plain(), tmp_path / "p.csv", batch_size=2, resume=tmp_path / "run")
    rows = list(csv.DictReader(result.out.read_text().splitlines()))
    assert [row["image"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert result.totals.labelled == 0


def test_adapt_stream_resumes_from_its_checkpoint_bit_for_bit(tree, tmp_path, monkeypatch):
    options = {"images": 48, "batch_size": 8, "progress": False}
    straight = mgtta.adapt_stream(tent(), tree, tmp_path / "straight.csv", **options)
    options |= {"resume": tmp_path / "run", "save_every": 2, "protocol": {"lr": 1e-3}}
    note = running.Run.note
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(running.Run, "note", lambda self, record, batch: note(self, record, batch) or _stop(record))
        mgtta.adapt_stream(tent(), tree, tmp_path / "resumed.csv", **options)
    assert not (tmp_path / "resumed.csv").exists()
    for change in ({"protocol": {"lr": 1e-2}}, {"batch_size": 4}, {"images": 47}):
        with pytest.raises(ValueError, match="other settings or images"):
            mgtta.adapt_stream(tent(), tree, tmp_path / "resumed.csv", **{**options, **change})
    resumed = mgtta.adapt_stream(tent(), tree, tmp_path / "resumed.csv", **options)
    assert resumed.totals == straight.totals
    assert resumed.out.read_bytes() == straight.out.read_bytes()
    assert not (tmp_path / "run").exists()


def test_adapt_stream_warns_if_the_labels_are_not_the_models_classes(tmp_path):
    root = write_images(tmp_path / "images", lambda i, label: f"class{i % 2}")
    with pytest.warns(UserWarning, match="2 class folders, but the model has 30 classes: the labels are not used"):
        result = mgtta.adapt_stream(tent(), root, tmp_path / "p.csv")
    assert result.totals.labelled == 0


def test_adapt_stream_finds_out_before_the_work_what_it_cannot_do(tmp_path):
    method = tent()
    with pytest.raises(ValueError, match=r"valid: \.csv, \.jsonl"):
        mgtta.adapt_stream(method, "nowhere", tmp_path / "p.xlsx")
    with pytest.raises(ValueError, match="it is a folder"):
        mgtta.adapt_stream(method, "nowhere", tmp_path / "p.csv", state=tmp_path)
    with pytest.raises(ValueError, match=r"leave out shuffle=\.\.\., or resume="):
        mgtta.adapt_stream(method, "nowhere", tmp_path / "p.csv", resume=tmp_path / "run", shuffle=0)
    with pytest.raises(ValueError, match=r"leave out split_shards=\.\.\., or resume="):
        mgtta.adapt_stream(method, "nowhere", tmp_path / "p.csv", resume=tmp_path / "run", split_shards=True)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        mgtta.adapt_stream(method, "nowhere", tmp_path / "p.csv")


# --- export


def test_adapt_stream_exports_the_weights_of_the_method(tree, tmp_path, monkeypatch):
    net = torch.nn.Linear(2, 3)
    monkeypatch.setattr(Method, "export", lambda self: net)
    mgtta.adapt_stream(tent(), tree, tmp_path / "p.csv", images=4, export=tmp_path / "net.safetensors")
    found = load_file(tmp_path / "net.safetensors")
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(found[name], t) for name, t in net.state_dict().items())


def test_adapt_stream_exports_nothing_if_the_method_cannot(tree, tmp_path, monkeypatch):
    def refuse(self):
        raise ValueError("lame has no weights of its own")

    monkeypatch.setattr(Method, "export", refuse)
    with pytest.raises(ValueError, match="no weights"):
        mgtta.adapt_stream(tent(), tree, tmp_path / "p.csv", export=tmp_path / "net.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images"]


def test_adapt_stream_exports_only_under_a_name_that_timm_reads(tree, tmp_path):
    with pytest.raises(ValueError, match=r"name .*net.pth with .safetensors"):
        mgtta.adapt_stream(tent(), tree, tmp_path / "p.csv", export=tmp_path / "net.pth")
    assert not (tmp_path / "p.csv").exists()


def test_timm_loads_what_adapt_exports(run, tree, tmp_path):  # noqa: F811
    torch.manual_seed(0)
    save_file(timm.create_model(ARCHITECTURE, num_classes=30).state_dict(), tmp_path / "w.safetensors")
    model = options(model=ARCHITECTURE, checkpoint=tmp_path / "w.safetensors", num_classes=30, device="cpu")
    outputs = options(out=tmp_path / "p.csv", export=tmp_path / "net.safetensors", state=tmp_path / "state")
    code, _, err = run("adapt", tree, *model, *options(method="tent", set="lr=0.1", images=4), *outputs)
    assert code == 0, err
    net = timm.create_model(ARCHITECTURE, num_classes=30, checkpoint_path=tmp_path / "net.safetensors").eval()
    model = mgtta.load_model(ARCHITECTURE, checkpoint=tmp_path / "w.safetensors", num_classes=30)
    method = mgtta.create("tent", model)
    mgtta.load_state(method, tmp_path / "state")
    x = torch.rand(2, 3, 224, 224)
    adapted = method.model(x)
    assert not torch.allclose(adapted, model(x))
    torch.testing.assert_close(mgtta.load_model(net)(x), adapted)


def test_compare_writes_the_sources_predictions_beside_the_adapted_ones(tmp_path):
    model = mgtta.load_model(confident_vit())
    data = TensorDataset(images(24), torch.full((24,), -1))
    method = mgtta.create("tent", model, lr=1.0)  # far too large, so that predictions change
    out = tmp_path / "p.csv"
    mgtta.adapt_stream(method, data, out, batch_size=8, compare=model, progress=False)
    with open(out, newline="") as file:
        rows = list(csv.DictReader(file))
    with torch.no_grad():
        expected = model(images(24)).argmax(1).tolist()
    assert [int(row["source_prediction"]) for row in rows] == expected
    assert [int(row["prediction"]) for row in rows] != expected
    assert {row["source_class"] for row in rows} == {""}  # neither the data nor the model name classes
    assert method.updates == 3


def test_predictions_of_a_timm_model_have_imagenets_names(tmp_path):
    model = mgtta.load_model(ARCHITECTURE, pretrained=False, img_size=32, patch_size=16)
    unlabelled = TensorDataset(images(2), torch.full((2,), -1))
    mgtta.adapt_stream(mgtta.create("noadapt", model), unlabelled, tmp_path / "p.jsonl", progress=False)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    names = timm.data.ImageNetInfo()
    assert [row["class"] for row in rows] == [names.index_to_description(row["prediction"]) for row in rows]
