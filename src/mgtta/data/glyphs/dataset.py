"""The drawn characters as a data set."""

from mgtta.data.glyphs.drawing import CLASSES, render, start
from mgtta.data.rendered import Rendered


class Glyphs(Rendered):
    """The first `n` characters of a seed, rendered on access."""

    classes = CLASSES
    kind = "glyph"
    title = "rendered characters"
    render = staticmethod(render)

    @staticmethod
    def label_of(index: int, seed: int) -> int:
        return start(seed, index)[1]
