"""Sections and their tables in markdown and LaTeX, on records made up for the purpose."""

import json
import re
import statistics

import pytest
from made_up import LEVEL, budgets, fake, table_1

from mgtta.report import Figure, latex, markdown, page, sections
from mgtta.report.summary import best, milliseconds, seconds_for
from mgtta.report.tables import latex_report, markdown_report
from mgtta.report.words import footing_words, headline, notes


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
    assert headline(section)[0].startswith("Highest: tent, ")
    assert "1 method of 3 not finished" in headline(section)[1]
    assert {r["domain"] for r in section.shared} == {"snow", "frost"}


def test_what_cannot_be_compared_is_kept_apart():
    plain = table_1(seeds=1, domains=("fog", "snow"))
    more_images = table_1(seeds=1, domains=("fog", "snow"), sizes=[64] * 20)
    other_model = table_1(seeds=1, domains=("fog", "snow"), protocol={"model": "resnet18"})
    found = sections([*plain, *more_images, *other_model, *plain])
    assert [(s.records[0]["images"], s.records[0]["protocol"]["model"]) for s in found] == [
        (1280, "glyphs_vit"),
        (512, "glyphs_vit"),
        (512, "resnet18"),
    ]
    assert [s.repeated for s in found] == [0, 6, 0]
    assert "6 records that repeat" in notes(found[1])
    text = markdown([*plain, *more_images])
    assert all(text.count(f"{images} images per domain") == 1 for images in ("1,280", "512"))


def test_a_method_at_two_sets_of_settings_has_its_rows_together():
    [section] = sections([fake(m) for m in ("tent", "deyo@mgtta", "noadapt", "deyo")])
    assert list(section.rows) == ["noadapt", "deyo", "deyo@mgtta", "tent"]


def test_rows_are_told_apart_by_what_differs_and_by_nothing_else():
    records = [fake("tent", "fog"), fake("tent", "fog", settings={"lr": 0.1}), fake("mgtta", "fog", settings={"lr": 1})]
    [section] = sections(records)
    assert list(section.rows) == ["mgtta", "tent", "tent, lr 0.1"]
    limited = [fake("mgtta", experiment="runtime"), fake("mgtta", experiment="runtime", max_updates=20)]
    assert list(sections(limited)[0].rows) == ["mgtta", "mgtta, 20 updates"]
    per_domain = [
        fake("mgtta", d, experiment="variants", severity=0, settings=s)
        for d, s in (("imagenet-r", {"trade_off": 0.2}), ("imagenet-a", {}))
    ]
    assert list(sections(per_domain)[0].rows) == ["mgtta"]


def test_budgets_are_columns():
    updates, seconds = sections(budgets())
    assert updates.columns == ["1", "10", "20", "inf"]
    assert seconds.columns == ["0.5", "2", "inf"]
    assert list(updates.rows) == ["noadapt", "mgtta"]
    expected = statistics.mean(r["top1"] for r in updates.of("mgtta") if r["max_updates"] == 10)
    assert updates.figures()["mgtta"]["10"].mean == pytest.approx(expected)
    assert "| method | 1 | 10 | 20 | ∞ |" in markdown(budgets())
    assert headline(updates)[0].startswith("Highest: mgtta, ")
    same = [{**r, "top1": 50.0} for r in budgets()]
    assert headline(sections(same)[0]) == ["Highest: noadapt and mgtta, 50.0 % (maximum updates: 1, 10, 20, ∞)."]
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


# --- streams, repeats, footings


def cell(name, records):
    return [{**r, "cell": name, "part": i, "parts": len(records)} for i, r in enumerate(records)]


def tries(values, lr, name="a", **changes):
    """A sweep's cell on a stream that comes to two domains again and again."""
    domains = (["fog", "snow"] * len(values))[: len(values)]
    sweep = {"experiment": "sweep", "split": "validation", "reset": "never", "domains": domains, "settings": {"lr": lr}}
    changes = {**sweep, "protocol": {"validation": "other images"}, **changes}
    return cell(f"{name}{lr}", [fake("mgtta", d, top1=v, **changes) for d, v in zip(domains, values, strict=True)])


def test_all_visits_of_a_domain_count():
    [section] = sections([*tries([10.0, 20.0, 60.0], 0.1), *tries([40.0, 20.0, 0.0], 0.2)])
    cells = section.figures()["mgtta"]
    assert (cells["0.1"].mean, cells["0.2"].mean) == (30.0, 20.0)
    assert section.repeated == 0
    assert "2 domains in 3 visits, 512 images per visit" in markdown_report([section])
    assert "mean over all visits of the domains" in notes(section)


def test_the_same_work_of_another_cell_is_a_repeat():
    [section] = sections([*tries([10.0, 20.0, 60.0], 0.1), *tries([1.0, 2.0, 3.0], 0.1, "b")])
    assert section.repeated == 3
    assert section.figures()["mgtta"]["0.1"].mean == 30.0


