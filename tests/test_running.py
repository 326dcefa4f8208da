"""Saved and resumed: the same predictions bit for bit, whatever kills the run; never from a damaged file."""

from pathlib import Path

import pytest
import torch
from conftest import images
from PIL import Image
from test_cli import run  # noqa: F401
from test_methods import make, same

import mgtta
from mgtta._lib.files import write_tree
from mgtta.running import resume as running

ROOT = Path(__file__).parent.parent


@pytest.fixture
def method(model):
    method = make("mgtta", model, guard=True)
    method(images(4))
    return method


def test_a_state_carries_all_of_it(method, model, tmp_path):
    torch.manual_seed(5)
    mgtta.save_state(method, tmp_path / "s", {"position": 7})
    expected = torch.rand(3), method(images(4, seed=1))
    other = make("mgtta", model, guard=True)
    assert mgtta.load_state(other, tmp_path / "s") == {"position": 7}
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(other(images(4, seed=1)), expected[1])


def test_a_damaged_state_is_never_loaded(method, tmp_path):
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


def test_other_kinds_and_newer_versions_are_refused(method, tmp_path):
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


def test_kills_leave_no_trace(monkeypatch, tmp_path):
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


def test_resume_counts_and_checks(run, pictures, tmp_path, monkeypatch):  # noqa: F811
    common = [
        "adapt", pictures, "--model", "glyphs_vit", "--method", "tent", "--batch-size", 1, "--skip-unreadable",
        "--device", "cpu", "--resume", tmp_path / "run", "--save-every", 1,
    ]  # fmt: skip
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
