"""The README, the pages of docs/ and the examples do what they say: every Python block runs."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from test_structure import MAY_IMPORT

import mgtta
from mgtta.methods.registry import recipe, recipes

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
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readmes_table_is_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import headline

    assert headline.headline(headline.by_method(ROOT / "results" / "imagenet")) in (ROOT / "README.md").read_text()


def test_the_methods_page_is_the_registry():
    written = runpy.run_path(str(ROOT / "docs" / "methods.py"))
    page = (ROOT / "docs" / "methods.md").read_text()
    assert page == written["updated"](page), "docs/methods.md is behind the recipes: run python docs/methods.py"
    parts = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(parts) == list(recipes())
    for name, part in parts.items():
        for setting in recipe(name).settings:
            assert re.search(rf"`{setting}[=`]", part), f"{name}: {setting}"
        assert "**Needs:**" in part
        own = name == "noadapt" or name.startswith(("eq7", "mgtta"))  # no paper, or this one
        assert own or re.search(r"\(.*20\d\d\)", part), f"{name}: paper and year"


def test_the_catalogue_of_the_list_command_is_the_registry():
    written = runpy.run_path(str(ROOT / "docs" / "methods.py"))
    assert written["CATALOGUE"].read_text() == written["catalogue"](), "run python docs/methods.py"


def test_the_api_page_names_all_public_names():
    named = re.findall(r"^::: mgtta\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(mgtta.__all__)


class Loaded(HTMLParser):
    """What a page fetches by itself."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for key, value in attrs if key == "src" or (tag == "link" and key == "href")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"no {name} here: the site was not built (pip install -c constraints.txt -e '.[docs]')")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


def test_the_site_builds_and_loads_nothing_from_elsewhere(site):
    pages = {page.stem: page.read_text() for page in site.glob("*.html")}
    assert pages.keys() >= {page.stem for page in (ROOT / "docs").glob("*.md")}
    for name, text in pages.items():
        outside = [address for address in Loaded(text).addresses if re.match(r"(\w+:)?//", address)]
        assert not outside, name
    assert not (site / "methods.py").exists()


def test_the_site_shows_signatures_and_docstrings(site):
    text = (site / "api.html").read_text()
    for name in mgtta.__all__:
        assert f'id="mgtta.{name}"' in text, name
    assert "Parameters:" in text


def test_the_tables_of_scale_are_the_measurement(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    result = json.loads((ROOT / "results" / "scale.json").read_text())
    assert scale.page(result) == (ROOT / "results" / "scale.md").read_text()
    assert scale.projection(result) in (ROOT / "docs" / "scale.md").read_text()


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60


def test_the_picture_of_the_rooms_is_the_table_of_imports():
    drawn = re.findall(r"<title>(\w+) imports (\w+)</title>", (ROOT / "docs" / "rooms.svg").read_text())
    allowed = [(package, other) for package, others in MAY_IMPORT.items() for other in others.split()]
    assert sorted(drawn) == sorted(allowed)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda p: p.name)
def test_pictures_are_valid_and_load_nothing(picture):
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<script", text)
