"""Streams whose classes come in turn, on networks with BatchNorm."""

import copy
import math

import pytest
import torch
from conftest import convnet, images
from test_blended import BARE, one_by_one, plus, set_one_by_one
from torch import nn

import mgtta
from mgtta.adaptation.gathered import BY_IMAGE_RATE
from mgtta.adaptation.turns import (
    ASKED_BATCHES,
    ASKED_EVERY,
    BACK,
    BACK_BATCHES,
    BY_BATCH,
    DEVIATIONS,
    LEAST_BATCHES,
    Turns,
)
from mgtta.adaptation.wrapper import innermost

CLASSES = 4


def predictions(classes, sure=4.0, seed=0):
    """Logits (n, C) of images of these classes; some are predicted wrongly."""
    noise = torch.randn(len(classes), CLASSES, generator=torch.Generator().manual_seed(seed))
    return sure * nn.functional.one_hot(torch.as_tensor(classes), CLASSES) + noise


def mixed(n, seed=0):
    return torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(seed))


def followed(*batches):
    turns = Turns()
    for seed, classes in enumerate(batches):
        by_batch = predictions(classes, seed=seed)
        turns.follow(*((None, by_batch) if turns.come else (by_batch, None)))
        turns.settle()
    return turns


def in_turn(n, batches):
    """Classes of batches that have one class each."""
    return [[k % CLASSES] * n for k in range(batches)]


def test_the_change_is_that_of_the_formula():
    turns = Turns()
    batches = [predictions(mixed(n, seed=n), seed=n) for n in (5, 9)]
    for batch in batches:
        turns.follow(batch, None)
    turns.settle()
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
    assert turns.changes == [pytest.approx([moved / sum(chance) / limit]), []]


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
        turns = Turns()
        for _ in range(40):
            labels = torch.randint(classes, (32,), generator=random)
            logits = 6.0 * nn.functional.one_hot(labels, classes) + torch.randn(32, classes, generator=random)
            turns.follow(*((None, logits) if turns.come else (logits, logits if turns.asks else None)))
            turns.settle()
        wrong += len(turns.events)
    assert wrong <= 2  # one of 20 streams, and back again


def test_few_classes_for_a_while_are_no_turns():
    """Under a shift a model may predict few classes, and under the next one others."""
    shifts = [[[k, k, k + 1, k + 2] * 16] * 9 for k in (0, 1, 0, 1)]
    assert not followed(*[batch for shift in shifts for batch in shift]).events


def test_nothing_is_decided_before_enough_batches_are_known():
    assert not followed(*in_turn(64, LEAST_BATCHES)).come
    assert followed(*in_turn(64, LEAST_BATCHES + 1)).come


def test_classes_that_are_mixed_again_are_noticed():
    turns = followed(*in_turn(64, 20), *[mixed(64, seed=k) for k in range(2 * BACK_BATCHES)])
    assert not turns.come
    assert [event["action"] for event in turns.events] == ["one by one", "by batch"]
    assert turns.events[0]["change"] > 1 > BACK > turns.events[1]["change"]


def test_turns_that_are_nearly_none_do_not_go_back_and_forth():
    turns = Turns()
    for seed in range(60):
        classes = [seed % CLASSES] * 8 + mixed(56, seed=seed).tolist()
        logits = predictions(classes, seed=seed)
        turns.follow(*((None, logits) if turns.come else (logits, logits if turns.asks else None)))
        turns.settle()
    assert len(turns.events) <= 1


def test_images_one_by_one_show_turns_that_a_batch_hides():
    turns = Turns()

    for seed, classes in enumerate(in_turn(64, 6)):
        hidden = predictions(mixed(64, seed=seed), seed=seed)  # normalised by one class, they look like all
        apart = predictions(classes, seed=seed) if turns.asks else None

        turns.follow(hidden, apart)
        turns.settle()
    assert turns.come


def test_images_are_asked_about_at_the_start_and_now_and_then():
    turns = Turns()
    asked = []
    for k in range(ASKED_EVERY + 2):
        if turns.asks:
            asked.append(k)
        turns.follow(predictions(mixed(64, seed=k), seed=k), None)
        turns.settle()
    assert asked == [*range(ASKED_BATCHES), ASKED_EVERY, ASKED_EVERY + 1]


def test_a_model_that_predicts_all_images_alike_may_learn():
    turns = Turns()
    for k in range(12):
        turns.follow(torch.tensor([[1.0 + 0.01 * k, 0.0, 0.0, 0.0]]).expand(64, -1), None)
        turns.settle()
    assert not turns.come


def test_a_prediction_that_is_not_finite_counts_as_unsure():
    turns = Turns()
    for seed in range(12):
        logits = predictions(mixed(64, seed=seed), seed=seed)
        logits[0] = float("nan")
        turns.follow(logits, None)
    turns.settle()
    assert all(math.isfinite(change) for change in turns.changes[0])
    assert not turns.come


