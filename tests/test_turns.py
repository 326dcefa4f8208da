"""Streams whose classes come in turn, on networks with BatchNorm."""

import copy

import pytest
import torch
from conftest import convnet, images
from test_blended import BARE, one_by_one, plus, set_one_by_one
from test_nested import Outer
from torch import nn

import mgtta
from mgtta.adaptation.gathered import Gathered
from mgtta.adaptation.normalising import BY_IMAGE_RATE
from mgtta.adaptation.recalled import Recalled
from mgtta.adaptation.turns import (
    ASKED_BATCHES,
    ASKED_EVERY,
    BACK,
    BACK_BATCHES,
    BY_BATCH,
    DEVIATIONS,
    FEW_IMAGES,
    LEAST_BATCHES,
    ONE_BY_ONE,
    Turns,
    change,
    mean_and_chance,
)
from mgtta.adaptation.wrapper import Log, find, innermost
from mgtta.serve.stream import Stream
from mgtta.serve.template import stream_copy

CLASSES = 4


def predictions(classes, sure=4.0, seed=0):
    """Logits (n, C) of images of these classes; some are predicted wrongly."""
    noise = torch.randn(len(classes), CLASSES, generator=torch.Generator().manual_seed(seed))
    return sure * nn.functional.one_hot(torch.as_tensor(classes), CLASSES) + noise


def mixed(n, seed=0):
    return torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(seed))


