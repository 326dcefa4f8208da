"""The 3,000 ImageNet images of all measurements here, as three WebDataset tars, from your own copy of ImageNet.

    python benchmarks/shards.py --images ILSVRC2012/val --out DATA

--images is the usual tree of the ILSVRC2012 validation images, synset/ILSVRC2012_val_00000293.JPEG. Each image is
resized to 256 (bicubic), its centre is cropped to 224, and it is written as a JPEG of quality 95 beside its class: the
image that the pipeline of ImageNet-C corrupts. results/imagenet/images.json has the numbers of the images of each tar.
Another version of the JPEG library writes other bytes, so sums of files differ; the pixels differ by very little.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

from PIL import Image
from torch import Tensor

from mgtta._lib.files import atomic
from mgtta.data.datasets import open_dataset

NUMBERS = Path(__file__).parents[1] / "results" / "imagenet" / "images.json"
SIDE = 224  # pixels
RESIZED = 256
QUALITY = 95


def make(images: Path, out: Path, numbers: dict[str, list[int]]) -> None:
    """Write a tar for each name, of the images of these numbers."""
    data = open_dataset(str(images), size=SIDE, crop_pct=SIDE / RESIZED)
    places = {int(Path(data.name(i)).stem.rpartition("_")[2]): i for i in range(len(data))}
    missing = [number for own in numbers.values() for number in own if number not in places]
    if missing:
        raise SystemExit(f"{images} lacks {len(missing)} images, among them ILSVRC2012_val_{missing[0]:08d}.JPEG")
    out.mkdir(parents=True, exist_ok=True)
    for name, own in numbers.items():
        with atomic(out / name) as path, tarfile.open(path, "w") as tar:
            for number in own:
                image, label = data[places[number]]
                add(tar, f"{number:08d}", _jpeg(image), label)
        print(f"{out / name}: {len(own):,} images", flush=True)


def add(tar: tarfile.TarFile, key: str, jpeg: bytes, label: int) -> None:
    """Add an image and its class to a tar in WebDataset form."""
    for suffix, content in (("jpg", jpeg), ("cls", str(label).encode())):
        info = tarfile.TarInfo(f"{key}.{suffix}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


def _jpeg(image: Tensor) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="tree of the ILSVRC2012 validation images")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tars")
    args = parser.parse_args()
    make(args.images, args.out, json.loads(NUMBERS.read_text()))


if __name__ == "__main__":
    main()
