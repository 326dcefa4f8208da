"""The research harness agrees with the library where it tries nothing new."""

import importlib
from pathlib import Path

import pytest
import torch
from conftest import images, vit

import mgtta
from mgtta.learned.optimizer import BETAS, EPS, generator_inputs


@pytest.fixture(autouse=True)
def _reachable(monkeypatch):
    benchmarks = Path(__file__).parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    monkeypatch.syspath_prepend(benchmarks / "research")


@pytest.fixture
def model():
    import objective

    return objective.Model(mgtta.load_model(vit()))


def test_its_objective_is_eq_7(model):
    from objective import Loss, statistics_of
    from tasks import Objective

    source = mgtta.source_statistics(model.classifier, images(16, seed=1))
    loss = Loss(Objective(), model, statistics_of(model, images(16, seed=1)))
    logits, value = loss(images())
    expected, features = model.classifier.features(images())
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(value, mgtta.objective(expected, features, source.mean, source.std))


def test_its_adam_is_torchs(model):
    from rules import Mover
    from tasks import Rule

    mover = Mover(Rule(lr=0.01), model, None, ())
    theta, p = model.source, torch.nn.Parameter(model.source.clone())
    adam = torch.optim.Adam([p], lr=0.01)
    for step in range(3):
        p.grad = torch.randn(len(theta), generator=torch.Generator().manual_seed(step))
        theta = mover(theta, p.grad)
        adam.step()
    torch.testing.assert_close(theta, p.detach())


def test_its_inputs_are_the_librarys(model):
    from rules import Inputs

    inputs = Inputs(("momentum", "gradient"), model, 1e-3)
    m = v = torch.zeros_like(model.source)
    for step in (1, 2, 3):
        grad = torch.randn(len(m), generator=torch.Generator().manual_seed(step))
        expected, m, v = generator_inputs(grad, m, v, step, BETAS, EPS)
        torch.testing.assert_close(inputs(grad, model.source), expected)


def test_every_piece_of_the_objective_changes_it(model):
    from objective import Loss, statistics_of
    from tasks import Objective

    def gradient(**changes):
        loss = Loss(Objective(**changes), model, statistics_of(model, images(16, seed=1)))
        for seed in (2, 3):
            logits, value = loss(images(seed=seed))
        grads = torch.autograd.grad(value, model.params, allow_unused=True)
        return logits, torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for g, p in zip(grads, model.params, strict=True)
            ]
        )

    plain_logits, plain = gradient()
    for change in (
        {"tokens": "patch"},
        {"tokens": "both"},
        {"history": 0.5},
        {"entropy_weight": 0.0},
        {"balance": 1.0},
        {"trade_off": 1.0},
        {"late": True},
        {"noisy": 1.0},
    ):
        logits, changed = gradient(**change)
        assert changed.isfinite().all()
        assert not torch.allclose(changed, plain), change
        torch.testing.assert_close(logits, plain_logits)
    for change in ({"recentre": 1.0}, {"align": 1.0}, {"align": 1.0, "align_std": False}, {"mirror": True}):
        assert not torch.allclose(gradient(**change)[0], plain_logits), change


def test_the_logs_tables_are_of_the_results_that_are_kept():
    import json

    from pages import between
    from tables import page

    root = Path(__file__).parent.parent
    lines = (root / "results" / "research" / "results.jsonl").read_text().splitlines()
    log = (root / "docs" / "research.md").read_text()
    assert log == between(log, "research", page({r["key"]: r for r in map(json.loads, lines)}))


@pytest.mark.parametrize(
    ("program", "folder", "row"),
    [
        ("trials", "batchnorm", "| ResNet-50, mgtta+, lr 0.01, share 0.3, calm 16 |"),
        ("own_share", "own_share", "| ResNet-56, mgtta+, 0.8, 0.1, 0.1 |"),
        ("class_mix", "class_mix", "| ResNet-56, 872 training images: with class_mix |"),
        ("tried", ".", "| validation, plus_adam, 0.6 and 0.99 |"),
    ],
)
def test_the_tables_of_trials_are_of_the_results_that_are_kept(program, folder, row):
    root = Path(__file__).parent.parent
    log = (root / "docs" / "research.md").read_text()
    with_tables = importlib.import_module(program).with_tables
    assert log == with_tables(log, root / "results" / "research" / folder)
    assert row in log