class Following(Turns):
    """Turns that note how the answer changed, and by what change."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def take(self, by_batch, one_by_one=None):
        """Follow a batch as Gathered does, and decide."""
        self.follow(None if self.come else by_batch, one_by_one)
        change = self.decide()
        if change is not None:
            self.noted.append((self.come, change))

    @property
    def answers(self):
        return [come for come, _ in self.noted]


def followed(*batches):
    """What is known after these batches, of which one_by_one is only told where classes come in turn."""
    turns = Following()
    for seed, classes in enumerate(batches):
        logits = predictions(classes, seed=seed)
        turns.take(logits, logits if turns.come else None)
    return turns


def in_turn(n, batches):
    """Classes of batches that have one class each."""
    return [[k % CLASSES] * n for k in range(batches)]


def test_the_change_is_that_of_the_formula():
    turns = Following()
    batches = [predictions(mixed(n, seed=n), seed=n) for n in (16, 21)]
    for batch in batches:
        turns.take(batch)
    means = []
    chances = []
    for batch in batches:
        rows = batch.softmax(1).tolist()
        columns = list(zip(*rows, strict=True))
        mean = [sum(column) / len(rows) for column in columns]
        means.append(mean)
        squares = [sum((p - m) ** 2 for p in column) for column, m in zip(columns, mean, strict=True)]
        chances.append([square / (len(rows) * (len(rows) - 1)) for square in squares])
    moved = sum((a - b) ** 2 for a, b in zip(*means, strict=True))
    chance = [a + b for a, b in zip(*chances, strict=True)]
    classes = sum(chance) ** 2 / sum(e**2 for e in chance)
    limit = max(BY_BATCH, 1 + DEVIATIONS * (2 / classes) ** 0.5)
    assert turns.by_batch.changes == pytest.approx([moved / sum(chance) / limit])
    assert turns.one_by_one.changes == []


def test_classes_in_turn_are_noticed_and_mixed_ones_are_not():
    assert not followed(*[mixed(64, seed=k) for k in range(20)]).come
    assert not followed(*[[1] * 64] * 20).come  # a model that predicts one class for all
    assert followed(*in_turn(64, 20)).come


@pytest.mark.parametrize("classes", [2, 4, 10, 100])
def test_mixed_classes_are_hardly_ever_taken_for_turns(classes):
    """However few classes there are: by chance some follow one another."""
    wrong = 0
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        turns = Following()
        for _ in range(40):
            labels = torch.randint(classes, (32,), generator=random)
            logits = 6.0 * nn.functional.one_hot(labels, classes) + torch.randn(32, classes, generator=random)
            turns.take(logits, logits if turns.asks else None)
        wrong += len(turns.answers)
    assert wrong <= 2  # one of 20 streams, and back again


def test_a_model_that_predicts_few_classes_until_the_next_shift_is_not_taken_for_turns():
    """Under a shift a model may predict few classes, and under the next one others."""
    shifts = [[[k, k, k + 1, k + 2] * 16] * 9 for k in (0, 1, 0, 1)]
    assert not followed(*[batch for shift in shifts for batch in shift]).answers


def test_nothing_is_decided_before_enough_batches_are_known():
    assert not followed(*in_turn(64, LEAST_BATCHES)).come
    assert followed(*in_turn(64, LEAST_BATCHES + 1)).come


def test_classes_that_are_mixed_again_are_noticed():
    turns = followed(*in_turn(64, 20), *[mixed(64, seed=k) for k in range(2 * BACK_BATCHES)])
    assert not turns.come
    assert turns.answers == [True, False]
    assert turns.noted[0][1] > 1 > BACK > turns.noted[1][1]


@pytest.mark.parametrize(("more", "answers"), [(8, []), (16, [True]), (24, [True])])
def test_a_weak_order_of_classes_does_not_go_back_and_forth(more, answers):
    """Of the 64 images of a batch, so many are of one class, another one in each batch; the rest are mixed."""
    turns = Following()
    for seed in range(60):
        classes = [seed % CLASSES] * more + mixed(64 - more, seed=seed).tolist()
        logits = predictions(classes, seed=seed)
        turns.take(logits, logits if turns.asks else None)
    assert turns.answers == answers


def test_images_one_by_one_show_turns_that_a_batch_hides():
    turns = Following()
    for seed, classes in enumerate(in_turn(64, 6)):
        hidden = predictions(mixed(64, seed=seed), seed=seed)  # normalised by one class, they look like all
        turns.take(hidden, predictions(classes, seed=seed) if turns.asks else None)
    assert turns.come


def test_what_the_source_said_long_ago_does_not_count_when_it_is_asked_anew():
    turns = Following()
    rounds = 3
    for k in range(rounds * ASKED_EVERY + ASKED_BATCHES):
        shown = mixed(64, seed=k) if k < rounds * ASKED_EVERY else [k % CLASSES] * 64
        turns.take(predictions(mixed(64, seed=k), seed=k), predictions(shown, seed=k) if turns.asks else None)
    assert turns.answers == [True]


def test_images_are_asked_about_at_the_start_and_now_and_then():
    turns = Following()
    asked = []
    for k in range(ASKED_EVERY + 2):
        if turns.asks:
            asked.append(k)
        turns.take(predictions(mixed(64, seed=k), seed=k))
    assert asked == [*range(ASKED_BATCHES), ASKED_EVERY, ASKED_EVERY + 1]


def test_a_model_that_predicts_all_images_alike_may_learn():
    turns = Following()
    for k in range(12):
        turns.take(torch.tensor([[1.0 + 0.01 * k, 0.0, 0.0, 0.0]]).expand(64, -1))
    assert not turns.come


def test_predictions_that_are_not_finite_are_left_out():
    whole = [predictions(mixed(64, seed=seed), seed=seed) for seed in range(2)]
    torn = [torch.cat([torch.full((3, CLASSES), float("nan")), logits]) for logits in whole]
    found = []
    for batches in (whole, torn):
        turns = Following()
        for logits in batches:
            turns.take(logits)
        found += turns.by_batch.changes
    assert found[1] == pytest.approx(found[0])


@pytest.mark.parametrize("finite", [0, 1, FEW_IMAGES - 1])
def test_a_batch_of_which_little_is_finite_is_not_known(finite):
    turns = Following()
    for seed in range(6):
        logits = predictions(mixed(64, seed=seed), seed=seed)
        if seed == 3:
            logits[finite:] = float("nan")
        turns.take(logits)
        assert len(turns.by_batch.changes) == (0, 1, 2, 2, 2, 3)[seed]
        if seed == 3:
            again = Turns.loaded(turns.state())
            assert again.by_batch.last is None
    assert not turns.come


def test_other_classes_than_before_show_no_change():
    turns = Following()
    turns.take(predictions(mixed(64)))
    turns.take(torch.randn(64, CLASSES + 1))
    assert turns.by_batch.changes == []
    turns.take(torch.randn(64, CLASSES + 1))
    assert len(turns.by_batch.changes) == 1


def test_images_one_by_one_have_a_higher_limit():
    now, before = (mean_and_chance(predictions(mixed(64, seed=k), seed=k)) for k in range(2))
    turns = Following()
    for k in (1, 0):
        logits = predictions(mixed(64, seed=k), seed=k)
        turns.take(logits, logits)
    assert turns.by_batch.changes == [float(change(now, before, BY_BATCH))]
    assert turns.one_by_one.changes == [float(change(now, before, ONE_BY_ONE))]


def test_a_state_continues_where_it_was_taken():
    batches = in_turn(64, 9)
    whole = followed(*batches)
    half = Following.loaded(copy.deepcopy(followed(*batches[:4]).state()))
    for seed, classes in enumerate(batches[4:], 4):
        logits = predictions(classes, seed=seed)
        half.take(logits, logits if half.come else None)
    found = half.state()
    expected = whole.state()
    for series in ("by_batch", "one_by_one"):
        a, b = (state[series].pop("last") for state in (found, expected))
        assert a is b is None or torch.equal(a, b)
    assert found == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"come": 1},
        {"batches": -1},
        {"by_batch": {"last": torch.zeros(3, 3), "changes": []}},
        {"by_batch": {"last": torch.full((2, 3), float("nan")), "changes": []}},
        {"one_by_one": {"last": None, "changes": [None]}},
        {"one_by_one": {"last": None}},
        {"one_by_one": None},
    ],
)
def test_an_invalid_state_is_refused(wrong):
    with pytest.raises(ValueError, match="turns"):
        Turns.loaded({**followed(*in_turn(16, 3)).state(), **wrong})
    with pytest.raises(ValueError, match="turns"):
        Turns.loaded({})


@pytest.mark.parametrize("wrong", [{"images": -1}, {"events": [1]}, {"events": [{"image": 1}]}, {"more": 1}])
def test_an_invalid_log_is_refused(wrong):
    log = Log(3)
    log.note(3, "one by one", change=1.5)
    assert Log.loaded(log.state(), "gather") == log
    with pytest.raises(ValueError, match="invalid gather state"):
        Log.loaded({**log.state(), **wrong}, "gather")


def test_then_batches_are_predicted_and_learned_from_image_by_image():
    model, method = plus(lr=1e-2, **BARE)
    _, twin = plus(lr=1e-2 * BY_IMAGE_RATE, gather=0, **BARE)
    set_one_by_one(innermost(twin).model)
    x = images(32)
    method.normalisation.turns.come = True
    torch.testing.assert_close(method.predict(x), one_by_one(model)(x))
    torch.testing.assert_close(method(x), twin(x))
    for name, value in innermost(method).adapted.items():
        torch.testing.assert_close(value, dict(innermost(twin).adapted)[name])
    assert not innermost(method).statistics.images.any()
    method.reset()
    assert not method.normalisation.turns.come


def test_a_guard_asks_the_source_image_by_image_then():
    model, method = plus(**BARE, guard=True)
    method.method.normalisation.turns.come = True
    x = images(32)
    assert not method.reference.by_batch(32)
    asked = method.reference.ask(x, torch.arange(32))
    torch.testing.assert_close(asked.judge, one_by_one(model)(x))


class Colours(nn.Module):
    """Tells images by their brightest channel."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(CLASSES - 1)
        self.head = nn.Linear(CLASSES - 1, CLASSES)
        with torch.no_grad():
            self.head.weight.copy_(6 * torch.eye(CLASSES, CLASSES - 1))
            self.head.bias.zero_()

    def forward(self, x):
        return self.head(self.norm(x).mean((2, 3)))


