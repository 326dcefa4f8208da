"""What a wheel holds: it is small, and complete without the repository."""

import io
import zipfile
from pathlib import Path

import mgtta

PACKAGE = Path(mgtta.__file__).parent
LARGEST_WHEEL = 5_000_000  # bytes


def test_the_wheel_is_under_five_megabytes():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in sorted(PACKAGE.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(PACKAGE.parent))
    assert len(packed.getvalue()) < LARGEST_WHEEL
