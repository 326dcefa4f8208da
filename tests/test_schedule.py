"""A schedule learns after a start and after a shift, and rests when there is nothing to gain."""

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import CLASSES, confident_vit, images, random_generator

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.adaptation.scheduled import BURST, MEAN_UPDATES, REST, SKIP, Schedule, summary


def make(name="mgtta", **settings):
    model = mgtta.load_model(confident_vit())
    if name == "mgtta":
        settings.setdefault("generator", random_generator())
        settings["source"] = mgtta.source_statistics(model, images(32, seed=99))
    return mgtta.create(name, model, schedule="auto", lr=1e-4, **settings)


def dark(x):
    return 0.2 * x


def learned(method, xs):
    """Which of the batches were learned from."""
    found = []
    for x in xs:
        before = method.updates
        method(x)
        found.append(method.updates > before)
    return found


def follow(schedule, n, centre, unsure=1.0, seed=0):
    """Which of n batches, with features around a centre, are learned from."""
    random = torch.Generator().manual_seed(seed)
    logits, found = torch.zeros(4, CLASSES), []
    logits[:, 0] = -torch.tensor(unsure).log() * 10
    for _ in range(n):
        found.append(schedule.due)
        schedule.note(summary(logits, [(centre + torch.randn(64, generator=random)).unsqueeze(0)]), schedule.due, 1)
    return found


def test_a_burst_then_ever_longer_rests():
    schedule = Schedule()
    found = follow(schedule, BURST + 15 * REST + 4, torch.zeros(64))
    assert found[:BURST] == [True] * BURST
    at = [i for i, learns in enumerate(found) if learns][BURST - 1 :]
    rests = [b - a - 1 for a, b in pairwise(at)]
    assert rests == [REST, 2 * REST, 4 * REST, 8 * REST]
    assert schedule.shifts == 0


def test_a_shift_is_noticed_and_learned():
    schedule = Schedule()
    follow(schedule, 25, torch.zeros(64))
    found = follow(schedule, 20, 3 * torch.ones(64), seed=1)
    assert schedule.shifts == 1
    assert found[1 : 1 + BURST] == [True] * BURST  # from the batch after the one that showed it
    assert sum(found) < 10


def test_rests_stay_short_as_long_as_predictions_become_surer():
    steady, falling = Schedule(), Schedule()
    logits = torch.zeros(4, CLASSES)
    counts = []
    for schedule, slope in ((steady, 0.0), (falling, 0.3)):
        random = torch.Generator().manual_seed(0)
        count = 0
        for t in range(BURST + 10 * REST):
            count += schedule.due
            logits[:, 0] = slope * t
            schedule.note(summary(logits, [torch.randn(1, 64, generator=random)]), schedule.due, 1)
        counts.append(count)
    assert counts[1] > counts[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["mgtta", "tent"])
def test_a_stream_with_one_shift(name, precision):
    method = make(name, precision=precision)
    same, other = [images(32, seed=t) for t in range(16)], [dark(images(32, seed=t)) for t in range(100, 112)]
    before, after = learned(method, same), learned(method, other)
    assert before[:BURST] == [True] * BURST
    assert sum(before) < 12
    assert method.schedule.shifts >= 1
    assert sum(after) >= BURST
    assert method(images(32)).isfinite().all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_rests_on_the_mean_of_its_parameters(precision, monkeypatch):
    method, average, seen = make("tent", precision=precision), Schedule.average, []

    def watched(schedule, params, last):
        seen.append([p.detach().clone() for p in params])
        average(schedule, params, last)

    monkeypatch.setattr(Schedule, "average", watched)
    method.schedule.rest = 4
    for t in range(BURST + 4 + 1):
        method(images(32, seed=t))
    assert len(seen) == BURST + 1
    assert method.schedule.shifts == 0
    for p, *values in zip(method.adapted.values(), *seen[SKIP:], strict=True):
        torch.testing.assert_close(p.detach(), torch.stack(values).mean(0))
    assert any(not torch.equal(p, last) for p, last in zip(method.adapted.values(), seen[-1], strict=True))