def coloured(classes, seed):
    """Images (n, 3, 8, 8) of these classes, the last of which has no colour."""
    random = torch.Generator().manual_seed(seed)
    x = 0.3 * torch.rand(len(classes), CLASSES, 8, 8, generator=random)
    x[range(len(classes)), classes] += 0.5
    return x[:, :3]


def colour_stream(batches):
    return [coloured(classes, seed) for seed, classes in enumerate(batches)]


class ByConvolution(Colours):
    """The same with a convolution as its head, and a linear layer that is not one."""

    def __init__(self):
        super().__init__()
        self.last = nn.Conv2d(CLASSES - 1, CLASSES, 1)
        with torch.no_grad():
            self.last.weight.copy_(self.head.weight[:, :, None, None])
            self.last.bias.zero_()
        self.head = nn.Linear(CLASSES - 1, CLASSES - 1)

    def forward(self, x):
        x = self.norm(x).mean((2, 3))
        return self.last((x + 0 * self.head(x))[:, :, None, None]).flatten(1)


@pytest.fixture(scope="module")
def colours():
    return trained(Colours())


def trained(net):
    """The network as a model, and its source statistics."""
    clean = coloured(mixed(256), seed=99)
    net.train()
    net.norm.momentum = None  # the mean over all batches
    net(clean)
    model = mgtta.load_model(net.eval())
    return model, mgtta.source_statistics(model, clean)


def created(colours, recall=0, **settings):
    model, source = colours
    return mgtta.create("mgtta+", model, source=source, recall=recall, mirror=False, **settings)


def sorted_stream(batches, n=64):
    return colour_stream(in_turn(n, batches))