def test_a_model_that_has_seen_other_domains_before_is_kept_apart():
    streams = [["fog", "snow"], ["snow"]]
    records = [fake("mgtta", d, experiment="continual", reset="never", domains=s) for s in streams for d in s]
    assert [s.domains for s in sections(records)] == [["snow", "fog"], ["snow"]]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([{"precision": "fp32"}, {"precision": "tf32"}], ["tent, fp32", "tent, tf32"]),
        ([{"source images": 64}, {"source images": 128}], ["tent, 64 source images", "tent, 128 source images"]),
        ([{"validation": "a.tar"}, {"validation": "b.tar"}], ["tent, validation a.tar", "tent, validation b.tar"]),
        ([{"device": "cpu"}, {"device": "H200"}], ["tent, on cpu", "tent, on H200"]),
    ],
)
def test_runs_of_other_options_are_no_repeats(changes, names):
    [section] = sections([fake("tent", protocol=protocol) for protocol in changes])
    assert list(section.rows) == names
    assert section.repeated == 0


def test_a_trained_generator_is_named_by_what_differs():
    def trained(images, size):
        text = f"trained on {images} images: gml of hidden size {size}, 2000 steps, seed 0"
        return {"generator": text, "training_images": images, "hidden_size": size}

    shipped = {"generator": "imagenet"}
    rows = [
        list(sections([fake("mgtta", protocol=p) for p in found])[0].rows)
        for found in (
            [trained(128, 8), trained(128, 16)],
            [shipped, trained(128, 8), trained(64, 16)],
            [shipped, {"generator": "glyphs"}],
        )
    ]
    assert rows == [
        ["mgtta, hidden size 8", "mgtta, hidden size 16"],
        ["mgtta", "mgtta, 128 training images, hidden size 8", "mgtta, 64 training images, hidden size 16"],
        ["mgtta, generator imagenet", "mgtta, generator glyphs"],
    ]


def test_a_sweeps_title_tells_its_stream_and_its_footing_the_validation_images():
    sweep = {"experiment": "sweep", "split": "validation", "settings": {"lr": 0.1}}
    sweep["protocol"] = {"validation": "other images"}
    records = [
        fake("tent", **sweep),
        fake("tent", sizes=[2] * 8, batch_size=2, **sweep),
        fake("tent", reset="never", **sweep),
        fake("tent", "mixed", mixed=True, **sweep),
    ]
    found = sections(records)
    assert [s.title.partition(": ")[2] for s in found] == [
        "reset before each, batch 64",
        "reset before each, batch 2",
        "never reset, batch 64",
        "mixed within each batch, batch 64",
    ]
    assert all("on other images;" in footing_words(s) for s in found)
    assert all(f"{s.title}\n\n| method" in markdown(records) for s in found)
    assert markdown(records[:1]).startswith("| method")
    [variant] = sections([fake("tent", "r", experiment="variants", severity=0, data="r.tar")])
    assert "on r.tar;" in footing_words(variant)


# --- figures and what is said of them


def test_runtime_and_memory_show_what_they_are_about():
    costs = {"noadapt": (0.512, 10**9), "mgtta": (1.024, 2 * 10**9)}
    runtime, memory = (
        [fake(m, experiment=e, seconds=s, peak_memory=b, process_peak_memory=1) for m, (s, b) in costs.items()]
        for e in ("runtime", "memory")
    )
    [time], [space] = sections(runtime), sections(memory)
    assert [time.figures()[m]["fog"].mean for m in costs] == [1.0, 2.0]
    assert headline(time) == ["Fastest: noadapt, 1.00 ms per image on fog."]
    assert headline(space) == ["Least memory: noadapt, 1,000 MB on fog."]
    assert "| noadapt | **1.00** |" in markdown(runtime)
    assert markdown(runtime).startswith("Runtime (Table 5): milliseconds per image, to predict and to adapt\n\n|")
    assert "| noadapt | **1,000** |" in markdown(memory)
    assert r"noadapt & \textbf{1.00} \\" in latex(runtime)
    assert "milliseconds per image" in latex(runtime)
    assert notes(space).startswith("Peak megabytes, of the GPU or, without one, of the process.")
    on_cpu = [{**r, "peak_memory": None, "process_peak_memory": 3 * 10**6} for r in memory]
    assert headline(sections(on_cpu)[0]) == ["Least memory: noadapt and mgtta, 3 MB on fog."]
    assert ">top-1</button>" in page.page([time])
    drawn = json.loads(re.search(r'id="charts">(.*?)</script>', page.page([space]), re.DOTALL)[1])["s0-memory"]
    assert drawn["views"]["all"][0]["y"] == [pytest.approx(space.records[0]["top1"], abs=0.01)]


def test_time_is_that_of_all_images_together():
    records = [fake("tent", seconds=s) | {"images": n} for s, n in ((1.0, 100), (2.0, 900), (0.0, 0))]
    assert milliseconds(records) == 3.0
    assert [milliseconds([r]) for r in records] == [10.0, pytest.approx(2.222, abs=1e-3), None]
    assert seconds_for(50_000, records) == 150.0


