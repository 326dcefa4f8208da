"""Draws one character: the image `index` of `seed`, a pure function of the two numbers.

Shapes: images are uint8 (3, SIZE, SIZE), layers and textures float32 (SIZE, SIZE) in [0, 1].
"""

import math
from functools import cache
from pathlib import Path

import numpy as np
from numpy.random import Generator, default_rng
from PIL import Image, ImageDraw, ImageFont, ImageOps

from mgtta.data.rendered import SIZE, TEST_SEED

CLASSES = tuple("0123456789ACDEFGHJKLMNPRTUVWXY")  # no B, I, O, Q, S, Z: they look like 8, 1, 0, 0, 5, 2
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)
HEIGHT = (17, 28)  # pixels, the least and the largest height of a character
CONTRAST = 0.5  # the least difference in luma between glyph and background, as a share of the full range

_CANVAS = 2 * SIZE  # shapes are drawn at twice the size and halved, for smooth edges
_GLYPH = (72, 64)  # the largest width and height of a character in its stencil
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
    """Return the character in white on black, centred, as large as `_GLYPH` allows."""
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
    """Return the stencil turned, sheared, scaled and shifted."""
    angle = math.radians(rng.uniform(-20, 20))
    shear = rng.uniform(-0.25, 0.25)
    width, height = rng.uniform(*HEIGHT) * rng.uniform(0.9, 1.1, 2) * 2 / _GLYPH[1]
    dx, dy = rng.uniform(-14, 14, 2) + _CANVAS / 2
    cos = math.cos(angle)
    sin = math.sin(angle)
    # PIL asks where an output pixel comes from: the inverse map, [1/width, 1/height] * shear * rotation
    a = (cos + shear * sin) / width
    b = (sin - shear * cos) / width
    c = _CANVAS / 2 - a * dx - b * dy
    d = -sin / height
    e = cos / height
    f = _CANVAS / 2 - d * dx - e * dy
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), Image.Resampling.BILINEAR)


def _strokes(rng: Generator) -> Image.Image:
    """Return up to three thin lines and arcs."""
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
    """Return how much of the second background colour each pixel has."""
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
    """Return (4, 3): glyph, the two of the background, stroke. The luma of the first differs from the next two."""
    threshold = rng.uniform(0.3, 0.7)
    glyph = (0.0, threshold - CONTRAST / 2)  # a range of luma
    back = (threshold + CONTRAST / 2, 1.0)
    if rng.random() >= 0.5:  # a light glyph on a dark background
        glyph, back = back, glyph
    luma = np.array([rng.uniform(*side) for side in (glyph, back, back, (0, 1))], dtype=np.float32)
    colour = rng.random((4, 3), dtype=np.float32)
    have = (colour @ _LUMA)[:, None]
    want = luma[:, None]
    return np.where(have > want, colour * want / have, 1 - (1 - colour) * (1 - want) / (1 - have))


def _compose(rng: Generator, character: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the image, float32 (3, SIZE, SIZE) in [0, 1], and where its glyph is, (SIZE, SIZE)."""
    font = FONTS[rng.integers(len(FONTS))]
    glyph = _layer(_bend(stencil(font, character), rng))
    strokes = _layer(_strokes(rng))
    ink, ground, second, stroke = _colours(rng)[:, :, None, None]
    image = ground + (second - ground) * _texture(rng)
    layers = [(glyph, ink), (strokes, stroke)]
    if rng.random() >= 0.5:
        layers.reverse()
    for mask, colour in layers:
        image = image + (colour - image) * mask
    return np.clip(image, 0, 1), glyph


def start(seed: int, index: int) -> tuple[Generator, int]:
    """Return the random numbers of an image, and its label, which is the first of them."""
    rng = default_rng((seed, index))
    return rng, int(rng.integers(len(CLASSES)))


def render(index: int, seed: int = TEST_SEED) -> tuple[np.ndarray, int]:
    """Return image `index` of `seed`, uint8 (3, SIZE, SIZE), and its label."""
    rng, label = start(seed, index)
    image, _ = _compose(rng, CLASSES[label])
    return (image * 255 + 0.5).astype(np.uint8), label
