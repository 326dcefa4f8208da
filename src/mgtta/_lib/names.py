"""Names as people read them."""

import re
from typing import Any


def spelled(method: Any) -> str:
    """Return a method's name as people read it: mgtta+ for the recipe mgtta_plus."""
    return re.sub(r"_plus\b", "+", str(method))
