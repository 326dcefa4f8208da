"""Tables, differences and published figures, on records made up for the purpose."""

import math
import random
import statistics

import pytest

from mgtta import report
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.recipes import RECIPES
from mgtta.report import (
    Figure,
    beside,
    best,
    differences,
    headline,
    latex,
    latex_report,
    markdown,
    markdown_report,
    published,
    sections,
    t_quantile,
)

LEVEL = {"noadapt": 55.0, "tent": 60.0, "mgtta": 70.0}


def fake(method="noadapt", domain="fog", seed=0, top1=None, **changes):
    """A record of bench's schema; its accuracy is drawn by chance unless given."""
    rng = random.Random(f"{method} {domain} {seed} {sorted(changes.items())}")
    sizes = changes.pop("sizes", [64] * 8)
    chance = (LEVEL.get(method, 50.0) if top1 is None else top1) / 100
    curve = [sum(rng.random() < chance for _ in range(n)) for n in sizes]
    bins = [[float(n), n * (k + 0.5) / 15, n * (k + 0.3) / 15] for k, n in enumerate(rng.choices(range(1, 60), k=15))]
    record = {
        "method": method, "domain": domain, "images": sum(sizes), "labelled": sum(sizes), "batches": len(sizes),
        "updates": 0 if method == "noadapt" else len(sizes), "skipped": 0, "seconds": 1.0 + rng.random(),
        "peak_memory": None, "top1": 100 * sum(curve) / sum(sizes) if top1 is None else top1, "top5": 90.0,
        "ece": 5.0, "sizes": sizes, "curve": curve, "bins": bins, "experiment": "corruptions", "domains": [domain],
        "seed": seed, "settings": {}, "batch_size": 64, "severity": 5, "mixed": False, "reset": "domain",
        "max_updates": None, "max_seconds": None, "split": "test",
        "protocol": {
            "model": "glyphs_vit", "weights": "0123456789abcdef", "mean": [0.5] * 3, "std": [0.5] * 3,
            "data": "rendered characters", "device": "cpu", "versions": {"mgtta": "0.1", "torch": "2"},
            "command": "mgtta bench corruptions --out runs",
        },
    }  # fmt: skip
    protocol = {**record["protocol"], **changes.pop("protocol", {})}
    return {**record, **changes, "protocol": protocol}


def table_1(methods=("noadapt", "tent", "mgtta"), seeds=2, domains=tuple(CORRUPTIONS), **changes):
    return [fake(m, d, s, **changes) for d in domains for s in range(seeds) for m in methods]


def budgets():
    limits = [{"max_updates": k} for k in (1, 10, 20)] + [{"max_seconds": s} for s in (0.5, 2.0)] + [{}]
    return [
        fake(m, d, experiment="budgets", **limit)
        for limit in limits
        for d in ("fog", "snow")
        for m in ("noadapt", "mgtta")
    ]


# --- tables


def test_means_and_spread_over_seeds():
    values = {("fog", 0): 50.0, ("fog", 1): 54.0, ("snow", 0): 60.0, ("snow", 1): 70.0}
    [section] = sections([fake("tent", d, s, v) for (d, s), v in values.items()])
    cells = section.figures()["tent"]
    assert cells["fog"] == Figure(52.0, pytest.approx(statistics.stdev([50, 54])), 2)
    assert cells["mean"] == Figure(pytest.approx(58.5), pytest.approx(statistics.stdev([55, 62])), 2)
    text = markdown(section.records)
    assert text.splitlines()[0] == "| method | snow | fog | mean |"  # the benchmark's order
    assert text.splitlines()[2] == "| tent | 65.0 | 52.0 | 58.5 ± 4.9 |"


def test_the_best_are_bold_as_printed_unless_all_are_alike():
    rows = {"noadapt": (50.0, 60.0), "tent": (55.04, 60.0), "mgtta": (55.01, 60.0)}
    records = [fake(m, d, top1=v) for m, vs in rows.items() for d, v in zip(("fog", "frost"), vs, strict=True)]
    [section] = sections(records)
    assert best(section.figures(), "fog") == {"tent", "mgtta"}
    assert best(section.figures(), "frost") == set()
    assert "| mgtta | 60.0 | **55.0** | **57.5** |" in markdown(records)
    assert r"mgtta & 60.0 & \textbf{55.0} & \textbf{57.5} \\" in latex(records)


