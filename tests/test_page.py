"""The report's files, and the page in a real browser: headless Chromium, where there is one."""

import itertools
import json
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from conftest import vit
from made_up import budgets, fake, table_1
from PIL import Image

import mgtta
from mgtta import cli
from mgtta.bench.store import Store
from mgtta.data.glyphs import Glyphs
from mgtta.methods.registry import recipes
from mgtta.report import page, sections, write_report
from mgtta.report.charts import POINTS, moving_accuracy, window_of
from mgtta.report.examples import Example, Prediction, data_uri, embedded_examples, own_examples
from mgtta.report.gains import bars, card, heat
from mgtta.report.gains import levels as levels_of
from mgtta.report.paired import differences

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">{{ 7*7 }}%{x}<b>\'&amp;'
IMAGE = data_uri(Glyphs(1)[0][0])
EXAMPLES = [Example("tent", "fog", "A", IMAGE, IMAGE, Prediction("C", 0.4, False), Prediction("A", 0.9, True))]


def everything():
    paper = {"protocol": {"model": "vit_base_patch16_224", "data": "imagenet-c"}}
    records = [
        *table_1(peak_memory=10**9, **paper),
        *(fake(m, "mixed", experiment="mixed", mixed=True) for m in ("noadapt", "mgtta")),
        *budgets(),
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


def charts_of(text):
    return json.loads(re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1])


def store(folder, records):
    Store(folder).add("cell", records)
    return folder


# --- files


def test_a_report_is_three_files(tmp_path):
    runs = store(tmp_path / "runs", everything())
    path = write_report(runs, tmp_path / "out", examples=EXAMPLES)
    assert path == tmp_path / "out" / "report.html"
    assert {p.name for p in path.parent.iterdir()} == {"report.html", "report.md", "report.tex"}
    assert "Limited adaptation budgets" in (path.parent / "report.md").read_text()
    assert r"\begin{tabular}" in (path.parent / "report.tex").read_text()
    assert write_report(runs, examples=False) == runs / "report.html"


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


def test_the_page_says_what_was_run_and_found():
    read = Reader(page.page(sections(everything()), EXAMPLES))
    for words in (
        "Highest: mgtta, ",
        "95 % interval",
        "vit_base_patch16_224 (weights 01234567) on imagenet-c",
        "Not on the same footing",
        "71.3",
        "mgtta bench corruptions --out runs",
        "90 % sure",
        "predicted and not learned",
        "without adaptation",
        "Gain over NoAdapt",
        "corrected",
    ):
        assert words in read.text, words
    assert "skipped" in read.text
    assert "tent, in the domain in which it gains most" in read.text
    assert "No example images" not in read.text
    without = Reader(page.page(sections(table_1()))).text
    assert "predicted and not learned" not in without
    assert "Not on the same footing" not in without
    assert "No example images" in without
    assert "mgtta report RUNS --data IMAGES" in without


def test_the_first_card_compares_the_best_with_noadapt():
    values = {"noadapt": (40.0, 50.0), "mgtta_plus": (60.0, 48.0), "tent": (45.0, 51.0)}
    records = [fake(m, d, top1=v) for m, vs in values.items() for d, v in zip(("fog", "snow"), vs, strict=True)]
    found = card(sections(records))
    assert (found.before, found.after, found.method, found.gain, found.gains) == (
        "45.0",
        "54.0",
        "mgtta+",
        "+9.0",
        True,
    )
    assert found.interval == ""  # two domains are too few
    assert found.facts[:3] == [
        ("largest gain: fog", "+20.0 points"),
        ("smallest gain: snow", "−2.0 points"),
        ("made worse", "1 of 2 domains"),
    ]
    assert "95 % interval" in card(sections(table_1())).interval
    assert "without adaptation" not in Reader(page.page(sections([fake("tent")]))).text


