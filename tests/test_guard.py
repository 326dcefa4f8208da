"""The guard: it leaves a sound method alone, answers with the source while one fails, and is saved with the method."""

import copy
import math
import pickle

import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, convnet, images
from test_methods import make, same, stream, suitable

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.adaptation import guarded as guarding
from mgtta.adaptation.content import has_content
from mgtta.adaptation.guarded import Guard, Guarded
from mgtta.adaptation.method import Method
from mgtta.adaptation.step import Pass
from mgtta.adaptation.turns import FEW_IMAGES
from mgtta.adaptation.watch import CREDIT, OF_SOURCE, Watch, blended, repeats, what_is_lost
from mgtta.data.corruptions import CORRUPTIONS, corrupt
from mgtta.data.glyphs import Glyphs
from mgtta.methods.registry import recipes
from mgtta.report.alarms import guard_words

OFTEN = Guard(every=4)
RATE = 1.0


class Bent(Method):
    """A method that pulls every prediction to the class that the source gives least often."""

    def __init__(self, model, rate=RATE):
        super().__init__(model)
        self.learns(mgtta.norm_parameters, lambda params: torch.optim.SGD(params, lr=rate))
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
    watched = mgtta.guarded(guarded.method, Guard(every=4, tolerance=0.999, doubt=1.0))
    watched.watch.lost = [0.0] * 64  # as if much were known
    watched.watch.of_source = watched.watch.of_method = list(range(64))
    plain = copy.deepcopy(guarded.method)
    assert all(torch.equal(watched(x), plain(x)) for x in stream(6))
    mine = watched.method.state_dict()
    theirs = plain.state_dict()
    for state in (mine, theirs):
        while "counters" not in state:
            state = state["method"]
        state["counters"].pop("seconds")
    assert same(mine, theirs)


def test_a_collapse_is_seen_and_the_source_answers(sure_model):
    plain = Bent(sure_model)
    held = mgtta.guarded(Bent(sure_model))
    fine = []
    for x in stream(12, batch=16):
        plain(x)
        fine.append(agreement(held(x), sure_model, x))
    assert agreement(plain.predict(images(64)), sure_model, images(64)) < 0.5
    assert sum(fine) / len(fine) > 0.9
    first = held.events[0]
    assert first["action"] == "slow"
    assert first["harm"] > Guard().tolerance
    assert {"lost", "repeats", "repeats of the source", "pace"} <= first.keys()
    assert held.optimizer.param_groups[0]["lr"] == pytest.approx(held.watch.pace * RATE)
    held.reset()
    assert held.optimizer.param_groups[0]["lr"] == RATE
    assert held.watch == Watch()


def test_after_an_alarm_the_source_answers_until_the_method_is_trusted(sure_model):
    held = mgtta.guarded(Bent(sure_model, rate=0.3), Guard(slower=0.002))
    answers = []
    for x in stream(40, batch=16):
        shadow = held.watch.shadow
        answers.append((shadow, agreement(held(x), sure_model, x)))
        if held.watch.shadow:
            held.watch.of_method = list(range(len(held.watch.lost)))  # as if what is learned spread the predictions
    actions = [event["action"] for event in held.events]
    assert actions[:2] == ["slow", "trust"]
    assert all(agreed == 1 for shadow, agreed in answers if shadow)
    trusted = held.events[1]
    assert trusted["image"] - held.events[0]["image"] >= guarding.TRUST_IMAGES
    assert trusted["harm"] < -Guard().tolerance / 2


def test_a_method_that_does_no_good_is_not_trusted_again(sure_model):
    held = mgtta.guarded(Bent(sure_model, rate=0.05), Guard(slower=1e-6))
    for x in stream(40, batch=16):
        held(x)
    assert [event["action"] for event in held.events] == ["rest"]  # it would learn too slowly
    held = mgtta.create("tent", sure_model, lr=0.0, guard=True)
    held.watch.shadow = True
    for x in stream(20, batch=16):
        held(x)
    assert held.watch.shadow


