"""The service over HTTP: endpoints, limits, tokens, and a server that is killed."""

import asyncio
import configparser
import io
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import typer
import yaml
from conftest import confident_vit
from fastapi import HTTPException, Request
from fastapi.testclient import TestClient
from PIL import Image
from test_serve import SIDE, WAIT_SECONDS, pictures, tent, until

import mgtta
from mgtta.cli import main
from mgtta.cli.app import app
from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.data.images import ImageError
from mgtta.serve import run
from mgtta.serve.app import create_app
from mgtta.serve.client import Client, ServiceError
from mgtta.serve.intake import HttpLimits, Intake
from mgtta.serve.pictures import batch_of
from mgtta.serve.queue import Limits
from mgtta.serve.streams import Streams
from mgtta.serve.template import template

LABELS = list("ABCDEFGHIJ")
LOCAL = "http://127.0.0.1:8000"


def encoded(x, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(x.permute(1, 2, 0).numpy()).save(file, kind)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Served:
    """An application with its streams and a client."""

    def __init__(self, folder, method=None, http=None, token=None, **limits):
        self.streams = Streams(method or tent(), SIDE, folder, Limits(**{"wait_seconds": 0, **limits}))
        app = create_app(self.streams, labels=LABELS, token=token, limits=HttpLimits(**http or {}))
        self.client = TestClient(app, base_url=LOCAL, raise_server_exceptions=False)

    def __enter__(self):
        self.client.__enter__()
        return self

    def __exit__(self, *error):
        self.client.__exit__(*error)

    def predict(self, content, name="a", **more):
        return self.client.post(f"/v1/streams/{name}/predict", content=content, **more)


@pytest.fixture
def served(tmp_path):
    with Served(tmp_path) as served:
        yield served


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_predict_takes_one_image_as_the_body(served, kind):
    content = encoded(pictures(1)[0], kind)
    x = batch_of([("x", content)], side=SIDE, crop_pct=0.875, max_images=1, max_pixels=10_000)
    expected = mgtta.load_model(confident_vit())(x).detach().softmax(1)[0]
    reply = served.predict(content)
    assert reply.status_code == 200
    number = int(expected.argmax())
    assert reply.json() == {
        "stream": "a",
        "predictions": [
            {"class": number, "label": LABELS[number], "probability": pytest.approx(float(expected.max()), abs=1e-5)}
        ],
        "updates": 0,
        "shifted": False,
    }


def test_predict_takes_several_images_as_multipart_in_their_order(served):
    x = pictures(5)
    files = [("images", (f"{i}.png", encoded(image), "image/png")) for i, image in enumerate(x)]
    reply = served.client.post("/v1/streams/a/predict", files=files)
    expected = mgtta.load_model(confident_vit())(x).argmax(1)
    assert [p["class"] for p in reply.json()["predictions"]] == expected.tolist()


@pytest.mark.parametrize("order", ["C", "F"])
def test_predict_takes_npy(served, order):
    x = pictures(3)
    array = np.array(x.permute(0, 2, 3, 1).numpy(), order=order)
    reply = served.predict(npy(array))
    expected = mgtta.load_model(confident_vit())(x).argmax(1)
    assert [p["class"] for p in reply.json()["predictions"]] == expected.tolist()
    assert len(served.predict(npy(array[0])).json()["predictions"]) == 1


def test_updates_are_told(served):
    files = [("images", (f"{i}.png", encoded(x))) for i, x in enumerate(pictures(4))]
    served.client.post("/v1/streams/a/predict", files=files)
    until(lambda: served.streams.totals["updates"] == 1)
    assert served.predict(encoded(pictures(1)[0])).json()["updates"] == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot read image body: not an image of a format that is read"),
        (b"hello", "cannot read image body: not an image of a format that is read"),
        (encoded(pictures(1)[0])[:200], "cannot read image body"),
        (npy(np.zeros((SIDE, SIDE, 3), np.float32)), "it must be uint8"),
        (npy(np.zeros((8, 8, 3), np.uint8)), "it must be uint8"),
        (npy(np.zeros((SIDE, SIDE, 3), np.uint8))[:-5], "bytes were expected after its header"),
        (npy(np.array([{}], object)), "it must be uint8"),
        (npy(np.zeros((0, SIDE, SIDE, 3), np.uint8)), "there is no image in the request"),
        (b"\x93NUMPY\x01\x00", "its header is damaged"),
    ],
)
def test_bad_images_get_their_reason_and_are_not_learned_from(served, content, reason):
    reply = served.predict(content)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]
    assert served.client.get("/v1/streams").json() == {"streams": []}