def test_a_state_continues_where_it_was_taken():
    batches = in_turn(64, 9)
    whole = followed(*batches)
    half = Turns.loaded(copy.deepcopy(followed(*batches[:4]).state()), CLASSES)
    for seed, classes in enumerate(batches[4:], 4):
        logits = predictions(classes, seed=seed)
        half.follow(*((None, logits) if half.come else (logits, None)))
        half.settle()
    found = half.state()
    expected = whole.state()
    for a, b in zip(found.pop("last"), expected.pop("last"), strict=True):
        assert a is b is None or torch.equal(a, b)
        assert a is None or a.device.type == "cpu"
    assert found == expected


@pytest.mark.parametrize(
    "wrong",
    [{"come": 1}, {"images": -1}, {"last": [torch.zeros(2, 3), None]}, {"last": []}, {"changes": [[None], []]}],
)
def test_an_invalid_state_is_refused(wrong):
    with pytest.raises(ValueError, match="turns"):
        Turns.loaded({**followed(*in_turn(8, 3)).state(), **wrong}, CLASSES)
    with pytest.raises(ValueError, match="turns"):
        Turns.loaded({}, CLASSES)


def test_then_batches_are_predicted_and_learned_from_image_by_image():
    model, method = plus(lr=1e-2, **BARE)
    _, twin = plus(lr=1e-2 * BY_IMAGE_RATE, gather=0, **BARE)
    set_one_by_one(innermost(twin).model)
    x = images(32)
    method.turns.come = True
    torch.testing.assert_close(method.predict(x), one_by_one(model)(x))
    torch.testing.assert_close(method(x), twin(x))
    for name, value in innermost(method).adapted.items():
        torch.testing.assert_close(value, dict(innermost(twin).adapted)[name])
    assert not innermost(method).statistics.images.any()
    method.reset()
    assert not method.turns.come


def test_a_guard_asks_the_source_image_by_image_then():
    model, method = plus(**BARE, guard=True)
    method.method.turns.come = True
    x = images(32)
    assert not method.reference.by_batch(32)
    asked, _ = method.reference.ask(x, torch.arange(32))
    torch.testing.assert_close(asked, one_by_one(model)(x))


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


@pytest.fixture(scope="module")
def colours():
    net = Colours()
    clean = coloured(mixed(256), seed=99)
    net.train()
    net.norm.momentum = None  # the mean over all batches
    net(clean)
    model = mgtta.load_model(net.eval())
    return model, mgtta.source_statistics(model, clean)


def created(colours, **settings):
    model, source = colours
    return mgtta.create("mgtta+", model, source=source, recall=0, mirror=False, **settings)


def test_a_stream_of_one_class_after_another_is_not_spoilt(colours):
    sorted_classes = [[k % CLASSES] * 64 for k in range(16)]
    method = created(colours)
    right = 0
    for x, classes in zip(colour_stream(sorted_classes), sorted_classes, strict=True):
        right += int((method(x).argmax(1) == torch.tensor(classes)).sum())
    assert method.turns.come
    assert [event["action"] for event in method.events] == ["one by one"]
    assert right > 0.8 * 64 * len(sorted_classes)
    mixed_classes = [mixed(64, seed=k).tolist() for k in range(2 * BACK_BATCHES)]
    for x in colour_stream(mixed_classes):
        method(x)
    assert "by batch" in [event["action"] for event in method.events]


@pytest.mark.parametrize("gather", [16, 48, 64])
def test_batches_that_are_gathered_show_turns_too(colours, gather):
    method = created(colours, gather=gather)
    seen = []
    learn = method.learn
    method.learn = lambda x, few=False: seen.append(method.turns.come) or learn(x, few)
    for x in colour_stream([[k % CLASSES] * 32 for k in range(16)]):
        method(x)
    assert method.turns.come
    assert method.turns.images == 16 * 32
    if gather > 32:
        assert seen[-1]


def test_a_spent_budget_still_follows_the_stream(colours):
    method = created(colours, max_updates=1)
    for x in colour_stream([[k % CLASSES] * 64 for k in range(8)]):
        method(x)
    assert method.updates == 1
    assert method.turns.come


def test_a_new_domain_does_not_make_turns_forgotten(colours):
    model, source = colours
    method = mgtta.create("mgtta+", model, source=source, recall=2, mirror=False)
    method.method.turns.come = True
    method._load(method._state())
    assert method.method.turns.come
    method.reset()
    assert not method.method.turns.come


def test_resume_continues_bit_for_bit(colours):
    batches = colour_stream([[k % CLASSES] * 64 for k in range(12)])
    method = created(colours)
    for x in batches[:7]:
        method(x)
    again = created(colours)
    again.load_state_dict(method.state_dict())
    for x in batches[7:]:
        assert torch.equal(again(x), method(x))
    older = method.state_dict()
    del older["gather"]["turns"]  # as an earlier version wrote it
    again.load_state_dict(older)
    assert not again.turns.come


def test_networks_without_batchnorm_know_no_turns():
    model = mgtta.load_model(convnet("group"))
    source = mgtta.source_statistics(model, images(32, seed=9))
    method = mgtta.create("mgtta+", model, source=source, recall=0, mirror=False)
    assert method.turns is None
    assert "turns" not in method.state_dict()["gather"]