def test_a_method_that_fails_again_and_again_rests(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "REST_IMAGES", 32)
    held = mgtta.guarded(Bent(sure_model), Guard(slower=1.0))
    updates = []
    for x in stream(40, batch=16):
        held.watch.shadow = False  # trusted at once
        held(x)
        updates.append(held.updates)
    actions = [event["action"] for event in held.events]
    assert actions[: guarding.FAILURES] == ["slow"] * (guarding.FAILURES - 1) + ["rest"]
    rests = [event["image"] for event in held.events if event["action"] == "rest"]
    assert len(rests) > 1
    assert rests[1] - rests[0] >= 32
    assert held.watch.rests == len(rests)
    assert updates == sorted(updates)  # counts are never rolled back
    assert len(set(updates)) < len(updates)  # nothing is learned during a rest


def test_during_a_rest_the_source_predicts_and_nothing_is_learned(sure_model):
    held = mgtta.create("tent", sure_model, lr=0.1, guard=True)
    held(images(16))
    held.watch.rest_until = 1000
    before = held.updates
    x = images(16, seed=5)
    assert torch.equal(held(x), sure_model(x))
    assert torch.equal(held.predict(x), sure_model(x))
    assert held.updates == before
    assert not held.learning


def test_logits_that_are_not_finite_are_an_alarm(sure_model):
    held = mgtta.create("tent", sure_model, guard=True)
    held(images(16))
    with torch.no_grad():
        next(iter(held.adapted.values())).fill_(float("nan"))
    x = images(16, seed=1)
    assert torch.equal(held(x), sure_model(x))
    assert [event["action"] for event in held.events] == ["slow"]
    assert all(p.isfinite().all() for p in held.adapted.values())


def test_the_first_batch_of_a_start_is_not_asked_about(sure_model):
    held = mgtta.create("tent", sure_model, guard=True)
    asked = watched(held)
    held(images(16))
    assert asked == []
    held(images(16, seed=1))
    assert asked == [16 + 8]  # eight of them also moved


def test_small_batches_are_all_asked_about_at_first_and_rarely_later(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "EARLY_IMAGES", 64)
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=Guard(every=256))
    asked = watched(held)
    counts = []
    for x in stream(60, batch=16):
        held(x)
        counts.append(sum(asked))
    assert counts[6] == 6 * (16 + 8)  # all but the first
    assert counts[59] - counts[29] <= 4 * (16 + 8)  # in 480 images


def test_of_large_batches_a_sample_is_asked_about_now_and_then(sure_model, monkeypatch):
    monkeypatch.setattr(Watch, "compare", lambda watch, steady: None)  # however steady the source is
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=Guard(every=256, doubt=1.0))
    asked = watched(held)
    at = []
    for k, x in enumerate(stream(14, batch=64)):
        held.watch.lost = [Guard().tolerance] * len(held.watch.lost)
        held(x)
        if len(asked) > len(at):
            at.append(k)
    assert asked == [32 + 8] * len(at)
    assert at == [1, 2, 4, 8, 12]  # the pauses double up to 256 images


def test_large_batches_are_asked_about_the_more_rarely_the_less_the_models_differ(sure_model):
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=True)
    pauses = []
    for part in (2.0, 0.5, 0.25, 0.0):
        held.watch.lost = [part * Guard().tolerance] * 64
        pauses.append(held._pause(64) / Guard().every)
    assert pauses == pytest.approx([1, 1, 2, guarding.LONGEST_PAUSE])


def test_in_doubt_the_source_is_asked_about_all_images(sure_model):
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=Guard(tolerance=0.9, doubt=1e-6))
    asked = watched(held)
    held(images(64))
    with torch.no_grad():
        for p in held.adapted.values():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    held(images(64, seed=1))
    assert held.watch.doubted
    x = images(64, seed=2)
    logits = held(x)
    assert asked == [32 + 8, 64 + 8]
    assert torch.allclose(logits.exp().sum(1), torch.ones(64))  # the logarithm of a mean of probabilities
    assert not held.events


def test_the_sample_of_a_large_batch_is_fair(sure_model):
    reference = mgtta.create("tent", sure_model, guard=True).reference
    counts = torch.zeros(64)
    for seed in range(400):
        which = reference.sample(64, seed)
        assert len(which.unique()) == 32
        counts[which] += 1
    assert 150 < counts.min() <= counts.max() < 250
    assert torch.equal(reference.sample(64, 7), reference.sample(64, 7))
    assert [len(reference.sample(n, 0)) for n in (1, 32, 40, 256)] == [1, 32, 32, 32]