def actions(method):
    return [event["action"] for event in method.events]


def test_a_stream_of_one_class_after_another_is_not_spoilt(colours):
    sorted_classes = [[k % CLASSES] * 64 for k in range(16)]
    method = created(colours)
    right = 0
    for x, classes in zip(colour_stream(sorted_classes), sorted_classes, strict=True):
        right += int((method(x).argmax(1) == torch.tensor(classes)).sum())
    assert method.normalisation.turns.come
    assert actions(method) == ["one by one"]
    assert right > 0.8 * 64 * len(sorted_classes)
    mixed_classes = [mixed(64, seed=k).tolist() for k in range(2 * BACK_BATCHES)]
    for x in colour_stream(mixed_classes):
        method(x)
    assert actions(method) == ["one by one", "by batch"]


@pytest.mark.parametrize("gather", [16, 48, 64])
def test_batches_that_are_gathered_show_turns_too(colours, gather):
    method = created(colours, gather=gather)
    inner = innermost(method)
    step = inner.step
    learned = []  # whether images were normalised one by one, update by update

    def watched(x, learn=True, **more):
        if learn:
            learned.append(method.engine.by_image)
        return step(x, learn, **more)

    inner.step = watched
    for x in sorted_stream(16, n=32):
        method(x)
    assert actions(method) == ["one by one"]
    assert method.log.images == 16 * 32
    assert len(learned) == {16: 16, 48: 8, 64: 8}[gather]
    assert learned == sorted(learned)  # first by batch, then one by one
    assert learned[-1]
    assert not learned[0]


def test_a_spent_budget_still_follows_the_stream(colours):
    method = created(colours, max_updates=1)
    for x in colour_stream([[k % CLASSES] * 64 for k in range(8)]):
        method(x)
    assert method.updates == 1
    assert method.normalisation.turns.come


def test_a_new_domain_does_not_make_turns_forgotten(colours):
    model, source = colours
    method = mgtta.create("mgtta+", model, source=source, recall=2, mirror=False)
    method.method.normalisation.turns.come = True
    method._load(method._state())
    assert method.method.normalisation.turns.come
    method.reset()
    assert not method.method.normalisation.turns.come


@pytest.mark.parametrize("settings", [{}, {"guard": True}, {"recall": 2}, {"gather": 96}])
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9])
def test_resume_continues_bit_for_bit(colours, cut, settings):
    batches = sorted_stream(12)
    method = created(colours, **settings)
    for x in batches[:cut]:
        method(x)
    again = created(colours, **settings)
    again.load_state_dict(method.state_dict())
    for x in batches[cut:]:
        assert torch.equal(again(x), method(x))
    assert again.events == method.events
    assert "one by one" in actions(method)


def test_a_state_of_an_earlier_version_knows_nothing_of_turns(colours):
    method = created(colours)
    for x in sorted_stream(8):
        method(x)
    older = method.state_dict()
    for name in ("turns", "log"):
        del older["gather"][name]
    method.load_state_dict(older)
    assert not method.normalisation.turns.come
    assert method.events == []


@pytest.mark.parametrize("guard", [None, True])
def test_a_network_whose_head_is_a_convolution_loads_its_own_state(guard):
    method = created(trained(ByConvolution()), recentre=0.0, class_mix=False, guard=guard)
    for x in sorted_stream(3):
        method(x)
    method.load_state_dict(method.state_dict())
    if guard:
        method.watch.snapshot = method.method.snapshot()
        method._alarm()
    for x in sorted_stream(3):
        assert method(x).isfinite().all()


def test_one_image_that_is_not_finite_does_not_look_like_turns(colours):
    """Normalised by the batch, it spoils the predictions of all others."""
    method = created(colours)
    stream = colour_stream([(mixed(64, seed=k) % 2).tolist() for k in range(6)])
    stream[2][0] = float("nan")
    for x in stream:
        method(x)
    assert actions(method) == []
    assert method.skipped == 1


def test_an_export_has_the_sources_statistics_while_images_are_normalised_one_by_one(colours):
    model, _ = colours
    method = created(colours, recall=2)
    for k, x in enumerate(sorted_stream(6)):
        method(x)
        if k == 2:  # some of few classes are in the statistics, and recall keeps them
            assert not torch.equal(method.export().norm.running_mean, model.net.norm.running_mean)
            kept = method._state()
    assert actions(method) == ["one by one"]
    for _ in range(2):
        assert torch.equal(method.export().norm.running_mean, model.net.norm.running_mean)
        assert torch.equal(method.export().norm.running_var, model.net.norm.running_var)
        method._load(kept)
    assert innermost(method).statistics.images.any()


