"""What `mgtta adapt` tells: words, lines of JSON, and a page of the user's own pictures."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from test_cli import folder, options, run, write_images  # noqa: F401

from mgtta.adaptation.monitor import Sample, Signals
from mgtta.data.glyphs import CLASSES
from mgtta.data.streams import Batch
from mgtta.running import adapt as running
from mgtta.running.page import MOST, Gallery, write_page
from mgtta.running.story import sentences


@pytest.fixture
def adapt(run, folder, tmp_path):  # noqa: F811
    common = options(
        model="glyphs_vit", source="glyphs_vit", batch_size=4, device="cpu", method="mgtta", out=tmp_path / "p.csv"
    )
    return lambda *more: run("adapt", folder, *common, *more)


def test_adapt_says_device_rate_speed_and_what_changed(adapt):
    code, out, err = adapt("--lr", "0.002")
    assert code == 0, err
    assert "mgtta on cpu, fp32, learning rate 0.002: 12 images of 48 pixels" in err
    assert "12 images; 3 updates, 0 skipped" in out
    assert re.search(r"^[\d.]+ images/s$", out, re.MULTILINE)
    assert re.search(
        r"Adaptation changed \d+ % of the predictions of the last 12 images \(25 % of them compared\)", out
    )


def test_adapt_json_is_lines_for_programs_only(adapt):
    code, out, err = adapt("--json")
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["start", "batch", "batch", "batch", "end"]
    assert events[0] == {
        "event": "start",
        "images": 12,
        "size": 48,
        "method": "mgtta",
        "device": "cpu",
        "precision": "fp32",
        "lr": 0.001,
    }
    assert [e["images"] for e in events[1:4]] == [4, 8, 12]
    assert {"entropy", "changed", "drift", "shifts", "events", "accuracy"} <= events[1].keys()
    assert events[-1]["updates"] == 3
    assert events[-1]["speed"] > 0


def test_adapt_report_is_one_file_with_pictures_and_curves(adapt, tmp_path):
    code, out, err = adapt("--report", tmp_path / "page.html", "--lr", "0.3")
    assert code == 0, err
    assert f"page: {tmp_path / 'page.html'}" in out
    page = (tmp_path / "page.html").read_text()
    assert "all of them compared" in page
    assert page.count("data:image/jpeg;base64,") == 12
    assert "class0/00.png" in page
    assert "<polyline" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_adapt_estimates_the_accuracy_from_clean_images(run, tmp_path):  # noqa: F811
    root = write_images(tmp_path / "images", lambda i, label: CLASSES[label], n=60)
    words = options(model="glyphs_vit", method="noadapt", out=tmp_path / "p.csv", device="cpu", estimate=root)
    code, out, err = run("adapt", root, *words, "--images", 16)
    assert code == 0, err
    found = re.search(
        r"Estimated accuracy: (\d+) % without adaptation, (\d+) % with it. Such estimates were off by", out
    )
    assert found
    assert found[1] == found[2]
    assert int(found[1]) > 80


def test_adapt_options_that_name_the_same_setting_are_refused(adapt):
    for words in (["--lr", "1", "--set", "lr=2"], ["--generator", "a", "--set", "generator=b"]):
        code, _, err = adapt(*words)
        assert code == 2
        assert "name the same setting: leave out one" in err


def test_adapt_takes_a_generator(adapt):
    code, _, err = adapt("--generator", "nothing_like_it")
    assert code == 2
    assert "unknown generator 'nothing_like_it'" in err
    assert adapt("--generator", "glyphs")[0] == 0


def test_progress_is_lines_without_a_terminal(adapt, monkeypatch):
    monkeypatch.setattr(running, "LINE_SECONDS", 0.0)
    code, _, err = adapt()
    assert code == 0
    assert "mgtta on images: 3 of 3 batches" in err


# --- the page


def sample(before, after, confidence=4.0):
    """Logits of two models that predict these classes."""
    eye = torch.eye(5)
    return Sample(torch.arange(len(before)), confidence * eye[after], confidence * eye[before])


def batch(n, first=0):
    return Batch(torch.zeros(n, 3, 40, 40, dtype=torch.uint8), None, "d", torch.arange(first, first + n))


def test_the_gallery_keeps_the_surest_changes():
    gallery = Gallery(str, str)
    for i in range(40):
        gallery.add(batch(2, first=2 * i), sample([0, 1], [3, 1], confidence=1 + 0.1 * i))
    assert (gallery.compared, gallery.number_changed) == (80, 40)
    assert len(gallery.changed) == MOST
    assert [picture.name for picture in gallery.changed[:2]] == ["78", "76"]
    assert {(p.before, p.after) for p in gallery.changed} == {("0", "3")}
    assert gallery.unsure[0].name == "1"


def test_names_on_the_page_are_escaped(tmp_path):
    gallery = Gallery(lambda i: "<script>alert(1)</script>", lambda c: "a & b")
    gallery.add(batch(1), sample([0], [3]))
    over_time = [
        Signals(4 * (i + 1), i, 0, 1.0 / (i + 1), 0.5, 0.1 * i, None, 0, i == 1, 0, (), None, None) for i in range(3)
    ]
    write_page(tmp_path / "page.html", gallery, over_time, ["told <b>"], "result")
    page = (tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert "a &amp; b" in page
    assert "told &lt;b&gt;" in page
    assert page.count("<polyline") == 2  # changed and entropy; there is no drift and no estimate
    assert page.count('stroke="orange"') == 2  # the shift, in both


def test_the_page_of_a_run_without_changes_says_so(tmp_path):
    write_page(tmp_path / "page.html", Gallery(str, str), [], [], "0 images")
    assert "No prediction changed." in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("recall", "acted once; the last time, recall loaded the state of a domain that came back."),
        ("by batch", "acted once; the last time, images were normalised by batch again."),
        ("something new", "acted once; the last time, something new."),
    ],
)
def test_sentences_say_who_acted(action, words):
    monitor = SimpleNamespace(seen=SimpleNamespace(events=[{"image": 7, "action": action}]), calibration=None)
    signals = SimpleNamespace(changed=None, shifts=2, alarms=1, events=[], gain=None)
    assert sentences(monitor, None) == []
    shift, acted = sentences(monitor, signals)
    assert shift == "A shift of the domain was noticed 2 times."
    assert acted.endswith(words)