def test_predictions_come_as_ever():
    method, plain = make(), mgtta.create("noadapt", mgtta.load_model(confident_vit()))
    assert torch.equal(method(images(8)), plain(images(8)))
    bad = images(8)
    bad[0, 0, 0, 0] = float("nan")
    known = copy.deepcopy(method.schedule)
    method(bad)
    assert method.schedule.state()["learned"] == known.learned  # it says nothing
    assert method.skipped == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_reset_and_resume(precision, tmp_path):
    xs = [images(8, seed=t) for t in range(10)]
    method = make(precision=precision)
    straight = [method(x) for x in xs]
    method.reset()
    assert method.schedule.state() == Schedule().state()
    for x, logits in zip(xs[:6], straight, strict=False):
        assert torch.equal(method(x), logits)
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = make(precision=precision)
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert all(torch.equal(other(x), logits) for x, logits in zip(xs[6:], straight[6:], strict=True))
    with pytest.raises(ValueError, match="differ in schedule"):
        mgtta.create("tent", mgtta.load_model(confident_vit())).load_state_dict(method.state_dict())
    broken = method.state_dict()
    broken["schedule"].pop("rest")
    with pytest.raises(ValueError, match="schedule state: it has other entries"):
        method.load_state_dict(broken)


def test_a_state_in_the_middle_of_a_burst_goes_on(tmp_path):
    """Its mean, too: see the parameters on which it rests."""
    xs = [images(8, seed=t) for t in range(BURST + 1)]
    method, other = make(), make()
    for x in xs[:3]:
        method(x)
    other.load_state_dict(method.state_dict())
    state = method.state_dict()
    for x in xs[3:]:
        assert torch.equal(method(x), other(x))
    assert method.schedule.left > 0
    for a, b in zip(method.adapted.values(), other.adapted.values(), strict=True):
        assert torch.equal(a, b)
    third = make()
    third.load_state_dict(state)  # which learning on has not changed
    for x in xs[3:]:
        third(x)
    assert all(torch.equal(a, b) for a, b in zip(method.adapted.values(), third.adapted.values(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"left": -1},
        {"learned": None},
        {"spread": float("nan")},
        {"centre": torch.zeros(2, 2)},
        {"centre": torch.tensor([float("nan")])},
        {"mean": []},
        {"mean": [torch.zeros(3)]},
        {"rest": "a"},
    ],
)
def test_a_state_that_no_schedule_can_have_is_refused(change):
    method = make("tent")
    for t in range(3):
        method(images(8, seed=t))
    state = method.state_dict()
    with pytest.raises(ValueError, match="values that are out of range"):
        method.load_state_dict({**state, "schedule": {**state["schedule"], **change}})
    assert method.schedule.learned == 3


def test_a_batch_that_is_skipped_changes_no_mean():
    bad = images(8)
    bad[0, 0, 0, 0] = float("nan")
    method, plain = make("tent"), make("tent")
    for t in range(BURST):
        if t == BURST - 1:
            for _ in range(3):
                method(bad)
        method(images(8, seed=t))
        plain(images(8, seed=t))
    assert (method.updates, method.skipped) == (plain.updates, 3)
    assert method.schedule.left > 0
    for a, b in zip(method.adapted.values(), plain.adapted.values(), strict=True):
        assert torch.equal(a, b)


def test_a_smaller_batch_is_no_shift():
    random = torch.Generator().manual_seed(0)
    schedule = Schedule()
    for t in range(200):
        n = 2 if t % 5 == 4 else 32
        features = torch.randn(n, 64, generator=random)
        schedule.note(summary(torch.zeros(n, CLASSES), [features]), schedule.due, n)
    assert schedule.shifts == 0


def test_a_guard_hides_nothing():
    guarded = make(guard=True, gather=0, precision="bf16")
    guarded.warm_up(images(8))
    for t in range(3):
        guarded(images(8, seed=t))
    assert guarded.precision == "bf16"
    assert guarded.updates == guarded.method.updates == 3
    assert guarded.method.schedule.learned == 3
    assert guarded.engine is guarded.method.engine


