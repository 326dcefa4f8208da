"""The README, the pages of docs/ and the examples do what they say: every Python block runs."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_up import fake
from PIL import Image
from test_structure import MAY_IMPORT

import mgtta
from mgtta._lib.names import spelled
from mgtta.bench.store import Store
from mgtta.methods.registry import recipe, recipes
from mgtta.report.examples import Example, Prediction

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


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.name)
def test_notebooks_run_and_are_stored_without_outputs(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    namespace: dict = {}
    for cell in code:
        exec(compile("".join(cell["source"]), notebook.name, "exec"), namespace)
    printed = capsys.readouterr().out
    found = dict(re.findall(r"^(noadapt|mgtta) +([\d.]+) %", printed, re.MULTILINE))
    assert float(found["mgtta"]) > float(found["noadapt"])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_point_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_readmes_tables_are_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import headline

    for page, texts in headline.pages().items():
        written = page.read_text()
        assert all(f"<!-- {mark}:start -->" in written for mark in ("gain", "cost", "streams"))
        assert headline.written(written, texts) == written, "python benchmarks/headline.py"
    command = "python benchmarks/headline.py results/imagenet"
    records = Store(ROOT / "results" / "imagenet").records()
    everything = headline.all_rows(records, command)
    assert everything == (ROOT / "results" / "imagenet" / "headline.md").read_text()


def test_the_readmes_tables_begin_with_the_best_and_are_short(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import headline

    methods = ["noadapt", "mgtta_plus", *list(recipes())[1:9]]
    levels = {method: 70.0 - k for k, method in enumerate(methods[1:])} | {"noadapt": 30.0}
    records = []
    for method in methods:
        for seed in (0, 1):
            own = {"experiment": "streams", "seed": seed, "domain": "fog", "settings": {"lr": 0.1}}
            records.append(fake(method, kind="reset", top1=levels[method] + seed, **own))
            records += [fake(method, kind="rounds", top1=levels[method] - 10 * k, part=k, **own) for k in range(3)]
    [table] = headline.streams(records)
    assert table.head == ["method", "mean", "ECE", "reset", "rounds (last)"]
    assert table.rows[0] == ["mgtta+", "**60.2 ± 0.4**", "5.0", "**70.5 ± 0.7**", "**50.0 ± 0.0**"]
    assert [row[0] for row in table.rows][-1] == "noadapt"
    lines = table.some("all.md").splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + headline.ROWS
    assert "| noadapt | 20.2 ± 0.4 |" in table.some("all.md")
    assert lines[-1] == "[All 10 rows](all.md): 2 more."
    assert "mgtta+: lr 0.1" in headline.settings(records)
    few = [r for r in records if r["method"] in ("noadapt", "mgtta_plus") or r["kind"] == "reset"]
    assert headline.streams(few)[0].rows[0][0] == "mgtta+"  # ranked by the kind that all have
    assert "mgtta_plus" not in headline.all_rows(records, "command")


def test_the_methods_page_is_the_registry():
    written = runpy.run_path(str(ROOT / "docs" / "methods.py"))
    page = (ROOT / "docs" / "methods.md").read_text()
    assert page == written["updated"](page), "docs/methods.md is behind the recipes: run python docs/methods.py"
    parts = dict(re.findall(r"^### ([\w+]+)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(parts) == [spelled(name) for name in recipes()]
    for name, part in parts.items():
        for setting in recipe(name).settings:
            assert re.search(rf"`{setting}[=`]", part), f"{name}: {setting}"
        assert "**Needs:**" in part
        own = name == "noadapt" or name.startswith(("eq7", "mgtta", "plus"))  # no paper, or this one
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


def test_no_line_of_code_is_cut_and_the_search_works_from_disk(site, browser):
    size = {"width": 1400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    cut = "return [...document.querySelectorAll('pre > code')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
    for page in sorted((ROOT / "docs").glob("*.md")):
        browser.get((site / f"{page.stem}.html").as_uri())
        assert browser.execute_script(cut) == 0, page.name
    browser.get((site / "index.html").as_uri())
    browser.execute_script(
        "const input = document.querySelector('.md-search__input'); input.focus(); input.value = 'checkpoint';"
        "input.dispatchEvent(new Event('keyup', {bubbles: true}))"
    )
    found = "return document.querySelectorAll('.md-search-result__item').length"
    until = time.monotonic() + 20
    while not browser.execute_script(found) and time.monotonic() < until:
        time.sleep(0.1)
    assert browser.execute_script(found) > 3
    assert browser.get_log("browser") == []


def test_the_tables_of_scale_are_the_measurement(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    result = json.loads((ROOT / "results" / "scale.json").read_text())
    assert scale.page(result) == (ROOT / "results" / "scale.md").read_text()
    assert scale.projection(result) in (ROOT / "docs" / "scale.md").read_text()


@pytest.mark.parametrize(
    ("network", "folder", "first"),
    [
        ("deit_tiny", ".", None),
        ("resnet50", "resnet50", 1000),
        ("cifar10", "cifar10", 1000),
        ("cifar10", "cifar10/whole", None),
        ("efficientnet_lite0", "efficientnet_lite0", 1000),
    ],
)
def test_the_pages_of_streams_are_their_records(network, folder, first, monkeypatch):
    """And they say with how many pairs of settings each method was tried."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import streams
    from pages import read_lines

    own = ROOT / "results" / folder
    tried = read_lines(own / "choices.jsonl")
    page = (own / "streams.md").read_text()
    assert streams.page(read_lines(own / "streams.jsonl"), network, "streams", first, tried) == page
    tries = {".": "(of 6)", "cifar10/whole": "of 8: roid", "efficientnet_lite0": "(of 8)"}
    assert tries.get(folder, "of 8: roid") in page


