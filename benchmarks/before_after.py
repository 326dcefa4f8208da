"""The README's picture: rendered images before and after adaptation, and the gain under each corruption.

    mgtta demo --out runs/picture
    python benchmarks/before_after.py runs/picture

writes docs/before-after.svg, for light and dark pages. Images come from the corruptions that gain most: of each, the
first one that adaptation corrects after 96 images of the stream. The last image is one that it spoils.
"""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mgtta._lib.files import atomic
from mgtta.bench.store import Store
from mgtta.report import Section, sections
from mgtta.report.examples import Example, embedded_examples
from mgtta.report.summary import MEAN

OUT = Path(__file__).parent.parent / "docs" / "before-after.svg"
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
    parts = [
        _text(x, y - 6, example.domain.replace("_", " ") + (", a loss" if example.outcome == "spoiled" else "")),
        f'<image x="{x}" y="{y}" width="{TILE}" height="{TILE}" href="{example.corrupted}"/>',
    ]
    for line, prediction in enumerate((example.before, example.after)):
        look, mark = marks[prediction.right]
        parts.append(_text(x, y + TILE + 16 + 16 * line, f"{mark} {prediction.name}", look))
    return parts


def gains(section: Section, method: str) -> list[str]:
    """Return a line for each corruption, from the accuracy before to the accuracy after, the largest gain first."""
    figures = section.figures()
    before = {name: figure.mean for name, figure in figures["noadapt"].items() if name != MEAN}
    after = {name: figures[method][name].mean for name in before}
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
    [method] = [name for name in figures if name != "noadapt"]
    before, after = (figures[name][MEAN].mean for name in ("noadapt", method))
    first = section.records[0]
    title = f"{before:.1f} % → {after:.1f} %"
    words = (
        f"accuracy without and with {method}, mean of {len(section.columns)} corruptions: a ViT with LayerNorm only, "
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
    return "\n".join([*parts, *gains(section, method), "</svg>\n"])


def _text(x: float, y: float, text: str, look: str = "") -> str:
    return f'<text class="{look}" x="{x}" y="{y}">{escape(text)}</text>'


def main() -> None:
    records = Store(Path(sys.argv[1])).records()
    examples = embedded_examples(records, domains=2 * ACROSS)
    with atomic(OUT) as temporary:
        temporary.write_text(picture(records, examples), encoding="utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
