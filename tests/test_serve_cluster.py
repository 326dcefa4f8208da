"""The service on a Ray cluster: a replica is killed, and its streams go on elsewhere."""

import pickle
from functools import partial

import pytest
import torch
from conftest import confident_vit
from fastapi.testclient import TestClient
from test_serve import SIDE, WAIT_SECONDS, pictures, serving, until

import mgtta
from mgtta._lib.files import read_tree
from mgtta.serve.app import create_app
from mgtta.serve.cluster import Cluster, _weight, connect
from mgtta.serve.streams import ClosedError, Limits, OverloadedError, UnknownStreamError
from mgtta.serve.template import template

try:
    import ray
except ImportError:
    ray = None

with_ray = pytest.mark.skipif(ray is None, reason="ray is not installed: pip install 'mgtta[ray]'")


def build():
    """Return the method, in the front and in each replica."""
    return partial(template, "tent", mgtta.load_model(confident_vit()), lr=0.01, gather=4)


def saved_updates(store, name):
    """Return the updates in the saved state of a stream; None if it was not saved."""
    if not store.has(name):
        return None
    state = read_tree(store.path(name))[0]
    while "method" in state:
        state = state["method"]
    return state["counters"]["updates"]


def test_streams_keep_their_replica_when_another_one_goes():
    names = [f"camera-{i}" for i in range(200)]
    with_all = {name: max(range(4), key=lambda i, name=name: _weight(name, i)) for name in names}
    without = {name: max((0, 1, 3), key=lambda i, name=name: _weight(name, i)) for name in names}
    assert all(with_all[name] == without[name] for name in names if with_all[name] != 2)
    counts = [list(with_all.values()).count(i) for i in range(4)]
    assert min(counts) > 25


def test_a_refusal_keeps_its_time_on_the_way_between_processes():
    again = pickle.loads(pickle.dumps(OverloadedError("too much waits", 7)))
    assert (str(again), again.retry_seconds) == ("too much waits", 7)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'mgtta\[ray\]'"):
        connect("auto")


@pytest.mark.slow
@with_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_the_streams_of_a_replica_that_is_killed_go_on_elsewhere(tmp_path):
    x = pictures(8)
    names = [f"camera-{i}" for i in range(6)]
    limits = Limits(wait_seconds=0, save_seconds=0)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with Cluster(build(), SIDE, tmp_path, limits, replicas=2) as cluster:
            expected = mgtta.load_model(confident_vit())(x[:4]).detach().softmax(1)
            for name in names:
                answer = cluster.predict(name, x[:4]).result(WAIT_SECONDS)
                torch.testing.assert_close(answer.probabilities, expected)
            for name in names:
                until(lambda name=name: saved_updates(cluster.store, name) == 1)
            owners = dict(cluster.owners)
            assert set(owners.values()) == {0, 1}, "both replicas work"
            assert cluster.totals["updates"] == len(names)

            ray.kill(cluster.replicas[0], no_restart=False)
            for name in names:
                assert cluster.predict(name, x[4:5]).result(WAIT_SECONDS).updates == 1, "it goes on from what was saved"
            assert set(cluster.owners.values()) == {1}
            assert all(cluster.owners[name] == 1 for name in names if owners[name] == 1)
            until(lambda: cluster.alive == [True, True])

            with TestClient(create_app(cluster), base_url="http://127.0.0.1:8000") as client:
                assert [s["stream"] for s in client.get("/v1/streams").json()["streams"]] == names
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
        assert streams.names() == names
        assert streams.report("camera-0").result(WAIT_SECONDS)["images"] == 5
