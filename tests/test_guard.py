"""The guard: it leaves a sound method alone, stops a failing one, and is saved, reset and resumed with it."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, convnet, images
from test_methods import make, same, stream, suitable

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.adaptation import guarded as guarding
from mgtta.adaptation.guarded import Guard, Guarded
from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.adaptation.watch import WINDOW, Watch, excess, what_is_lost
from mgtta.methods.registry import recipes
from mgtta.report.alarms import guard_words

OFTEN = Guard(every=4, images=4, sure=0.2, anchors=3)  # asked at every batch of the tests
RATE = 1.0


class Bent(Method):
    """A method that pulls every prediction to the class that the source gives least often."""

    def __init__(self, model):
        super().__init__(model)
        self.learns(mgtta.norm_parameters, lambda params: torch.optim.SGD(params, lr=RATE))
        self.target = int(torch.bincount(model(images(64, seed=3)).argmax(1), minlength=CLASSES).argmin())

    def loss(self, x):
        logits = self.model(x)
        return Pass(logits), -logits[:, self.target].mean()


@pytest.fixture
def sure_model():
    return mgtta.load_model(confident_vit())


def agreement(logits, model, x):
    return float((logits.argmax(1) == model(x).argmax(1)).float().mean())


PAIRS = [(name, "suitable") for name in recipes()] + [
    ("tent", "batchnorm"),
    ("mgtta", "batchnorm"),
    ("tent", "groupnorm"),
]


@pytest.fixture(params=PAIRS, ids=["-".join(pair) for pair in PAIRS])
def guarded(request):
    name, net = request.param
    module = suitable(name) if net == "suitable" else NETS[net]()
    return make(name, mgtta.load_model(module), guard=OFTEN)


def test_the_contract_holds_for_every_recipe(guarded, tmp_path):
    assert isinstance(guarded, Guarded)
    assert guarded.name in recipes()
    start = copy.deepcopy(guarded.model.state_dict())
    xs = stream(6)
    straight = [guarded(x) for x in xs]
    assert all(y.shape == (4, CLASSES) and y.isfinite().all() and not y.requires_grad for y in straight)
    guarded.reset()
    assert guarded.updates == 0
    assert not guarded.events
    assert all(torch.equal(t, start[name]) for name, t in guarded.model.state_dict().items())
    for x in xs[:3]:
        guarded(x)
    write_tree(tmp_path / "state", guarded.state_dict(), {})
    other = copy.deepcopy(guarded)
    other.reset()
    other(images(4, seed=77))
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert same(other.state_dict(), guarded.state_dict())
    assert all(torch.equal(a, other(x)) for a, x in zip(straight[3:], xs[3:], strict=True))


def test_a_sound_method_is_left_alone(guarded):
    """With a tolerance that nothing exceeds, predictions and state are those of the method without a guard."""
    watched = mgtta.guarded(guarded.method, Guard(every=4, images=4, tolerance=0.999, anchors=3))
    plain = copy.deepcopy(guarded.method)
    assert all(torch.equal(watched(x), plain(x)) for x in stream(6))
    mine, theirs = watched.method.state_dict(), plain.state_dict()
    mine["counters"].pop("seconds")
    theirs["counters"].pop("seconds")
    assert same(mine, theirs)


@pytest.mark.parametrize("policy", ["rollback", "slow", "source"])
def test_a_collapse_is_seen_and_undone(sure_model, policy, monkeypatch):
    plain = Bent(sure_model)
    monkeypatch.setattr(guarding, "REST_IMAGES", 64)
    often = Guard(policy=policy, sure=0.3, every=64, images=16, dominance=1.0)
    held = mgtta.guarded(Bent(sure_model), often)
    fine = []
    for x in stream(12, batch=16):
        plain(x)
        fine.append(agreement(held(x), sure_model, x))
    assert agreement(plain.predict(images(64)), sure_model, images(64)) < 0.5
    assert sum(fine) / len(fine) > 0.9  # at an alarm the batch is given the source's predictions
    assert {event["action"] for event in held.events} == {policy}
    assert all(event["lost"] > 0 and event["distance"] > 0 for event in held.events)
    assert {"entropy", "diversity"} <= held.events[0].keys()
    pace = 0.1 ** len(held.events) if policy == "slow" else 1.0
    assert held.optimizer.param_groups[0]["lr"] == pytest.approx(pace * RATE)
    held.reset()
    assert held.optimizer.param_groups[0]["lr"] == RATE
    assert held.watch == Watch()


def test_the_ladder_and_its_rest(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "REST_IMAGES", 32)
    guard = Guard(policy=("rollback", "source"), sure=0.3, every=16, images=16)
    held = mgtta.guarded(Bent(sure_model), guard)
    updates = []
    for x in stream(16, batch=16):
        held(x)
        updates.append(held.updates)
    actions = [(event["action"], event["image"]) for event in held.events]
    assert [action for action, _ in actions][:3] == ["rollback", "source", "source"]
    rests = [later - sooner for (_, sooner), (_, later) in pairwise(actions[1:])]
    assert all(rest >= 32 * 2**i for i, rest in enumerate(rests))  # it rests, tries again, and rests twice as long
    assert held.watch.rest_until - actions[-1][1] == 32 * 2 ** len(rests)
    assert updates == sorted(updates)  # counts are never rolled back


def test_batch_norm_falls_back_to_the_running_statistics():
    model = mgtta.load_model(convnet("batch"))
    held = mgtta.create("tent", model, guard=Guard(policy="source"))
    held.watch.rest_until = 10**6
    x = images(4)
    assert torch.equal(held(x), model(x))
    assert not torch.equal(held.method.predict(x), model(x))


@pytest.mark.parametrize(("norm", "size", "by_batch"), [("batch", 16, True), ("batch", 4, False), ("group", 16, False)])
def test_the_measure_normalises_as_the_method_does(norm, size, by_batch):
    """Until something is learned nothing is lost; in small batches the source's own statistics are the measure."""
    method = mgtta.create("tent", mgtta.load_model(convnet(norm)), guard=True)
    x = images(size)
    reference = method._reference(size)(x)
    assert torch.equal(reference, method.method.predict(x)) == (by_batch or norm == "group")
    assert torch.equal(reference, method.source(x)) == (not by_batch)
    source = dict(method.source.named_parameters())
    if method.unlearned is not None:
        assert all(p is source[name] for name, p in method.unlearned.named_parameters())
    method(x)
    assert torch.equal(method._reference(size)(x), reference)