def test_the_tables_of_the_service_are_the_measurement(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    serve = runpy.run_path(str(ROOT / "benchmarks" / "serve.py"))
    result = json.loads((ROOT / "results" / "serve.json").read_text())
    assert serve["page"](result) == (ROOT / "results" / "serve.md").read_text()
    assert serve["sizing"](result) in (ROOT / "docs" / "serve.md").read_text()


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
    assert not re.search(r"href=\"(?!data:image/png;)|url\(|@import|<script", text)


def test_the_readmes_picture_has_the_figures_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import before_after

    values = {"noadapt": (40.0, 50.0), "neo": (41.0, 52.0), "mgtta_plus": (61.0, 48.0)}
    protocol = {"model": "patterns_vit", "data": "patterns"}
    records = [
        fake(method, domain, top1=top1, protocol=protocol)
        for method, found in values.items()
        for domain, top1 in zip(("fog", "snow"), found, strict=True)
    ]
    wrong, right = Prediction("rings", 0.5, False), Prediction("dots", 0.5, True)
    image = "data:image/png;base64,"
    examples = [Example("mgtta+", "fog", "dots", image, image, *pair) for pair in ((wrong, right), (right, wrong))]
    drawn = ElementTree.fromstring(before_after.picture(records, examples))
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert texts[0] == "45.0 % → 54.5 %"
    assert {"fog", "fog, a loss", "✗ rings", "✓ dots", "40.0 → 61.0", "50.0 → 48.0"} <= set(texts)
    found = before_after.page_texts(records, records)
    assert "`mgtta+` makes worse: snow (-2.0 points)." in found["reset"]
    assert "| neo | **52.0** | 41.0 | 46.5 |" in found["continual"]
    assert "gains 9.5 points over NoAdapt" in found["statistics"]
    assert "Over `neo` it gains 8.0 points" in " ".join(found["statistics"].split())
    page = (ROOT / "docs" / "patterns.md").read_text()
    assert all(f"<!-- {mark}:start -->" in page for mark in found)


def test_the_command_line_page_is_the_program():
    written = runpy.run_path(str(ROOT / "docs" / "commands.py"))
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == written["page"](), "docs/commands.md is behind the program: run python docs/commands.py"
    for command in ("adapt DATA --model MODEL", "report RUNS", "demo"):
        assert f"\nmgtta {command} [OPTIONS]\n" in page
    assert "| `--batch-size` | `64` | Images in a batch. |" in page


def test_the_citation_names_the_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {mgtta.__version__}\n" in text
    assert f"## [{mgtta.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
