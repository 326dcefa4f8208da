"""The images that come with each embedded model."""

from mgtta.data.glyphs import Glyphs
from mgtta.data.patterns import Patterns
from mgtta.data.rendered import Rendered

EMBEDDED: dict[str, type[Rendered]] = {"glyphs_vit": Glyphs, "patterns_vit": Patterns}


def images_for(model: str) -> type[Rendered]:
    """Return the images that come with an embedded model; for any other model, characters."""
    return EMBEDDED.get(model, Glyphs)
