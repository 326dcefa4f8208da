"""The service on a Ray cluster: which process has a stream; a replica is killed, and its streams go on elsewhere."""

import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from conftest import confident_vit
from fastapi.testclient import TestClient
from test_serve import SIDE, WAIT_SECONDS, ask, pictures, serving, tent, until

import mgtta
from mgtta._lib.files import read_tree
from mgtta.serve.app import create_app
from mgtta.serve.cluster import Cluster, connect, stop
from mgtta.serve.queue import ClosedError, Limits, OverloadedError, UnknownStreamError
from mgtta.serve.store import StateFolder
from mgtta.serve.stream import Stream
from mgtta.serve.streams import Streams
from mgtta.serve.template import template

MISSING = [name for name in ("ray", "mmh3") if find_spec(name) is None]  # Ray Serve needs both
with_ray = pytest.mark.skipif(bool(MISSING), reason="Ray Serve is not installed: pip install 'mgtta[serve,ray]'")
with_rays_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


def build():
    """Return the method, in the front and in each replica."""
    return partial(template, "tent", mgtta.load_model(confident_vit()), lr=0.01, gather=4)


def saved_updates(folder, name):
    """Return the updates in the saved state of a stream; None if it was not saved."""
    store = StateFolder(folder, shared=True)
    if not store.has(name):
        return None
    state = read_tree(store.path(name))[0]
    while "method" in state:
        state = state["method"]
    return state["counters"]["updates"]


def replica(folder, **limits):
    """Return the streams of a replica, in this process."""
    return Streams(tent(), SIDE, folder, Limits(wait_seconds=0, **limits), shared=True)


# --- a stream belongs to one replica


def test_a_replica_that_is_asked_for_a_stream_takes_it_from_another_one(tmp_path):
    x = pictures(8)
    with replica(tmp_path, save_seconds=0) as first, replica(tmp_path, save_seconds=0) as second:
        ask(first, "camera", x[:4])
        until(lambda: saved_updates(tmp_path, "camera") == 1)
        assert ask(second, "camera", x[4:]).updates == 1, "it goes on from what was saved"
        until(lambda: saved_updates(tmp_path, "camera") == 2)
        assert ask(first, "camera", x[:1]).updates == 2, "and the first one loads it again"
        assert first.report("camera").result(WAIT_SECONDS)["images"] == 9
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    with serving(tmp_path) as streams:
        assert streams.report("camera").result(WAIT_SECONDS)["images"] == 9


def test_a_replica_that_has_lost_a_stream_does_not_save_it(tmp_path):
    x = pictures(8)
    with replica(tmp_path, save_seconds=1000) as second:
        with replica(tmp_path, save_seconds=1000) as first:
            ask(first, "camera", x[:4])
            until(lambda: first.report("camera").result(WAIT_SECONDS)["updates"] == 1)
            assert ask(second, "camera", x[:2]).updates == 0, "the first one has not saved its update"
        assert first.totals["saves"] == 0, "it has nothing of its own when it closes"
        assert first.loaded_streams == 0
    with serving(tmp_path) as streams:
        assert streams.report("camera").result(WAIT_SECONDS)["images"] == 2


def test_a_late_save_of_an_older_generation_is_never_read(tmp_path):
    stream = Stream("Camera", tent(), 64)
    first = StateFolder(tmp_path, shared=True)
    first.claim(stream)
    late = first.path("Camera")
    second = StateFolder(tmp_path, shared=True)
    second.claim(stream)
    stream.images = 7
    assert second.save(stream)
    assert not first.holds("Camera")
    late.write_bytes(b"a process that was cut off writes this")
    assert not first.save(stream)
    found = Stream("Camera", tent(), 64)
    with closing(StateFolder(tmp_path)) as alone:
        assert alone.load(found)
    assert found.images == 7


def test_of_replicas_that_claim_a_stream_at_once_each_gets_its_own_generation(tmp_path):
    folders = [StateFolder(tmp_path, shared=True) for _ in range(8)]
    streams = [Stream("camera", tent(), 64) for _ in folders]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: pair[0].claim(pair[1]), zip(folders, streams, strict=True)))
    assert sorted(folder.path("camera").name for folder in folders) == [
        f"camera@{generation}.state.safetensors" for generation in range(1, 9)
    ]
    assert [folder.holds("camera") for folder in folders].count(True) == 1