def test_an_npy_that_claims_a_huge_shape_allocates_nothing():
    file = io.BytesIO()
    claim = {"shape": (10**10, SIDE, SIDE, 3), "fortran_order": False, "descr": "|u1"}
    np.lib.format.write_array_header_1_0(file, claim)
    with pytest.raises(ImageError, match="30,720,000,000,000 bytes were expected after its header, not 0"):
        batch_of([("x", file.getvalue())], side=SIDE, crop_pct=1, max_images=8, max_pixels=10_000)


def test_one_bad_image_of_several_rejects_all_of_them(served):
    files = [("images", ("0.png", encoded(pictures(1)[0]))), ("images", ("1.png", b"no image"))]
    reply = served.client.post("/v1/streams/a/predict", files=files)
    assert reply.status_code == 400
    assert "1.png" in reply.json()["error"]
    assert served.streams.names() == []


def test_bodies_images_and_pixels_are_limited(tmp_path):
    http = {"body_bytes": 20_000, "image_pixels": 2000}
    with Served(tmp_path, http=http, batch_images=4) as served:
        reply = served.predict(b"x" * 20_001)
        assert (reply.status_code, reply.json()["error"]) == (413, "the body is larger than 20,000 bytes")
        assert served.predict(iter([b"x" * 15_000] * 2)).status_code == 413, "without a content-length"
        files = [("images", (f"{i}.png", b"x")) for i in range(5)]
        assert served.client.post("/v1/streams/a/predict", files=files).status_code == 413
        array = np.zeros((5, SIDE, SIDE, 3), np.uint8)
        reply = served.predict(npy(array))
        assert (reply.status_code, "more than 4 images" in reply.json()["error"]) == (413, True)
        reply = served.predict(encoded(torch.zeros(3, 60, 60, dtype=torch.uint8)))
        assert reply.status_code == 400
        assert "claims 60 x 60 pixels, more than 2,000" in reply.json()["error"]
        assert served.streams.names() == []


def test_bytes_in_memory_are_counted_back(tmp_path):
    with Served(tmp_path, http={"bodies_bytes": 5000}) as served:
        assert served.predict(b"x" * 6000).status_code == 429
        for _ in range(3):
            assert served.predict(b"x" * 4000).status_code == 400


def test_a_body_that_does_not_come_is_408_and_frees_its_bytes():
    intake = Intake(HttpLimits(read_seconds=0.05))
    parts = iter([{"type": "http.request", "body": b"x" * 100, "more_body": True}])

    async def receive():
        return next(parts, None) or await asyncio.sleep(WAIT_SECONDS)

    async def read():
        async with intake.files(Request({"type": "http", "method": "POST", "headers": []}, receive), 1):
            pytest.fail("the body is not complete")

    with pytest.raises(HTTPException, match=r"did not arrive within 0\.05 seconds") as caught:
        asyncio.run(read())
    assert caught.value.status_code == 408
    assert intake.bytes == 0


def test_pictures_of_a_multipart_body_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", lambda _: pytest.fail("written to disk"))
    noise = torch.randint(0, 256, (3, 900, 900), dtype=torch.uint8)
    content = encoded(noise)
    assert len(content) > 2**21
    with Served(tmp_path) as served:
        assert served.client.post("/v1/streams/a/predict", files={"images": ("big.png", content)}).status_code == 200


