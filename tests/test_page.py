"""The report's files, and the page in a real browser: headless Chromium, where there is one."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
from made_up import budgets, fake, table_1

from mgtta import cli
from mgtta.data.glyphs import Glyphs
from mgtta.report import page, sections, write_report
from mgtta.report.charts import POINTS, running_accuracy
from mgtta.report.examples import Example, Prediction, data_uri, embedded_examples
from mgtta.store import Store

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">{{ 7*7 }}%{x}<b>\'&amp;'
IMAGE = data_uri(Glyphs(1)[0][0])
EXAMPLES = [Example("fog", "A", IMAGE, IMAGE, Prediction("C", 0.4, False), Prediction("A", 0.9, True))]


def everything():
    records = [
        *table_1(peak_memory=10**9),
        *budgets(),
        *(fake(m, "mixed", experiment="mixed", mixed=True) for m in ("noadapt", "mgtta")),
    ]
    return [{**r, "skipped": 2} if r["method"] == "tent" and r["domain"] == "fog" else r for r in records]


class Reader(HTMLParser):
    """The elements and the visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self._inside = [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture
def small(monkeypatch):
    """Without the library of 5 MB, for tests that do not draw."""
    monkeypatch.setattr(page, "get_plotlyjs", lambda: "/* library */")


def store(folder, records):
    Store(folder).add("cell", records)
    return folder


# --- files


@pytest.mark.usefixtures("small")
def test_a_report_is_three_files(tmp_path):
    runs = store(tmp_path / "runs", everything())
    path = write_report(runs, tmp_path / "out", examples=EXAMPLES)
    assert path == tmp_path / "out" / "report.html"
    assert {p.name for p in path.parent.iterdir()} == {"report.html", "report.md", "report.tex"}
    assert "Limited adaptation budgets" in (path.parent / "report.md").read_text()
    assert r"\begin{tabular}" in (path.parent / "report.tex").read_text()
    assert write_report(runs, examples=False) == runs / "report.html"


@pytest.mark.usefixtures("small")
def test_the_command(tmp_path, monkeypatch, capsys):
    runs = store(tmp_path, table_1())
    monkeypatch.setattr(sys, "argv", ["mgtta", "report", str(runs), "--no-examples"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert capsys.readouterr().out.strip() == str(runs / "report.html")


def test_without_records_the_error_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="mgtta bench"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "records.jsonl").write_text('{"cell": "torn')
    with pytest.raises(ValueError, match="no finished records"):
        write_report(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]


# --- content, without a browser


@pytest.mark.usefixtures("small")
def test_the_page_says_what_was_run_and_found():
    read = Reader(page.page(sections(everything()), EXAMPLES))
    for words in (
        "mgtta is highest with", "95 % confidence interval", "glyphs_vit (weights 01234567) on rendered characters",
        "Not on the same footing", "71.3", "mgtta bench corruptions --out runs", "90 % sure",
        "predicted but not learned", "clean", "before:", "Table 2, right",
    ):  # fmt: skip
        assert words in read.text, words
    assert "skipped" in read.text
    assert "predicted but not learned" not in Reader(page.page(sections(table_1()))).text


@pytest.mark.usefixtures("small")
def test_nothing_is_loaded_from_elsewhere():
    text = page.page(sections(everything()), EXAMPLES)
    for tag, attributes in Reader(text).elements:
        for name in ("src", "href", "action", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\(", text)
    [policy] = [a["content"] for _, a in Reader(text).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


@pytest.mark.usefixtures("small")
def test_text_of_records_is_never_markup():
    plain, hostile = (
        Reader(page.page(sections([fake(text, text, settings={"a": text}, protocol=dict.fromkeys(
            ("model", "weights", "data", "device", "command"), text))])))
        for text in ("plain", HOSTILE)
    )  # fmt: skip
    assert [tag for tag, _ in plain.elements] == [tag for tag, _ in hostile.elements]
    assert not any(name.startswith("on") for _, attributes in hostile.elements for name in attributes)
    assert HOSTILE in hostile.text


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "records",
    [
        [fake("mgtta")],
        [fake("mgtta", curve=[], bins=[]) | {"top1": None, "top5": None, "ece": None, "labelled": 0}],
        [fake("mgtta", experiment="budgets", max_updates=3)],
        [{**fake(), "protocol": {}, "settings": {}}],
    ],
    ids=["one record", "no labels", "one budget", "no protocol"],
)
def test_little_is_enough(records):
    text = page.page(sections(records))
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1])
    assert ("s0-curve" in charts) == (records[0]["experiment"] == "corruptions" and records[0]["top1"] is not None)


def test_running_accuracy():
    records = [{"curve": [1, 3], "sizes": [2, 4]}, {"curve": [2, 2], "sizes": [2, 4]}]
    assert running_accuracy(records) == ([1, 2], [75.0, pytest.approx(100 * 4 / 6, abs=0.01)])
    xs, ys = running_accuracy([{"curve": [1] * 5000, "sizes": [2] * 5000}])
    assert len(xs) <= POINTS + 1
    assert (xs[0], xs[-1], set(ys)) == (1, 5000, {50.0})


def test_examples_are_rendered_for_the_embedded_data():
    found = embedded_examples([fake("noadapt"), fake("mgtta", batch_size=16)], domains=1, images=32)
    assert 1 <= len(found) <= 3
    assert {e.domain for e in found} == {"fog"}
    for e in found:
        assert e.clean.startswith("data:image/png;base64,")
        assert e.clean != e.corrupted
        assert e.before.right == (e.before.name == e.label)


def test_examples_come_from_the_domains_that_changed_most(monkeypatch):
    values = {"fog": (50, 51), "snow": (60, 40), "frost": (30, 35)}
    methods = ("noadapt", "mgtta")
    records = [fake(m, d, top1=v, batch_size=4) for d, vs in values.items() for m, v in zip(methods, vs, strict=True)]
    monkeypatch.setattr("mgtta.report.examples._examples", lambda domain, *_: [domain])
    assert embedded_examples(records, domains=2, images=0) == ["snow", "frost"]


@pytest.mark.parametrize(
    "record",
    [
        fake("noadapt"),
        fake("mgtta", protocol={"data": "photos"}),
        fake("mgtta", protocol={"model": "resnet18"}),
        fake("mgtta", protocol={"checkpoint": "other.safetensors"}),
        fake("mgtta", protocol={"generator": "trained on 128 images"}),
        fake("mgtta", protocol={"generator": "gone.safetensors"}),
    ],
    ids=["nothing adapts", "other images", "other model", "other weights", "generator trained there", "generator gone"],
)
def test_there_are_no_examples_of_what_cannot_be_repeated(record):
    assert embedded_examples([record]) == []


# --- in the browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium here: the page was not looked at in a browser (install chromium, chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update",
        "disable-sync", "no-first-run", "disable-dev-shm-usage", f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield driver
    driver.quit()


class Opened:
    """A page in the browser."""

    def __init__(self, browser, path, width=1280, scheme="light"):
        self.browser, self.url = browser, path.as_uri()
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.look(scheme)
        browser.get(self.url)
        self.js("return new Promise(r => setTimeout(r, 100))")

    def look(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def click(self, selector):
        self.js(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "for (const kind of ['mousedown', 'mouseup', 'click'])"
            "  e.dispatchEvent(new MouseEvent(kind, {bubbles: true, view: window}))",
            selector,
        )

    def first_column(self, table=0):
        return self.js(
            "return [...document.querySelectorAll('table.sortable')[arguments[0]].tBodies[0].rows]"
            ".map(row => row.cells[0].textContent)",
            table,
        )

    def complaints(self):
        return self.browser.get_log("browser")

    def requests(self):
        messages = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        mine = [p["request"]["url"] for p in sent if p["documentURL"] == self.url]  # not of the browser's own first tab
        assert self.url in mine
        return [url for url in mine if not url.startswith(("data:", "blob:")) and url != self.url]


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    runs = store(tmp_path_factory.mktemp("runs"), everything())
    return write_report(runs, examples=EXAMPLES)


def test_it_renders_without_complaint_or_request(browser, report_file):
    opened = Opened(browser, report_file)
    assert opened.js("return document.documentElement.dataset.ready") == "1"
    drawn, wanted = opened.js(
        "return [document.querySelectorAll('.chart .scatterlayer .trace').length,"
        " [...document.querySelectorAll('.chart')].reduce((n, box) => n + box.data.length, 0)]"
    )
    assert drawn == wanted > 10
    assert opened.js("return document.querySelector('.example img').naturalWidth") == 48
    assert opened.complaints() == []
    assert opened.requests() == []


def test_a_click_sorts(browser, report_file):
    opened = Opened(browser, report_file)
    assert opened.first_column() == ["noadapt", "tent", "mgtta"]
    opened.click("table.sortable th:nth-child(2) button")  # mean: the highest first
    assert opened.first_column() == ["mgtta", "tent", "noadapt"]
    opened.click("table.sortable th:nth-child(2) button")
    assert opened.first_column() == ["noadapt", "tent", "mgtta"]
    opened.click("table.sortable th:first-child button")
    assert opened.first_column() == ["mgtta", "noadapt", "tent"]
    assert opened.js("return document.querySelector('table.sortable th').ariaSort") == "ascending"


def test_the_legend_toggles_a_curve_and_the_menu_chooses_a_domain(browser, report_file):
    opened = Opened(browser, report_file)
    visible = "return document.querySelector('[data-chart=s0-curve]').data.map(t => t.visible ?? true)"
    assert opened.js(visible) == [True, True, True]
    opened.click("[data-chart=s0-curve] .legend .traces:nth-child(2) .legendtoggle")
    opened.js("return new Promise(r => setTimeout(r, 700))")  # the library waits for a double click
    assert opened.js(visible) == [True, "legendonly", True]
    curve = "return [...document.querySelector('[data-chart=s0-curve]').data[2].y]"
    before = opened.js(curve)
    opened.js(
        "const menu = document.querySelector('figure select'); menu.value = 'fog';"
        "menu.dispatchEvent(new Event('change'))"
    )
    assert opened.js(curve) != before
    assert opened.js(visible) == [True, "legendonly", True]
    assert opened.complaints() == []


@pytest.mark.parametrize("width", [375, 320])
def test_a_phone_needs_no_sideways_scrolling(browser, report_file, width):
    opened = Opened(browser, report_file, width)
    assert opened.js("return document.documentElement.scrollWidth") <= width
    opened.js("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert opened.js("return document.documentElement.scrollWidth") <= width
    assert opened.js("const b = document.querySelector('.scroll'); return b.scrollWidth > b.clientWidth")


def test_light_and_dark(browser, report_file):
    opened = Opened(browser, report_file)
    colours = (
        "return [getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.xtick text')).fill]"
    )
    light = opened.js(colours)
    opened.look("dark")
    opened.js("return new Promise(r => setTimeout(r, 300))")
    dark = opened.js(colours)
    assert light == ["rgb(255, 255, 255)", "rgb(28, 32, 36)"]
    assert dark == ["rgb(20, 23, 26)", "rgb(230, 233, 236)"]


def test_hostile_records_do_nothing(browser, tmp_path):
    protocol = dict.fromkeys(("model", "weights", "data", "device", "command"), HOSTILE)
    records = [fake(HOSTILE, d, protocol=protocol, settings={HOSTILE: HOSTILE}) for d in (HOSTILE, "fog")]
    records += [fake(HOSTILE, experiment="samples", protocol={"training_images": HOSTILE})]
    opened = Opened(browser, write_report(store(tmp_path, records)))
    assert opened.js("return window.hacked") is None
    assert opened.js("return document.querySelector('.legendtext').textContent") == HOSTILE
    assert opened.complaints() == []
    opened.js("document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.hacked=1\">')")
    opened.js("return new Promise(r => setTimeout(r, 200))")
    assert opened.js("return window.hacked") is None  # the policy holds even where escaping would not
    assert opened.requests() == []


def test_little_is_drawn_without_complaint(browser, tmp_path):
    nothing = {"top1": None, "top5": None, "ece": None, "labelled": 0, "curve": [], "bins": []}
    records = [fake("mgtta", sizes=[64]), {**fake("mgtta", experiment="mixed"), **nothing}]
    opened = Opened(browser, write_report(store(tmp_path, records), examples=False))
    assert opened.js("return document.documentElement.dataset.ready") == "1"
    assert opened.complaints() == []
