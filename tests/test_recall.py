"""Recall: the state of a domain is kept when it ends, and found again when it returns."""

import copy

import pytest
import torch
from conftest import NETS, confident_vit, images, random_generator, vit
from test_methods import GRADIENT, RECIPES, make, same, suitable
from torch import nn

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.adaptation.recalled import LOOK_IMAGES, SIDE_PIXELS, Recalled, first_frozen_layer, summaries
from mgtta.adaptation.shift import Arriving
from mgtta.adaptation.wrapper import innermost
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream

BATCH = LOOK_IMAGES


def day(seed, n=BATCH):
    return images(n, seed)


def dark(seed, n=BATCH):
    return 0.2 * images(n, seed)


def flat(seed, n=BATCH):
    return 0.5 + 0.1 * images(n, seed)


def tent(recall=4, **settings):
    return mgtta.create("tent", mgtta.load_model(confident_vit()), recall=recall, **{"lr": 0.01, **settings})


def run(method, *domains, batches=5):
    """Adapt to one domain after another, each with its own images each time."""
    logits = []
    for visit, domain in enumerate(domains):
        logits += [method(domain(100 * visit + t)) for t in range(batches)]
    return logits


def actions(method):
    return [event["action"] for event in method.events]


def params(method):
    return {name: p.detach().clone() for name, p in method.adapted.items()}


def test_recall_finds_the_state_of_a_domain_that_returns():
    method = tent()
    run(method, day, dark)
    [day_] = method.domains.known
    learned = copy.deepcopy(day_.state["params"])
    method(day(300))
    assert actions(method) == ["shift", "recall"]
    assert same(params(method), learned)
    assert [event["image"] for event in method.events] == [7 * BATCH, 11 * BATCH]
    assert len(method.domains.known) == 1  # the dark one


def test_the_same_images_again_and_again_are_one_domain():
    """Their batches do not scatter: a difference as small as rounding is not a shift."""
    method = tent()
    for t in range(6):
        method(day(0) * (1 - 1e-6 * t))
    assert actions(method) == []
    run(method, dark)
    method(day(0))
    assert actions(method) == ["shift", "recall"]


def test_recall_keeps_moments_and_buffers_but_not_counters():
    model = mgtta.load_model(confident_vit())
    source = mgtta.source_statistics(model, images(16, seed=99))
    made = {"source": source, "generator": random_generator(), "mirror": False}
    method = mgtta.create("mgtta+", model, recall=2, **made)
    run(method, day, dark)
    state = copy.deepcopy(method.domains.known[0].state)
    assert "counters" not in state
    method(day(300))
    inner = innermost(method)
    assert actions(method)[-1] == "recall"
    assert same(inner.snapshot()["buffers"], state["buffers"])
    assert same(inner.snapshot()["optimizer"]["state"], state["optimizer"]["state"])
    assert method.updates == 11


def test_recall_keeps_the_learning_rate_that_a_guard_chose():
    method = tent()
    run(method, day, dark)
    method.optimizer.param_groups[0]["lr"] = 1e-5
    method(day(300))
    assert actions(method)[-1] == "recall"
    assert method.optimizer.param_groups[0]["lr"] == 1e-5


def test_an_unknown_domain_continues_or_starts_from_the_source():
    going_on = tent()
    plain = tent(recall=None)
    assert all(torch.equal(a, b) for a, b in zip(run(going_on, day, dark), run(plain, day, dark), strict=True))
    method = mgtta.create("tent", mgtta.load_model(confident_vit()), lr=0.01)
    source = params(method)
    fresh = Recalled(method, 4, unknown="source")
    run(fresh, day)
    fresh(dark(0))
    fresh(dark(1))
    assert actions(fresh) == ["shift"]
    assert same(params(fresh), source)
    assert fresh.updates == 7
    with pytest.raises(ValueError, match="valid: continue, source"):
        Recalled(method, 4, unknown="forget")


def test_recall_keeps_so_many_domains_and_the_oldest_goes_first():
    method = tent(recall=1)
    run(method, day, dark, flat)
    assert len(method.domains.known) == 1
    run(method, dark)
    assert actions(method) == ["shift", "shift", "recall"]
    run(method, day)
    assert actions(method)[-1] == "shift"  # its state is gone


