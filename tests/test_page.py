"""The report's files, and the page in a real browser: headless Chromium, where there is one."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest
from made_up import budgets, fake, table_1

from mgtta import cli
from mgtta.bench.store import Store
from mgtta.data.glyphs import Glyphs
from mgtta.methods.registry import recipes
from mgtta.report import page, sections, write_report
from mgtta.report.charts import POINTS, running_accuracy
from mgtta.report.examples import Example, Prediction, data_uri, embedded_examples

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">{{ 7*7 }}%{x}<b>\'&amp;'
IMAGE = data_uri(Glyphs(1)[0][0])
EXAMPLES = [Example("tent", "fog", "A", IMAGE, IMAGE, Prediction("C", 0.4, False), Prediction("A", 0.9, True))]


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


def charts_of(text):
    return json.loads(re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1])


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
        "Highest: mgtta, ",
        "95 % interval",
        "glyphs_vit (weights 01234567) on rendered characters",
        "Not on the same footing",
        "71.3",
        "mgtta bench corruptions --out runs",
        "90 % sure",
        "predicted and not learned",
        "clean",
        "before:",
        "Table 2, right",
    ):
        assert words in read.text, words
    assert "skipped" in read.text
    assert "tent, in the domains in which it changed accuracy most" in read.text
    assert "No example images" not in read.text
    without = Reader(page.page(sections(table_1()))).text
    assert "predicted and not learned" not in without
    assert "No example images: they are drawn only for the embedded data and model" in without


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
        Reader(
            page.page(
                sections(
                    [
                        fake(
                            text,
                            text,
                            settings={"a": text},
                            protocol=dict.fromkeys(("model", "weights", "data", "device", "command"), text),
                        )
                    ]
                )
            )
        )
        for text in ("plain", HOSTILE)
    )
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
    charts = charts_of(text)
    assert ("s0-curve" in charts) == (records[0]["experiment"] == "corruptions" and records[0]["top1"] is not None)


@pytest.mark.usefixtures("small")
def test_no_two_methods_look_alike():
    few = ("noadapt", "tent", "eq7_adam", "mgtta_plus")
    records = [*table_1(recipes(), 1, ("fog",)), *(fake(m, "mixed", experiment="mixed") for m in few)]
    rows = [fake("tent", experiment="ablation", settings={"lr": k}) for k in range(12)]
    looks: dict[str, set] = {}
    for name, chart in charts_of(page.page(sections([*records, *rows]))).items():
        own = [t for t in chart["traces"] if t["name"] != "perfect"]
        lines = {t["name"]: (t["line"]["color"], t["line"]["dash"]) for t in own}
        markers = {t["name"]: (t["line"]["color"], t["marker"]["symbol"]) for t in own}
        assert len({(lines[n], markers[n]) for n in lines}) == len(own), name
        if "lr" not in own[0]["name"]:
            assert len(set(lines.values())) == len(set(markers.values())) == len(own), name
            for method, line in lines.items():
                looks.setdefault(method, set()).add((line, markers[method]))
    assert set(looks) == set(recipes())
    assert all(len(look) == 1 for look in looks.values())  # the same in all charts
    assert {line[1] for method in few for line, _ in looks[method]} == {"solid"}  # those seen most: by colour


@pytest.mark.usefixtures("small")
def test_time_is_of_timed_records_of_one_device():
    def timed(records):
        text = page.page(sections(records))
        heads = re.findall(r'<button type="button">(.*?)</button>', text)
        chart = charts_of(text).get("s0-runtime")
        assert ("ms/image" in heads) == (chart is not None)
        return {t["name"]: t["x"] for t in chart["traces"]} if chart else {}

    assert timed(table_1()) == {}
    assert timed([fake("tent", alone=False)]) == {}
    alone = [fake("tent", s, seconds=0.512, alone=True, experiment="runtime") for s in ("fog", "snow")]
    assert timed(alone) == {"tent": [pytest.approx(1)]}
    slow = fake("tent", "frost", seconds=512.0, alone=True, experiment="runtime", protocol={"device": "slow"})
    untimed = fake("tent", "glass_blur", seconds=512.0, experiment="runtime")
    assert timed([slow, *alone, untimed]) == {"tent": [pytest.approx(1)]}


@pytest.mark.usefixtures("small")
def test_time_of_a_budget_in_seconds_is_in_the_table():
    text = page.page(sections(budgets()))
    updates, seconds = (part for part in text.split("<thead>") if "sortable" not in part and "ECE at" in part)
    assert "ms/image" in seconds
    assert "ms/image" not in updates


@pytest.mark.usefixtures("small")
def test_a_method_has_one_entry_in_the_legend_for_all_its_batch_sizes():
    records = [fake("tent", experiment="small-batch", batch_size=b, peak_memory=b * 10**9) for b in (4, 64)]
    [trace] = charts_of(page.page(sections(records)))["s0-memory"]["traces"]
    assert (trace["name"], trace["x"], trace["text"]) == ("tent", [4, 64], ["batch size 4", "batch size 64"])


@pytest.mark.usefixtures("small")
def test_many_settings_are_folded():
    records = [fake("tent", experiment="sweep", settings={"lr": k / 1000, "momentum": 0.9}) for k in range(1, 200)]
    text = page.page(sections(records))
    [shown, rest] = re.search(
        r"<dt>settings</dt><dd>(.*?)<details.*?</summary>(.*?)</details>", text, re.DOTALL
    ).groups()
    assert len(shown) < 400
    assert len(shown.split(";")) + len(rest.split(";")) == 199
    assert f"and {len(rest.split(';'))} more" in text
    assert "more</summary>" not in page.page(sections(records[:3]))


def test_running_accuracy():
    records = [{"curve": [1, 3], "sizes": [2, 4]}, {"curve": [2, 2], "sizes": [2, 4]}]
    assert running_accuracy(records) == ([1, 2], [75.0, pytest.approx(100 * 4 / 6, abs=0.01)])
    xs, ys = running_accuracy([{"curve": [1] * 5000, "sizes": [2] * 5000}])
    assert len(xs) <= POINTS + 1
    assert (xs[0], xs[-1], set(ys)) == (1, 5000, {50.0})


def test_examples_are_rendered_for_the_embedded_data():
    found = embedded_examples([fake("noadapt"), fake("mgtta", batch_size=16)], domains=1, images=32)
    assert 1 <= len(found) <= 3
    assert {(e.method, e.domain) for e in found} == {("mgtta", "fog")}
    for e in found:
        assert e.clean.startswith("data:image/png;base64,")
        assert e.clean != e.corrupted
        assert e.before.right == (e.before.name == e.label)


def test_examples_come_from_the_domains_that_changed_most(monkeypatch):
    values = {"fog": (50, 51), "snow": (60, 40), "frost": (30, 35)}
    methods = ("noadapt", "mgtta")
    records = [fake(m, d, top1=v, batch_size=4) for d, vs in values.items() for m, v in zip(methods, vs, strict=True)]
    monkeypatch.setattr("mgtta.report.examples._examples", lambda _, domain, *__: [domain])
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
    assert opened.first_column() == ["noadapt", "mgtta", "tent"]
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


def test_hovering_names_the_curves(browser, report_file):
    opened = Opened(browser, report_file)
    x, y = opened.js(
        "const plot = document.querySelector('[data-chart=s0-curve] .nsewdrag');"
        "plot.scrollIntoView({block: 'center'});"
        "const r = plot.getBoundingClientRect(); return [r.right - 8, r.top + r.height / 2]"  # the last batch
    )
    for step in (0, 5):
        event = {"type": "mouseMoved", "x": x + step, "y": y}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)
        opened.js("return new Promise(r => setTimeout(r, 200))")
    shown = opened.js("return document.querySelector('[data-chart=s0-curve] .hoverlayer').textContent")
    assert all(method in shown for method in ("noadapt", "tent", "mgtta"))
    assert opened.complaints() == []


@pytest.fixture(scope="module")
def full_file(tmp_path_factory):
    """All methods, many learning rates, and long names."""
    rates = [k * 10.0**-e for e in range(2, 6) for k in (1, 2.5, 5)]
    swept = [fake(m, experiment="sweep", settings={"lr": lr}) for m in recipes() for lr in rates]
    long = [
        fake(
            "mgtta",
            experiment="sweep",
            settings={"lr": lr},
            protocol={"generator": f"trained on {n} images, {'x ' * 40}"},
        )
        for lr in rates
        for n in (64, 128)
    ]
    records = [*table_1(recipes(), peak_memory=10**9), *swept, *long]
    return write_report(store(tmp_path_factory.mktemp("full"), records), examples=False)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_legend_lies_below_all_else_and_the_plot_keeps_its_height(browser, full_file, width):
    opened = Opened(browser, full_file, width)
    charts = opened.js(
        "return [...document.querySelectorAll('.chart')].map(box => {"
        "  const all = part => [...box.querySelectorAll(part)].map(e => e.getBoundingClientRect());"
        "  const [legend] = all('.legend .bg'), [plot] = all('.nsewdrag'), mine = box.getBoundingClientRect();"
        "  return {plot: plot.height, gap: legend.top - Math.max(...all('.xtick text, .xtitle').map(r => r.bottom)),"
        "    over: Math.max(legend.bottom - mine.bottom, ...all('.legendtext').map(r => r.right - mine.right))}})"
    )
    assert len(charts) == 4
    for chart in charts:
        assert chart["plot"] == pytest.approx(260, abs=2)
        assert 0 < chart["gap"] < 20
        assert chart["over"] < 1
    opened.browser.execute_cdp_cmd(  # turned
        "Emulation.setDeviceMetricsOverride", {"width": 700, "height": 390, "deviceScaleFactor": 1, "mobile": False}
    )
    opened.js("return new Promise(r => setTimeout(r, 500))")
    assert opened.js("return [...document.querySelectorAll('.chart')].every(b => b.layout.width === b.clientWidth)")
    assert opened.complaints() == []


def test_long_names_leave_room_for_figures_on_a_phone(browser, full_file):
    opened = Opened(browser, full_file, 390)
    widths = "return [...document.querySelectorAll('table.sortable')].map(t => t.rows[1].cells[0].offsetWidth)"
    plain, long = opened.js(widths)
    assert 60 < plain < 110
    assert 100 < long < 180


def test_on_paper_all_is_as_wide_as_the_paper(browser, full_file):
    opened = Opened(browser, full_file, scheme="dark")
    look = (
        "return {main: document.querySelector('main').clientWidth,"
        " tables: [...document.querySelectorAll('.scroll > table')].map(t => t.getBoundingClientRect().width),"
        " charts: [...document.querySelectorAll('.chart')].map(b =>"
        "   [b.querySelector('.main-svg').getBoundingClientRect().width, b.closest('figure').clientWidth]),"
        " open: [...document.querySelectorAll('details')].map(d => [d.className, d.open]),"
        " ink: getComputedStyle(document.querySelector('.xtick text')).fill}"
    )
    before = opened.js(look)
    opened.js("dispatchEvent(new Event('beforeprint'))")
    paper = opened.js(look)
    assert paper["main"] == pytest.approx(184 * 96 / 25.4, abs=1)  # A4 less its margins
    assert max(paper["tables"]) <= paper["main"] + 1 < max(before["tables"])
    assert all(figure - 30 < svg <= figure for svg, figure in paper["charts"])
    assert {(name, is_open) for name, is_open in paper["open"]} == {("", True), ("fold", False)}
    assert paper["ink"] == "rgb(28, 32, 36)"
    opened.js("dispatchEvent(new Event('afterprint'))")
    assert opened.js(look) == before
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
