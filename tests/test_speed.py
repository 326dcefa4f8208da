"""The speed benchmark runs, small, and writes its page."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "speed.py"


@pytest.mark.parametrize(
    ("words", "heading", "row"),
    [
        (["--part", "step", "--model", "test_vit"], "## A step: test_vit, batch 2", "| TENT as usually written |"),
        (["--part", "plus", "--model", "test_vit"], "## MGTTA+ on the fast path: test_vit", "| MGTTA+ |"),
        (["--part", "methods", "--model", "test_vit"], "## Methods that choose images: test_vit", "| eata |"),
        (["--part", "networks"], "## Other networks", "| test_vit reg_tokens=2 | TENT, captured |"),
        (["--part", "single", "--model", "test_vit"], "## Batches of one: test_vit", "| MGTTA+ | in a row |"),
        (["--part", "evaluate"], "## What `evaluate` adds", "| 1,000 |"),
        (["--part", "growth"], "## As work grows", "| test_vit2 | 2 |"),
        (["--part", "data"], "## From JPEG tars", "| 1 |"),
    ],
)
def test_parts(words, heading, row, tmp_path, monkeypatch):
    small = ["--quick", "--rounds", "1", "--batch", "2", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["speed.py", *small, *words])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    page = (tmp_path / "speed.md").read_text()
    assert heading in page
    assert row in page
    assert all(
        part["command"].startswith("python benchmarks/speed.py --quick")
        for part in json.loads((tmp_path / "speed.json").read_text()).values()
    )
    assert (tmp_path / "growth_cpu.svg").exists() == ("growth" in words)


def test_what_fails_or_does_not_fit_is_named_on_the_page(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import speed_pages
    import speed_tools

    def fail():
        raise RuntimeError("no such kernel")

    who = [speed_tools.Contender("works", lambda: lambda: 1), speed_tools.Contender("fails", fail)]
    who.append(speed_tools.Contender("slow", fail, seconds=100.0))
    rows = speed_tools.measure(who, 2, "cpu", speed_tools.Deadline(50.0))
    assert [row["name"] for row in speed_pages.measured(rows)] == ["works"]
    told = speed_pages.left_out(rows)
    assert "fails : RuntimeError: no such kernel" in told
    assert f"slow : {speed_tools.ENDED}" in told
