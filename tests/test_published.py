"""The paper's figures: whole, in agreement with each other, and beside the measured ones."""

import statistics

import pytest
from made_up import budgets, fake, table_1

from mgtta import report
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.methods.registry import recipes
from mgtta.report.published import beside, published
from mgtta.report.tables import markdown_report


def sections(records):
    """The records' sections, as if they were of the paper's model and data."""
    paper = {"model": "vit_base_patch16_224", "data": "imagenet-c"}
    return report.sections([{**r, "protocol": {**r["protocol"], **paper}} for r in records])


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
        "deyo": average["deyo"],
        "eq7_sgd": ablated["eq7_sgd"]["imagenet-c"],
        "mgtta": average["mgtta"],
    }


def test_published_tables_are_whole():
    assert len({table["table"] for table in published()["tables"]}) == 12
    for table in published()["tables"]:
        assert {row.partition(",")[0] for row in table["rows"]} <= set(recipes())
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
    for part in ("512; the paper's: 50,000", "mean 0.5, 0.5, 0.5"):
        assert part in words
    assert "batch size" not in words
    assert "| mgtta | measured |" in markdown_report([section])


def test_published_figures_are_shown_only_where_the_footing_is_near():
    [far] = report.sections(table_1())
    assert beside(far) == []
    assert "Published, Table 1" not in markdown_report([far])
    assert beside(sections(table_1())[0])
    assert beside(sections(table_1(batch_size=16))[0]) == []
    assert beside(sections(table_1(severity=3))[0]) == []


def test_published_rows_have_notes_on_what_is_known_of_them():
    def notes(methods, **more):
        [section] = sections(table_1(methods, **more))
        [table] = beside(section)
        return table.notes, markdown_report([section])

    found, report = notes(["noadapt", "sar", "mgtta"])
    assert [note.partition(":")[0] for note in found] == ["sar", "mgtta"]
    assert "perturbed model" in found[0]
    assert "lr 5e-3" in found[1]
    assert "- Published sar: " in report
    assert notes(["noadapt"])[0] == []
    on_r = [
        fake(m, d, experiment="variants", severity=0) for m in ("deyo", "mgtta") for d in ("imagenet-r", "imagenet-a")
    ]
    [table] = beside(sections(on_r)[0])
    assert any("among 200 classes" in note for note in table.notes)
    assert not any("among 200 classes" in note for note in notes(["deyo"])[0])
    for note in published()["row_notes"]:
        assert note["row"] in recipes()


def test_published_figures_stand_beside_either_set_of_settings():
    [section] = sections(table_1(["deyo", "deyo@mgtta"]))
    [table] = beside(section)
    assert table.printed["deyo@mgtta"] == table.printed["deyo"]
    assert table.measured["deyo@mgtta"]["fog"] == section.figures()["deyo@mgtta"]["fog"]


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
    assert costs.differs[0] == "the seconds were measured for 512 images, and scaled to the paper's 50,000"
    text = markdown_report(sections([fake("mgtta", experiment="memory", peak_memory=2 * 10**9)]))
    assert "| seconds for 50,000 |" in text


def test_the_footing_names_precision_seeds_rates_and_corruptions():
    made = "mgtta, on the fly; frost: generated (6 textures)"
    plain = "; ".join(beside(sections(table_1())[0])[0].differs)
    assert "2 seeds; the paper does not state its own number" in plain
    assert "precision" not in plain
    assert "learning rates" not in plain
    assert "corruptions:" not in plain
    protocol = {"precision": "tf32", "corruptions": made}
    swept = {"settings": {"lr": 0.1}, "chosen_from": [0.1, 0.2]}
    [section] = sections([*table_1(["noadapt"], protocol=protocol), *table_1(["mgtta"], protocol=protocol, **swept)])
    words = "; ".join(beside(section)[0].differs)
    for part in (
        "precision: tf32; the paper does not state its own",
        f"corruptions: {made}; the paper's: as published",
        "learning rates of mgtta: each chosen from 2 on the validation corruptions",
    ):
        assert part in words