def test_statistics_of_few_classes_are_forgotten_at_a_change(colours):
    method = created(colours)
    for x in sorted_stream(4):
        method(x)
    assert innermost(method).statistics.images.any()
    assert torch.equal(method.export().norm.running_mean, colours[0].net.norm.running_mean)  # it decides first
    assert not innermost(method).statistics.images.any()


def test_the_source_model_is_moved_but_not_saved_with_the_method(colours):
    method = created(colours)
    outer = Outer(method)
    assert not any("unlearned" in name for name in outer.state_dict())
    assert str(outer.load_state_dict(outer.state_dict())) == "<All keys matched successfully>"
    outer.double()
    assert {p.dtype for p in method.normalisation.unlearned.parameters()} == {torch.float64}
    twin = copy.deepcopy(method)
    assert twin.normalisation.unlearned is not method.normalisation.unlearned


def test_a_guard_that_goes_back_keeps_what_was_noted(colours):
    method = created(colours, guard=True, recall=2)
    x = sorted_stream(8)
    method(x[0])
    early = method.method.snapshot()
    for batch in x[1:]:
        method(batch)
    inside = [find(method, kind).log for kind in (Gathered, Recalled)]
    known = copy.deepcopy(inside)
    assert "one by one" in actions(method)
    normalisation = find(method, Gathered).normalisation
    assert not early["method"]["gather"]["turns"]["come"]
    for state in (early, None):
        method._restore(state)
        assert inside == known
        assert "one by one" in actions(method)
        assert normalisation.turns.come
    method.reset()
    assert method.events == []
    assert not normalisation.turns.come
    assert find(method, Gathered).log == Log()


def test_images_that_pass_while_a_guard_rests_are_counted_by_all(colours):
    """So events stay in the order in which they happened."""
    method = created(colours, guard=True, recall=2)
    stream = sorted_stream(9)
    method(stream[0])
    method.watch.rest_until = 3 * 64
    for x in stream[1:3]:
        method(x)
    for x in stream[3:]:
        method(x)
    assert method.watch.images == find(method, Gathered).log.images == find(method, Recalled).log.images == 9 * 64
    [event] = [event for event in method.events if event["action"] == "one by one"]
    assert event["image"] > 3 * 64


def test_in_the_shadow_a_guard_answers_with_the_source_model_itself(colours):
    method = created(colours, guard=True)
    for x in sorted_stream(6):
        method(x)
    assert method.method.normalisation.turns.come
    method.watch.shadow = True
    x = coloured([0] * 64, seed=9)
    expected = colours[0](x)
    assert torch.equal(method.predict(x), expected)
    assert torch.equal(method(x), expected)


def test_a_state_of_a_network_that_blends_statistics_does_not_fit_one_that_does_not(colours):
    state = created(colours).state_dict()
    with pytest.raises(ValueError, match="give the source_share"):
        created(colours, source_share=0.0).load_state_dict(state)


def test_learning_later_does_not_depend_on_who_has_looked(colours):
    both = [created(colours, gather=96) for _ in range(2)]
    stream = sorted_stream(4)
    for method in both:
        for x in stream:
            method.step(x, learn=False)
    assert actions(both[0]) == ["one by one"]
    for method in both:
        method.learn(stream[0])
    first, second = (list(method.adapted.values()) for method in both)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def test_guard_and_gather_ask_one_copy_of_the_source(colours):
    method = created(colours, guard=True, recall=2)
    gathered = find(method, Gathered)
    assert gathered is method.method.method
    assert method.reference.unlearned is gathered.normalisation.unlearned
    assert find(created(colours), type(method)) is None


def test_a_stream_of_the_service_has_turns_of_its_own_and_marks_them(colours):
    first = created(colours, guard=True)
    method = stream_copy(first)
    assert method.reference.unlearned is method.method.normalisation.unlearned is first.method.normalisation.unlearned
    stream = Stream("a", method, update_images=16)
    for x in sorted_stream(6):
        stream.answer(x)
    assert "one by one" in [mark.kind for mark in stream.live.news().marks]
    assert not method.reference.by_batch(64)
    assert first.reference.by_batch(64)


def test_networks_without_batchnorm_know_no_turns():
    model = mgtta.load_model(convnet("group"))
    source = mgtta.source_statistics(model, images(32, seed=9))
    method = mgtta.create("mgtta+", model, source=source, recall=0, mirror=False)
    assert method.normalisation.turns is None
    assert "turns" not in method.state_dict()["gather"]