def test_a_budget_that_ends_within_a_burst_ends_on_the_mean():
    method = make("tent", max_updates=BURST - 1)
    for t in range(BURST):
        method(images(8, seed=t))
    assert method.schedule.left == 0
    assert all(torch.equal(p, m) for p, m in zip(method.adapted.values(), method.schedule.mean, strict=True))


def test_the_mean_looks_back_on_so_many_updates():
    schedule = Schedule(learned=SKIP + 1)
    p = torch.zeros(1)
    for t in range(3 * MEAN_UPDATES):
        p.fill_(float(t >= MEAN_UPDATES))
        schedule.average([p])
        schedule.learned += 1
    assert schedule.mean[0] > 1 - (1 - 1 / MEAN_UPDATES) ** (2 * MEAN_UPDATES) - 1e-5
    assert schedule.mean[0] < 1


def test_guarded_and_limited():
    guarded, limited = make(guard=True, gather=0), make(max_updates=2)
    for t in range(6):
        guarded(images(8, seed=t))
        limited(images(8, seed=t))
    assert guarded.updates < 6
    assert limited.updates == 2


def test_what_cannot_follow_one_is_refused(model):
    for name in ("lame", "cotta", "sar", "deyo"):
        with pytest.raises(ValueError, match="pure objective"):
            mgtta.create(name, model, schedule="auto")
    with pytest.raises(ValueError, match=r"unknown schedule 'never'; valid: always, auto"):
        mgtta.create("tent", model, schedule="never")


@pytest.mark.filterwarnings("error")
def test_what_is_beyond_all_numbers_is_passed_over():
    schedule = Schedule()
    for _ in range(2 * BURST):
        schedule.note(torch.ones(9), schedule.due, 8)
    before = copy.deepcopy(schedule.state())
    for value in (1e30, float("inf"), float("nan")):
        schedule.note(torch.full((9,), value), schedule.due, 8)
    after = schedule.state()
    assert torch.equal(before.pop("centre"), after.pop("centre"))
    assert before == after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_comes_from_a_gpu_is_read_before_the_next_batch():
    here, there = Schedule(), Schedule()
    random = torch.Generator().manual_seed(0)
    for t in range(3 * BURST):
        found = torch.randn(65, generator=random) + (t > 2 * BURST)
        here.note(found, here.due, 8)
        there.note(found.cuda(), there.due, 8)
        there.settle()
    states = here.state(), there.state()
    assert states[0].keys() == states[1].keys()
    assert torch.equal(states[0].pop("centre"), states[1].pop("centre"))
    assert states[0] == states[1]


def test_constants_are_compared_row_by_row(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    import imagenet
    import schedule as compare

    from mgtta.adaptation import scheduled as schedule

    for name in ("BURST", "REST", "SKIP"):  # which a row sets
        monkeypatch.setattr(schedule, name, getattr(schedule, name))
    held = imagenet.Held((images(144, seed=3) * 255).byte(), torch.arange(144) % CLASSES)
    monkeypatch.setattr(imagenet, "deit_tiny", lambda *_: mgtta.load_model(confident_vit()))
    monkeypatch.setattr(imagenet, "shard", lambda *_: held)
    always, *_, last = compare.ways()
    rows = [compare.run(way, tmp_path, tmp_path, "cpu", orders=2) for way in (always, last)]
    assert rows[0]["share"] == 1
    assert rows[1]["share"] < 1
    assert last["constants"] == [schedule.BURST, schedule.REST, schedule.SKIP]
    assert all(len(row["top1"]) == 2 and max(row["top1"]) > 0 for row in rows)
    assert compare.missing(rows) == compare.ways()[1:-1]
    said = compare.page({"command": "python ...", "protocol": {"orders": 2}, "rows": rows})
    assert "| always | 0.001 |" in said
    assert " ± " in said