def test_nothing_is_asked_while_nothing_moves(sure_model):
    held = mgtta.create("eta", sure_model, margin=1e-9, guard=OFTEN)  # no image is reliable
    held._ask = None
    for x in stream(6):
        held(x)
    assert held.updates == 0


@pytest.mark.parametrize(("size", "asked"), [(1, True), (16, False)])
def test_poor_statistics_are_looked_at_though_nothing_is_learned(size, asked):
    held = mgtta.create("tent", mgtta.load_model(convnet("batch")), lr=0.0, guard=OFTEN)
    for x in stream(6, batch=size):
        held(x)
    assert bool(held.watch.asked_at) == asked


def test_calm_begins_after_a_rest(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "REST_IMAGES", 64)
    monkeypatch.setattr(guarding, "CALM_IMAGES", 32)
    guard = Guard(policy=("rollback", "source"), sure=0.3, every=16, images=16)
    held = mgtta.guarded(Bent(sure_model), guard)
    for x in stream(24, batch=16):
        held(x)
    actions = [event["action"] for event in held.events]
    assert actions[:3] == ["rollback", "source", "source"]  # a rest longer than `calm` is no calm


def test_a_stream_of_one_class_is_left_to_the_source(sure_model, monkeypatch):
    """One image again and again, in batches: then others, from which it learns again."""
    same_one = images(1).expand(16, -1, -1, -1)
    monkeypatch.setattr(guarding, "PAUSE_IMAGES", 48)
    monkeypatch.setattr(guarding, "MOVED", 10.0)
    guard = Guard(dominance=0.3, every=10**6)
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=guard)
    logits = [held(same_one) for _ in range(7)]
    assert [(event["image"], event["action"]) for event in held.events] == [(64, "pause")]
    assert held.updates == 4
    assert all(torch.equal(y, sure_model(same_one)) for y in logits[4:])
    learned = {name: p.clone() for name, p in held.adapted.items()}
    assert any(not torch.equal(p, held.method.start["params"][name]) for name, p in learned.items())  # and it stays
    varied = images(64)[sure_model(images(64)).argmax(1).unique(return_inverse=True)[1].argsort()][::4]
    held(varied)
    assert held.updates == 5
    assert "1 x pause" in guard_words([{"method": "tent", "domain": "x", "events": held.events}])