def test_overload_is_429_with_retry_after(tmp_path):
    with Served(tmp_path, wait_seconds=5, stream_queue_images=2, batch_images=2, queue_images=2) as served:
        waiting = threading.Thread(target=served.predict, args=(encoded(pictures(1)[0]),))
        waiting.start()
        until(lambda: served.streams.queued_images == 1)
        reply = served.predict(npy(np.zeros((2, SIDE, SIDE, 3), np.uint8)))
        assert reply.status_code == 429
        assert int(reply.headers["Retry-After"]) >= 1
        assert "wait already" in reply.json()["error"]
        served.predict(encoded(pictures(1)[0]))  # fills the batch
        waiting.join(WAIT_SECONDS)


def test_what_is_refused_is_not_read(tmp_path, monkeypatch):
    with Served(tmp_path, streams=1) as served:
        served.predict(encoded(pictures(1)[0]))
        monkeypatch.setattr("mgtta.serve.app.batch_of", lambda *_, **__: pytest.fail("it was decoded"))
        assert served.predict(encoded(pictures(1)[0]), name="b").status_code == 429


def test_an_answer_that_takes_too_long_is_503_and_not_learned_from(tmp_path):
    with Served(tmp_path, http={"answer_seconds": 0.05}, wait_seconds=0.5) as served:
        reply = served.predict(encoded(pictures(1)[0]))
        assert reply.status_code == 503
        assert reply.headers["Retry-After"] == "1"
        until(lambda: served.streams.queued_images == 0)
        assert served.streams.totals["images"] == 0


def test_reports_reset_and_freeze(served):
    for x in pictures(4):
        served.predict(encoded(x))
    until(lambda: served.streams.totals["updates"] == 1)
    report = served.client.get("/v1/streams/a").json()
    assert report["updates"] == 1
    assert report["images"] == 4
    assert 0 <= report["entropy"] <= 2.31
    assert (report["shifts"], report["recalled"], report["frozen"], report["loaded"]) == (0, 0, False, True)
    assert served.client.post("/v1/streams/a/freeze").json()["frozen"]
    assert not served.client.post("/v1/streams/a/freeze?frozen=false").json()["frozen"]
    assert served.client.post("/v1/streams/a/reset").json()["updates"] == 0
    assert served.client.get("/v1/streams").json() == {"streams": [{"stream": "a", "loaded": True}]}


def test_export_gives_safetensors(served):
    served.predict(encoded(pictures(1)[0]))
    reply = served.client.get("/v1/streams/a/export")
    net = confident_vit()
    net.load_state_dict(safetensors.torch.load(reply.content))
    assert 'filename="a.safetensors"' in reply.headers["Content-Disposition"]


def test_a_method_that_cannot_be_exported_says_why(tmp_path):
    method = template("lame", mgtta.load_model(confident_vit()))
    with Served(tmp_path, method) as served:
        served.predict(encoded(pictures(1)[0]))
        reply = served.client.get("/v1/streams/a/export")
        assert reply.status_code == 409
        assert "cannot be exported" in reply.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/streams/nobody", 404),
        ("POST", "/v1/streams/nobody/reset", 404),
        ("GET", "/v1/streams/nobody/export", 404),
        ("GET", "/v1/streams/.hidden", 422),
        ("POST", "/v1/streams/a%20b/predict", 422),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/streams/a/predict", 405),
    ],
)
def test_unknown_and_invalid_names_are_json_errors(served, method, path, status):
    reply = served.client.request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"]


def test_a_token_is_asked_for(tmp_path, monkeypatch):
    compared = []
    compare = __import__("hmac").compare_digest
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    with Served(tmp_path, token="s3cret") as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            for path in ("/v1/streams", "/metrics", "/v1/streams/a", "/v1/streams/a/export"):
                reply = served.client.get(path, headers=headers)
                assert reply.status_code == 401
                assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert served.predict(encoded(pictures(1)[0]), headers=headers).status_code == 401
        assert served.client.get("/v1/streams", headers={"Authorization": "Bearer s3cret"}).status_code == 200
        assert served.client.get("/v1/streams", headers={"Authorization": "Bearer s3crét".encode()}).status_code == 401
        assert served.client.get("/healthz").status_code == 200
    assert (b"wrong", b"s3cret") in compared