def test_one_odd_batch_is_not_a_shift():
    method = tent()
    plain = tent(recall=None)
    for x in (*map(day, range(5)), dark(0), *map(day, range(5, 10))):
        assert torch.equal(method(x), plain(x))
    assert actions(method) == []
    assert method.domains.alarm is None


def test_two_odd_batches_of_different_kinds_are_not_a_shift():
    method = tent()
    odd = 1 - 0.2 * images(BATCH)
    for x in (*map(day, range(5)), dark(0), odd, *map(day, range(5, 10))):
        method(x)
    assert actions(method) == []


def test_domains_that_alternate_batch_by_batch_are_one_wide_domain():
    method = tent()
    for t in range(20):
        method((day, dark)[t % 2](t))
    assert len(actions(method)) <= 1


@pytest.mark.parametrize("size", [1, 5])
def test_small_batches_are_looked_at_together(size):
    method = tent(gather=8)
    for domain in (day, dark, day):
        for x in domain(0, 3 * LOOK_IMAGES).split(size):
            method(x)
    assert actions(method) == ["shift", "recall"]


def test_images_that_are_not_finite_say_nothing():
    method = tent()
    run(method, day)
    known = copy.deepcopy(method.domains.present.state())
    for _ in range(3):
        method(torch.full_like(day(0), float("nan")))
    assert same(method.domains.present.state(), known)
    run(method, day)
    assert actions(method) == []


def test_recall_is_saved_and_resumed_bit_for_bit(tmp_path):
    xs = [domain(10 * i + t) for i, domain in enumerate((day, dark, day, dark)) for t in range(4)]
    method = tent()
    straight = [method(x) for x in xs]
    expected = actions(method)
    assert expected == ["shift", "recall", "recall"]
    for cut in (3, 5, 9, 13):  # 5: in the middle of an alarm
        method.reset()
        assert (actions(method), method.domains.known) == ([], [])
        for x in xs[:cut]:
            method(x)
        write_tree(tmp_path / "state", method.state_dict(), {})
        other = tent()
        other.load_state_dict(read_tree(tmp_path / "state")[0])
        for x, logits in zip(xs[cut:], straight[cut:], strict=True):
            assert torch.equal(other(x), logits)
        assert actions(other) == expected


def test_a_state_in_the_middle_of_a_look_continues():
    method = tent()
    other = tent()
    for x in day(0, LOOK_IMAGES - 8).split(4):
        method(x)
    other.load_state_dict(method.state_dict())
    for x in day(1, 16).split(4):
        method(x)
        other(x)
    assert method.domains.present.seen == 1
    assert same(method.state_dict()["recall"], other.state_dict()["recall"])


def broken(state, **change):
    return {**state, "recall": {**state["recall"], **change}}


def test_an_invalid_recall_state_is_rejected_and_changes_nothing():
    method = tent()
    run(method, day, dark)
    before = method.state_dict()
    known = before["recall"]["known"][0]
    wrong = copy.deepcopy(known)
    next(iter(wrong["state"]["params"].values())).fill_(float("nan"))
    for change, message in (
        ({"images": -1}, "out of range"),
        ({"scale": torch.zeros(2, 2)}, "out of range"),
        ({"known": [known] * 5}, "out of range"),
        ({"known": [{}]}, "detector"),
        ({"known": [{**known, "state": None}]}, "no state"),
        ({"known": [wrong]}, "not finite"),
        ({"present": {}}, "other entries"),
        ({"alarm": {"summary": torch.zeros(3)}}, "missing"),
        ({"more": 1}, "other entries"),
    ):
        with pytest.raises(ValueError, match=message):
            method.load_state_dict(broken(before, **change))
        assert same(method.state_dict(), before)


@pytest.mark.parametrize("name", GRADIENT)
def test_recall_under_every_gradient_method(name):
    method = make(name, mgtta.load_model(suitable(name)), recall=2)
    run(method, day, dark, day, batches=4)
    assert actions(method) == ["shift", "recall"]
    assert method.skipped == 0


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in GRADIENT])
def test_recall_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}.* recall"):
        make(name, mgtta.load_model(suitable(name)), recall=2)