@with_ray
@with_rays_warnings
def test_streams_keep_their_replica_when_another_one_goes():
    from mgtta.serve.affinity import weight

    names = [f"camera-{i}" for i in range(200)]
    with_all = {name: max("abcd", key=lambda r, name=name: weight(name, r)) for name in names}
    without = {name: max("abd", key=lambda r, name=name: weight(name, r)) for name in names}
    assert all(with_all[name] == without[name] for name in names if with_all[name] != "c")
    counts = [list(with_all.values()).count(r) for r in "abcd"]
    assert min(counts) > 25


def test_a_refusal_keeps_its_time_on_the_way_between_processes():
    again = pickle.loads(pickle.dumps(OverloadedError("too much waits", 7)))
    assert (str(again), again.retry_seconds) == ("too much waits", 7)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'mgtta\[serve,ray\]'"):
        connect("auto")


@with_ray
@with_rays_warnings
def test_stopping_waits_longer_than_ray_serve_but_not_for_ever(monkeypatch):
    calls = []

    def delete(app):
        calls.append(app)
        if len(calls) < 3:
            raise TimeoutError("it has not stopped in 60 seconds")

    monkeypatch.setattr("ray.serve.delete", delete)
    stop("mgtta")
    assert calls == ["mgtta"] * 3

    calls.clear()
    monkeypatch.setattr("mgtta.serve.cluster.START_SECONDS", -1)
    monkeypatch.setattr("mgtta.serve.cluster.STOP_SECONDS", 0)
    with pytest.raises(TimeoutError, match="not stopped"):
        stop("mgtta")
    assert calls == ["mgtta"]


# --- on a local cluster


@pytest.mark.slow
@with_ray
@with_rays_warnings
def test_the_streams_of_a_replica_that_is_killed_go_on_elsewhere(tmp_path):
    import ray

    x = pictures(8)
    names = [f"camera-{i}" for i in range(12)]
    limits = Limits(wait_seconds=0, save_updates=1, save_seconds=1000)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with Cluster(build(), SIDE, tmp_path, limits, replicas=2) as cluster:
            expected = mgtta.load_model(confident_vit())(x[:4]).detach().softmax(1)
            for answer in [cluster.predict(name, x[:4]) for name in names]:
                torch.testing.assert_close(answer.result(WAIT_SECONDS).probabilities, expected)
            for name in names:
                until(lambda name=name: saved_updates(tmp_path, name) == 1)
            assert cluster.totals["updates"] == len(names)
            owners = {tuple(r["stream"] for r in figures["overview"]) for figures in cluster._figures()}
            assert len(owners) == 2, "both replicas work"
            assert sorted(sum(owners, ())) == sorted(names), "each stream is in one of them"

            os.kill(cluster.processes()[0], signal.SIGKILL)
            for answer in [cluster.predict(name, x[4:5]) for name in names]:
                assert answer.result(WAIT_SECONDS).updates == 1, "it goes on from what was saved"

            with TestClient(create_app(cluster), base_url="http://127.0.0.1:8000") as client:
                assert [s["stream"] for s in client.get("/v1/streams").json()["streams"]] == sorted(names)
                assert client.get("/v1/streams/camera-0").json()["images"] == 5
                assert "mgtta_images_total" in client.get("/metrics").text
                assert client.get("/v1/streams/nobody").status_code == 404
                assert cluster.news(names[0]).points
                assert {report["stream"] for report in cluster.overview() if report["loaded"]} == set(names)
                with pytest.raises(UnknownStreamError):
                    cluster.report("nobody")
            with pytest.raises(ClosedError):
                cluster.predict("camera-0", x[:1])
    finally:
        ray.shutdown()
    with serving(tmp_path) as streams:
        assert streams.names() == sorted(names)
        found = [streams.report(name).result(WAIT_SECONDS)["images"] for name in names]
        assert found == [5] * len(names), "the replicas have saved everything at the end"
