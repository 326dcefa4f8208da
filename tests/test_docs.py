"""The README, the pages of docs/ and the examples do what they say: every Python block runs."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folders(tmp_path):
    """The folders that the pages name."""
    for place in ("imagenet/val/n01440764", "imagenet/val/n01443537", "photos/cat"):
        (tmp_path / place).mkdir(parents=True)
        Image.effect_noise((240, 230), 60).convert("RGB").save(tmp_path / place / "one.JPEG")


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), namespace)
    assert namespace


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [example.name, "--quick"])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_point_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readmes_table_is_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import headline

    assert headline.table(headline.by_method(ROOT / "results" / "imagenet")) in (ROOT / "README.md").read_text()


def test_the_tables_of_scale_are_the_measurement(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    result = json.loads((ROOT / "results" / "scale.json").read_text())
    assert scale.page(result) == (ROOT / "results" / "scale.md").read_text()
    assert scale.projection(result) in (ROOT / "docs" / "scale.md").read_text()


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