LENIENT = mgtta.Guard(tolerance=0.9)
OPTIONS = {
    "gather": {"gather": 48},
    "schedule": {"schedule": "auto"},
    "guard": {"guard": LENIENT},
    "bf16": {"precision": "bf16"},
    "all": {"gather": 48, "schedule": "auto", "guard": LENIENT, "pull": 0.05},
}


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS.keys())
def test_recall_works_with_the_other_options(settings, tmp_path):
    method = tent(lr=1e-4, **settings)
    straight = run(method, day, dark, day, batches=4)
    assert actions(method) == ["shift", "recall"]
    method.reset()
    xs = [domain(100 * i + t) for i, domain in enumerate((day, dark, day)) for t in range(4)]
    for x in xs[:7]:
        method(x)
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = tent(lr=1e-4, **settings)
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert all(torch.equal(other(x), logits) for x, logits in zip(xs[7:], straight[7:], strict=True))


def test_events_of_recall_and_of_its_guard_come_in_order():
    method = tent(guard=LENIENT)
    run(method, day, dark, batches=4)
    method.watch.events.append({"image": 1, "action": "slow"})
    assert actions(method) == ["slow", "shift"]
    method.watch.events.append({"image": 10**6, "action": "rest"})
    assert actions(method) == ["slow", "shift", "rest"]


def test_wrappers_inside_begin_again_when_a_state_is_loaded():
    method = tent(gather=3 * BATCH, schedule="auto", lr=1e-4)
    run(method, day, dark, batches=4)
    assert method.waiting > 0
    method(day(300))
    assert actions(method)[-1] == "recall"
    assert method.waiting == 0
    assert method.method.schedule.learned == 0


def test_a_guard_that_goes_back_keeps_images_and_events():
    method = tent(guard=LENIENT)
    early = method.method.snapshot()
    run(method, day, dark, batches=4)
    assert actions(method) == ["shift"]
    for state in (early, None):
        method._restore(state)
        assert actions(method) == ["shift"]
        assert method.method.log.images == 8 * BATCH
    method.reset()
    assert method.method.log.images == 0


def test_recall_is_paused_with_the_method():
    method = tent()
    run(method, day)
    with method.frozen():
        run(method, dark)
    assert actions(method) == []
    assert method.log.images == 5 * BATCH


def test_recall_over_ranks_is_refused(model):
    method = mgtta.create("tent", model)
    method.ranks = copy.copy(method.ranks)
    method.ranks.size = 2
    with pytest.raises(ValueError, match="tent cannot recall over ranks"):
        Recalled(method, 2)


# --- what is looked at


def test_summaries_are_of_the_first_layer_where_it_is_frozen():
    assert first_frozen_layer(mgtta.create("tent", vit())) == "patch_embed.proj"
    assert first_frozen_layer(mgtta.create("tent", NETS["batchnorm"]())) == "0"
    assert first_frozen_layer(mgtta.create("cotta", vit())) is None  # all of it adapts
    frozen = tent()
    assert frozen._measure(day(0)).shape == (BATCH, 2, 16)
    moving = mgtta.create("cotta", vit(), recall=2)
    assert moving._measure(day(0)).shape == (BATCH, 2, 3)  # of the channels of the image


def test_summaries_do_not_move_with_adaptation():
    method = tent(lr=0.1)
    before = method._measure(day(0))
    run(method, day, dark)
    assert torch.equal(method._measure(day(0)), before)