def test_one_domain_has_its_spread():
    records = [fake("tent", "mixed", s, 50.0 + s, experiment="mixed") for s in range(3)]
    assert "| tent | 51.0 ± 1.0 |" in markdown(records)
    assert r"tent & 51.0 $\pm$ 1.0 \\" in latex(records)
    records += [fake("noadapt", "mixed", s, 40.0, experiment="mixed") for s in range(3)]
    assert "(over seeds where there is one domain)" in markdown_report(sections(records))


def test_of_learning_rates_the_best_of_each_row_is_marked():
    values = {"tent": {0.1: 50.0, 0.2: 40.0}, "mgtta": {0.1: 60.0, 0.2: 70.0}}
    records = [
        fake(m, top1=v, experiment="learning-rate", settings={"lr": lr})
        for m, vs in values.items()
        for lr, v in vs.items()
    ]
    assert "| tent | **50.0** | 40.0 |" in markdown(records)
    assert "| mgtta | 60.0 | **70.0** |" in markdown(records)
    assert r"tent & \textbf{50.0} & 40.0 \\" in latex(records)
    assert "Bold: the best of a row." in markdown_report(sections(records))
    shown = page._shown(sections(records)[0], "s0", [])
    assert [[c["best"] for c in row["cells"]] for row in shown["rows"]] == [[False, True], [True, False]]


def test_learning_rates_that_were_chosen_are_told():
    swept = {"chosen_from": [0.1, 0.2, 0.3]}
    records = [fake("noadapt"), *(fake(m, settings={"lr": lr}, **swept) for m, lr in (("mgtta", 0.2), ("tent", 0.001)))]
    words = "Learning rates, each chosen from 3: mgtta 0.2, tent 0.001."
    [section] = sections(records)
    assert words in markdown_report([section])
    assert words in latex(records)
    assert words in page._shown(section, "s0", [])["notes"]
    small = [fake("tent", experiment="small-batch", batch_size=n, settings={"lr": n / 10}, **swept) for n in (2, 4)]
    words = "Learning rates, each chosen from 3: tent 0.2 (batch size 2) and 0.4 (batch size 4)."
    assert words in notes(sections(small)[0])
    assert "Learning rate" not in notes(sections(table_1())[0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tent": [50.0, 60.0]}, "Highest: tent, 60.0 % (maximum updates: 2)."),
        ({"tent": [60.0, 60.0]}, "Highest: tent, 60.0 % (maximum updates: 1, 2)."),
        ({"tent": [60.0, 50.0, 60.0], "mgtta": [0.0] * 3}, "Highest: tent, 60.0 % (maximum updates: 1, 3)."),
        ({"tent": [60.0, 50.0], "mgtta": [0.0, 60.0]}, "Highest: mgtta and tent, 60.0 % (maximum updates: 1, 2)."),
    ],
)
def test_headlines_of_columns(values, words):
    records = [
        fake(m, top1=v, experiment="budgets", max_updates=k) for m, vs in values.items() for k, v in enumerate(vs, 1)
    ]
    assert headline(sections(records)[0]) == [words]


def test_figures_beside_accuracy_are_those_of_the_largest_budget():
    records = [fake("mgtta", experiment="budgets", max_updates=k, updates=n) for k, n in ((10, 7), (20, 9))]
    rates = [fake("mgtta", experiment="learning-rate", settings={"lr": lr}) for lr in (0.1, 0.2)]
    shown = page.page(sections(records))
    assert re.search(r"<td[^>]*>9</td>\s*</tr>", shown)
    assert ">updates at 20</button>" in shown
    assert "updates" not in re.findall(r">([\w -]+)</button>", page.page(sections(rates)))
    assert ">updates</button>" in page.page(sections(table_1()))


def test_ticks_of_many_rates_leave_room_for_each_other():
    from mgtta.report.charts import TICKS, apart

    rates = [2.5e-5, 5e-5, 1e-4, 1.25e-4, 2e-4, 2.5e-4, 5e-4, 1e-3, 1.25e-3, 2e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05]
    shown = apart(rates)
    assert shown[0] == rates[0]
    assert 4 <= len(shown) <= TICKS + 1
    assert apart([2.0, 4.0, 8.0]) == [2.0, 4.0, 8.0]
    assert apart([3.0]) == [3.0]


def test_rows_whose_rate_was_chosen_at_an_edge_of_the_grid_are_marked():
    grid = [0.1, 0.2, 0.3]
    edge, inside = (table_1([m], settings={"lr": lr}, chosen_from=grid) for m, lr in (("tent", 0.3), ("mgtta", 0.2)))
    [section] = sections([*edge, *inside])
    text = markdown_report([section])
    assert "| tent † |" in text
    assert "| mgtta |" in text
    assert "†: chosen at an edge of the tried rates" in text
    assert "tent †" in latex_report([section])
    assert "†" not in markdown_report(sections(inside))
