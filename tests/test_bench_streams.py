"""`mgtta bench streams`: eight kinds of stream, one setting of each method for all of them."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import vit

import mgtta
from mgtta import cli
from mgtta.bench import streams as module
from mgtta.bench.cells import Cell, Options, Setup, digest
from mgtta.bench.experiments import experiment_cells
from mgtta.bench.resources import Lab
from mgtta.bench.run import run_cells, run_experiments
from mgtta.bench.store import Store
from mgtta.bench.streams import PULLS, stream_tries, streams, tuned_jointly
from mgtta.bench.sweep import rates
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.streams import GRADUAL, STREAM_KINDS
from mgtta.report import markdown, sections
from mgtta.report.page import page
from mgtta.report.tables import latex_report, markdown_report
from mgtta.report.words import headline

SMALL = Setup(images=6)
FEW = {"batch_size": 3, "corruptions": ("fog", "contrast"), "rounds": 3, "round_images": 4, "single": 2}
ALIKE = (("pull", 0.05), ("gather", 2), ("recall", 2))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    options = Options(["noadapt", "tent", "t3a"], wrappers=ALIKE, **FEW)
    return run_experiments(["streams"], options, SMALL, Store(tmp_path_factory.mktemp("runs")))


def test_streams_are_eight_kinds_with_one_setting_of_each_method():
    cells = streams(Options(["noadapt", "tent", "mgtta"], seeds=2, wrappers=ALIKE))
    assert len(cells) == 8 * 2 * 3
    assert {cell.experiment for cell in cells} == {"streams"}
    assert list(dict.fromkeys(cell.kind for cell in cells)) == list(STREAM_KINDS)
    for method in ("noadapt", "tent", "mgtta"):
        assert len({cell.settings for cell in cells if cell.method == method}) == 1
    kinds = {cell.kind: cell for cell in cells if cell.method == "tent"}
    assert {kind: (cell.reset, cell.mixed) for kind, cell in kinds.items() if cell.reset == "domain"} == {
        "reset": ("domain", False),
        "mixed": ("domain", True),
        "clean": ("domain", False),
    }
    assert kinds["rounds"].domains == tuple(CORRUPTIONS) * 10
    assert kinds["rounds"].limit == 1000
    assert kinds["labels"].by_class
    assert (kinds["one"].batch_size, kinds["one"].limit) == (1, 400)
    assert kinds["gradual"].domains[:10] == (*(f"gaussian_noise/{s}" for s in GRADUAL), "shot_noise/1")
    assert (kinds["clean"].severity, kinds["clean"].domains) == (0, ("clean",))


def test_settings_for_all_methods_are_left_out_where_a_recipe_refuses_them():
    options = Options(["noadapt", "tent", "t3a", "mgtta"], wrappers=(*ALIKE, ("mgtta.lr", 0.01)))
    found = {cell.method: (dict(cell.settings), cell.without) for cell in streams(options)}
    assert found == {
        "noadapt": ({}, ("pull", "gather", "recall")),
        "tent": (dict(ALIKE), ()),
        "t3a": ({}, ("pull", "gather", "recall")),
        "mgtta": ({**dict(ALIKE), "lr": 0.01}, ()),
    }
    with pytest.raises(ValueError, match=r"unknown setting for all methods .*'lr'.*pull"):
        streams(Options(["tent"], wrappers=(("lr", 0.1),)))
    with pytest.raises(ValueError, match=r"unknown setting of tent 'trade_off'"):
        streams(Options(["tent"], wrappers=(("tent.trade_off", 0.1),)))
    with pytest.raises(ValueError, match="unknown recipe 'tend'"):
        streams(Options(["tent"], wrappers=(("tend.lr", 0.1),)))
    with pytest.raises(ValueError, match="finite numbers only"):
        streams(Options(["mgtta"], wrappers=(("mgtta.decay", float("inf")),)))


def test_a_kind_is_a_label_and_does_not_change_the_work():
    """So that the continual stream of `streams` and the experiment `continual` share their records."""
    options = Options(["tent"])
    [continual] = experiment_cells("continual", options)
    mine = next(cell for cell in streams(options) if cell.kind == "continual")
    assert mine.key(SMALL) == continual.key(SMALL)
    assert digest(mine) != digest(continual)
    keys = [cell.key(SMALL) for cell in streams(options)]
    assert len(set(keys)) == 8
    assert dataclasses.replace(mine, without=("pull",)).key(SMALL) == mine.key(SMALL)
    assert len({cell.stream for cell in streams(options)}) == 7  # reset and continual see the same batches


def test_each_kind_of_stream_holds_what_its_name_says(tmp_path):
    lab = Lab(SMALL, tmp_path)
    cells = {cell.kind: cell for cell in streams(Options(["noadapt"], **FEW))}
    batches = {kind: list(lab._batches(cell)[0]) for kind, cell in cells.items()}
    domains = {kind: list(dict.fromkeys(batch.domain for batch in found)) for kind, found in batches.items()}
    images = {kind: sum(len(batch.x) for batch in found) for kind, found in batches.items()}
    assert domains["reset"] == domains["rounds"] == ["fog", "contrast"]
    assert domains["mixed"] == ["mixed"]
    assert domains["clean"] == ["clean"]
    assert len(domains["gradual"]) == 2 * 5
    assert images == {
        "reset": 12,
        "continual": 12,
        "rounds": 3 * 2 * 4,
        "mixed": 12,
        "labels": 12,
        "one": 4,
        "gradual": 18 * 6,
        "clean": 6,
    }
    assert {len(batch.x) for batch in batches["one"]} == {1}
    for name in ("fog", "contrast"):
        labels = torch.cat([batch.y for batch in batches["labels"] if batch.domain == name])
        assert len(labels.unique_consecutive()) == len(labels.unique())
    mild, strong = (next(b for b in batches["gradual"] if b.domain == f"contrast/{s}") for s in (1, 5))
    assert torch.equal(mild.index, strong.index)
    assert strong.x.float().std() < mild.x.float().std()
    assert torch.equal(strong.x, next(b for b in batches["reset"] if b.domain == "contrast").x)


def test_records_of_streams_say_kind_settings_and_what_was_left_out(records):
    assert {r["kind"] for r in records} == set(STREAM_KINDS)
    for r in records:
        assert r["settings"] == (dict(ALIKE) if r["method"] == "tent" else {})
        assert r["without"] == ([] if r["method"] == "tent" else ["pull", "gather", "recall"])
        assert r["ece"] is not None
        json.dumps(r, allow_nan=False)
    rounds = [r["domain"] for r in records if r["kind"] == "rounds" and r["method"] == "tent"]
    assert rounds == ["fog", "contrast"] * 3
    single = [r for r in records if r["kind"] == "one" and r["method"] == "tent"]
    assert [(r["sizes"], r["updates"]) for r in single] == [([1, 1], 1)] * 2  # two images are gathered for an update
    assert {r["protocol"]["order"] for r in records if r["kind"] == "labels"} == {
        "shuffled, seed 0, then sorted by class"
    }


def test_the_report_of_streams_is_one_table_of_methods_and_kinds_and_a_line_for_the_rounds(records):
    [section] = sections(records)
    assert section.columns == list(STREAM_KINDS)
    row = "tent, gather 2, pull 0.05, recall 2"
    assert list(section.rows) == ["noadapt", "t3a", row]
    figures = section.figures()
    mine = [r for r in records if r["method"] == "tent"]
    for kind in STREAM_KINDS:
        expected = [r["top1"] for r in mine if r["kind"] == kind]
        assert figures[row][kind].mean == pytest.approx(sum(expected) / len(expected))
    text = markdown(records)
    lines = text.splitlines()
    heading = lines.index("| method | reset | continual | rounds | mixed | labels | one | gradual | clean |")
    cells = next(line for line in lines[heading:] if line.startswith(f"| {row}")).replace("**", "").split(" | ")
    top1, ece = cells[1].split(" / ")
    resets = [r for r in mine if r["kind"] == "reset"]
    assert float(top1) == pytest.approx(sum(r["top1"] for r in resets) / 2, abs=0.06)
    assert float(ece) == pytest.approx(sum(r["ece"] for r in resets) / 2, abs=0.06)
    assert "| method | 1 | 2 | 3 |" in lines
    last = [r["top1"] for r in mine if r["kind"] == "rounds"][-2:]
    of_rounds = [line for line in lines[lines.index("| method | 1 | 2 | 3 |") :] if line.startswith(f"| {row}")]
    assert float(of_rounds[0].split(" | ")[-1].strip(" |")) == pytest.approx(sum(last) / 2, abs=0.06)
    report = markdown_report([section])
    assert "Without settings that these methods do not take: noadapt (pull, gather, recall), t3a" in report
    assert "on average over 8 kinds of stream" in headline(section)[0]
    assert r"\toprule" in latex_report([section])
    assert "gather 2" in page([section], ())


def test_rows_of_one_method_with_and_without_wrappers_stand_apart(tmp_path):
    cells = [Cell("streams", "tent", ("fog",), batch_size=3, kind="reset", settings=s) for s in ((), ALIKE[:1])]
    [section] = sections(run_cells(cells, SMALL, Store(tmp_path)))
    assert list(section.rows) == ["tent", "tent, pull 0.05"]


def test_a_sweep_of_streams_gives_every_method_the_same_tries_over_all_kinds():
    options = Options(["noadapt", "tent", "mgtta"], seeds=3)
    tries = stream_tries(options)
    assert {(cell.experiment, cell.split, cell.seed) for cell in tries} == {("sweep", "validation", 0)}
    assert {name.partition("/")[0] for cell in tries for name in cell.domains} == {*VALIDATION_CORRUPTIONS, "clean"}
    for method in ("tent", "mgtta"):
        for kind in STREAM_KINDS:
            mine = [dict(cell.settings) for cell in tries if (cell.method, cell.kind) == (method, kind)]
            assert [(s["lr"], s["pull"]) for s in mine] == [(lr, p) for lr in rates(method) for p in PULLS]
    assert not [cell for cell in tries if cell.method == "noadapt"]
    given = stream_tries(dataclasses.replace(options, wrappers=(("pull", 0.1), ("tent.lr", 0.1))))
    assert {cell.method for cell in given} == {"mgtta"}
    assert {dict(cell.settings)["pull"] for cell in given} == {0.1}


def test_the_setting_with_the_best_mean_over_kinds_is_chosen_for_all_of_them():
    """A kind counts once, however many domains it has."""
    accuracies = {0.1: {"reset": [60.0], "one": [10.0, 10.0, 10.0]}, 0.2: {"reset": [40.0], "one": [20.0, 20.0, 20.0]}}
    records = [
        {"method": "tent", "kind": kind, "settings": {"lr": lr, "pull": 0.0}, "top1": value}
        for lr, kinds in accuracies.items()
        for kind, values in kinds.items()
        for value in values
    ]
    cells = streams(Options(["noadapt", "tent"]))
    found = {(cell.method, cell.settings, cell.chosen_from) for cell in tuned_jointly(cells, records)}
    assert found == {("noadapt", (), ()), ("tent", (("lr", 0.1), ("pull", 0.0)), (0.1, 0.2))}


def test_a_swept_run_of_streams_says_what_it_chose_from(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "VALIDATION_CORRUPTIONS", ("saturate", "spatter"))
    monkeypatch.setattr(module, "PULLS", (0.0, 0.1))
    options = Options(["tent"], rates=(0.5, 2.0), **FEW)
    monkeypatch.setattr("mgtta.bench.resources.IMAGES", 6)
    records = run_experiments(["streams"], options, SMALL, Store(tmp_path), sweep=True)
    assert len({json.dumps(r["settings"]) for r in records}) == 1
    low, high = rates("tent", (0.5, 2.0))
    assert {tuple(r["protocol"]["chosen_from"]) for r in records} == {(low, low, high, high)}
    tried = [r for r in Store(tmp_path).records() if r["experiment"] == "sweep"]
    assert {r["kind"] for r in tried} == set(STREAM_KINDS)
    titles = [section.title for section in sections(Store(tmp_path).records())]
    assert sum(title.startswith("Learning rates tried") for title in titles) == 8


def test_the_command_runs_streams_with_settings_for_all(tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["mgtta", "bench", *words, "--out", str(tmp_path), "--device", "cpu"])
        with contextlib.suppress(SystemExit):
            cli.main()
        return capsys.readouterr()

    quick = ["--quick", "--images", "4", "--corruptions", "fog", "--single", "2", "--rounds", "2"]
    shown = run("streams", "--methods", "noadapt,tent", "--set", "pull=0.05", *quick)
    assert "| tent, pull 0.05 |" in shown.out
    assert "belong to `mgtta bench streams`" in run("mixed", "--set", "pull=0.05").err
    assert "unknown setting for all methods" in run("streams", "--set", "decay=5", *quick).err


def test_clean_streams_need_clean_images(tmp_path):
    (tmp_path / "c" / "fog" / "5" / "n01440764").mkdir(parents=True)
    lab = Lab(Setup(), tmp_path)
    cell = next(cell for cell in streams(Options(["noadapt"])) if cell.kind == "clean")
    with pytest.raises(ValueError, match="clean images are needed"):
        lab._domains(cell, str(tmp_path / "c"))


# --- benchmarks/streams.py


@pytest.mark.parametrize(("kind", "turns"), [("reset", 4), ("continual", 1)])
def test_records_count_the_turns_of_all_domains(kind, turns, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import streams as benchmark

    class Turning:
        """Says that classes come in turn at its first batch."""

        precision = "fp32"

        def __init__(self):
            self.reset()

        def reset(self):
            self.events = []

        def __call__(self, x):
            if not self.events:
                self.events = [{"image": 0, "action": "one by one"}, {"image": 1, "action": "shift"}]
            return torch.zeros(len(x), 3)

    bench = benchmark.Bench.__new__(benchmark.Bench)
    bench.names = ["a", "b", "c", "d"]
    bench.sets = {name: (4 * k, 4) for k, name in enumerate(bench.names)}
    bench.labels = torch.arange(4) % 3
    bench.images = torch.zeros(16, 3, 2, 2)
    bench.batch = 2
    bench.needs = {}
    bench.model, bench.precision, bench.split, bench.device = None, "fp32", "test", "cpu"
    monkeypatch.setattr(mgtta, "create", lambda *_, **__: Turning())
    records = bench.run("tent", kind, 0, {})
    assert [record["turns"] for record in records] == [turns] * 4


# --- benchmarks/stream_search.py


@pytest.fixture
def search(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import stream_search

    return stream_search


@pytest.fixture
def shard():
    """A shard of 160 small images, of which the search takes those after the first 128."""
    import imagenet

    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (160, 3, 32, 32), generator=random, dtype=torch.uint8)
    return imagenet.Held(x, torch.arange(160) % 10)


def test_the_search_runs_every_kind_of_stream(search, shard, monkeypatch, tmp_path):
    monkeypatch.setattr(search, "BATCH_SIZE", 8)
    monkeypatch.setattr(search, "SINGLE_IMAGES", 3)
    monkeypatch.setattr("mgtta.methods._neighbours.MEMORY_IMAGES", 640)
    model = mgtta.load_model(vit())
    source = mgtta.source_statistics(model, shard.x)
    validation = search.Validation(shard, "cpu", images=12)
    method = search.build(model, source, {**search.BASE, "gather": 2}, tmp_path)
    visits = {kind: len(search.accuracies(method, validation, kind)) for kind in search.KINDS}
    assert visits == {"reset": 4, "continual": 8, "mixed": 1, "labels": 4, "one": 4, "clean": 1}
    assert search.accuracies(method, validation, "one") == search.accuracies(method, validation, "one")


def test_the_searchs_variants_are_plain_mgtta_plus_at_their_neutral_values(search, shard, monkeypatch, tmp_path):
    monkeypatch.setattr("mgtta.methods._neighbours.MEMORY_IMAGES", 640)
    model = mgtta.load_model(vit())
    source = mgtta.source_statistics(model, shard.x)
    expected = mgtta.create("mgtta+", model, source=source, lr=5e-3, decay=float("inf"), pull=0.05, gather=16)
    for x in shard.x[:64].split(16):
        expected(x)

    def adapted(**config):
        method = search.build(model, source, {**search.BASE, **config}, tmp_path)
        for x in shard.x[:64].split(16):
            method(x)
        return torch.cat([p.detach().flatten() for p in method.method.adapted.values()])

    plain = torch.cat([p.detach().flatten() for p in expected.method.adapted.values()])
    assert torch.equal(adapted(), plain)
    for neutral in ({"agree": [1e-9, 1.0]}, {"average": 1.0}):
        torch.testing.assert_close(adapted(**neutral), plain)
    for other in ({"agree": [100.0, 1.0]}, {"average": 0.5}, {"opt": "adam"}, {"opt": "sgd"}, {"trade_off": 2.0}):
        assert not torch.allclose(adapted(**other), plain, atol=1e-5), other


def test_the_search_gives_every_optimizer_as_many_rates_and_pulls(search):
    plain = [c for c in search.configs() if c.keys() == {"opt", "lr", "pull"}]
    assert {opt: sum(c["opt"] == opt for c in plain) for opt in ("mgg", "adam", "sgd")} == dict.fromkeys(
        ("mgg", "adam", "sgd"), 12
    )


def test_the_tables_of_one_setting_for_every_stream_are_of_the_results_that_are_kept(search):
    from pages import between

    root = Path(__file__).parent.parent
    lines = search.read_lines(root / "results" / "research" / "streams.jsonl")
    log = (root / "docs" / "research.md").read_text()
    assert log == between(log, "streams", search.tables(lines))
    assert len(search.tables(lines, everything=True)) > len(search.tables(lines))
    assert not any("/" in line["config"].get("generator", "") for line in lines)
