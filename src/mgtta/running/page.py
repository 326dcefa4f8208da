"""The page of `mgtta adapt --report`: your own pictures before and after adaptation, and signals over time.

One file without links to others. Shapes: n images, C classes.
"""

import base64
import heapq
import io
from collections.abc import Callable, Sequence
from html import escape
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from mgtta._lib.files import atomic
from mgtta.adaptation.monitor import Sample, Signals

MOST = 24  # pictures of each kind
SIDE = 160  # pixels of a thumbnail
QUALITY = 80  # of its JPEG
POINTS = 400  # of a curve
WIDTH = 720  # of a chart, in its own units
HEIGHT = 120

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1100px; padding: 1rem; overflow-wrap: anywhere }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 1rem }
figure { margin: 0 }
img { width: 100%; border-radius: 6px; display: block }
figcaption { font-size: .85rem }
.before { opacity: .7; text-decoration: line-through }
svg { width: 100%; height: auto; display: block }
polyline { fill: none; stroke: currentColor; stroke-width: 1.5 }
text { font-size: 12px; fill: currentColor }
"""


class Picture(NamedTuple):
    """One picture with both predictions."""

    name: str
    jpeg: bytes
    before: str
    before_confidence: float
    after: str
    after_confidence: float


class Gallery:
    """The pictures whose prediction changed most, and the surest of those whose prediction stayed.

    "Most" is the product of the two confidences: both models were sure, of different classes.

    Args:
        names: number of an image in its data set -> its name.
        classes: class -> its name.
    """

    def __init__(self, names: Callable[[int], str], classes: Callable[[int], str]):
        self.names = names
        self.classes = classes
        self.compared = 0
        self.number_changed = 0
        self._changed: list[tuple[float, int, Picture]] = []
        self._unsure: list[tuple[float, int, Picture]] = []
        self._order = count()

    @property
    def changed(self) -> list[Picture]:
        """The changed pictures, those of which both models were surest first."""
        return [picture for _, _, picture in sorted(self._changed, reverse=True)]

    @property
    def unsure(self) -> list[Picture]:
        """The pictures of which the adapted model is least sure."""
        return [picture for _, _, picture in sorted(self._unsure, reverse=True)]

    def add(self, batch: Any, sample: Sample) -> None:
        """Look at the sampled images of a batch, and keep those that belong here."""
        q, before = sample.asked.float().softmax(1).max(1)
        p, after = sample.given.float().softmax(1).max(1)
        different = before != after
        self.compared += len(before)
        self.number_changed += int(different.sum())
        for i, row in enumerate(sample.rows.tolist()):
            place = self._changed if different[i] else self._unsure
            score = float(p[i] * q[i]) if different[i] else 1 - float(p[i])
            if len(place) == MOST and score <= place[0][0]:
                continue
            labels = (self.classes(int(before[i])), float(q[i]), self.classes(int(after[i])), float(p[i]))
            picture = Picture(self.names(int(batch.index[row])), jpeg(batch.x[row]), *labels)
            entry = (score, next(self._order), picture)
            if len(place) < MOST:
                heapq.heappush(place, entry)
            else:
                heapq.heapreplace(place, entry)


def jpeg(x: Tensor) -> bytes:
    """Return a thumbnail of an image (3, H, W), uint8 or float in [0, 1], as JPEG."""
    x = x.detach().cpu()
    if x.dtype != torch.uint8:
        x = (x.float().clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(x.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def write_page(path: Path, gallery: Gallery, over_time: Sequence[Signals], told: Sequence[str], result: str) -> None:
    """Write the page."""
    parts = [f"<p>{escape(sentence)}</p>" for sentence in (result, *told)]
    share = f"{gallery.number_changed:,} of {gallery.compared:,} compared predictions changed"
    parts += [f"<h2>Most changed</h2><p>{share}; these are the ones of which both models were surest.</p>"]
    parts.append(_pictures(gallery.changed) or "<p>No prediction changed.</p>")
    parts += ["<h2>Over time</h2>", *_charts(over_time)]
    if gallery.unsure:
        parts += ["<h2>Least sure</h2><p>The same prediction before and after, and unsure.</p>"]
        parts.append(_pictures(gallery.unsure))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
    title = "Adaptation on your pictures"
    text = f"<!doctype html><html lang=en><head>{head}<title>{title}</title></head><body><h1>{title}</h1>"
    with atomic(path) as temporary:
        temporary.write_text(f"{text}{''.join(parts)}</body></html>\n", encoding="utf-8")


def _pictures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    figures = [_figure(picture) for picture in pictures]
    return f'<div class="pictures">{"".join(figures)}</div>'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.jpeg).decode()
    name = escape(picture.name)
    after = f"{escape(picture.after)} {100 * picture.after_confidence:.0f}&nbsp;%"
    before = f"{escape(picture.before)} {100 * picture.before_confidence:.0f}&nbsp;%"
    if picture.before != picture.after:
        before = f'<span class="before">{before}</span>'
    caption = f"{before} → <b>{after}</b><br>{name}"
    image = f'<img alt="{name}" src="data:image/jpeg;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _charts(over_time: Sequence[Signals]) -> list[str]:
    curves = {
        "changed predictions, share": lambda s: s.changed,
        "entropy, nats": lambda s: s.entropy,
        "drift, squared standard deviations": lambda s: s.drift,
        "estimated gain, points": lambda s: s.gain,
    }
    return [chart for title, value in curves.items() if (chart := _chart(title, over_time, value))]


def _chart(title: str, over_time: Sequence[Signals], value: Callable[[Signals], float | None]) -> str:
    """Return a curve over the number of images as SVG, with a mark at each shift; empty if there is nothing to show."""
    step = max(1, len(over_time) // POINTS)
    points = [(s.images, found) for s in over_time[::step] if (found := value(s)) is not None]
    if len(points) < 2:
        return ""
    low = min(0.0, *(y for _, y in points))
    high = max(y for _, y in points)
    span = (high - low) or 1.0
    last = points[-1][0]
    line = " ".join(f"{WIDTH * x / last:.1f},{HEIGHT * (1 - (y - low) / span):.1f}" for x, y in points)
    shifts = [WIDTH * s.images / last for s in over_time if s.shifted]
    marks = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}" stroke="orange"/>' for x in shifts)
    text = f'<text x="0" y="-6">{escape(title)}: {points[-1][1]:.3g} at {last:,} images, at most {high:.3g}</text>'
    box = f"0 -22 {WIDTH} {HEIGHT + 26}"
    curve = f'<polyline points="{line}"/>'
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}">{text}{marks}{curve}</svg>'
