import math

import pytest
import torch

from mgtta.evaluation.metrics import BINS, correct, expected_calibration_error, reliability


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