def test_of_large_batches_the_source_answers_all_images_after_an_alarm(sure_model):
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=True)
    held(images(64))
    with torch.no_grad():
        for p in held.adapted.values():
            p.zero_()
    x = images(64, seed=1)
    assert torch.equal(held(x), sure_model(x))
    assert held.watch.shadow


def test_a_good_state_is_kept_and_restored(sure_model):
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=Guard(every=16))
    for x in stream(34, batch=16):
        held(x)
    assert held.watch.snapshot is not None
    with torch.no_grad():
        next(iter(held.adapted.values())).fill_(float("nan"))
    held(images(16, seed=7))
    assert held.watch.snapshot is None
    moved = [float((p.detach() - p0).abs().max()) for p, p0 in zip(held.adapted.values(), held.origin, strict=True)]
    assert 0 < max(moved) < 1e-3  # what was learned is still there


def test_the_learning_rate_rises_again_after_calm(sure_model, monkeypatch):
    monkeypatch.setattr(guarding, "CALM_IMAGES", 128)
    held = mgtta.create("tent", sure_model, lr=1e-6, guard=Guard(every=16))
    held.watch.pace = 0.1
    held._set_rates()
    for x in stream(14, batch=16):
        held(x)
    assert held.watch.pace == 1.0
    assert held.optimizer.param_groups[0]["lr"] == 1e-6


def test_a_guarded_method_gathers_small_batches(sure_model):
    assert mgtta.create("tent", sure_model, guard=True).method.images == FEW_IMAGES
    held = mgtta.create("tent", sure_model, gather=0, guard=True)
    held(images(1))
    assert held.updates == 1
    still = mgtta.create("noadapt", sure_model, guard=True)
    assert torch.equal(still(images(2)), sure_model(images(2)))


def test_batch_norm_is_compared_with_what_normalises_alike():
    model = mgtta.load_model(convnet("batch"))
    held = mgtta.create("tent", model, lr=0.0, guard=Guard(every=4))
    assert held.reference.by_batch(16)
    assert len(held.reference.sample(256, 0)) == 256
    assert not held.reference.by_batch(4)
    for x in stream(6, batch=32):
        held(x)
    assert held.watch.lost
    assert max(held.watch.lost) < 1e-4  # nothing was learned: nothing that the judge values is lost
    assert held.watch.of_source == held.watch.of_method


# --- the estimate


def test_the_source_model_shares_the_weights_that_the_fast_path_keeps_unrounded():
    held = make("mgtta_plus", mgtta.load_model(convnet("batch")), guard=True, precision="bf16")
    kept = held.model.full_precision
    assert kept
    assert held.reference.source.full_precision is kept
    assert held.reference.unlearned.full_precision is kept


def test_what_is_lost_by_the_source_s_own_judgement():
    asked = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, 1.0, 0.0], [float("nan"), 0.0, 0.0]])
    lost, sure, of_source, of_method = what_is_lost(asked, None, logits)
    q = asked.softmax(-1)
    assert lost.tolist() == pytest.approx([float(q[0, 0] - q[0, 1]), 0, float(q[2, 0])])
    assert torch.equal(sure, q.amax(-1))
    assert of_source.tolist() == [0, 1, 0]
    assert of_method.tolist()[:2] == [1, 1]
    own = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    lost, *rest = what_is_lost(asked, own, logits)
    assert lost.tolist() == pytest.approx([0, float(q[1, 2] - q[1, 1]), float(q[2, 0])])
    assert torch.equal(rest[0], sure)
    assert rest[1].tolist() == [0, 1, 0]


def test_a_blended_answer_is_the_mean_of_both_probabilities():
    asked = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.5]])
    logits = torch.tensor([[0.0, 4.0, 1.0], [0.0, 5.0, 0.5]])
    mean = OF_SOURCE * asked.softmax(-1) + (1 - OF_SOURCE) * logits.softmax(-1)
    torch.testing.assert_close(blended(asked, logits), mean.log())
    small = blended(asked, logits / 1000)  # as if the method scaled its logits down
    assert torch.equal(small.argmax(1), mean.argmax(1))
    assert small.softmax(-1).amax(1).min() > 0.45  # far from equal chances
    flat = blended(asked, torch.zeros(2, 3))
    assert torch.equal(flat.argmax(1), asked.argmax(1))


