"""Sections and their tables in markdown and LaTeX, on records made up for the purpose."""

import statistics

import pytest
from made_up import LEVEL, budgets, fake, table_1

from mgtta.report import Figure, latex, markdown, sections
from mgtta.report.summary import best
from mgtta.report.tables import latex_report, markdown_report
from mgtta.report.words import headline, notes


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
    assert "6 records that repeat" in notes(found[1])


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
