"""Sweeps: the same tries for every contender, on the validation split."""

import dataclasses
import math

import pytest
from small_bench import sweep_cells

from mgtta.bench import sweep
from mgtta.bench.cells import Cell, Options, Setup, Training
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.run import run_experiments
from mgtta.bench.store import Store
from mgtta.bench.sweep import by_contender, rates, tuning
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.methods.registry import recipes
from mgtta.report.words import at_edge


def swept(cells, run, limit=None):
    """Return the cells as their sweeps return them; `run` gives the records of cells."""
    found = {}
    for own in by_contender(cells):
        plan = tuning(own, limit)
        try:
            asked = next(plan)
            while True:
                asked = plan.send(run(asked))
        except StopIteration as end:
            found |= zip(own, end.value, strict=True)
    return [found[cell] for cell in cells]


def test_a_sweep_gives_every_contender_the_same_tries_on_the_validation_split():
    counts = {name: len(rates(name)) for name in recipes()}
    assert set(counts.values()) == {0, 7}
    options = Options(["noadapt", "tent", "mgtta"])
    cells = sweep_cells([*experiment_cells("corruptions", options), *experiment_cells("small-batch", options)])
    assert {c.split for c in cells} == {"validation"}
    assert {c.domains[0] for c in cells} == set(VALIDATION_CORRUPTIONS)
    tries = {
        (m, b): sum(c.method == m and c.batch_size == b for c in cells) for m in ("tent", "mgtta") for b in (2, 64)
    }
    assert set(tries.values()) == {4 * 7}
    assert not sweep_cells(experiment_cells("learning-rate", options))
    assert {c.training for c in sweep_cells(experiment_cells("samples", options))} > {Training(images=64)}
    both = [*experiment_cells("corruptions", options), *experiment_cells("learning-rate", options)]
    assert sweep_cells(both) == sweep_cells(experiment_cells("corruptions", options))


def test_a_sweep_may_have_fewer_images():
    cells = experiment_cells("corruptions", Options(["tent", "cotta"], limits=[("cotta", 32)]))
    run = Scored(nearness(1e-3))
    chosen = swept(cells, run, limit=64)
    assert {(cell.method, cell.limit) for cell in run.ran} == {("tent", 64), ("cotta", 32)}
    assert {(cell.method, cell.limit) for cell in chosen} == {("tent", None), ("cotta", 32)}


def test_the_best_mean_is_chosen_for_each_batch_size():
    cells = [Cell("small-batch", "tent", ("fog",), batch_size=size) for size in (2, 4)]
    best = {2: rates("tent")[1], 4: rates("tent")[5]}

    def run(tries):
        return [{"top1": 50.0 if dict(c.settings)["lr"] == best[c.batch_size] else 40.0} for c in tries]

    for cell in swept(cells, run):
        assert dict(cell.settings) == {"lr": best[cell.batch_size]}
        assert cell.chosen_from == tuple(rates("tent"))


@pytest.mark.parametrize("name", ["mixed", "continual"])
def test_rates_for_long_streams_are_tried_on_long_streams(name):
    cells = experiment_cells(name, Options(["noadapt", "tent"], seeds=2))
    tries = sweep_cells(cells)
    assert len(tries) == 7
    assert {(c.mixed, c.reset, len(c.domains)) for c in tries} == {(cells[0].mixed, cells[0].reset, 15)}
    assert set(tries[0].domains) == set(VALIDATION_CORRUPTIONS)
    best = rates("tent")[2]
    parts = 1 if name == "mixed" else 15

    def run(tries):
        return [{"top1": 50.0 if dict(c.settings)["lr"] == best else 40.0} for c in tries for _ in range(parts)]

    assert {dict(c.settings).get("lr") for c in swept(cells, run)} == {None, best}


