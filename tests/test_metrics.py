import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mgtta.evaluation.metrics import BINS, HELD_IMAGES, Tally, correct, expected_calibration_error, reliability


def test_top_k_and_predictions_that_are_not_finite():
    logits = torch.tensor([[3.0, 1.0, 0.0], [float("nan")] * 3, [0.0, 1.0, 2.0]])
    assert correct(logits, torch.tensor([0, 0, 1])) == 1
    assert correct(logits, torch.tensor([0, 0, 1]), k=2) == 2
    assert correct(logits, torch.tensor([2, 2, 0]), k=99) == 2


def test_calibration_error_agrees_with_a_plain_loop():
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 5, generator=g)
    labels = torch.randint(0, 5, (200,), generator=g)
    groups: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        p = [math.exp(a) for a in row]
        sure = max(p) / sum(p)
        groups.setdefault(min(int(sure * BINS), BINS - 1), []).append((sure, row.index(max(row)) == label))
    expected = sum(
        len(group) / 200 * abs(sum(s for s, _ in group) / len(group) - sum(r for _, r in group) / len(group))
        for group in groups.values()
    )
    assert expected_calibration_error(reliability(logits, labels)) == pytest.approx(100 * expected, abs=1e-4)


def test_bins_add_up_over_batches():
    g = torch.Generator().manual_seed(1)
    logits, labels = torch.randn(30, 4, generator=g), torch.randint(0, 4, (30,), generator=g)
    parts = sum(reliability(a, b) for a, b in zip(logits.split(7), labels.split(7), strict=True))
    torch.testing.assert_close(parts, reliability(logits, labels))
    assert parts[:, 0].sum() == 30


def test_a_perfect_and_a_hopeless_predictor():
    sure = torch.tensor([[50.0, 0.0], [0.0, 50.0]])
    assert expected_calibration_error(reliability(sure, torch.tensor([0, 1]))) == pytest.approx(0)
    assert expected_calibration_error(reliability(sure, torch.tensor([1, 0]))) == pytest.approx(100)
    broken = torch.full((2, 2), float("nan"))
    assert reliability(broken, torch.tensor([0, 1]))[0].tolist() == [2.0, 0.0, 0.0]


def _some(sizes, seed=2, classes=7):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, classes, generator=g), torch.randint(0, classes, (n,), generator=g)) for n in sizes]


@pytest.mark.parametrize("held", [0, 1, 5, 512])
def test_a_tally_agrees_with_the_functions_of_each_batch(held):
    batches = _some([1, 1, 4, 2, 1, 9, 3])
    tally = Tally(held)
    bins = torch.zeros(BINS, 3, dtype=torch.float64)
    for logits, labels in batches:
        tally.update(logits, labels)
        bins += reliability(logits, labels)
    figures = tally.figures()
    assert tally.sizes == [1, 1, 4, 2, 1, 9, 3]
    assert tally.curve == [int(correct(logits, labels)) for logits, labels in batches]
    assert tally.bins == bins.tolist()
    assert figures["top1"] == 100 * sum(tally.curve) / 21
    assert figures["top5"] == 100 * sum(int(correct(logits, labels, k=5)) for logits, labels in batches) / 21
    assert figures["ece"] == expected_calibration_error(bins)
    assert figures["remaining"] is None


def test_a_tally_of_batches_without_labels_and_of_late_ones():
    (first, y1), (second, _), (third, y3) = _some([4, 2, 3])
    tally = Tally()
    assert set(tally.figures().values()) == {None}
    tally.update(first, y1)
    tally.update(second, None)
    tally.update(third, y3, late=True)
    figures = tally.figures()
    assert (tally.images, tally.labelled, tally.sizes) == (9, 7, [4, 2, 3])
    assert len(tally.curve) == 2
    assert figures["remaining"] == 100 * tally.curve[1] / 3


def test_a_tally_does_not_look_at_memory_that_a_method_uses_again():
    logits = torch.tensor([[1.0, 0.0]])
    labels = torch.tensor([0])
    tally = Tally()
    tally.update(logits, labels)
    logits.copy_(torch.tensor([[0.0, 1.0]]))
    labels.fill_(1)
    assert tally.figures()["top1"] == 100


class Operations(TorchDispatchMode):
    """Counts the operations of torch, and how often images are judged."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.judged = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        self.judged += function is torch.ops.aten.topk.default and args[1] == 1
        return function(*args, **(kwargs or {}))


def test_a_tally_judges_batches_of_one_together():
    """Each batch costs the copies of its logits and labels; they are judged, and a GPU is waited for, by the block."""
    batches = _some([1] * (4 * HELD_IMAGES))
    with Operations() as seen:
        tally = Tally()
        for logits, labels in batches:
            tally.update(logits, labels)
        tally.figures()
    assert seen.judged == 4
    assert seen.count < 4 * len(batches)
