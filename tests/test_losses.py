import math

import pytest
import torch
import transcription

from mgtta.losses import discrepancy, entropy, objective


def problem(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, 7, generator=g, dtype=torch.float64)
    features = [torch.randn(n, d, generator=g, dtype=torch.float64) for d in (4, 6)]
    mean = [torch.randn(d, generator=g, dtype=torch.float64) for d in (4, 6)]
    std = [torch.rand(d, generator=g, dtype=torch.float64) for d in (4, 6)]
    return logits, features, mean, std


@pytest.mark.parametrize("n", [1, 2, 5, 64])
@pytest.mark.parametrize("trade_off", [0.0, 0.2, 0.4])
def test_objective_agrees_with_the_transcription(n, trade_off):
    logits, features, mean, std = problem(n)
    expected = transcription.objective(logits, features, mean, std, trade_off)
    assert objective(logits, features, mean, std, trade_off).item() == pytest.approx(expected, abs=1e-12)


def test_objective_is_eq_7_over_64_at_the_papers_batch():
    logits, features, mean, std = problem(64)
    eq7 = entropy(logits).sum() + 0.4 * discrepancy(features, mean, std)
    torch.testing.assert_close(objective(logits, features, mean, std) * 64, eq7)


def test_weights_are_of_the_entropy_of_each_image():
    logits, features, mean, std = problem(5)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    plain = objective(logits, features, mean, std)
    found = objective(logits, features, mean, std, weight=weight)
    torch.testing.assert_close(found - plain, ((weight - 1) * entropy(logits)).mean())


def test_entropy_of_extreme_logits():
    logits = torch.tensor([[1e4, 0.0, 0.0], [0.0, 0.0, 0.0], [-1e4, 0.0, 0.0]], requires_grad=True)
    values = entropy(logits)
    torch.testing.assert_close(values, torch.tensor([0.0, math.log(3), math.log(2)]))
    values.sum().backward()
    assert logits.grad.isfinite().all()


def test_discrepancy_of_one_image_has_only_the_means():
    _, features, mean, std = problem(1)
    expected = sum((f[0] - m).square().sum() for f, m in zip(features, mean, strict=True))
    torch.testing.assert_close(discrepancy(features, mean, std), expected)


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_are_finite_for_tiny_batches_and_equal_images(n):
    logits, features, mean, std = problem(1)
    features = [f.repeat(n, 1).requires_grad_() for f in features]  # no spread at all
    logits = logits.repeat(n, 1).requires_grad_()
    objective(logits, features, mean, std).backward()
    assert all(t.grad.isfinite().all() for t in (logits, *features))
