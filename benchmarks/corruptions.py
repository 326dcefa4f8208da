"""The corruption engine beside the reference package: speed, and what a classifier makes of both.

    python benchmarks/corruptions.py                     # speed, one thread, beside the reference
    python benchmarks/corruptions.py --device cuda       # images a second, without the reference
    python benchmarks/corruptions.py --accuracy --data TAR... --checkpoint FILE

The reference is imagecorruptions 1.1.2, a development extra; load_reference makes it run on current numpy,
scipy, scikit-image and setuptools by patching it in memory.
"""

import argparse
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mgtta.data.corruptions import CORRUPTIONS, SEVERITIES, VALIDATION_CORRUPTIONS, corrupt

ALL = (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)


def load_reference() -> Callable[[np.ndarray, int, str], np.ndarray]:
    """Return imagecorruptions.corrupt(image, severity, name); raise an ImportError if a package is missing."""
    import cv2
    import scipy.ndimage
    import skimage.filters

    cv2.setNumThreads(1)
    resources = ModuleType("pkg_resources")
    interpolation = ModuleType("scipy.ndimage.interpolation")
    resources.resource_filename = lambda module, name: str(Path(sys.modules[module].__file__).parent / name)
    interpolation.map_coordinates = scipy.ndimage.map_coordinates
    gone = {module.__name__: module for module in (resources, interpolation)}
    before = {name: sys.modules.get(name) for name in gone}
    sys.modules.update(gone)
    try:
        module = import_module("imagecorruptions.corruptions")
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old

    def gaussian(image, *args, multichannel=False, **kwargs):
        return skimage.filters.gaussian(image, *args, channel_axis=-1 if multichannel else None, **kwargs)

    module.gaussian = gaussian
    module.np = SimpleNamespace(**{**vars(np), "float_": np.float64})
    return import_module("imagecorruptions").corrupt


def scene(n: int, size: int = 224, seed: int = 0) -> Tensor:
    """Return (n, 3, size, size) uint8: smooth colours, edges and texture, with a spectrum like that of photographs."""
    generator = torch.Generator().manual_seed(seed)
    frequency = torch.fft.fftfreq(size)
    radius = torch.hypot(frequency[:, None], frequency).clamp(min=1 / size)
    spectrum = torch.fft.fft2(torch.randn(n, 3, size, size, generator=generator)) / radius**1.2
    x = torch.fft.ifft2(spectrum).real
    x = x + 0.7 * x.mean(1, keepdim=True) + 0.5 * x.mean(1, keepdim=True).sign() * x.std()
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
    return (118 + 55 * x).clamp(0, 255).to(torch.uint8)


def best_ms(functions: list[Callable[[], object]], budget: float) -> list[float]:
    """Return the shortest run of each function in CPU time; they take turns."""
    for function in functions:
        function()
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + budget
    while time.perf_counter() < end or float("inf") in best:
        for i, function in enumerate(functions):
            start = time.process_time()
            function()
            best[i] = min(best[i], time.process_time() - start)
    return [1e3 * t for t in best]


def speed(names: Sequence[str], batch: int, budget: float) -> None:
    torch.set_num_threads(1)
    reference = load_reference()
    x = scene(1)
    image = x[0].permute(1, 2, 0).contiguous().numpy()
    x = x.repeat(batch, 1, 1, 1)
    print("| corruption | ours, ms/image, severity 1 3 5 | reference | ratio, least |\n|---|---|---|---|")
    for name in names:
        times = []
        for severity in (1, 3, 5):
            ours = partial(corrupt, x, name, severity)
            theirs = partial(reference, image, severity, name)
            a, b = best_ms([ours, theirs], budget)
            times.append((a / batch, b))
        columns = [" ".join(f"{t:.2f}" for t in column) for column in zip(*times, strict=True)]
        print(f"| {name} | {' | '.join(columns)} | {min(b / a for a, b in times):.1f} |", flush=True)


def speed_on_device(names: Sequence[str], device: str, batch: int) -> None:
    x = scene(batch).to(device)
    print("| corruption | images/s, severity 1 3 5 | peak MiB |\n|---|---|---|")
    for name in names:
        rates = []
        torch.cuda.reset_peak_memory_stats()
        for severity in (1, 3, 5):
            corrupt(x, name, severity)
            torch.cuda.synchronize()
            start = time.perf_counter()
            runs = 0
            while time.perf_counter() < start + 0.5:
                for _ in range(5):
                    corrupt(x, name, severity)
                torch.cuda.synchronize()
                runs += 5
            rates.append(runs * batch / (time.perf_counter() - start))
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"| {name} | {' '.join(f'{rate:,.0f}' for rate in rates)} | {peak:.0f} |")


def labelled_images(tars: list[str], n: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (image (224, 224, 3), label) from KEY.jpg and KEY.cls."""
    left = n
    for path in tars:
        with tarfile.open(path) as tar:
            members = {member.name: member for member in tar}
            for name in (name for name in members if name.endswith(".jpg")):
                if left == 0:
                    return
                left -= 1
                image = Image.open(BytesIO(tar.extractfile(members[name]).read())).convert("RGB")
                yield np.asarray(image), int(tar.extractfile(members[name[:-4] + ".cls"]).read())


def accuracy(args: argparse.Namespace) -> None:
    from safetensors.torch import load_file

    from mgtta._lib.timm import timm

    torch.set_num_threads(args.threads)
    np.random.seed(0)
    reference = load_reference()
    pixels, labels = zip(*labelled_images(args.data, args.images), strict=True)
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    labels = torch.tensor(labels)
    model = timm.create_model(args.model)
    model.load_state_dict(load_file(args.checkpoint))
    model.eval()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    @torch.inference_mode()
    def right(x: Tensor) -> Tensor:
        return torch.cat([model((part / 255 - mean) / std).argmax(1) for part in x.split(50)]) == labels

    print(f"{len(x)} images, severity {args.severity}, clean {100 * right(x).float().mean():.1f} %\n")
    print("| corruption | ours % | reference % | difference | ± (paired) |\n|---|---|---|---|---|", flush=True)
    for name in args.corruptions:
        ours = right(corrupt(x, name, args.severity, frost_textures=args.frost_textures)).float()
        corrupted = np.stack([np.array(reference(image, args.severity, name)) for image in pixels])
        theirs = right(torch.from_numpy(corrupted).permute(0, 3, 1, 2)).float()
        difference = ours - theirs
        error = difference.std() / len(x) ** 0.5
        a, b, d, e = (100 * v for v in (ours.mean(), theirs.mean(), difference.mean(), error))
        print(f"| {name} | {a:.1f} | {b:.1f} | {d:+.1f} | {e:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help="4 on the CPU, 64 elsewhere")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds for each timing")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--data", nargs="+", metavar="TAR")
    parser.add_argument("--checkpoint", metavar="FILE")
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--severity", type=int, default=5, choices=SEVERITIES)
    parser.add_argument("--corruptions", nargs="+", default=ALL, choices=ALL)
    parser.add_argument("--frost-textures", metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.accuracy:
        if not (args.data and args.checkpoint):
            parser.error("--accuracy needs --data and --checkpoint")
        accuracy(args)
    elif args.device == "cpu":
        speed(args.corruptions, args.batch or 4, args.budget)
    else:
        speed_on_device(args.corruptions, args.device, args.batch or 64)


if __name__ == "__main__":
    main()