@pytest.mark.parametrize(
    "records",
    [
        [fake()],
        [fake("mgtta", seed=3)],
        [fake(m, top1=None, curve=[], labelled=0) | {"top1": None, "top5": None, "ece": None} for m in LEVEL],
        [fake("something_new", "somewhere", experiment="something")],
    ],
    ids=["one", "one, other seed", "without labels", "unknown names"],
)
def test_little_is_enough(records):
    found = sections(records)
    assert markdown_report(found)
    assert latex_report(found)
    assert all(headline(section) for section in found)


def test_an_unfinished_row_has_no_mean_and_is_not_ranked():
    records = table_1(domains=("fog", "snow", "frost"))
    records = [r for r in records if (r["method"], r["domain"]) != ("mgtta", "fog")]
    [section] = sections(records)
    assert "mean" not in section.figures()["mgtta"]
    assert "mean" in section.figures()["tent"]
    assert "tent is highest" in headline(section)[0]
    assert "1 method of 3 not finished" in headline(section)[1]
    assert {r["domain"] for r in section.shared} == {"snow", "frost"}


def test_what_cannot_be_compared_is_kept_apart():
    plain = table_1(seeds=1, domains=("fog", "snow"))
    more_images = table_1(seeds=1, domains=("fog", "snow"), sizes=[64] * 20)
    other_model = table_1(seeds=1, domains=("fog", "snow"), protocol={"model": "resnet18"})
    found = sections([*plain, *more_images, *other_model, *plain])
    assert [(s.records[0]["images"], s.records[0]["protocol"]["model"]) for s in found] == [
        (1280, "glyphs_vit"), (512, "glyphs_vit"), (512, "resnet18"),
    ]  # fmt: skip
    assert [s.repeated for s in found] == [0, 6, 0]
    assert "6 records that repeat" in report.notes(found[1])


def test_rows_are_told_apart_by_what_differs_and_by_nothing_else():
    records = [fake("tent", "fog"), fake("tent", "fog", settings={"lr": 0.1}), fake("mgtta", "fog", settings={"lr": 1})]
    [section] = sections(records)
    assert list(section.rows) == ["tent", "tent, lr 0.1", "mgtta"]
    limited = [fake("mgtta", experiment="runtime"), fake("mgtta", experiment="runtime", max_updates=20)]
    assert list(sections(limited)[0].rows) == ["mgtta", "mgtta, 20 updates"]
    per_domain = [fake("mgtta", d, experiment="variants", severity=0, settings=s)
                  for d, s in (("imagenet-r", {"trade_off": 0.2}), ("imagenet-a", {}))]  # fmt: skip
    assert list(sections(per_domain)[0].rows) == ["mgtta"]


def test_budgets_are_columns():
    updates, seconds = sections(budgets())
    assert updates.columns == ["1", "10", "20", "inf"]
    assert seconds.columns == ["0.5", "2", "inf"]
    assert list(updates.rows) == ["noadapt", "mgtta"]
    expected = statistics.mean(r["top1"] for r in updates.of("mgtta") if r["max_updates"] == 10)
    assert updates.figures()["mgtta"]["10"].mean == pytest.approx(expected)
    assert "| method | 1 | 10 | 20 | ∞ |" in markdown(budgets())
    assert headline(updates)[0].startswith("mgtta is highest with ")
    same = [{**r, "top1": 50.0} for r in budgets()]
    assert headline(sections(same)[0]) == ["The highest figures of noadapt and mgtta are alike, 50.0 %."]
    assert r"$\infty$" in latex(budgets())
    unlimited = [r for r in budgets() if r["max_updates"] is None]
    assert [s.axis for s in sections(unlimited)] == ["max_seconds"]