def test_a_swept_experiment_says_what_it_chose_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "VALIDATION_CORRUPTIONS", ("saturate",))
    monkeypatch.setattr(sweep, "rates", lambda method, centre=None: [5e-4, 1e-3, 2e-3])
    options = Options(["tent"], corruptions=("fog", "contrast"))
    records = run_experiments(["corruptions"], options, Setup(images=2), Store(tmp_path), sweep=True)
    tried = [r for r in Store(tmp_path).records() if r["experiment"] == "sweep"]
    rates_tried = sorted({r["settings"]["lr"] for r in tried})
    assert {5e-4, 1e-3, 2e-3} <= set(rates_tried)  # and more where the grid grew
    assert [r["protocol"]["chosen_from"] for r in records] == [rates_tried] * 2
    assert {r["split"] for r in tried} == {"validation"}


class Scored:
    """Runs cells by a made-up accuracy of their settings, and counts them."""

    def __init__(self, score):
        self.score = score
        self.ran = []

    def __call__(self, cells):
        self.ran += cells
        return [{"top1": self.score(**dict(cell.settings))} for cell in cells for _ in cell.domains]


def nearness(peak):
    """Best at the peak, worse by the decade."""
    return lambda lr, **_: 50 - abs(math.log10(lr / peak))


@pytest.mark.parametrize(("peak", "growths"), [(1e-3, 0), (0.03, 1), (0.4, 3), (2e-6, 3)])
def test_a_sweep_grows_its_grid_until_the_best_rate_is_inside(peak, growths):
    run = Scored(nearness(peak))
    [cell] = swept([Cell("corruptions", "tent", ("fog",))], run)
    assert len(cell.chosen_from) == 7 + 2 * growths
    assert len(run.ran) == 4 * len(cell.chosen_from)
    chosen = dict(cell.settings)["lr"]
    assert min(cell.chosen_from) < chosen < max(cell.chosen_from)
    assert chosen == max(cell.chosen_from, key=lambda rate: nearness(peak)(rate))


def test_a_sweep_stops_growing_at_its_bound_and_its_rate_is_at_the_edge():
    run = Scored(lambda lr: lr)
    [cell] = swept([Cell("corruptions", "tent", ("fog",))], run)
    assert len(cell.chosen_from) == 7 + 2 * sweep.GROWTHS
    assert dict(cell.settings)["lr"] == max(cell.chosen_from) == pytest.approx(1e-2 * 5**4)
    assert at_edge(dataclasses.asdict(cell) | {"settings": dict(cell.settings)})


def test_a_sweep_where_all_rates_are_alike_does_not_grow():
    [cell] = swept([Cell("corruptions", "tent", ("fog",))], Scored(lambda lr: 10.0))
    assert dict(cell.settings)["lr"] == 1e-3
    assert len(cell.chosen_from) == 7


def test_a_sweep_tries_the_settings_that_decide_a_method():
    def score(lr, restore=None):
        return nearness(0.01)(lr) + {1e-4: 1.0, 1e-2: 2.0}.get(restore, 0.0)

    run = Scored(score)
    [cotta, tent] = swept([Cell("corruptions", m, ("fog",)) for m in ("cotta", "tent")], run)
    assert dict(cotta.settings) == {"lr": 0.01, "restore": 1e-2}
    assert dict(tent.settings).keys() == {"lr"}
    values = [dict(cell.settings)["restore"] for cell in run.ran if "restore" in dict(cell.settings)]
    assert sorted(set(values)) == [1e-4, 1e-2]  # the default is known from the rates
    assert {cell.split for cell in run.ran} == {"validation"}
    [worse] = swept([Cell("corruptions", "cotta", ("fog",))], Scored(lambda lr, restore=None: -bool(restore)))
    assert "restore" not in dict(worse.settings)


def test_a_sweep_at_a_small_batch_size_begins_at_the_rate_of_the_authors_rule():
    cells = experiment_cells("small-batch", Options(["tent"], corruptions=("fog",)))
    tried = {cell.batch_size: set() for cell in cells}
    for cell in sweep_cells(cells):
        tried[cell.batch_size].add(dict(cell.settings)["lr"])
    assert {size: sorted(rates)[3] for size, rates in tried.items()} == {2: 3.125e-5, 4: 6.25e-5}
