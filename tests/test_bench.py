import dataclasses

import pytest

from mgtta import bench
from mgtta.bench import Cell, Lab, Options, Setup, chosen, experiment_cells, rates, run_cells, sweep_cells
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.recipes import RECIPES
from mgtta.report import markdown
from mgtta.store import Store

SMALL = Setup(images=6)
FEW = [Cell("corruptions", m, (c,), batch_size=3) for c in ("contrast", "fog") for m in ("noadapt", "eq7_sgd")]


def without_timing(records):
    return [{**r, "seconds": None, "protocol": None} for r in records]


def test_records_hold_figures_and_protocol(tmp_path):
    records = run_cells(FEW, SMALL, Store(tmp_path))
    assert [(r["method"], r["domain"]) for r in records] == [
        ("noadapt", "contrast"), ("eq7_sgd", "contrast"), ("noadapt", "fog"), ("eq7_sgd", "fog"),
    ]  # fmt: skip
    for r in records:
        assert r["images"] == 6
        assert r["sizes"] == [3, 3]
        assert r["top1"] == pytest.approx(100 * sum(r["curve"]) / 6)
        assert 0 <= r["ece"] <= 100
        assert sum(row[0] for row in r["bins"]) == 6
        assert r["updates"] == (0 if r["method"] == "noadapt" else 2)
        assert r["protocol"]["mean"] == [0.5, 0.5, 0.5]
        assert {"weights", "data", "corruptions", "versions", "command", "device"} <= r["protocol"].keys()
    table = markdown(records)
    assert "| method | contr | fog | mean |" in table
    assert table.count("\n") == 3


def test_finished_cells_are_not_run_again_and_a_stopped_run_goes_on(tmp_path, monkeypatch):
    run = Lab.run
    ran = []

    def stopping(lab, cell, on_batch=None):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(cell)
        return run(lab, cell, on_batch)

    monkeypatch.setattr(Lab, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_cells(FEW, SMALL, Store(tmp_path))
    assert len(Store(tmp_path).cells()) == 2

    def counting(lab, cell, on_batch=None):
        ran.append(cell)
        return run(lab, cell, on_batch)

    monkeypatch.setattr(Lab, "run", counting)
    records = run_cells(FEW, SMALL, Store(tmp_path))
    assert ran == FEW
    assert run_cells(FEW, SMALL, Store(tmp_path)) == records
    assert ran == FEW


@pytest.mark.slow
def test_worker_processes_give_the_same_records(tmp_path):
    here = run_cells(FEW, SMALL, Store(tmp_path / "here"))
    there = run_cells(FEW, SMALL, Store(tmp_path / "there"), workers=2)
    assert without_timing(here) == without_timing(there)


def test_keys_tell_work_apart():
    cell = FEW[0]
    same = [
        dataclasses.replace(cell, experiment="ablation").key(SMALL),
        cell.key(dataclasses.replace(SMALL, device="cuda")),
    ]
    assert set(same) == {cell.key(SMALL)}
    others = [
        dataclasses.replace(cell, **change).key(SMALL)
        for change in (
            {"seed": 1},
            {"method": "tent"},
            {"batch_size": 4},
            {"settings": (("lr", 1.0),)},
            {"max_updates": 3},
        )
    ]
    assert len({*others, *same, cell.key(Setup(images=7)), cell.key(Setup(model="resnet18"))}) == 8


def test_experiments():
    options = Options(["noadapt", "mgtta"], seeds=2, settings={"mgtta": {"lr": 5e-3}})
    cells = experiment_cells("corruptions", options)
    assert len(cells) == 15 * 2 * 2
    assert {c.domains for c in cells} == {(c,) for c in CORRUPTIONS}
    assert {c.settings for c in cells if c.method == "mgtta"} == {(("lr", 5e-3),)}
    assert {c.method for c in experiment_cells("ablation", options)} == {"mgtta", "mgtta_lstm", "eq7_sgd", "eq7_adam"}
    [mixed, *_] = experiment_cells("mixed", options)
    assert mixed.mixed
    assert len(mixed.domains) == 15
    assert {c.reset for c in experiment_cells("continual", options)} == {"never"}
    assert {c.batch_size for c in experiment_cells("small-batch", options)} == {2, 4}
    assert {c.max_updates for c in experiment_cells("budgets", options)} >= {10, 20}
    for name in bench.EXPERIMENTS:
        assert len(set(experiment_cells(name, options))) == len(experiment_cells(name, options))
    with pytest.raises(ValueError, match="corruptions, learning-rate"):
        experiment_cells("corruption", options)


def test_a_sweep_gives_every_method_the_same_tries_on_the_validation_split():
    counts = {name: len(rates(name)) for name in RECIPES}
    assert set(counts.values()) == {0, 7}
    assert counts["mgtta"] == counts["tent"] == counts["eq7_adam"] == 7
    cells = sweep_cells(["tent", "mgtta"])
    assert {c.split for c in cells} == {"validation"}
    assert {c.domains[0] for c in cells} == set(VALIDATION_CORRUPTIONS)


def test_chosen_takes_the_best_mean():
    tried = {0.1: [50, 10], 0.2: [31, 31], 0.3: [0, 40]}
    records = [{"method": "tent", "settings": {"lr": lr}, "top1": t} for lr, ts in tried.items() for t in ts]
    assert chosen(records) == {"tent": {"lr": 0.2}}


def test_missing_data_is_named(tmp_path):
    lab = Lab(SMALL)
    lab.data["validation"] = None
    with pytest.raises(ValueError, match="validation images are needed"):
        lab.run(dataclasses.replace(FEW[0], split="validation"))