def test_in_doubt_the_answer_is_blended(sure_model):
    held = mgtta.create("tent", sure_model, lr=1e-6, gather=0, guard=True)
    plain = mgtta.create("tent", sure_model, lr=1e-6, gather=0)
    known = {"lost": [0.0] * 64, "of_source": list(range(64)), "of_method": list(range(64))}
    xs = stream(4, batch=16)
    for k, x in enumerate(xs):
        if k == 2:
            vars(held.watch).update(known)
        if k == 3:
            held.watch.lost = [0.02] * 64
        answer = held(x)
        of_method = plain(x)
        if k in (0, 2):  # the method is still the source; enough is known, and nothing is lost
            assert torch.equal(answer, of_method)
        else:  # hardly anything is known; something may be lost
            torch.testing.assert_close(answer, blended(sure_model(x), of_method))
    assert not held.events


def test_repeats_are_the_chance_of_one_class():
    classes = [1, 1, 1, 2, 3]
    pairs = [(a, b) for i, a in enumerate(classes) for j, b in enumerate(classes) if i != j]
    assert repeats(classes) == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    assert repeats([4]) == repeats([]) == 0


def test_harm_falls_where_predictions_spread_and_rises_where_they_gather():
    n = 64
    half = torch.full((n,), 0.5)  # as sure as it is steady, or less
    watch = Watch()
    watch.take(torch.full((n,), 0.05), half, torch.arange(n) % 16, torch.arange(n) % 24, window=256)
    least = 4 / (n * (n - 1) / 2)
    spread = math.log((repeats([k % 16 for k in range(n)]) + least) / (repeats([k % 24 for k in range(n)]) + least))
    assert 0.5 < spread < 1
    assert watch.harm() == pytest.approx(0.05 - CREDIT * spread)

    watch = Watch()
    watch.take(torch.full((n,), 0.05), half, torch.arange(n) % 32, torch.arange(n) % 8, window=256)
    assert watch.harm() == pytest.approx(0.1)  # repeats double what is lost, at most
    assert watch.alarming(0.03)
    assert not watch.alarming(0.04)


def test_spread_predictions_make_up_for_little():
    n = 256
    watch = Watch()
    one_class = torch.zeros(n, dtype=torch.long)
    watch.take(torch.full((n,), 0.2), torch.full((n,), 0.5), one_class, torch.arange(n), window=n)
    assert watch.harm() == pytest.approx(0.2 - CREDIT)
    assert watch.alarming(0.04)


def test_less_is_lost_where_the_source_is_surer_than_it_is_steady():
    n = 64
    watch = Watch()
    watch.take(torch.full((n,), 0.2), torch.full((n,), 0.9), torch.arange(n), torch.arange(n), window=n)
    assert watch.harm() == pytest.approx(0.2 * 0.6 / 0.9)  # 0.6: what a steadiness begins with


def test_repeats_say_nothing_where_nothing_is_lost():
    watch = Watch()
    watch.take(torch.zeros(64), torch.ones(64), torch.arange(64), torch.zeros(64, dtype=torch.long), window=256)
    assert watch.harm() == 0


def test_few_images_are_given_more_slack():
    assert Watch().tolerated(0.05, 128) == pytest.approx(0.1)
    assert Watch().tolerated(0.05, 256) < Watch().tolerated(0.05, 32)


def test_less_is_tolerated_where_the_source_is_steady():
    classes = torch.arange(100)
    steady = Watch()
    steady.compare(classes == classes)
    assert steady.steadiness > 0.9
    assert steady.tolerated(0.04, 128) < 0.1 * Watch().tolerated(0.04, 128)
    shaky = Watch()
    shaky.compare(classes == classes + 1)
    assert shaky.tolerated(0.04, 128) == Watch().tolerated(0.04, 128)  # never more


def test_the_source_is_asked_about_moved_images_too(sure_model):
    held = mgtta.create("tent", sure_model, guard=True)
    x = images(16)
    both = sure_model(torch.cat([x, x[:8].roll((1, 1), (2, 3))])).detach()
    everything = torch.arange(16)
    asked = held.reference.ask(x, everything)
    assert torch.equal(asked.judge, both[:16])
    assert asked.own is asked.judge
    assert torch.equal(asked.steady, both[:8].argmax(1) == both[16:].argmax(1))


