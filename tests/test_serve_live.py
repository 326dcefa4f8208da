"""The live view: what it is told, what it costs, and the page in a real browser."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import uvicorn
from conftest import confident_vit
from test_serve import SIDE, WAIT_SECONDS, ask, pictures, serving, tent, until

import mgtta
from mgtta.adaptation.wrapper import innermost
from mgtta.data.glyphs import Glyphs
from mgtta.serve import live as live_module
from mgtta.serve.app import create_app
from mgtta.serve.client import Client
from mgtta.serve.live import MARKS, POINTS, SAMPLE_IMAGES, SAMPLED, Live, Point, merged
from mgtta.serve.page import VIEWERS, LiveView
from mgtta.serve.queue import Limits
from mgtta.serve.run import Server
from mgtta.serve.streams import Streams
from mgtta.serve.template import template

ROOT = Path(__file__).parent.parent
HOSTILE = '<img src=x onerror="window.hacked=1">'
LABELS = [HOSTILE, *"BCDEFGHIJ"]
TOKEN = "s3cret"


def probabilities(n, classes=10, seed=0):
    return torch.randn(n, classes, generator=torch.Generator().manual_seed(seed)).softmax(1)


# --- one stream's figures


def test_one_image_in_so_many_is_sampled_however_they_come():
    numbers = []
    for sizes in ([40], [1] * 40, [7, 9, 3, 21]):
        live = Live(thumbnails=0)
        first = 0
        for n in sizes:
            live.answered(pictures(n), probabilities(n), first)
            first += n
        numbers.append([s.image for s in live.sampled])
    assert numbers == [list(range(0, 40, SAMPLE_IMAGES))] * 3


def test_what_the_live_view_keeps_is_bounded(monkeypatch):
    monkeypatch.setattr(live_module, "POINT_SECONDS", 0)
    live = Live(thumbnails=3)
    x = pictures(16)
    p = probabilities(16)
    for i in range(3 * POINTS):
        live.answered(x, p, 16 * i)
        live.asked(live.sampled[:1], p[:1])
        live.mark(16 * i, "shift")
    assert len(live.sampled) == SAMPLED
    found = live.news()
    assert POINTS // 2 < len(found.points) <= POINTS
    assert len(found.marks) == MARKS
    assert len(found.pictures) == 3
    assert found.told == {"points": 3 * POINTS, "marks": 3 * POINTS, "pictures": 3 * POINTS}
    numbers = [point.image for point in found.points]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 16 * 3 * POINTS
    assert numbers[0] < 16 * POINTS, "the time line reaches back to the start"


def test_a_viewer_is_told_only_what_is_new():
    live = Live(thumbnails=2)
    live.answered(pictures(16), probabilities(16), 0)
    live.mark(16, "shift")
    first = live.news()
    assert (first.fresh, len(first.points), len(first.marks)) == (True, 1, 1)
    second = live.news(first.number, first.told)
    assert (second.fresh, second.points, second.marks, second.pictures) == (False, [], [], [])
    live.mark(20, "recall")
    assert [mark.kind for mark in live.news(second.number, second.told).marks] == ["recall"]
    assert Live(thumbnails=2).news(second.number, second.told).fresh, "the stream was loaded again"


def test_merged_points_average_what_is_known():
    a = Point(16, 1.0, 0.5, 1.0, None, None, None, None, 10.0, None)
    b = Point(32, 2.0, 0.7, 2.0, 0.4, None, None, None, 20.0, 0.1)
    assert merged(a, b) == Point(32, 2.0, pytest.approx(0.6), 1.5, 0.4, None, None, None, 15.0, 0.1)


def test_rate_and_latency(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live_module.time, "monotonic", lambda: now[0])
    live = Live(thumbnails=0)
    for _ in range(5):
        live.answered(pictures(8), probabilities(8), 0)
        now[0] += 1
    live.took([0.1] * 99 + [5.0])
    figures = live.figures()
    assert figures["images_per_second"] == pytest.approx(8)
    assert figures["latency_seconds"] == pytest.approx(0.1)
    assert 0.1 <= figures["late_seconds"] < 5
    now[0] += 60
    assert live.figures()["images_per_second"] == 0


# --- the streams


def test_the_source_model_is_asked_about_a_sample(tmp_path):
    x = pictures(32)
    with serving(tmp_path, tent(lr=0.1), wait_seconds=0) as streams:
        for batch in x.split(4):
            ask(streams, "a", batch)
        until(lambda: streams.totals["asked"] == 4)
        until(lambda: len(streams.news("a").pictures) == 4)
        shown = streams.news("a").pictures
        [report] = streams.overview()
        assert streams.busy_seconds["ask"] > 0
    assert [picture.image for picture in shown] == [0, 8, 16, 24]
    expected = mgtta.load_model(confident_vit())(x[::8]).detach().softmax(1)
    assert [picture.before.number for picture in shown] == expected.argmax(1).tolist()
    same = [picture.before.number == picture.after.number for picture in shown]
    assert report["agreement"] == pytest.approx(sum(same) / 4)
    assert report["source_confidence"] == pytest.approx(float(expected.amax(1).mean()), abs=1e-4)
    assert shown[0].thumbnail.startswith("data:image/jpeg;base64,")


def test_without_thumbnails_no_picture_is_kept(tmp_path):
    with serving(tmp_path, wait_seconds=0, thumbnails=0) as streams:
        ask(streams, "a", pictures(4))
        until(lambda: streams.totals["asked"] == 1)
        assert streams.news("a").pictures == []
        until(lambda: streams.overview()[0]["agreement"] is not None)


def test_samples_of_all_streams_are_asked_about_together(tmp_path, monkeypatch):
    batches = []
    with serving(tmp_path, wait_seconds=0) as streams:
        source = streams.source
        monkeypatch.setattr(streams, "source", lambda x: batches.append(len(x)) or source(x))
        for name in "abcd":
            ask(streams, name, pictures(1))
        until(lambda: streams.totals["asked"] == 4)
        assert sum(batches) == 4
        assert len(batches) < 4
        assert all(report["agreement"] == 1 for report in streams.overview())


def calibration(method):
    """Return one that trusts confidence as it is."""
    coefficients = torch.tensor([[0.0, 1, 0, 0], [0.0, 1, 0, 0]], dtype=torch.float64)
    fingerprint = innermost(method).fingerprint
    return mgtta.Calibration(coefficients, 1.0, 3.0, "tent", 128, True, method.model.name, fingerprint)


def test_accuracy_is_estimated_with_a_calibration(tmp_path):
    method = tent()
    with Streams(method, SIDE, tmp_path, Limits(wait_seconds=0), calibration=calibration(method)) as streams:
        ask(streams, "a", pictures(4))
        until(lambda: streams.overview()[0]["accuracy"] is not None)
        [report] = streams.overview()
        logits = streams.source(pictures(4)[:1]).detach()  # only the first image is sampled, before any update
        expected = calibration(method).estimates(logits, logits)[0]
        assert report["accuracy"] == pytest.approx(float(expected[0]), abs=1e-3)
        assert report["accuracy"] == pytest.approx(report["source_accuracy"], abs=1e-6)
        assert collect(LiveView(streams, None), None, 1)[0][1]["error_points"] == 3


def test_a_calibration_of_another_method_is_refused(tmp_path):
    other = template("noadapt", mgtta.load_model(confident_vit()))
    with pytest.raises(ValueError, match="this calibration is of tent, not of noadapt"):
        Streams(other, SIDE, tmp_path, calibration=calibration(tent()))


def test_shifts_and_resets_are_marked_and_shifts_survive_a_restart(tmp_path):
    dark = pictures(320, seed=3) // 4
    with serving(tmp_path, tent(lr=1e-4), wait_seconds=0) as streams:
        for x in [*dark.split(32), *(255 - dark).split(32)]:
            ask(streams, "a", x)
        marks = streams.news("a").marks
        assert [mark.kind for mark in marks] == ["shift"]
        assert 320 < marks[0].image <= 416
    with serving(tmp_path, tent(lr=1e-4), wait_seconds=0) as streams:
        ask(streams, "a", dark[:1])
        assert [mark.kind for mark in streams.news("a").marks] == ["shift"]
        before = streams.news("a").number
        streams.reset("a").result(WAIT_SECONDS)
        assert streams.news("a").number != before, "a viewer begins again"
        assert [mark.kind for mark in streams.news("a").marks] == ["reset"]


# --- events


def collect(view, name, count):
    """Return the first events of a viewer."""

    async def work():
        events = view.told(name)
        found = [await anext(events) for _ in range(count)]
        await events.aclose()
        return found

    texts = asyncio.run(asyncio.wait_for(work(), WAIT_SECONDS))
    parts = [re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", text, re.DOTALL).groups() for text in texts]
    return [(kind, json.loads(data)) for kind, data in parts]


def test_events_tell_all_streams_in_brief_and_one_in_full(tmp_path):
    with serving(tmp_path, wait_seconds=0) as streams:
        for name in "ab":
            ask(streams, name, pictures(4))
        until(lambda: streams.totals["asked"] == 2)
        until(lambda: streams.news("b").pictures)
        about, brief, full = collect(LiveView(streams, LABELS), "b", 3)
        assert about[1]["method"] == "tent"
        assert brief[0] == "streams"
        assert [report["stream"] for report in brief[1]] == ["a", "b"]
        assert full[0] == "stream"
        assert (full[1]["stream"], full[1]["fresh"], len(full[1]["points"])) == ("b", True, 1)
        [picture] = full[1]["pictures"]
        assert picture["before"]["label"] in LABELS


def test_events_end_when_the_service_stops_and_viewers_are_counted(tmp_path):
    with serving(tmp_path) as streams:
        view = LiveView(streams, None)
        view.stopping = True

        async def all_of_it():
            return [event async for event in view.told(None)]

        assert len(asyncio.run(all_of_it())) == 1
        assert view._viewers == 0
        view._viewers = VIEWERS
        with pytest.raises(Exception, match="viewers are watching already"):
            asyncio.run(view.events())


def test_the_page_may_load_nothing_else(tmp_path):
    with serving(tmp_path) as streams:
        reply = asyncio.run(LiveView(streams, None).page())
    text = reply.body.decode()
    assert not re.search(r'(src|href)="(?!docs|data:)', text)
    policy = reply.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


# --- in the browser


class Running:
    """A service in a thread of this process."""

    def __init__(self, folder, method=None, **more):
        self.streams = Streams(method or tent(), SIDE, folder, Limits(wait_seconds=0))
        app = create_app(self.streams, labels=LABELS, **more)
        config = uvicorn.Config(app, port=0, log_level="warning", ws="none", timeout_graceful_shutdown=WAIT_SECONDS)
        self.server = Server(config, app.state.live)
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        [server] = self.server.servers
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(WAIT_SECONDS)
        assert not self.thread.is_alive(), "a viewer keeps the service from stopping"


def opened(browser, address, width=1400):
    browser.get_log("browser")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")
    browser.get(address)
    return lambda script, *arguments: browser.execute_script(script, *arguments)


def text_of(js, selector):
    return js("return document.querySelector(arguments[0])?.textContent", selector)


def complaints(browser):
    return [entry for entry in browser.get_log("browser") if "401" not in entry["message"]]


def test_the_page_shows_streams_as_they_come_and_commands_them(browser, tmp_path):
    with Running(tmp_path) as service:
        js = opened(browser, service.address)
        until(lambda: js("return !document.getElementById('empty').hidden"))
        assert f"{service.address}/v1/streams/camera-1/predict" in text_of(js, "#curl")
        for batch in pictures(64).split(16):
            ask(service.streams, "gate", batch)
            time.sleep(live_module.POINT_SECONDS)
        until(lambda: js("return document.querySelectorAll('.picture img').length") == 8)
        until(lambda: js("return document.querySelectorAll('#chart .curve').length") == 4)
        assert text_of(js, ".card strong") == "gate"
        assert "64 images" in text_of(js, "#counts")
        assert js("return document.querySelector('.picture img').naturalWidth") == SIDE
        js("document.getElementById('freeze').click()")
        until(lambda: text_of(js, "#state") == "frozen")
        until(lambda: "Frozen" in (text_of(js, "#marks li") or ""))
        for _ in range(2):  # the second click says that it is meant
            js("document.getElementById('reset').click()")
        until(lambda: "Reset" in (text_of(js, "#marks li") or ""))
        ask(service.streams, "roof", pictures(4))
        until(lambda: js("return document.querySelectorAll('.card').length") == 2)
        assert js("return window.hacked") is None
        assert complaints(browser) == []


def test_the_page_asks_for_the_token(browser, tmp_path):
    with Running(tmp_path, token=TOKEN) as service:
        ask(service.streams, "gate", pictures(4))
        js = opened(browser, service.address)
        enter = (
            "const [field, button] = document.getElementById('token').elements;"
            "field.value = arguments[0]; button.click()"
        )
        until(lambda: js("return !document.getElementById('token').hidden"))
        assert js("return document.getElementById('wrong').hidden")
        js(enter, "wrong")
        until(lambda: js("return !document.getElementById('wrong').hidden"))
        assert js("return document.getElementById('overview').hidden")
        js(enter, TOKEN)
        until(lambda: text_of(js, ".card strong") == "gate")
        assert js("return document.getElementById('token').hidden")
        assert complaints(browser) == []


@pytest.mark.slow
def test_the_demo_shows_marks_of_changing_weather(browser):
    words = [
        sys.executable,
        str(ROOT / "examples" / "serve_weather.py"),
        "--port",
        "0",
        "--cameras",
        "2",
        "--requests",
        "6",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as demo:
        try:
            address = demo.stdout.readline().split()[-1]
            js = opened(browser, address)
            until(lambda: js("return document.querySelectorAll('.card').length") == 2)
            until(lambda: js("return document.querySelectorAll('#chart .mark[data-kind=shift]').length") >= 1)
            until(lambda: "A new domain begins" in (text_of(js, "#marks") or ""))
            assert len(Client(address).streams()) == 2
            js = opened(browser, address, width=390)
            until(lambda: js("return document.querySelectorAll('#chart .mark').length") >= 1)
            assert js("return document.documentElement.scrollWidth") <= 390
            assert complaints(browser) == []
        finally:
            demo.send_signal(signal.SIGINT)
            said = demo.communicate(timeout=WAIT_SECONDS)[0]
    assert said == "stopped\n"


def test_a_thumbnail_is_small():
    image = Glyphs(1)[0][0]
    large = image.repeat_interleave(8, 1).repeat_interleave(8, 2)
    assert len(live_module.thumbnail(large)) < 8000