def test_pages_of_other_sites_cannot_send_requests(served):
    content = encoded(pictures(1)[0])
    assert served.predict(content, headers={"Origin": "https://evil.example"}).status_code == 403
    assert served.predict(content, headers={"Host": "evil.example"}).status_code == 403
    assert served.predict(content, headers={"Origin": LOCAL}).status_code == 200


def test_health_and_metrics(served):
    assert served.client.get("/healthz").json() == {"status": "ok"}
    served.predict(encoded(pictures(1)[0]))
    served.predict(b"no image")
    text = served.client.get("/metrics").text
    for line in (
        "mgtta_images_total 1.0",
        'mgtta_requests_total{status="400"} 1.0',
        "mgtta_streams 1.0",
        "mgtta_answer_seconds_count 1.0",
    ):
        assert f"\n{line}\n" in text
    served.streams.close()
    assert served.client.get("/healthz").status_code == 503
    assert served.predict(encoded(pictures(1)[0])).status_code == 503


def test_the_page_of_all_endpoints_loads_nothing(served):
    page = served.client.get("/docs").text
    paths = served.client.get("/openapi.json").json()["paths"]
    assert "/v1/streams/{name}/predict" in paths
    assert all(path in page for path in paths)
    assert "http" not in page
    assert "<script" not in page


def test_labels_are_counted(tmp_path):
    with (
        Streams(tent(), SIDE, tmp_path) as streams,
        pytest.raises(ValueError, match="3 labels for 10 classes"),
    ):
        create_app(streams, labels=["a", "b", "c"])


# --- a real server