def test_other_experiments_have_their_columns():
    records = [
        *(fake("tent", experiment="learning-rate", settings={"lr": lr}) for lr in (1e-4, 1e-3)),
        *(fake("mgtta", experiment="small-batch", batch_size=n) for n in (4, 2)),
        *(fake("mgtta", experiment="hidden-size", protocol={"hidden_size": n}) for n in (16, 2, 8)),
        *(fake("mgtta", experiment="convergence", max_updates=n, remaining=40.0 + n) for n in (0, 5)),
    ]
    found = {s.experiment: s for s in sections(records)}
    assert {name: s.columns for name, s in found.items()} == {
        "small-batch": ["2", "4"],
        "hidden-size": ["2", "8", "16"],
        "learning-rate": ["0.0001", "0.001"],
        "convergence": ["0", "5"],
    }
    assert found["convergence"].figures()["mgtta"]["5"].mean == 45.0


def test_text_of_records_stays_text():
    hostile = "<b>|&_%$#{}~^\\\n<script>"
    found = sections([fake(hostile, hostile, protocol={"model": hostile, "command": hostile})])
    tables = [line for line in markdown_report(found).splitlines() if not line.startswith("    ")]
    assert not any("<" in line for line in tables)
    assert all(line.count("|") - line.count("\\|") in (0, 3) for line in tables)
    row = latex_report(found).splitlines()[-4]
    assert row.startswith(
        r"\textless{}b\textgreater{}|\&\_\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} "
    )


# --- differences


def test_t_quantiles_are_scipys():
    stats = pytest.importorskip("scipy.stats")
    for df in (1, 2, 3, 4, 7, 14, 29, 100, 999):
        assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)
    assert t_quantile(14, 0.99) == pytest.approx(stats.t.ppf(0.995, 14), rel=1e-9)


def test_differences_are_paired_and_their_interval_is_students_over_domains():
    [section] = sections(table_1(seeds=3))
    found = {(d.row, d.against): d for d in differences(section)}
    assert set(found) == {(a, b) for a in LEVEL for b in ("noadapt", "mgtta") if a != b}
    top1 = {(r["method"], r["domain"], r["seed"]): r["top1"] for r in section.records}
    units = [
        sum(top1["tent", d, s] - top1["noadapt", d, s] for s in range(3)) / 3 for d in CORRUPTIONS
    ]  # one figure a domain: its seeds are not independent
    mean = sum(units) / 15
    variance = sum((u - mean) ** 2 for u in units) / 14
    half = 2.1447866879 * math.sqrt(variance / 15)  # t at 0.975 with 14 degrees of freedom
    d = found["tent", "noadapt"]
    assert (d.mean, d.low, d.high, d.pairs) == pytest.approx((mean, mean - half, mean + half, 45))


def test_differences_with_one_domain_are_over_seeds_and_with_one_pair_without_interval():
    values = {"noadapt": (50.0, 52.0), "mgtta": (60.0, 64.0)}
    [section] = sections([fake(m, seed=s, top1=v) for m, vs in values.items() for s, v in enumerate(vs)])
    d = next(d for d in differences(section) if d.row == "mgtta")
    half = 12.7062047362 * statistics.stdev([10, 12]) / math.sqrt(2)
    assert (d.mean, d.low, d.high) == pytest.approx((11, 11 - half, 11 + half))
    assert "cannot tell it from no difference" in " ".join(headline(section))
    [alone] = sections([fake("noadapt", top1=50.0), fake("mgtta", top1=60.0)])
    assert differences(alone)[0].low is None
    assert "gives no confidence interval" in " ".join(headline(alone))


def test_differences_skip_what_has_no_partner():
    records = [fake("noadapt", "fog", top1=50.0), fake("tent", "fog", top1=51.0), fake("tent", "snow", top1=99.0)]
    [d] = differences(sections(records)[0])
    assert (d.mean, d.pairs) == (1.0, 1)


# --- published figures


def tables(experiment):
    return [table for table in published()["tables"] if table["experiment"] == experiment]


def test_published_averages_are_those_of_their_rows():
    for table in (*tables("corruptions"), *tables("variants")):
        for method, row in table["rows"].items():
            rest = [x for column, x in row.items() if column != "mean"]
            assert len(rest) == (15 if table["experiment"] == "corruptions" else 3)
            assert statistics.mean(rest) == pytest.approx(row["mean"], abs=0.1), method


