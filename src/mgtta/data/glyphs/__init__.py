"""An endless, seeded set of small colour images of letters and digits: data without a download.

Image `index` of `seed` is a pure function of the two numbers, in any order and in any process. The characters are
drawn in fonts that ship with matplotlib, bent a little, laid over a texture and crossed by stray strokes.
Glyph and background always differ in luma by at least `CONTRAST` of the full range, except under strokes.
"""

from mgtta.data.glyphs.dataset import Glyphs
from mgtta.data.glyphs.drawing import (
    CLASSES,
    CONTRAST,
    FONTS,
    HEIGHT,
    render,
    stencil,
)
from mgtta.data.glyphs.styles import STAND_INS, StyledGlyphs, inverted, sketch
from mgtta.data.rendered import SIZE, TEST_SEED, TRAIN_SEED, VALIDATION_SEED

__all__ = [
    "CLASSES",
    "CONTRAST",
    "FONTS",
    "HEIGHT",
    "SIZE",
    "STAND_INS",
    "TEST_SEED",
    "TRAIN_SEED",
    "VALIDATION_SEED",
    "Glyphs",
    "StyledGlyphs",
    "inverted",
    "render",
    "sketch",
    "stencil",
]
