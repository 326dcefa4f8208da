"""What a wheel holds: it is small, and complete without the repository."""

import io
import zipfile
from pathlib import Path

import mgtta
from mgtta._lib.files import read_tensors
from mgtta._lib.shipped import shipped
from mgtta._lib.shrunk import SCALE, widened

PACKAGE = Path(mgtta.__file__).parent
LARGEST_WHEEL = 5_000_000  # bytes


def test_the_wheel_is_under_five_megabytes():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in sorted(PACKAGE.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(PACKAGE.parent))
    assert len(packed.getvalue()) < LARGEST_WHEEL


def test_weights_in_8_bits_are_whole_numbers_times_the_scale_of_their_row():
    tensors, metadata = read_tensors(shipped("models")["glyphs_plain"])
    scales = [name for name in tensors if name.endswith(SCALE)]
    assert len(scales) > 30
    assert "predictions stay the same" in metadata["rounded"]
    weights = widened(tensors)
    assert not any(name.endswith(SCALE) for name in weights)
    net = mgtta.load_model("glyphs_plain").net
    for scale in scales:
        name = scale.removesuffix(SCALE)
        row = tensors[name][-1].float() * tensors[scale][-1]
        assert weights[name][-1].equal(row)
        assert net.get_parameter(name)[-1].equal(row)