def test_the_heat_map_has_the_gain_of_each_method_in_each_domain():
    values = {"noadapt": (40.0, 50.0), "mgtta": (60.0, 48.0), "tent": (45.0, 51.0)}
    records = [fake(m, d, top1=v) for m, vs in values.items() for d, v in zip(("snow", "fog"), vs, strict=True)]
    [section] = sections(records)
    found = heat(section)
    assert found.columns == ["snow", "fog", "mean"]
    assert found.rows == {"mgtta": [20.0, -2.0, 9.0], "tent": [5.0, 1.0, 3.0]}
    text = page.page([section])
    assert '<td class="gain" style="--g:1.00">+20.0</td>' in text
    assert '<td class="loss" style="--g:0.10">−2.0</td>' in text
    assert heat(sections(records[2:])[0]) is None  # without NoAdapt


def test_bars_have_the_best_first_and_the_interval_of_the_paired_difference():
    [section] = sections(table_1())
    made = bars(section)
    paired = {d.row: d for d in differences(section) if d.against == "noadapt"}
    assert [bar.name for bar in made.bars] == ["mgtta", "tent", "noadapt"]
    left, right = (min(0.0, *(d.low for d in paired.values())), max(d.high for d in paired.values()))
    for bar in made.bars[:2]:
        assert bar.low == pytest.approx(100 * (paired[bar.name].low - left) / (right - left))
        assert bar.start + bar.width == pytest.approx(100 * (paired[bar.name].mean - left) / (right - left))
    assert made.bars[2].width == 0
    [ablation] = sections([fake(m, experiment="ablation", top1=v) for m, v in (("eq7_sgd", 20.0), ("mgtta", 40.0))])
    assert [(bar.name, bar.width, bar.gain) for bar in bars(ablation).bars] == [("mgtta", 100, ""), ("eq7_sgd", 50, "")]


