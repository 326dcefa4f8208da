"""The README's picture, rendered images before and after adaptation, and the tables of docs/patterns.md.

    mgtta demo --methods noadapt,neo,mgtta+ --out runs/demo
    mgtta bench continual --model patterns_vit --images 512 --methods noadapt,tent,neo,mgtta+ --out runs/continual
    python benchmarks/before_after.py runs/demo runs/continual

writes docs/before-after.svg, for light and dark pages, and the texts between the marks of docs/patterns.md. Images come
from the corruptions that gain most: of each, the first one that adaptation corrects after 96 images of the stream. The
last image is one that it spoils.
"""

import sys
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from pages import between

from mgtta._lib.files import atomic
from mgtta.bench.store import Store
from mgtta.report import Section, markdown, sections
from mgtta.report.examples import Example, embedded_examples
from mgtta.report.summary import MEAN

DOCS = Path(__file__).parent.parent / "docs"
METHOD = "mgtta+"
STATISTICS = "neo"  # only re-centres
WIDTH = 760  # of the picture, px
TILE = 92  # side of an image
ACROSS = 4  # images in a row
STEP_X = 104  # from one image to the next
STEP_Y = 160
TOP = 84  # of images and bars
NAMES = 536  # where names of corruptions end
SCALE = 1.35  # px for a percent
ROW = 19  # px for a corruption
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #5b6570; }
.title { font-size: 26px; font-weight: 700; fill: #1c2024; } .gain { fill: #1a7f37; font-weight: 600; }
.loss { fill: #b3261e; } .dark { fill: #1c2024; } .end { text-anchor: end; }
image { image-rendering: pixelated; }
.track { stroke: #1a7f37; stroke-width: 3; } .worse { stroke: #b3261e; stroke-width: 3; }
.before { fill: #8b949e; } .after { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #9ba5af; } .title, .dark { fill: #e6e9ec; } .gain { fill: #56d364; } .loss { fill: #ff8f85; }
  .track { stroke: #56d364; } .worse { stroke: #ff8f85; } .after { fill: #56d364; }
}
"""


def chosen(examples: Sequence[Example]) -> list[Example]:
    """Return the images that are drawn: corrected ones, one of each corruption, and at last one that is spoiled."""
    corrected = [one for one in examples if one.outcome == "corrected"]
    spoiled = [one for one in examples if one.outcome == "spoiled"]
    return [*corrected[: 2 * ACROSS - 1], *spoiled[:1]]


def tile(example: Example, x: float, y: float) -> list[str]:
    """Return an image with its corruption above, and the two predictions below."""
    marks = {True: ("gain", "✓"), False: ("loss", "✗")}
    title = example.domain.replace("_compression", "").replace("_", " ")  # the whole one is wider than the image
    parts = [
        _text(x, y - 6, title + (", a loss" if example.outcome == "spoiled" else "")),
        f'<image x="{x}" y="{y}" width="{TILE}" height="{TILE}" href="{example.corrupted}"/>',
    ]
    for line, prediction in enumerate((example.before, example.after)):
        look, mark = marks[prediction.right]
        parts.append(_text(x, y + TILE + 16 + 16 * line, f"{mark} {prediction.name}", look))
    return parts


def gains(section: Section) -> list[str]:
    """Return a line for each corruption, from the accuracy before to the accuracy after, the largest gain first."""
    figures = section.figures()
    before = {name: figure.mean for name, figure in figures["noadapt"].items() if name != MEAN}
    after = {name: figures[METHOD][name].mean for name in before}
    parts = []
    for i, name in enumerate(sorted(before, key=lambda name: before[name] - after[name])):
        y = TOP + 10 + ROW * i
        left, right = (NAMES + 8 + SCALE * value for value in (before[name], after[name]))
        change = after[name] - before[name]
        look = "track" if change >= 0 else "worse"
        parts += [
            _text(NAMES, y + 4, name.replace("_", " "), "end"),
            f'<line class="{look}" x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}"/>',
            f'<circle class="before" cx="{left:.1f}" cy="{y}" r="4"/>',
            f'<circle class="after" cx="{right:.1f}" cy="{y}" r="4"/>',
            _text(WIDTH, y + 4, f"{before[name]:.1f} → {after[name]:.1f}", "end gain" if change >= 0 else "end loss"),
        ]
    return parts


def picture(records: Sequence[dict[str, Any]], examples: Sequence[Example]) -> str:
    """Return the SVG."""
    [section] = sections(records)
    figures = section.figures()
    before, after = (figures[name][MEAN].mean for name in ("noadapt", METHOD))
    first = section.records[0]
    title = f"{before:.1f} % → {after:.1f} %"
    words = (
        f"accuracy without and with {METHOD}, mean of {len(section.columns)} corruptions: a ViT with LayerNorm only, "
        f"{first['images']} rendered images each"
    )
    height = TOP + 2 * STEP_Y - 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(f"{title}: {words}")}">',
        f"<style>{STYLE}</style>",
        _text(0, 26, title, "title"),
        _text(0, 48, words),
        _text(NAMES, TOP - 6, "● without", "end"),
        _text(NAMES + 8, TOP - 6, "● with adaptation, %", "gain"),
    ]
    for i, example in enumerate(chosen(examples)):
        parts += tile(example, STEP_X * (i % ACROSS), TOP + STEP_Y * (i // ACROSS))
    return "\n".join([*parts, *gains(section), "</svg>\n"])


def _text(x: float, y: float, text: str, look: str = "") -> str:
    return f'<text class="{look}" x="{x}" y="{y}">{escape(text)}</text>'


def page_texts(demo: Sequence[dict[str, Any]], continual: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return mark -> the text between its marks in docs/patterns.md."""
    return {
        "reset": f"{markdown(demo)}\n\n{worse(demo)}",
        "continual": f"{markdown(continual)}\n\n{worse(continual)}",
        "statistics": textwrap.fill(
            f"With resets, `mgtta+` gains {difference(demo, 'noadapt'):.1f} points over NoAdapt, and in one stream "
            f"{difference(continual, 'noadapt'):.1f}. Over `neo` it gains {difference(demo, STATISTICS):.1f} points "
            f"with resets, and {difference(continual, STATISTICS):.1f} in one stream.",
            120,
        ),
    }


def difference(records: Sequence[dict[str, Any]], other: str) -> float:
    """Return how many points mgtta+ is ahead of another method, on the mean of the corruptions."""
    [section] = sections(records)
    figures = section.figures()
    return figures[METHOD][MEAN].mean - figures[other][MEAN].mean


def worse(records: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on the corruptions that mgtta+ makes worse."""
    [section] = sections(records)
    figures = section.figures()
    changes = {name: figures[METHOD][name].mean - figures["noadapt"][name].mean for name in figures[METHOD]}
    lost = [f"{name} ({change:+.1f} points)" for name, change in changes.items() if change < 0]
    return f"`mgtta+` makes worse: {', '.join(lost) or 'none of them'}."


def main() -> None:
    demo, continual = (Store(Path(name)).records() for name in sys.argv[1:])
    examples = embedded_examples(demo, domains=2 * ACROSS)
    page = (DOCS / "patterns.md").read_text()
    for mark, text in page_texts(demo, continual).items():
        page = between(page, mark, text)
    for name, text in {"before-after.svg": picture(demo, examples), "patterns.md": page}.items():
        with atomic(DOCS / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(DOCS / name)


if __name__ == "__main__":
    main()
