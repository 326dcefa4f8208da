"""An endless, seeded set of small colour images of letters and digits: data without a download.

Image `index` of `seed` is a pure function of the two, in any order and in any process. The characters are
drawn in fonts that ship with matplotlib, bent a little, laid over a texture and crossed by stray strokes.
Glyph and background always differ in luma by at least `CONTRAST` of the full range, strokes aside.

Shapes: images are uint8 (3, SIZE, SIZE), layers and textures float32 (SIZE, SIZE) in [0, 1].
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, cached_property, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator, default_rng
from PIL import Image, ImageDraw, ImageFont, ImageOps

# The seeds of the three splits. Seed 0, the default everywhere, is the test split: never train on it.
TEST_SEED, TRAIN_SEED, VALIDATION_SEED = 0, 1, 2

CLASSES = tuple("0123456789ACDEFGHJKLMNPRTUVWXY")  # no B, I, O, Q, S, Z: they look like 8, 1, 0, 0, 5, 2
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)
SIZE = 48
HEIGHT = (17, 28)  # of a character, in pixels
CONTRAST = 0.5

_CANVAS = 2 * SIZE  # shapes are drawn at twice the size and halved: smooth edges
_GLYPH = (72, 64)  # width and height of a character in its stencil, at most
_CHUNK = 256  # images a process renders at a time
_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_Y, _X = np.mgrid[-1 : 1 : SIZE * 1j, -1 : 1 : SIZE * 1j].astype(np.float32)


@cache
def _font_folder() -> Path:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("glyphs are drawn in matplotlib's fonts: pip install matplotlib") from error
    return Path(matplotlib.get_data_path(), "fonts", "ttf")


@cache
def stencil(font: str, character: str) -> Image.Image:
    """The character in white on black, centred, as large as `_GLYPH` allows."""
    path = str(_font_folder() / f"{font}.ttf")
    sheet = Image.new("L", (600, 400))
    large = ImageFont.truetype(path, 200, layout_engine=ImageFont.Layout.BASIC)
    ImageDraw.Draw(sheet).text((150, 50), character, fill=255, font=large)
    ink = ImageOps.contain(sheet.crop(sheet.getbbox()), _GLYPH)
    image = Image.new("L", (_CANVAS, _CANVAS))
    image.paste(ink, ((_CANVAS - ink.width) // 2, (_CANVAS - ink.height) // 2))
    return image


def _layer(image: Image.Image) -> np.ndarray:
    return np.asarray(image.reduce(2), dtype=np.float32) / 255


def _bend(image: Image.Image, rng: Generator) -> Image.Image:
    """The stencil turned, sheared, scaled and shifted."""
    angle = math.radians(rng.uniform(-20, 20))
    shear = rng.uniform(-0.25, 0.25)
    width, height = rng.uniform(*HEIGHT) * rng.uniform(0.9, 1.1, 2) * 2 / _GLYPH[1]
    dx, dy = rng.uniform(-14, 14, 2) + _CANVAS / 2
    cos, sin = math.cos(angle), math.sin(angle)
    # PIL asks where an output pixel comes from: the inverse map, [1/width, 1/height] * shear * rotation
    a, b = (cos + shear * sin) / width, (sin - shear * cos) / width
    d, e = -sin / height, cos / height
    c, f = _CANVAS / 2 - a * dx - b * dy, _CANVAS / 2 - d * dx - e * dy
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR)


def _strokes(rng: Generator) -> Image.Image:
    """Up to three thin lines and arcs."""
    image = Image.new("L", (_CANVAS, _CANVAS))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(4)):
        x0, y0, x1, y1 = (float(p) for p in rng.uniform(0, _CANVAS, 4))
        width = int(rng.integers(2, 4))
        if rng.random() < 0.5:
            draw.line((x0, y0, x1, y1), 255, width)
        else:
            start = float(rng.uniform(0, 360))
            box = (min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1))
            draw.arc(box, start, start + float(rng.uniform(60, 180)), 255, width)
    return image


def _clouds(rng: Generator) -> np.ndarray:
    grid = rng.integers(3, 9)
    coarse = Image.fromarray(rng.integers(0, 256, (grid, grid), dtype=np.uint8))
    return np.asarray(coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC), dtype=np.float32) / 255


def _texture(rng: Generator) -> np.ndarray:
    """How much of the second background colour each pixel has."""
    kind = rng.integers(9)
    angle, frequency, phase = rng.uniform((0, 6, 0), (2 * math.pi, 24, 2 * math.pi))
    u = _X * math.cos(angle) + _Y * math.sin(angle)
    v = _Y * math.cos(angle) - _X * math.sin(angle)
    if kind == 0:  # gradient
        return np.clip(u / 2 + 0.5, 0, 1)
    if kind == 1:  # clouds
        return _clouds(rng)
    if kind == 2:  # blots
        return np.clip(6 * _clouds(rng) - 2.5, 0, 1)
    if kind == 3:  # soft stripes
        wave = np.sin(frequency * u + phase)
    elif kind == 4:  # hard stripes
        wave = 4 * np.sin(frequency * u + phase)
    elif kind == 5:  # checks
        wave = 8 * np.sin(frequency * u + phase) * np.sin(frequency * v)
    elif kind == 6:  # dots
        wave = 6 * np.sin(frequency * u + phase) * np.sin(frequency * v) - 3
    elif kind == 7:  # rings around a point off the centre
        wave = 2 * np.sin(frequency * np.hypot(u - 0.7, v))
    else:  # ripples
        wave = np.sin(frequency * u + 2 * np.sin(4 * v + phase))
    return np.clip(wave / 2 + 0.5, 0, 1)


def _colours(rng: Generator) -> np.ndarray:
    """(4, 3): glyph, the two of the background, stroke. The first keeps its distance from the next two."""
    threshold = rng.uniform(0.3, 0.7)
    dark, light = (0, threshold - CONTRAST / 2), (threshold + CONTRAST / 2, 1)
    glyph, back = (dark, light) if rng.random() < 0.5 else (light, dark)
    luma = np.array([rng.uniform(*side) for side in (glyph, back, back, (0, 1))], dtype=np.float32)
    colour = rng.random((4, 3), dtype=np.float32)
    have, want = (colour @ _LUMA)[:, None], luma[:, None]
    return np.where(have > want, colour * want / have, 1 - (1 - colour) * (1 - want) / (1 - have))


def _compose(rng: Generator, character: str) -> tuple[np.ndarray, np.ndarray]:
    """The image, float32 (3, SIZE, SIZE) in [0, 1], and where its glyph is, (SIZE, SIZE)."""
    font = FONTS[rng.integers(len(FONTS))]
    glyph, strokes = _layer(_bend(stencil(font, character), rng)), _layer(_strokes(rng))
    ink, ground, second, stroke = _colours(rng)[:, :, None, None]
    image = ground + (second - ground) * _texture(rng)
    layers = [(glyph, ink), (strokes, stroke)]
    for mask, colour in layers if rng.random() < 0.5 else reversed(layers):
        image = image + (colour - image) * mask
    return np.clip(image, 0, 1), glyph


def _start(seed: int, index: int) -> tuple[Generator, int]:
    rng = default_rng((seed, index))
    return rng, int(rng.integers(len(CLASSES)))


def render(index: int, seed: int = TEST_SEED) -> tuple[np.ndarray, int]:
    """Image `index` of `seed`, uint8 (3, SIZE, SIZE), and its label."""
    rng, label = _start(seed, index)
    image, _ = _compose(rng, CLASSES[label])
    return (image * 255 + 0.5).astype(np.uint8), label


def _render_chunk(indices: range, seed: int) -> np.ndarray:
    return np.stack([render(index, seed)[0] for index in indices])


class Glyphs(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The first `n` images of a seed, rendered as they are asked for."""

    classes = CLASSES

    def __init__(self, n: int, seed: int = TEST_SEED):
        if n < 0 or seed < 0:
            raise ValueError(f"n and seed must not be negative, got n={n}, seed={seed}")
        self.n, self.seed = n, seed

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image, label = render(self._checked(i), self.seed)
        return torch.from_numpy(image), label

    def name(self, i: int) -> str:
        """What image i is called in records and file names."""
        return f"glyph-{self.seed}-{self._checked(i)}"

    @cached_property
    def labels(self) -> torch.Tensor:
        """int64 (n,), without rendering."""
        return torch.tensor([_start(self.seed, i)[1] for i in range(self.n)], dtype=torch.int64)

    def tensors(
        self, processes: int = 1, progress: Callable[[int, int], object] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All images, uint8 (n, 3, SIZE, SIZE), and labels (n,).

        Args:
            processes: started by spawn, so CUDA may be in use; the caller needs a `__main__` guard.
            progress: called with (images done, n) now and then.
        """
        images = torch.empty(self.n, 3, SIZE, SIZE, dtype=torch.uint8)
        done = 0
        for chunk in self._chunks(processes):
            images[done : done + len(chunk)] = torch.from_numpy(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, self.n)
        return images, self.labels

    def _chunks(self, processes: int) -> Iterator[np.ndarray]:
        work = [range(i, min(i + _CHUNK, self.n)) for i in range(0, self.n, _CHUNK)]
        draw = partial(_render_chunk, seed=self.seed)
        if processes == 1 or len(work) == 1:
            yield from map(draw, work)
            return
        with ProcessPoolExecutor(min(processes, len(work)), get_context("spawn")) as pool:
            yield from pool.map(draw, work)

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.n:
            raise IndexError(f"image {i} of {self.n}")
        return int(i)