def test_published_tables_agree_with_each_other():
    average = {method: row["mean"] for method, row in tables("corruptions")[0]["rows"].items()}
    seconds, updates = tables("budgets")
    for method, mean in average.items():
        assert seconds["rows"][method]["inf"] == updates["rows"][method]["782"] == mean
        assert tables("runtime")[0]["rows"][method]["top1"] == mean
    for n in (20, 50, 100):
        assert tables("runtime")[0]["rows"][f"mgtta, {n} updates"]["top1"] == updates["rows"]["mgtta"][str(n)]
    for method, row in tables("memory")[0]["rows"].items():
        assert row["seconds"] == tables("runtime")[0]["rows"][method]["seconds"]
        assert row["top1"] == (66.7 if method == "eata" else average[method])  # as the notes say
    on_r = tables("variants")[0]["rows"]["mgtta"]["imagenet-r"]
    ablated = tables("ablation")[0]["rows"]
    assert ablated["mgtta"]["imagenet-c"] == average["mgtta"]
    assert {c: x for c, x in ablated["mgtta"].items() if c != "imagenet-c"} == {
        c: x for c, x in tables("variants")[0]["rows"]["mgtta"].items() if c != "mean"
    }
    assert [t["rows"]["mgtta"]["128"] for t in tables("samples")] == [average["mgtta"], on_r]
    assert [t["rows"]["mgtta"]["8"] for t in tables("hidden-size")] == [average["mgtta"], on_r]
    tried = tables("learning-rate")[0]["rows"]
    assert {m: max(row.values()) for m, row in tried.items()} == {
        "deyo": average["deyo"], "eq7_sgd": ablated["eq7_sgd"]["imagenet-c"], "mgtta": average["mgtta"],
    }  # fmt: skip


def test_published_tables_are_whole():
    assert len({table["table"] for table in published()["tables"]}) == 12
    for table in published()["tables"]:
        assert {row.partition(",")[0] for row in table["rows"]} <= set(RECIPES)
        assert len({tuple(row) for row in table["rows"].values()}) == 1
        assert {"model", "normalisation", "images", "batch_size", "severity"} <= table["footing"].keys()
        for row in table["rows"].values():
            assert all(0 <= x <= 100 for column, x in row.items() if column not in ("seconds", "megabytes"))
    assert set(tables("corruptions")[0]["rows"]["mgtta"]) == {*CORRUPTIONS, "mean"}


def test_published_figures_stand_beside_with_what_differs():
    [section] = sections(table_1())
    [table] = beside(section)
    assert table.columns == [*CORRUPTIONS, "mean"]
    assert table.printed["mgtta"]["mean"] == 71.3
    assert table.measured["mgtta"]["fog"] == section.figures()["mgtta"]["fog"]
    words = "; ".join(table.differs)
    for part in ("glyphs_vit", "rendered characters", "512; the paper's: 50,000", "mean 0.5, 0.5, 0.5"):
        assert part in words
    assert "batch size" not in words
    assert "| mgtta | measured |" in markdown_report([section])


def test_a_mean_over_other_domains_does_not_stand_beside():
    [part] = sections(table_1(domains=("fog", "snow")))
    assert beside(part)[0].columns == ["snow", "fog"]
    updates, seconds = sections(budgets())
    assert beside(updates)[0].columns == ["10", "20"]
    assert beside(seconds)[0].columns == ["2", "inf"]
    assert "the means are over 2 domains" in beside(updates)[0].differs[0]
    assert not beside(sections([fake("bn")])[0])


def test_variants_and_costs_stand_beside():
    [variants] = sections([fake("mgtta", d, experiment="variants", severity=0) for d in ("imagenet-r", "imagenet-a")])
    assert beside(variants)[0].columns == ["imagenet-r", "imagenet-a"]
    on_r = [fake("mgtta", "imagenet-r", experiment="samples", severity=0, protocol={"training_images": 128})]
    [table] = beside(sections(on_r)[0])
    assert table.printed["mgtta"]["128"] == 70.2
    [costs] = beside(sections([fake("mgtta", experiment="memory", peak_memory=2 * 10**9)])[0])
    assert costs.measured["mgtta"]["megabytes"].mean == 2000
    assert costs.measured["mgtta"]["seconds"].mean == pytest.approx(
        50_000 / 512 * fake("mgtta", experiment="memory", peak_memory=2 * 10**9)["seconds"]
    )
