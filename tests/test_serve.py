"""The service without the web: streams, batches, turns, saving and limits."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from contextlib import closing

import pytest
import torch
from conftest import CLASSES, confident_vit
from test_methods import RECIPES, make, suitable

import mgtta
from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.adaptation.wrapper import innermost
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream
from mgtta.serve.queue import ClosedError, Limits, OverloadedError, UnknownStreamError
from mgtta.serve.store import StateFolder, check_name
from mgtta.serve.stream import Stream
from mgtta.serve.streams import Streams
from mgtta.serve.template import own_bytes, stream_copy, template

SIDE = 32
WAIT_SECONDS = 60


def pictures(n=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, SIDE, SIDE), generator=random, dtype=torch.uint8)


def tent(**settings):
    return template("tent", mgtta.load_model(confident_vit()), **{"lr": 0.01, "gather": 4, **settings})


def serving(folder, method=None, **limits):
    return Streams(method or tent(), SIDE, folder, Limits(**limits))


def ask(streams, name, x):
    return streams.predict(name, x).result(WAIT_SECONDS)


def until(condition):
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def same_state(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.adapted.values(), b.adapted.values(), strict=True))


# --- sharing


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_copy_for_a_stream_learns_as_a_method_of_its_own_and_shares_frozen_weights(name):
    method = make(name, suitable(name))
    method.remember_start()
    twin = make(name, suitable(name))
    copied = stream_copy(method)
    other = stream_copy(method)
    x = pictures(8) / 255
    for batch in x.split(4):
        torch.testing.assert_close(copied(batch), twin(batch), rtol=0, atol=0)
    assert same_state(copied, twin)
    assert same_state(other, method), "one stream has changed another"
    assert method.updates == other.updates == 0
    frozen = {p.data_ptr() for n, p in method.model.named_parameters() if n not in method.adapted}
    assert frozen <= {p.data_ptr() for p in copied.model.parameters()}
    assert not {p.data_ptr() for p in copied.adapted.values()} & {p.data_ptr() for p in other.adapted.values()}
    copied.reset()
    assert same_state(copied, other)


def test_a_stream_holds_little_besides_the_shared_model():
    model = mgtta.load_model("patterns_vit")
    method = template("tent", model)
    copied = stream_copy(method)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert own_bytes(copied, method) < whole / 100
    assert own_bytes(mgtta.create("tent", model), method) > whole


# --- answers


def test_answers_and_learning_are_those_of_the_method_called_directly(tmp_path):
    direct = tent(recall=None)
    with serving(tmp_path, tent(recall=None), wait_seconds=0) as streams:
        for i, x in enumerate(pictures(40).split(4)):
            expected = direct.step(x, learn=False).logits
            innermost(direct).step(x, observe=False)
            answer = ask(streams, "a", x)
            torch.testing.assert_close(answer.probabilities, expected.softmax(1))
            until(lambda i=i: streams.totals["updates"] == i + 1)
        assert streams.report("a").result(WAIT_SECONDS)["updates"] == direct.updates == 10


def test_requests_of_one_stream_are_gathered_into_batches(tmp_path):
    with serving(tmp_path, wait_seconds=0.5, batch_images=8) as streams:
        futures = [streams.predict("a", x) for x in pictures(16).split(1)]
        assert [f.result(WAIT_SECONDS).probabilities.shape for f in futures] == [(1, 10)] * 16
        assert streams.totals["batches"] == 2
        assert streams.totals["images"] == 16


def test_a_lonely_request_is_answered_after_the_waiting_time(tmp_path):
    with serving(tmp_path, wait_seconds=0.2) as streams:
        began = time.monotonic()
        assert ask(streams, "a", pictures(1)).probabilities.shape == (1, CLASSES)
        assert time.monotonic() - began >= 0.2
        assert streams.totals["batches"] == 1


def test_a_stream_with_one_client_does_not_wait_for_others(tmp_path):
    with serving(tmp_path, wait_seconds=1) as streams:
        ask(streams, "a", pictures(1))
        began = time.monotonic()
        for x in pictures(3).split(1):
            ask(streams, "a", x)
        assert time.monotonic() - began < 3
        streams.freeze("a").result(WAIT_SECONDS)  # while it works, requests come together, and then it waits again
        futures = [streams.predict("a", x) for x in pictures(8).split(1)]
        wait(futures, WAIT_SECONDS)
        assert streams.totals["batches"] < 4 + 8


def test_streams_take_turns(tmp_path):
    order = []
    with serving(tmp_path, wait_seconds=0, batch_images=2) as streams:
        hold = threading.Event()
        blocked = streams.predict("first", pictures(1))
        blocked.add_done_callback(lambda _: hold.wait(WAIT_SECONDS))  # runs in the streams' thread
        futures = []
        for name, count in (("busy", 6), ("quiet", 1)):
            for _ in range(count):
                future = streams.predict(name, pictures(2))
                future.add_done_callback(lambda _, name=name: order.append(name))
                futures.append(future)
        hold.set()
        wait(futures, WAIT_SECONDS)
    assert order.index("quiet") <= 1
    assert len(order) == 7


def test_one_stream_does_not_change_another(tmp_path):
    calm = pictures(16, seed=1)
    with serving(tmp_path / "a", wait_seconds=0) as streams:
        alone = [ask(streams, "calm", x).probabilities for x in calm.split(1)[:3]]
    with serving(tmp_path / "b", wait_seconds=0) as streams:
        for x in pictures(32, seed=2).split(8):
            ask(streams, "wild", x)
        beside = [ask(streams, "calm", x).probabilities for x in calm.split(1)[:3]]
    torch.testing.assert_close(torch.cat(beside), torch.cat(alone))


def test_learning_is_done_in_small_portions_between_answers(tmp_path, monkeypatch):
    learned = []
    monkeypatch.setattr(Stream, "learn", lambda stream: (learned.append(stream.name), stream.kept.clear()))
    with serving(tmp_path, wait_seconds=0, pause_seconds=0) as streams:
        futures = [streams.predict(name, pictures(4)) for name in "abcd"]
        wait(futures, WAIT_SECONDS)
        until(lambda: len(learned) == 4)
        assert sorted(learned) == list("abcd")


def test_images_that_learning_does_not_reach_are_dropped_and_counted(tmp_path):
    stream = Stream("a", tent(), update_images=4)
    for x in pictures(40).split(4):
        stream.answer(x)
    assert stream.waiting == 16
    assert stream.dropped == 24


def test_an_image_that_repeats_is_answered_and_teaches_nothing(tmp_path):
    x = pictures(4)
    with serving(tmp_path, wait_seconds=0) as streams:
        for _ in range(10):
            ask(streams, "a", x[:1])
        report = streams.report("a").result(WAIT_SECONDS)
        assert (report["images"], report["updates"], report["waiting"], report["repeated"]) == (10, 0, 1, 9)
        ask(streams, "a", x)
        until(lambda: streams.report("a").result(WAIT_SECONDS)["updates"] == 1)
    with serving(tmp_path) as streams:
        assert streams.report("a").result(WAIT_SECONDS)["repeated"] == 10


def test_running_statistics_do_not_follow_a_camera_that_stands_still(tmp_path):
    x = Glyphs(1).tensors()[0]
    method = template("mgtta+", mgtta.load_model("glyphs_vit"), source="glyphs_vit", mirror=False)
    with Streams(method, 48, tmp_path, Limits(wait_seconds=0)) as streams:
        first = ask(streams, "a", x).probabilities
        for _ in range(40):
            last = ask(streams, "a", x).probabilities
    torch.testing.assert_close(last, first, atol=0.02, rtol=0)


def test_shifts_are_told_and_a_domain_that_returns_is_recalled():
    stream = Stream("a", tent(lr=1e-4), update_images=64)
    dark = pictures(640, seed=3) // 4
    light = 255 - dark
    shifted = []
    for x in [*dark.split(32)[:10], *light.split(32)[:10], *dark.split(32)[10:]]:
        shifted.append(stream.answer(x).shifted)
        if stream.due:
            stream.learn()
    assert sum(shifted) == stream.shifts == 2
    assert stream.recalled == 1
    assert not any(shifted[:10])


def test_a_failure_of_the_thread_is_told_and_what_was_learned_is_saved(tmp_path, monkeypatch):
    streams = serving(tmp_path, wait_seconds=0, save_seconds=1000)
    ask(streams, "a", pictures(4))
    until(lambda: streams.totals["updates"] == 1)
    until(lambda: streams.totals["saves"] == 1)
    monkeypatch.setattr(streams, "_learn", lambda _: 1 / 0)
    ask(streams, "a", pictures(1))
    until(lambda: not streams.working)
    with pytest.raises(ClosedError):
        streams.predict("a", pictures(1))
    streams.close()
    with serving(tmp_path) as again:
        report = again.report("a").result(WAIT_SECONDS)
    assert (report["images"], report["updates"]) == (5, 1)


@pytest.mark.parametrize("name", ["noadapt", "t3a"])
def test_methods_without_gradients_are_served(tmp_path, name):
    method = template(name, mgtta.load_model(confident_vit()))
    with serving(tmp_path, method, wait_seconds=0) as streams:
        expected = stream_copy(method)(pictures(4)).softmax(1)
        torch.testing.assert_close(ask(streams, "a", pictures(4)).probabilities, expected)


# --- guard and schedule


def patterns(n, seed=0):
    """Return images that show something: a guard has no use for random pixels."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (n, 3, 8, 8), generator=random, dtype=torch.uint8)
    return coarse.repeat_interleave(SIDE // 8, 2).repeat_interleave(SIDE // 8, 3)


class OneClass(Method):
    """A method that soon gives every image the class that the source model gives least often."""

    def __init__(self, model):
        super().__init__(model)
        self.learns(mgtta.norm_parameters, lambda params: torch.optim.SGD(params, lr=1.0))
        self.target = int(torch.bincount(model(patterns(64)).argmax(1), minlength=CLASSES).argmin())

    def loss(self, x):
        logits = self.model(x)
        return Pass(logits), -logits[:, self.target].mean()


def harmful():
    """Return such a method under a guard."""
    return mgtta.guarded(Gathered(OneClass(mgtta.load_model(confident_vit())), 4))


def test_a_guard_brings_a_stream_back_and_its_alarms_are_told(tmp_path):
    x = patterns(512, seed=5)
    expected = mgtta.load_model(confident_vit())(x).detach().argmax(1)
    with serving(tmp_path, harmful(), wait_seconds=0) as streams:
        found = []
        for batch in x.split(16):
            found.append(ask(streams, "a", batch).probabilities.argmax(1))
            until(lambda: not streams._due)
        report = streams.report("a").result(WAIT_SECONDS)
        marks = [mark.kind for mark in streams.news("a").marks]
        assert len([kind for kind in marks if kind in ("slow", "rest")]) == report["alarms"] >= 3
        assert report["resting"]
        assert torch.equal(torch.cat(found)[-64:], expected[-64:]), "the source model answers"
    with serving(tmp_path, harmful()) as streams:
        after = streams.report("a").result(WAIT_SECONDS)
    kept = ("alarms", "resting", "images")
    assert [after[name] for name in kept] == [report[name] for name in kept]
    assert after["updates"] >= report["updates"] > 0  # the last one may follow the report


def test_a_guarded_stream_does_not_learn_from_images_without_content():
    stream = Stream("a", harmful(), update_images=16)
    stream.answer(torch.cat([patterns(3), pictures(2)]))
    assert stream.waiting == 3
    stream.answer(pictures(2))
    assert stream.waiting == 3


def test_no_image_is_saved_with_a_guard(tmp_path):
    method = tent(lr=1e-3, guard=mgtta.Guard(every=8))
    x = patterns(64, seed=6)
    with serving(tmp_path, method, wait_seconds=0) as streams:
        for batch in x.split(8):
            ask(streams, "a", batch)
            until(lambda: not streams._due)
        until(lambda: streams._loaded["a"].method.watch.lost)
    [path] = tmp_path.glob("*.safetensors")
    saved = path.read_bytes()
    assert not any(image.numpy().tobytes()[:64] in saved for image in x)


def test_a_scheduled_stream_learns_and_rests_as_the_method_called_directly():
    settings = {"lr": 1e-4, "schedule": "auto", "recall": None, "gather": 16}
    direct = tent(**settings)
    stream = Stream("a", tent(**settings), update_images=32)
    dark = pictures(32 * 30, seed=3) // 4
    counts = []
    for batch in [*dark.split(32), *(255 - dark).split(32)]:
        torch.testing.assert_close(stream.answer(batch).probabilities, direct(batch).softmax(1))
        if stream.due:
            stream.learn()
        assert stream.method.updates == direct.updates
        counts.append(direct.updates)
    assert counts[4] == 5
    assert counts[29] < 15, "it rests"
    assert counts[-1] > counts[29], "a shift wakes it"


@pytest.mark.parametrize("option", [{"guard": True}, {"schedule": "auto"}])
def test_copies_with_guard_or_schedule_share_what_never_changes(option):
    method = tent(**option)
    whole = sum(p.numel() * p.element_size() for p in method.model.parameters())
    assert own_bytes(stream_copy(method), method) < whole / 2


def test_a_method_that_has_no_schedule_refuses_it_by_name():
    with pytest.raises(ValueError, match="schedule='auto' is for methods with a pure objective"):
        template("t3a", mgtta.load_model(confident_vit()), schedule="auto")


# --- saving


def test_the_least_recently_used_stream_is_saved_and_loaded_again(tmp_path):
    with serving(tmp_path, wait_seconds=0, loaded_streams=2) as streams:
        first = pictures(4, seed=4)
        ask(streams, "a", first)
        until(lambda: streams.totals["updates"] == 1)
        before = ask(streams, "a", first[:1]).probabilities
        for name in "bcd":
            ask(streams, name, pictures(1))
            assert streams.loaded_streams <= 2
        assert not streams.is_loaded("a")
        assert streams.names() == list("abcd")
        assert streams.report("a").result(WAIT_SECONDS)["updates"] == 1
        torch.testing.assert_close(ask(streams, "a", first[:1]).probabilities, before)
        assert streams.totals["evictions"] == 3


def test_closing_answers_what_waits_and_saves_everything(tmp_path):
    streams = serving(tmp_path, wait_seconds=30, save_updates=1000, save_seconds=1000)
    futures = [streams.predict(name, pictures(4)) for name in "ab"]
    streams.close()
    assert all(f.result(0).probabilities.shape == (4, 10) for f in futures)
    with pytest.raises(ClosedError, match="stopping"):
        streams.predict("a", pictures(1))
    with serving(tmp_path) as again:
        assert again.names() == ["a", "b"]
        assert again.report("a").result(WAIT_SECONDS)["images"] == 4


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
from test_serve import serving, pictures, ask, until
streams = serving(sys.argv[1], wait_seconds=0, save_updates=2, save_seconds=1000)
for i, x in enumerate(pictures(400).split(4)):
    ask(streams, "a", x)
    until(lambda: streams.totals["updates"] == i + 1)
    print(i + 1, flush=True)
"""


def test_a_kill_loses_at_most_the_updates_since_the_last_save(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path), os.path.dirname(__file__)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        done = 0
        while done < 9:
            done = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        done = max([done, *map(int, child.stdout.read().split())])
    with serving(tmp_path) as streams:
        saved = streams.report("a").result(WAIT_SECONDS)["updates"]
    assert done - 3 <= saved <= done + 1


def test_streams_are_saved_after_some_time(tmp_path):
    with serving(tmp_path, wait_seconds=0, save_seconds=0.05) as streams:
        ask(streams, "a", pictures(1))
        until(lambda: streams.totals["saves"] == 1)
        until(lambda: streams.report("a").result(WAIT_SECONDS)["bytes"] > 0)
        ask(streams, "a", pictures(1))
        until(lambda: streams.totals["saves"] == 2)
        assert streams.store.has("a")
    found = Stream("a", tent(), 4)
    with closing(StateFolder(tmp_path)) as folder:
        assert folder.load(found)
    assert found.images == 2


def test_a_disk_that_fails_is_tried_again_and_answers_go_on(tmp_path, monkeypatch):
    save = StateFolder.save
    broken = [True]

    def sometimes(folder, stream):
        if broken[0]:
            raise OSError("no space left on device")
        return save(folder, stream)

    monkeypatch.setattr(StateFolder, "save", sometimes)
    with serving(tmp_path, wait_seconds=0, save_seconds=0.02) as streams:
        ask(streams, "a", pictures(1))
        until(lambda: streams.totals["failed_saves"] > 1)
        broken[0] = False
        until(lambda: streams.totals["saves"] == 1)
        assert ask(streams, "a", pictures(1)).probabilities.isfinite().all()
        assert streams.totals["failed"] == 0, "no request has failed"
    with serving(tmp_path) as streams:
        assert streams.report("a").result(WAIT_SECONDS)["images"] == 2


def test_pictures_are_never_saved(tmp_path):
    x = pictures(3)
    with serving(tmp_path, wait_seconds=0) as streams:
        ask(streams, "a", x)
        assert streams.report("a").result(WAIT_SECONDS)["waiting"] == 3
    [path] = tmp_path.glob("*.safetensors")
    assert x[0].numpy().tobytes()[:64] not in path.read_bytes()


def test_a_damaged_state_fails_only_its_own_stream_and_can_be_reset(tmp_path):
    with serving(tmp_path, wait_seconds=0) as streams:
        ask(streams, "a", pictures(4))
        ask(streams, "b", pictures(4))
    path = tmp_path / "a.state.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with serving(tmp_path, wait_seconds=0) as streams:
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            ask(streams, "a", pictures(1))
        ask(streams, "b", pictures(1))
        assert streams.reset("a").result(WAIT_SECONDS)["updates"] == 0
        ask(streams, "a", pictures(1))


def test_two_services_cannot_use_one_folder(tmp_path):
    with serving(tmp_path), pytest.raises(RuntimeError, match="another service uses the state folder"):
        serving(tmp_path)
    serving(tmp_path).close()


def test_half_written_files_are_removed(tmp_path):
    leftover = tmp_path / ".a.state.safetensors.x7"
    leftover.write_bytes(b"half")
    with serving(tmp_path) as streams:
        assert streams.names() == []
    assert not leftover.exists()


# --- commands


def test_reset_goes_back_to_the_source_and_freeze_stops_learning(tmp_path):
    x = pictures(4)
    with serving(tmp_path, wait_seconds=0) as streams:
        first = ask(streams, "a", x).probabilities
        until(lambda: streams.totals["updates"] == 1)
        assert streams.freeze("a").result(WAIT_SECONDS)["frozen"]
        for _ in range(3):
            assert ask(streams, "a", x).updates == 1
        assert not torch.equal(ask(streams, "a", x).probabilities, first)
        assert not streams.freeze("a", False).result(WAIT_SECONDS)["frozen"]
        report = streams.reset("a").result(WAIT_SECONDS)
        assert report["updates"] == report["images"] == 0
        torch.testing.assert_close(ask(streams, "a", x).probabilities, first)


def test_a_frozen_stream_stays_frozen_after_a_restart(tmp_path):
    with serving(tmp_path, wait_seconds=0) as streams:
        ask(streams, "a", pictures(1))
        streams.freeze("a").result(WAIT_SECONDS)
    with serving(tmp_path) as streams:
        assert streams.report("a").result(WAIT_SECONDS)["frozen"]


def test_exported_weights_are_those_of_the_stream(tmp_path):
    x = pictures(4)
    with serving(tmp_path, wait_seconds=0) as streams:
        ask(streams, "a", x)
        until(lambda: streams.totals["updates"] == 1)
        weights = streams.weights("a").result(WAIT_SECONDS)
        expected = ask(streams, "a", x).probabilities
    net = confident_vit()
    net.load_state_dict(weights)
    torch.testing.assert_close(mgtta.load_model(net)(x).softmax(1), expected)


# --- limits


def test_overload_is_refused_with_a_time_to_retry(tmp_path):
    with serving(tmp_path, wait_seconds=30, queue_images=96, stream_queue_images=64) as streams:
        streams.predict("a", pictures(60))
        with pytest.raises(OverloadedError, match="60 images of stream 'a' wait already") as caught:
            streams.predict("a", pictures(8))
        assert caught.value.retry_seconds >= 1
        streams.predict("b", pictures(36))
        with pytest.raises(OverloadedError, match="96 images wait already"):
            streams.predict("c", pictures(1))
        assert streams.totals["refused"] == 2


def test_images_that_would_wait_too_long_are_refused(tmp_path):
    with serving(tmp_path, wait_seconds=30, queue_seconds=0.3) as streams:
        streams._image_seconds = 0.01
        streams.predict("a", pictures(31))
        with pytest.raises(OverloadedError, match="31 images wait already, for about 0 seconds"):
            streams.predict("b", pictures(1))
        streams.report("a")  # a command is not


def test_the_number_of_streams_is_bounded(tmp_path):
    with serving(tmp_path, wait_seconds=0, streams=2) as streams:
        for name in "ab":
            ask(streams, name, pictures(1))
        with pytest.raises(OverloadedError, match="there are 2 streams already"):
            streams.predict("c", pictures(1))


def test_a_request_that_was_cancelled_is_not_learned_from(tmp_path):
    with serving(tmp_path, wait_seconds=0.3) as streams:
        gone = streams.predict("a", pictures(4))
        assert gone.cancel()
        ask(streams, "a", pictures(1))
        assert streams.report("a").result(WAIT_SECONDS)["images"] == 1


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.zeros(1, 3, SIDE, SIDE), "must be uint8"),
        (torch.zeros(3, SIDE, SIDE, dtype=torch.uint8), "must be uint8"),
        (torch.zeros(1, 3, 8, SIDE, dtype=torch.uint8), "must be uint8"),
        (torch.zeros(0, 3, SIDE, SIDE, dtype=torch.uint8), "0 images in a request"),
        (torch.zeros(65, 3, SIDE, SIDE, dtype=torch.uint8), "65 images in a request: 1 to 64"),
    ],
)
def test_invalid_images_are_rejected_and_begin_no_stream(tmp_path, x, reason):
    with serving(tmp_path) as streams:
        with pytest.raises(ValueError, match=reason):
            streams.predict("a", x)
        assert streams.names() == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 65, "a b", "é", "a\n"])
def test_invalid_stream_names_are_rejected(name):
    with pytest.raises(ValueError, match="invalid stream name"):
        check_name(name)


def test_names_that_differ_in_case_have_their_own_files(tmp_path):
    folder = StateFolder(tmp_path)
    assert folder.path("Cam-A").name.lower() != folder.path("cam-a").name.lower()
    with serving(tmp_path / "s", wait_seconds=0) as streams:
        ask(streams, "Cam-A.1", pictures(1))
    with serving(tmp_path / "s") as streams:
        assert streams.names() == ["Cam-A.1"]
    folder.close()


def test_unknown_streams_are_named(tmp_path):
    with serving(tmp_path) as streams, pytest.raises(UnknownStreamError):
        streams.report("nobody")


def test_limits_are_checked():
    with pytest.raises(ValueError, match="batch_images must be at least 1, not 0"):
        Limits(batch_images=0)


@pytest.mark.slow
def test_characters_in_noise_are_read_better_than_by_the_source_model(tmp_path):
    batches = list(stream(corrupted(Glyphs(512), ["gaussian_noise"]), batch_size=16))
    source = mgtta.load_model("glyphs_vit")
    method = template("mgtta+", source, source="glyphs_vit", mirror=False)
    right = {"served": 0, "source": 0}
    with Streams(method, 48, tmp_path, Limits(wait_seconds=0)) as streams:
        for batch in batches:
            answer = ask(streams, "camera", batch.x)
            right["served"] += int((answer.probabilities.argmax(1) == batch.y).sum())
            right["source"] += int((source(batch.x).argmax(1) == batch.y).sum())
    assert right["served"] > right["source"]