def test_in_a_network_of_batch_norms_the_source_is_also_asked_as_it_predicts_by_itself():
    model = mgtta.load_model(convnet("batch"))
    method = mgtta.create("tent", model, guard=True)
    x = images(16)
    asked = method.reference.ask(x, torch.arange(16))
    torch.testing.assert_close(asked.judge, method.reference.unlearned(x).detach())
    own = model(torch.cat([x, x[:8].roll((1, 1), (2, 3))])).detach()
    assert torch.equal(asked.own, own[:16])
    assert torch.equal(asked.steady, asked.judge[:8].argmax(1) == own[16:].argmax(1))
    assert not torch.allclose(asked.judge, asked.own)


def test_a_gain_over_the_source_by_itself_is_no_harm():
    """Even if the judge would rather have its own predictions."""
    watch = Watch()
    judge = torch.eye(4).repeat(8, 1) * 3
    by_itself = torch.zeros(32, 4)  # class 0
    method = judge.clone()
    method[:4] = method[:4].roll(1, 1)  # an eighth is predicted otherwise than by the judge
    for own, harmful in ((None, True), (by_itself, False)):
        watch.forget()
        watch.take(*what_is_lost(judge, own, method), window=256)
        assert (watch.harm() > 0.05) == harmful
        assert watch.harm() == pytest.approx(watch.mean_lost(32), abs=0.02)


def test_the_window_keeps_the_last_images():
    watch = Watch()
    watch.take(torch.arange(10.0), torch.arange(10.0), torch.arange(10), torch.arange(10), window=4)
    assert watch.lost == watch.sure == [6, 7, 8, 9]
    assert watch.of_source == watch.of_method == [6, 7, 8, 9]


# --- images without content


def test_content_is_seen_under_every_corruption():
    x = Glyphs(40).tensors()[0]
    for name in CORRUPTIONS:
        assert has_content(corrupt(x, name)).float().mean() > 0.9, name
    assert has_content(x).all()
    assert has_content(x.float() / 255).all()


def test_plain_images_and_random_pixels_have_no_content():
    grey = torch.full((4, 3, 48, 48), 128, dtype=torch.uint8)
    noise = torch.randint(256, (50, 3, 48, 48), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert not has_content(grey).any()
    assert not has_content(noise).any()
    assert not has_content(noise.float() / 255).any()
    assert has_content(torch.randn(4, 7)).all()  # not an image: nothing is said


def test_images_without_content_are_answered_by_the_source_and_not_learned_from():
    model = mgtta.load_model("glyphs_vit")
    x = corrupt(Glyphs(32).tensors()[0], "fog")
    grey = torch.full_like(x[:16], 128)
    held = mgtta.create("mgtta", model, source="glyphs_vit", guard=True)
    plain = mgtta.create("mgtta", model, source="glyphs_vit")
    for part in (x[:16], x[16:]):
        mixed = torch.cat([grey[:8], part, grey[:8]])
        logits = held(mixed)
        torch.testing.assert_close(logits[:8], model(grey[:8]).detach())
        plain(part)
        torch.testing.assert_close(held.predict(part), plain.predict(part))
    held(grey)
    assert held.updates == 2


# --- a method like any other


def test_events_are_in_the_records(sure_model):
    held = mgtta.guarded(Bent(sure_model))
    batches = [_batch(x, domain) for domain in ("a", "b") for x in stream(4, batch=16)]
    records = mgtta.evaluate(held, batches, reset="never")
    assert sum((record.events for record in records), []) == held.events
    assert records[0].events


def test_the_report_tells():
    event = {"action": "slow", "image": 9}
    record = {"method": "tent", "domain": "f|og", "events": [event, event, {"action": "rest"}, {"action": "?"}, 5]}
    assert guard_words([record, {"method": "a"}]) == " The guard acted (tent on f?og: 2 x slow, 1 x rest)."
    assert guard_words([{"events": None}, {"events": []}]) == ""


def watched(held):
    """Return the numbers of images that the source will be asked about."""
    asked = []
    for model in held.reference.children():
        model.register_forward_pre_hook(lambda _, inputs: asked.append(len(inputs[0])))
    return asked


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
    shared = dict(held.reference.source.named_parameters())
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
        {**before, "guard": {**before["guard"], "lost": [0.5]}},
        {**before, "guard": {**before["guard"], "doubted": "a"}},
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
    for wrong in ({"tolerance": 0.0}, {"every": 0}, {"slower": 2.0}, {"window": 8}):
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
