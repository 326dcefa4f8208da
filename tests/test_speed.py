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