def test_the_batch_that_shows_one_class_again_is_not_learned_from(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "PAUSE_IMAGES", 64)
    monkeypatch.setattr(guarding, "MOVED", 10.0)
    guard = Guard(dominance=0.3, every=10**6)
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=guard)
    same_one = images(1).expand(64, -1, -1, -1)
    held(same_one)
    learned = copy.deepcopy(held.method.state_dict())
    for _ in range(5):
        held(same_one)
    assert [event["image"] for event in held.events] == [64, 192, 320]
    assert same(held.method.state_dict()["params"], learned["params"])
    assert same(held.method.state_dict()["optimizer"], learned["optimizer"])


def test_a_source_that_is_sure_of_nothing_does_not_tell_of_one_class(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "MOVED", 10.0)
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=Guard(dominance=0.3, sure=1 - 1e-9, every=10**6))
    for _ in range(6):
        held(images(1).expand(16, -1, -1, -1))
    assert not held.events


def test_a_collapsed_method_is_not_taken_for_a_stream_of_one_class(sure_model):
    held = mgtta.guarded(Bent(sure_model), Guard(policy="slow", sure=0.3, every=64, images=16, dominance=0.9))
    for x in stream(12, batch=16):
        held(x)
    assert {event["action"] for event in held.events} == {"slow"}


def test_anchors_serve_where_the_batch_says_nothing(sure_model):
    anchors = images(16, seed=5)
    guard = Guard(policy="source", sure=0.3, every=8, images=8, anchors=anchors)
    held = mgtta.guarded(Bent(sure_model), guard)
    grey = torch.full((8, 3, 32, 32), 0.5)
    source = held._ask
    # the source is sure only of anchors
    held._ask = lambda model, x: torch.zeros(len(x), CLASSES) if len(x) == 8 else source(model, x)
    for _ in range(6):
        held(grey)
    assert held.events


def test_a_source_that_is_unsure_allows_more():
    assert excess(1, 0, 20, 0.01) == pytest.approx(5)
    assert excess(1, 20, 20, 0.01) == pytest.approx(5 / 3)
    watch = Watch()
    for _ in range(100):
        watch.look = [64.0, 64 * 0.08, 0.0]
        watch.end_look()
    assert watch.weight == pytest.approx(WINDOW)
    assert watch.share == pytest.approx(0.08)
    assert watch.alarming(0.01)
    assert not watch.alarming(0.08)
    watch.look = [64.0, 0.0, 64.0]  # noise
    assert watch.share == pytest.approx(0.08)
    watch.look = [64.0, 64.0, 0.0]  # half a look is heard as well
    assert watch.share == pytest.approx(0.54)


def test_what_counts_as_lost():
    asked = torch.tensor([[9.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.1, 0.0, 0.0], [9.0, 0.0, 0.0], [float("nan")] * 3])
    logits = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [float("nan")] * 3, [1.0, 0, 0]])
    lost, sure = what_is_lost(asked, logits, 0.9)
    assert sure.tolist() == [True, True, False, True, False]
    assert lost.tolist() == pytest.approx([0, 1, 0, 1, 0], abs=1e-3)


def test_a_class_that_most_images_are_given_counts_where_the_source_is_unsure():
    asked = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    lost, sure = what_is_lost(asked, logits, 0.9, top=1)
    assert sure.tolist() == [True, False, False]
    q = asked.softmax(-1)
    assert lost.tolist() == pytest.approx([float(q[0, 0] - q[0, 1]), 0, 0])


