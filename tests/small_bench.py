"""Small cells, a small training and trees of images, for the tests of `mgtta.bench`."""

from PIL import Image

from mgtta.bench.cells import Cell, Setup, Training
from mgtta.bench.sweep import by_contender, tuning
from mgtta.data.glyphs import CLASSES, Glyphs

SMALL = Setup(images=6)
FEW = [Cell("corruptions", m, (c,), batch_size=3) for c in ("contrast", "fog") for m in ("noadapt", "eq7_sgd")]
TINY = Training(images=4, hidden_size=2, steps=2, judges=4)
CLOCK = ("seconds", "predict_seconds", "adapt_seconds", "process_peak_memory", "protocol")


def without_timing(records):
    return [{key: value for key, value in record.items() if key not in CLOCK} for record in records]


def write_tree(root, folder_of, n=12):
    glyphs = Glyphs(n)
    for i in range(n):
        image, label = glyphs[i]
        path = root / folder_of(label) / f"{i:02}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, format="PNG")
    return root


def character_tree(root):
    """Write twelve images in a folder for each of the 30 characters, so that labels fit the embedded model."""
    write_tree(root, lambda label: CLASSES[label])
    for name in CLASSES:
        (root / name).mkdir(exist_ok=True)
    return root


def sweep_cells(cells):
    """Return what the sweeps of the cells try first."""
    return [cell for own in by_contender(cells) for cell in next(tuning(own), [])]
