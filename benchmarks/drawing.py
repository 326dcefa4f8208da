"""Curves as an SVG for light and dark pages: some stand out, the rest is grey, and each has its name at its end."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 760  # of the picture, px
HEIGHT = 400
LEFT = 46  # of the plot
TOP = 40
PLOT_WIDTH = 590
PLOT_HEIGHT = 310
LINE = 15  # px, from one name to the next
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; fill: #5b6570; }
.title { font-size: 13px; font-weight: 600; fill: #1c2024; }
.grid { stroke: #dfe3e8; }
.curve { fill: none; stroke: #b9c0c8; stroke-width: 1.2; stroke-linejoin: round; }
.lead { fill: none; stroke: #b9c0c8; stroke-width: .7; }
.best { stroke: #c8501e; stroke-width: 2.6; } text.best { fill: #c8501e; stroke: none; font-weight: 600; }
.second { stroke: #0a6cab; stroke-width: 2.6; } text.second { fill: #0a6cab; stroke: none; font-weight: 600; }
.still { stroke: #1c2024; stroke-width: 2; stroke-dasharray: 5 3; }
text.still { fill: #1c2024; stroke: none; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #9ba5af; } .title { fill: #e6e9ec; } .grid { stroke: #333a41; } .curve, .lead { stroke: #59626b; }
  .best { stroke: #ff8f5a; } text.best { fill: #ff8f5a; } .second { stroke: #6cbcf0; } text.second { fill: #6cbcf0; }
  .still { stroke: #e6e9ec; } text.still { fill: #e6e9ec; }
}
"""


def curves_svg(
    curves: Mapping[str, Sequence[float]], looks: Mapping[str, str], first: int, title: str, x: str, y: str
) -> str:
    """Return the picture.

    Args:
        curves: name -> values at `first`, `first` + 1, ...
        looks: name -> best, second or still; the other curves are grey.
    """
    values = [v for curve in curves.values() for v in curve]
    low = 5 * (min(values) // 5)
    high = 5 * -(-max(values) // 5)
    longest = max(map(len, curves.values()))

    def at(i: int, value: float) -> tuple[float, float]:
        return LEFT + PLOT_WIDTH * i / max(1, longest - 1), TOP + PLOT_HEIGHT * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="0" y="14">{escape(title)}</text>',
        f'<text x="0" y="{TOP - 8}">{escape(y)}</text>',
    ]
    for value in range(int(low), int(high) + 1, 5):
        _, level = at(0, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT_WIDTH}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{value}</text>')
    ticks = range(-first % 5, longest, 5)
    parts += [_centred(at(i, low)[0], TOP + PLOT_HEIGHT + 18, str(first + i)) for i in ticks]
    parts.append(_centred(LEFT + PLOT_WIDTH / 2, HEIGHT - 8, x))
    for name in sorted(curves, key=lambda name: name in looks):  # what stands out is drawn last
        points = (at(i, value) for i, value in enumerate(curves[name]))
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path class="curve {looks.get(name, "")}" d="M{path}"/>')
    ends = {name: at(len(curve) - 1, curve[-1]) for name, curve in curves.items()}
    parts += _names(ends, looks)
    return "\n".join([*parts, "</svg>\n"])


def _centred(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{escape(text)}</text>'


def _names(ends: Mapping[str, tuple[float, float]], looks: Mapping[str, str]) -> list[str]:
    """Return the names beside the ends of their curves, moved apart, each with a line to its end."""
    order = sorted(ends, key=lambda name: ends[name][1])
    levels = []
    free = float(TOP)
    for name in order:
        free = max(free, ends[name][1])
        levels.append(free)
        free += LINE
    lowest = TOP + PLOT_HEIGHT
    for i in reversed(range(len(order))):
        levels[i] = min(levels[i], lowest)
        lowest = levels[i] - LINE
    parts = []
    edge = LEFT + PLOT_WIDTH
    for name, level in zip(order, levels, strict=True):
        x, y = ends[name]
        parts.append(f'<path class="lead" d="M{x + 2:.1f} {y:.1f}L{edge + 8} {level:.1f}"/>')
        parts.append(f'<text class="{looks.get(name, "")}" x="{edge + 11}" y="{level + 4:.1f}">{escape(name)}</text>')
    return parts