@pytest.mark.parametrize("net", ["vit", "groupnorm"])
def test_what_is_measured_is_the_first_layer_without_its_bias(net):
    method = mgtta.create("tent", mgtta.load_model(NETS[net]()), recall=2)
    layer = method.model.net.get_submodule(first_frozen_layer(innermost(method)))
    x = (images(4) * 255).byte()
    t = layer(x / 255).detach().flatten(2) - layer.bias.detach()[:, None]
    expected = torch.stack([t.mean(2), t.var(2, correction=0)], 1)
    torch.testing.assert_close(method._measure(x), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(method._measure(x / 255), expected, atol=1e-5, rtol=1e-4)


def test_a_summary_separates_contrast_from_the_rest():
    x = images(4)
    method = tent()
    one, half = (summaries(method._measure(f * x)) for f in (1.0, 0.5))
    channels = 16
    torch.testing.assert_close(half[:, channels:-1], one[:, channels:-1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(half[:, -1], one[:, -1] - torch.tensor(2.0).log(), atol=1e-3, rtol=1e-3)
    assert one.shape == (4, 2 * channels + 1)


def test_a_look_is_at_the_middle_of_an_image():
    x = torch.rand(2, 3, SIDE_PIXELS + 20, SIDE_PIXELS + 40)
    totals = []
    for given in (x, x[:, :, 10:-10, 20:-20]):
        method = mgtta.create("tent", mgtta.load_model(NETS["groupnorm"]()), recall=2)
        method(given)
        totals.append(method.domains.total)
    assert torch.equal(*totals)


def test_nets_without_convolutions_are_looked_at_by_their_images():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.LayerNorm(16), nn.Linear(16, 10))
    method = mgtta.create("tent", mgtta.load_model(net), recall=2)
    run(method, day, dark, day)
    assert actions(method) == ["shift", "recall"]


# --- embedded characters under corruptions


@pytest.fixture(scope="module")
def characters():
    """Corruption -> 512 characters under it."""
    clean = list(zip(*Glyphs(512, seed=5).tensors(), strict=True))
    return {d.name: torch.cat([b.x for b in stream(d, batch_size=512)]) for d in corrupted(clean)}


class Watching:
    """A recall around a method that does not learn: only its detector runs."""

    def __init__(self, model):
        self.method = mgtta.create("tent", model, recall=16)
        self.method.method.step = lambda x, learn: None

    def __call__(self, x, size=64):
        """Return the numbers of the batches that ended a domain, counted from the first that is given now."""
        before = len(self.method.events)
        began = self.method.log.images
        for batch in x.split(size):
            self.method.step(batch)
        return [(event["image"] - began) // size for event in self.method.events[before:]]


@pytest.fixture
def watching():
    return Watching(mgtta.load_model("glyphs_vit"))


def test_shifts_between_corruptions_are_noticed(watching, characters):
    found = [watching(characters[name]) for name in CORRUPTIONS]
    assert found[0] == []
    assert sum(bool(at) for at in found[1:]) >= 13  # of 14
    assert all(at in ([], [1], [2]) for at in found)  # by the first two batches, and never later
    again = [watching(characters[name].flip(0)) for name in CORRUPTIONS]
    assert all(at in ([], [1], [2]) for at in again)
    kinds = [event["action"] for event in watching.method.events[-13:]]
    assert kinds.count("recall") >= 12


@pytest.mark.parametrize("name", ["fog", "gaussian_noise", "contrast", "glass_blur"])
def test_one_corruption_has_no_shifts(watching, characters, name):
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        assert watching(characters[name][torch.randperm(512, generator=random)]) == []


@pytest.mark.parametrize("size", [64, 32])
def test_a_mixed_stream_has_no_shifts(watching, characters, size):
    mixed = torch.cat(list(characters.values()))
    mixed = mixed[torch.randperm(len(mixed), generator=torch.Generator().manual_seed(0))]
    assert watching(mixed, size) == []


class LikeOnAGpu(torch.Tensor):
    """A tensor on the CPU that says otherwise."""

    is_cuda = property(lambda _: True)


def test_held_images_of_another_kind_are_judged_before_the_next_step(monkeypatch):
    """A state that is loaded after the step would undo it."""
    send = Arriving.send
    monkeypatch.setattr(Arriving, "send", lambda self, t, told: send(self, t.as_subclass(torch.Tensor), told))
    method = tent(gather=16)
    held = []
    step = method.method.step

    def watched(x, learn):
        held.append(sum(map(len, method._held)))
        return step(x.as_subclass(torch.Tensor), learn)

    method.method.step = watched
    for x in (images(4), images(4), images(4).double(), images(4).double()):
        method(x.as_subclass(LikeOnAGpu))
    assert held == [0, 4, 0, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recall_on_a_gpu_is_that_on_a_cpu(precision):
    here = tent()
    there = mgtta.create("tent", mgtta.load_model(confident_vit()).cuda(), recall=4, lr=0.01, precision=precision)
    for method in (here, there):
        run(method, day, dark, day, dark)
    assert there.events == here.events
    assert actions(there) == ["shift", "recall", "recall"]
    twin = copy.deepcopy(there)
    torch.testing.assert_close(there(day(0)), twin(day(0)), atol=0.05, rtol=0.05)  # one of them is captured
    assert actions(twin) == actions(there)