def test_nothing_is_loaded_from_elsewhere():
    text = page.page(sections(everything()), EXAMPLES)
    for tag, attributes in Reader(text).elements:
        for name in ("src", "href", "action", "data"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\(", text)
    [policy] = [a["content"] for _, a in Reader(text).elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


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


def test_kinds_of_stream_are_compared_by_their_mean_and_rounds_by_the_last():
    levels = {"noadapt": 40.0, "mgtta": 50.0}
    records = []
    for method, level in levels.items():
        for seed in (0, 1):
            own = {"experiment": "streams", "seed": seed, "settings": {}}
            kinds = ("reset", "continual", "mixed", "one", "clean")
            records += [fake(method, kind=kind, top1=level + seed + k, **own) for k, kind in enumerate(kinds)]
            records += [fake(method, kind="rounds", top1=level + seed + 10 * k, part=k, **own) for k in (0, 1)]
    [section] = sections(records)
    assert levels_of(section)["mgtta"].mean == pytest.approx(50.5 + (0 + 1 + 2 + 3 + 4 + 10) / 6)
    found = card([section])
    assert (found.gain, found.interval) == ("+10.0", "95 % interval +10.00 to +10.00")
    assert heat(section).columns == ["reset", "continual", "rounds (last)", "mixed", "one", "clean", "mean"]
    assert bars(section).bars[0].low is not None
    rounds = charts_of(page.page([section]))["s0-rounds"]["views"]["all"]
    assert {s["name"]: s["y"] for s in rounds} == {"noadapt": [40.5, 50.5], "mgtta": [50.5, 60.5]}


def test_three_methods_stand_out_and_the_rest_is_grey():
    levels = {method: 40.0 + k for k, method in enumerate(recipes())}
    records = [fake(m, d, top1=v) for m, v in levels.items() for d in ("fog", "snow")]
    for name, chart in charts_of(page.page(sections(records))).items():
        for series in chart["views"].values():
            looks = {s["look"]: s["name"] for s in series if s["look"] not in ("other", "ideal")}
            assert looks == {"best": "tent_come", "second": "mgtta", "still": "noadapt"}, name
            assert sum(s["look"] == "other" for s in series) == len(recipes()) - 3
    tried = {"tent": {0.1: 40.0, 0.2: 60.0}, "eata": {0.2: 30.0, 0.4: 50.0}}  # each by its own best rate
    swept = [
        fake(m, experiment="sweep", settings={"lr": lr}, top1=v) for m, vs in tried.items() for lr, v in vs.items()
    ]
    rates = charts_of(page.page(sections(swept)))["s0-axis"]
    assert [(s["name"], s["look"]) for s in rates["views"]["all"]] == [("eata", "second"), ("tent", "best")]
    few = charts_of(page.page(sections([fake("tent", top1=50.0), fake("eata", top1=40.0)])))["s0-curve"]
    assert [(s["name"], s["look"]) for s in few["views"]["all domains"]] == [("eata", "second"), ("tent", "best")]


def test_time_is_of_timed_records_of_one_device():
    def timed(records):
        text = page.page(sections(records))
        heads = re.findall(r'<button type="button">(.*?)</button>', text)
        chart = charts_of(text).get("s0-runtime")
        assert ("ms/image" in heads) == (chart is not None)
        return {s["name"]: s["x"] for s in chart["views"]["all"]} if chart else {}

    assert timed(table_1()) == {}
    assert timed([fake("tent", alone=False)]) == {}
    alone = [fake("tent", s, seconds=0.512, alone=True, experiment="runtime") for s in ("fog", "snow")]
    assert timed(alone) == {"tent": [pytest.approx(1)]}
    slow = fake("tent", "frost", seconds=512.0, alone=True, experiment="runtime", protocol={"device": "slow"})
    untimed = fake("tent", "glass_blur", seconds=512.0, experiment="runtime")
    assert timed([slow, *alone, untimed]) == {"tent": [pytest.approx(1)]}


def test_time_of_a_budget_in_seconds_is_in_the_table():
    text = page.page(sections(budgets()))
    updates, seconds = (part for part in text.split("<thead>") if "sortable" not in part and "ECE at" in part)
    assert "ms/image" in seconds
    assert "ms/image" not in updates


def test_a_method_is_one_series_for_all_its_batch_sizes():
    records = [fake("tent", experiment="small-batch", batch_size=b, peak_memory=b * 10**9) for b in (4, 64)]
    [series] = charts_of(page.page(sections(records)))["s0-memory"]["views"]["all"]
    assert (series["name"], series["x"], series["text"]) == ("tent", [4, 64], ["batch size 4", "batch size 64"])


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


def test_curves_are_by_moving_window():
    assert [window_of(n) for n in (1, 3, 32, 120)] == [1, 3, 5, 10]
    records = [{"curve": [1, 3, 2, 2, 2, 0], "sizes": [4] * 6}, {"curve": [2, 2, 2, 2, 2, 4], "sizes": [4] * 6}]
    assert moving_accuracy(records) == ([5, 6], [pytest.approx(100 * 20 / 40), pytest.approx(100 * 21 / 40)])
    xs, ys = moving_accuracy([{"curve": [1] * 5000, "sizes": [2] * 5000}])
    assert len(xs) <= POINTS + 1
    assert (xs[0], xs[-1], set(ys)) == (416, 5000, {50.0})


def test_examples_are_rendered_for_the_embedded_data():
    found = embedded_examples([fake("noadapt"), fake("mgtta", batch_size=16)], domains=1, images=32)
    assert 1 <= len(found) <= 3
    assert {(e.method, e.domain) for e in found} == {("mgtta", "fog")}
    for e in found:
        assert e.clean.startswith("data:image/png;base64,")
        assert e.clean != e.corrupted
        assert e.before.right == (e.before.name == e.label)


def test_examples_come_from_the_domain_that_gains_most_and_from_the_one_that_loses(monkeypatch):
    values = {"fog": (50, 51), "snow": (60, 40), "frost": (30, 35)}
    methods = ("noadapt", "mgtta")
    records = [fake(m, d, top1=v, batch_size=4) for d, vs in values.items() for m, v in zip(methods, vs, strict=True)]
    monkeypatch.setattr("mgtta.report.examples._examples", lambda _, domain, *__: [domain])
    monkeypatch.setattr("mgtta.report.examples.LOOKED_AT", 4)
    assert embedded_examples(records, domains=2, images=0) == ["frost", "snow"]


def test_an_example_says_what_adaptation_did():
    def outcome(before, after):
        return Example("m", "d", "A", "", "", Prediction("x", 1, before), Prediction("x", 1, after)).outcome

    found = [outcome(*rights) for rights in ((False, True), (True, False), (True, True), (False, False))]
    assert found == ["corrected", "spoiled", "still right", "still wrong"]


@pytest.fixture
def photos(tmp_path):
    """Class folders of noisy images, and weights for them."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(6):
            Image.effect_noise((120, 110), 40 + k).convert("RGB").save(tmp_path / "photos" / name / f"{k}.png")
    return tmp_path / "photos"


def test_examples_of_the_users_own_pictures(photos, monkeypatch):
    own = mgtta.load_model(vit())
    monkeypatch.setattr("mgtta.report.examples.load_model", lambda *_, **__: own)
    monkeypatch.setattr("mgtta.report.examples.LOOKED_AT", 8)
    protocol = {"model": "mine", "weights": own.fingerprint(), "data": "photos"}
    records = [fake(m, "fog", batch_size=4, protocol=protocol) for m in ("noadapt", "tent")]
    found = own_examples(records, str(photos))
    assert {(e.method, e.domain) for e in found} == {("tent", "fog")}
    assert {e.label for e in found} <= {"cat", "dog"}
    other = [{**r, "protocol": {**r["protocol"], "weights": "others"}} for r in records]
    with pytest.raises(ValueError, match="checkpoint is not the one of these records"):
        own_examples(other, str(photos))
    needy = [fake("mgtta", "fog", batch_size=4, protocol=protocol)]
    with pytest.raises(ValueError, match="--source FILE"):
        own_examples(needy, str(photos))
    with pytest.raises(ValueError, match="examples need records of a corruption"):
        own_examples([fake("noadapt")], str(photos))


def test_a_photo_is_a_jpeg_and_a_small_image_a_png():
    assert data_uri(torch.zeros(3, 300, 300)).startswith("data:image/jpeg;")
    assert data_uri(torch.zeros(3, 48, 48)).startswith("data:image/png;")


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


OPEN_ALL = "document.querySelectorAll('details').forEach(d => { d.open = true; })"
WAIT = "return new Promise(r => setTimeout(r, 200))"


def test_it_renders_without_complaint_or_request(browser, report_file):
    opened = Opened(browser, report_file)
    assert opened.js("return document.documentElement.dataset.ready") == "1"
    opened.js(OPEN_ALL)
    opened.js(WAIT)
    drawn = opened.js("return [...document.querySelectorAll('.chart')].map(b => b.querySelectorAll('.series').length)")
    assert len(drawn) > 6
    assert min(drawn) >= 2
    assert opened.js("return document.querySelector('.example img').naturalWidth") == 48
    assert opened.complaints() == []
    assert opened.requests() == []
    assert report_file.stat().st_size < 2_000_000


def test_sections_are_folded_and_a_link_opens_one(browser, report_file):
    opened = Opened(browser, report_file)
    is_open = "return [...document.querySelectorAll('details.section')].map(d => d.open)"
    assert opened.js(is_open) == [True, False, False, False]
    opened.js("document.querySelector('nav a[href=\"#s2\"]').click()")
    opened.js(WAIT)
    assert opened.js(is_open) == [True, False, True, False]
    assert opened.js("return document.getElementById('s2').getBoundingClientRect().top") < 100


def test_a_click_sorts(browser, report_file):
    opened = Opened(browser, report_file)
    assert opened.first_column() == ["mgtta", "tent", "noadapt"]  # the best first
    opened.click("table.sortable th:nth-child(2) button")  # mean: the highest first
    assert opened.first_column() == ["mgtta", "tent", "noadapt"]
    opened.click("table.sortable th:nth-child(2) button")
    assert opened.first_column() == ["noadapt", "tent", "mgtta"]
    opened.click("table.sortable th:first-child button")
    assert opened.first_column() == ["mgtta", "noadapt", "tent"]
    assert opened.js("return document.querySelector('table.sortable th').ariaSort") == "ascending"


def test_the_menu_chooses_a_domain(browser, report_file):
    opened = Opened(browser, report_file)
    curve = "return document.querySelector('[data-chart=s0-curve] .series.best path').getAttribute('d')"
    before = opened.js(curve)
    opened.js(
        "const menu = document.querySelector('figure select'); menu.value = 'fog';"
        "menu.dispatchEvent(new Event('change'))"
    )
    assert opened.js(curve) != before
    assert opened.complaints() == []


def test_pointing_at_a_curve_names_it(browser, report_file):
    opened = Opened(browser, report_file)
    x, y = opened.js(
        "const path = document.querySelector('[data-chart=s0-curve] .series.best path');"
        "path.scrollIntoView({block: 'center'});"
        "const r = path.getBoundingClientRect(), end = path.getPointAtLength(path.getTotalLength());"
        "const svg = path.ownerSVGElement.getBoundingClientRect(); return [svg.left + end.x, svg.top + end.y]"
    )
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    opened.js(WAIT)
    tip = opened.js("const t = document.querySelector('[data-chart=s0-curve] .tip'); return t.hidden || t.textContent")
    assert tip.startswith("mgtta: ")
    assert "(batch 8)" in tip
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


CUT = """
const inside = (e, selector) => e.closest(selector) !== null;
const found = [];
for (const e of document.querySelectorAll('body *')) {
  const r = e.getBoundingClientRect();
  if (!r.width || inside(e, '.scroll') || inside(e, '.bars .name')) continue;
  if (r.right > innerWidth + 0.5 || r.left < -0.5) found.push(`${e.tagName} ${e.className} ${Math.round(r.right)}`);
}
for (const e of document.querySelectorAll('svg text')) {
  const r = e.getBoundingClientRect(), svg = e.ownerSVGElement.getBoundingClientRect();
  if (r.right > svg.right + 0.5 || r.left < svg.left - 0.5 || r.top < svg.top - 2 || r.bottom > svg.bottom + 2)
    found.push(`${e.textContent} ${Math.round(r.right - svg.right)}`);
}
return found.slice(0, 10);
"""


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("which", ["report_file", "full_file"])
def test_nothing_is_cut_at_the_edge(browser, request, which, width):
    opened = Opened(browser, request.getfixturevalue(which), width)
    assert opened.js(CUT) == []
    opened.js(OPEN_ALL)
    opened.js(WAIT)
    assert opened.js("return document.documentElement.scrollWidth") <= width
    assert opened.js(CUT) == []
    assert opened.complaints() == []


@pytest.mark.parametrize("width", [1400, 390])
def test_a_table_that_scrolls_says_so_until_its_end(browser, full_file, width):
    opened = Opened(browser, full_file, width)
    opened.js(OPEN_ALL)
    opened.js(WAIT)
    cues = (
        "return [...document.querySelectorAll('.scroll')].map(s => [s.scrollWidth > s.clientWidth + 2,"
        " getComputedStyle(s.parentElement.querySelector('.arrow')).display !== 'none'])"
    )
    found = opened.js(cues)
    assert [True, True] in found
    assert all(scrolls == shown for scrolls, shown in found)
    opened.js("document.querySelectorAll('.scroll').forEach(s => { s.scrollLeft = s.scrollWidth; })")
    opened.js(WAIT)
    assert not any(shown for _, shown in opened.js(cues))


@pytest.mark.parametrize("width", [1400, 390])
def test_names_stand_at_the_ends_of_the_curves_and_apart(browser, full_file, width):
    opened = Opened(browser, full_file, width)
    names = opened.js(
        "const box = document.querySelector('[data-chart=s0-curve]'), plot = box.querySelector('.axes line');"
        "return [...box.querySelectorAll('.name text')].map(t => {"
        "  const r = t.getBoundingClientRect(); return [r.top, r.left - plot.getBoundingClientRect().right]})"
    )
    assert len(names) == len(recipes())
    tops = sorted(top for top, _ in names)
    assert min(b - a for a, b in itertools.pairwise(tops)) > 12
    assert all(0 < right < 20 for _, right in names)
    browser.execute_cdp_cmd(  # turned
        "Emulation.setDeviceMetricsOverride", {"width": 700, "height": 390, "deviceScaleFactor": 1, "mobile": False}
    )
    opened.js(OPEN_ALL)
    opened.js(WAIT)
    assert opened.js(
        "return [...document.querySelectorAll('.chart')].every(b => b.firstChild.clientWidth === b.clientWidth)"
    )
    assert opened.complaints() == []


def test_long_names_leave_room_for_figures_on_a_phone(browser, full_file):
    opened = Opened(browser, full_file, 390)
    opened.js(OPEN_ALL)
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
        "   [b.querySelector('svg')?.clientWidth ?? 0, b.clientWidth]),"
        " open: [...document.querySelectorAll('main details')].map(d => [d.classList.contains('fold'), d.open]),"
        " ink: getComputedStyle(document.body).color}"
    )
    before = opened.js(look)
    opened.js("dispatchEvent(new Event('beforeprint'))")
    paper = opened.js(look)
    assert paper["main"] == pytest.approx(184 * 96 / 25.4, abs=1)  # A4 less its margins
    assert max(paper["tables"]) <= paper["main"] + 1
    assert all(svg == box > 0 for svg, box in paper["charts"])
    assert {(folds, is_open) for folds, is_open in paper["open"]} == {(False, True), (True, False)}
    assert paper["ink"] == "rgb(0, 0, 0)"
    opened.js("dispatchEvent(new Event('afterprint'))")
    after = opened.js(look)
    assert {**after, "charts": 0} == {**before, "charts": 0}
    assert opened.complaints() == []


@pytest.mark.parametrize("width", [375, 320])
def test_a_phone_needs_no_sideways_scrolling(browser, report_file, width):
    opened = Opened(browser, report_file, width)
    assert opened.js("return document.documentElement.scrollWidth") <= width
    opened.js(OPEN_ALL)
    assert opened.js("return document.documentElement.scrollWidth") <= width
    assert opened.js("const b = document.querySelector('.scroll'); return b.scrollWidth > b.clientWidth")


def test_light_and_dark(browser, report_file):
    opened = Opened(browser, report_file)
    colours = (
        "return [getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.axes text')).fill]"
    )
    light = opened.js(colours)
    opened.look("dark")
    opened.js("return new Promise(r => setTimeout(r, 300))")
    dark = opened.js(colours)
    assert light == ["rgb(255, 255, 255)", "rgb(91, 101, 112)"]
    assert dark == ["rgb(20, 23, 26)", "rgb(155, 165, 175)"]


def test_hostile_records_do_nothing(browser, tmp_path):
    protocol = dict.fromkeys(("model", "weights", "data", "device", "command"), HOSTILE)
    records = [fake(HOSTILE, d, protocol=protocol, settings={HOSTILE: HOSTILE}) for d in (HOSTILE, "fog")]
    records += [fake(HOSTILE, experiment="samples", protocol={"training_images": HOSTILE})]
    opened = Opened(browser, write_report(store(tmp_path, records)))
    assert opened.js("return window.hacked") is None
    assert opened.js("return document.querySelector('.series.best').dataset.name") == HOSTILE
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