def start(folder, *words):
    """Start `mgtta serve` on a free port; return the process and its address."""
    command = [sys.executable, "-m", "mgtta", "serve", "--state", str(folder), "--port", "0", "--device", "cpu", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = process.stdout.readline()
    if " at http://127.0.0.1:" not in line:
        pytest.fail(line + stop(process, signal.SIGKILL)[1])
    return process, line.split()[-1]


def stop(process, with_signal):
    process.send_signal(with_signal)
    said = process.communicate(timeout=WAIT_SECONDS)[0]
    return process.returncode, said


def characters(n, first=0):
    images = Glyphs(first + n)
    return [images[i][0].permute(1, 2, 0).numpy() for i in range(first, first + n)]


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_with_its_streams(tmp_path):
    process, address = start(tmp_path, "--save-seconds", "0.1")
    try:
        client = Client(address)
        answer = client.predict("camera-1", characters(32))
        labels = [p["label"] for p in answer["predictions"]]
        expected = [CLASSES[int(y)] for y in Glyphs(32).labels]
        assert sum(a == b for a, b in zip(labels, expected, strict=True)) > 16
        client.predict("camera-2", [encoded(torch.from_numpy(x).permute(2, 0, 1)) for x in characters(1)])
        until(lambda: client.report("camera-1")["updates"] == 1)
        until(lambda: all(client.report(f"camera-{i}")["bytes"] for i in (1, 2)))
        time.sleep(1)
    finally:
        code, _ = stop(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    process, address = start(tmp_path)
    try:
        client = Client(address)
        assert [s["stream"] for s in client.streams()] == ["camera-1", "camera-2"]
        assert client.report("camera-1")["images"] == 32
        assert client.predict("camera-1", characters(16, first=32))["updates"] == 1
        until(lambda: client.report("camera-1")["updates"] == 2)
        assert client.freeze("camera-1")["frozen"]
        client.export("camera-1", tmp_path / "adapted.safetensors")
        mgtta.load_model("glyphs_vit", checkpoint=tmp_path / "adapted.safetensors")
    finally:
        code, said = stop(process, signal.SIGTERM)
    assert code == 143, said
    assert said == ""
    process, address = start(tmp_path)
    try:
        report = Client(address).report("camera-1")
        assert (report["images"], report["updates"], report["frozen"]) == (48, 2, True), "SIGTERM saves"
    finally:
        stop(process, signal.SIGTERM)


@pytest.mark.slow
def test_a_server_with_a_token_and_a_body_that_does_not_come(tmp_path):
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    process, address = start(tmp_path / "state", "--token", str(token), "--method", "noadapt")
    try:
        with pytest.raises(ServiceError, match="401: send the service's token"):
            Client(address).streams()
        client = Client(address, token="s3cret")
        with pytest.raises(ServiceError, match="400: cannot read image 0") as caught:
            client.predict("a", b"no image")
        assert caught.value.status == 400
        assert caught.value.retry_seconds is None
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(
                b"POST /v1/streams/a/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer s3cret\r\n"
                b"Content-Length: 99\r\n\r\nx"
            )
        assert client.streams() == []
    finally:
        code, said = stop(process, signal.SIGTERM)
    assert (code, said) == (143, "")


def test_answers_are_sent_at_once():
    with run._listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only on such sockets"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "name a file with a token, --token FILE"),
        (["--labels", "LABELS"], "2 labels for 30 classes"),
        (["--set", "guard=True"], "--guard"),
        (["--set", "schedule=auto"], "--schedule"),
        (["--token", "EMPTY"], "is empty: write a long random token into it"),
        (["--model", "vit_tiny_patch16_224"], "source statistics are needed: --source FILE"),
        (["--port", "TAKEN"], "name another --port"),
    ],
)
def test_mistakes_are_named_before_anything_listens(tmp_path, capsys, monkeypatch, words, message):
    (tmp_path / "labels").write_text("a\nb\n")
    (tmp_path / "empty").write_text("\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        known = {"LABELS": str(tmp_path / "labels"), "EMPTY": str(tmp_path / "empty")}
        known["TAKEN"] = str(taken.getsockname()[1])
        words = [known.get(word, word) for word in words]
        common = ["mgtta", "serve", "--state", str(tmp_path / "s"), "--device", "cpu", "--port", "0"]
        monkeypatch.setattr(sys, "argv", [*common, *words])
        monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: pytest.fail("it listens"))
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            main()
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_of_readme_and_page_work_as_they_stand(tmp_path, monkeypatch, capsys):
    root = Path(__file__).parent.parent
    monkeypatch.chdir(root)
    page = (root / "docs" / "serve.md").read_text()
    [curl] = re.findall(r"^curl .*$", page, re.MULTILINE)
    assert re.findall(r"^curl .*$", (root / "README.md").read_text(), re.MULTILINE) == [curl]
    [told] = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [block] = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    process, address = start(tmp_path / "state")
    try:
        if shutil.which("curl"):
            words = shlex.split(curl.replace("http://127.0.0.1:8000", address))
            answer = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
            expected = json.loads(told)
            assert answer.keys() == expected.keys()
            assert answer["predictions"][0]["label"] == expected["predictions"][0]["label"]
            assert answer["predictions"][0]["class"] == expected["predictions"][0]["class"]
        exec(block.replace("http://127.0.0.1:8000", address), {})
        assert "'stream': 'camera-1'" in capsys.readouterr().out
    finally:
        stop(process, signal.SIGTERM)


def test_the_files_of_the_page_are_valid():
    page = (Path(__file__).parent.parent / "docs" / "serve.md").read_text()
    [unit] = re.findall(r"^```ini\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    parsed = configparser.ConfigParser(strict=True)
    parsed.read_string(unit)
    assert parsed["Service"]["SuccessExitStatus"] == "143"
    [manifest] = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    pod = yaml.safe_load(manifest)["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {"states", "token"}
    [dockerfile] = re.findall(r"^```dockerfile\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert dockerfile == (Path(__file__).parent.parent / "Dockerfile").read_text()
    words = json.loads(re.search(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)[1])
    known = {option for parameter in command().params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def command():
    """Return the command line's `serve`."""
    return typer.main.get_command(app).commands["serve"]