def test_events_are_in_the_records(sure_model):
    held = mgtta.guarded(Bent(sure_model), Guard(sure=0.3, every=16, images=16))
    batches = [_batch(x, domain) for domain in ("a", "b") for x in stream(4, batch=16)]
    records = mgtta.evaluate(held, batches, reset="never")
    assert sum((record.events for record in records), []) == held.events
    assert records[0].events


def test_the_report_tells():
    event = {"action": "slow", "image": 9}
    record = {"method": "tent", "domain": "f|og", "events": [event, event, {"action": "source"}, {"action": "?"}, 5]}
    assert guard_words([record, {"method": "a"}]) == " The guard acted (tent on f?og: 2 x slow, 1 x source)."
    assert guard_words([{"events": None}, {"events": []}]) == ""


def _batch(x, domain):
    from mgtta.data.streams import Batch

    return Batch(x, None, domain, torch.arange(len(x)))


def test_copies_pickles_and_other_dtypes(sure_model):
    held = mgtta.create("eta", sure_model, guard=OFTEN)
    held(images(4))
    for twin in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert torch.equal(twin(images(4, seed=1)), copy.deepcopy(held)(images(4, seed=1)))
    held.double()
    assert held(images(4, seed=2)).dtype == torch.float64
    shared = dict(held.source.named_parameters())
    own = dict(held.model.named_parameters())
    assert all((shared[name] is own[name]) == (name not in held.adapted) for name in own)


def test_in_and_out_of_inference_mode(sure_model):
    held = mgtta.create("eta", sure_model, guard=OFTEN)
    with torch.inference_mode():
        for x in stream(4):
            held(x)
        state = held.state_dict()
    for x in stream(4):
        held(x)
    held.load_state_dict(state)
    assert held(images(4)).isfinite().all()


def test_a_look_takes_as_many_batches_as_it_needs(sure_model):
    held = mgtta.create("tent", sure_model, guard=Guard(every=100, images=6))
    asked = []
    ask = held._ask
    held._ask = lambda model, x: asked.append(len(x)) or ask(model, x)
    for x in stream(10, batch=2):
        held(x)
    assert asked[:3] == [2, 2, 2]  # begins with the second batch
    assert len(asked) < 10


def test_states_that_do_not_fit(sure_model):
    held = mgtta.create("tent", sure_model, guard=True)
    held(images(4))
    before = held.state_dict()
    strangers = [
        mgtta.create("tent", sure_model).state_dict(),
        mgtta.create("eta", sure_model, guard=True).state_dict(),
        {**before, "guard": {}},
        {**before, "guard": None},
        {**before, "guard": {**before["guard"], "images": "many"}},
        {**before, "guard": {**before["guard"], "snapshot": {"params": {}}}},
        {**before, "guard": {**before["guard"], "anchors": torch.zeros(2)}},
    ]
    for state in strangers:
        with pytest.raises(ValueError, match="state"):
            held.load_state_dict(state)
        assert same(held.state_dict(), before)


def test_what_is_no_batch_is_refused_as_without_a_guard(sure_model):
    held = mgtta.create("tent", sure_model, guard=True)
    with pytest.raises(TypeError, match="not NoneType"):
        held(None)
    with pytest.raises(ValueError, match="the batch is empty"):
        held(images(4)[:0])
    assert held.watch == Watch()


def test_settings_are_checked(sure_model):
    with pytest.raises(ValueError, match=r"unknown policy of a guard 'stop'; valid: rollback, slow, source"):
        Guard(policy="stop")
    for wrong in ({"tolerance": 0.0}, {"every": 0}, {"policy": ()}, {"sure": 1.5}):
        with pytest.raises(ValueError):
            Guard(**wrong)
    with pytest.raises(TypeError, match="guard must be True"):
        mgtta.create("tent", sure_model, guard="yes")
    held = mgtta.create("tent", sure_model, guard=True)
    with pytest.raises(ValueError, match="guarded already"):
        mgtta.guarded(held)


def test_a_guard_over_several_ranks_is_refused():
    with pytest.raises(ValueError, match="cannot run over several ranks"):
        mgtta.create("tent", mgtta.load_model(confident_vit()), guard=True, process_group=object())
