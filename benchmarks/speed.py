"""What a step of adaptation costs, beside the plain forward pass and what a user would pick instead.

    python benchmarks/speed.py --part plus methods single:40 networks start --rounds 4 --out results       # on the GPU
    python benchmarks/speed.py --part step --model deit_tiny_patch16_224 --batch 16 --device cpu
    python benchmarks/speed.py --part accuracy --data SHARDS --checkpoint DEIT_TINY --out results

step      a batch by each contender, in float32 and on the fast path; the optimizer's step in three ways
plus      MGTTA+ with pull, gather and recall on the fast path, with and without mirrored twins
methods   methods that choose images, in float32 and on the fast path
networks  TENT and MGTTA on convolutional networks and other transformers, beside TENT as it is commonly written
start     the first batches of a stream: as in a first run, and in a second one that finds compiled code
single    how long a caller waits for the prediction of one image
data      images a second that the loader gives from JPEG tars, against its number of worker processes
evaluate  what `evaluate` adds to many batches of one
growth    time and memory against batch size, model and the generator's hidden size
accuracy  DeiT-Tiny on ImageNet under the 15 corruptions: the fast path against float32, schedule="auto" against always
paths     five corruptions: other methods on the fast path against float32; DeiT-Tiny, or an embedded model
twins     the same corruptions: MGTTA+ with mirrored twins at all, at the first, or at no batches of a domain

Weights are random where the package ships none: they don't change the work. The contenders take turns in an order drawn
anew for each round; a figure is the median over rounds, after each has been warmed up. On a CPU a turn is a batch, and
its time one thread's CPU time; on a GPU it is a few batches in a row, as a stream brings them, and a batch's time its
part of the wall time between two waits for the GPU. Memory is what a contender adds to what was there before it,
weights included: the peak of what torch has allocated, within CUDA graphs too. `--quick` does all of it small. What
does not fit into `--seconds` is left out, and said to be.

The parts' figures go to OUT/speed.json, from which OUT/speed.md and the plots of growth are written.
"""

import argparse
import io
import json
import math
import os
import shlex
import statistics
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shards import add
from speed_pages import ALONE, PARTS, VISIT, WAYS, page, plot
from speed_parts import decoding, evaluation, methods, networks, paths, plus, shuffled, single, start, twins
from speed_tools import Contender, Deadline, classifier, clock, images, measure, method_of, tent_as_usual
from torch import Tensor, nn

import mgtta
from mgtta._lib.files import atomic
from mgtta._lib.profile import now
from mgtta.adaptation.step import Pass
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.datasets import open_dataset
from mgtta.data.images import simplejpeg
from mgtta.data.streams import corrupted, stream
from mgtta.fast.captured import Captured, GraphPlace, compiled_code
from mgtta.fast.flat import FlatStep
from mgtta.fast.vit import ViT
from mgtta.learned.optimizer import BETAS, EPS, generator_inputs

MODELS = ("deit_tiny_patch16_224", "deit_small_patch16_224", "vit_base_patch16_224", "vit_large_patch16_224")
TUNED = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_"))  # glibc
SMALL = ("test_vit", "test_vit2", "test_vit", "test_vit2")  # with --quick, in their place


class LoopedMGG:
    """The generator's step in the style of the released code: one parameter after another, each a new one's data."""

    def __init__(self, params: list[nn.Parameter], generator: mgtta.MetaGradientGenerator, lr: float = 1e-3):
        self.params = params
        self.generator = generator.requires_grad_(False)
        self.lr = lr
        self.t = 0
        self.moments = [(torch.zeros(p.numel(), device=p.device),) * 2 for p in params]
        self.memories = [generator.init_memory(p.numel()) for p in params]

    @torch.no_grad()
    def step(self, grads: list[Tensor]) -> None:
        self.t += 1
        for i, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            inputs, *self.moments[i] = generator_inputs(grad.flatten(), *self.moments[i], self.t, BETAS, EPS)
            update, self.memories[i] = self.generator(inputs, self.memories[i])
            p.data = (p - self.lr * update.view_as(p)).clone()


def optimizer_step(model: mgtta.Classifier, way: str, hidden_size: int = 8) -> Contender:
    """Return only the generator's step, for all norm parameters of the model, in one of three ways."""

    def make() -> Callable[[], object]:
        own = [nn.Parameter(p.detach().clone()) for p in mgtta.norm_parameters(model)]
        grads = [torch.randn_like(p) for p in own]
        generator = mgtta.load_generator("imagenet") if hidden_size == 8 else mgtta.MetaGradientGenerator(hidden_size)
        generator = generator.to(own[0].device)
        if way == WAYS[0]:
            looped = LoopedMGG(own, generator)
            return lambda: looped.step(grads)
        optimizer = mgtta.MGG(own, generator)
        if way == WAYS[1]:
            for p, grad in zip(own, grads, strict=True):
                p.grad = grad
            return optimizer.step
        flat = FlatStep(optimizer, own, own)
        flat.take_in()
        sound = torch.tensor(True, device=own[0].device)
        if not own[0].is_cuda:
            return lambda: flat.step(grads, sound)

        def run() -> Pass:
            compiled_code(_flat_step)(flat, grads, sound)
            return Pass(sound, [])

        captured = Captured(run, sound, GraphPlace(torch.cuda.graph_pool_handle(), torch.cuda.Stream()))
        return lambda: (captured.graph.replay(), flat, grads)  # which the graph reads: they must live as long

    return Contender(f"{ALONE}, {way}", make, "fp32")


def _flat_step(flat: FlatStep, grads: list[Tensor], sound: Tensor) -> None:
    flat.step(grads, sound)


# --- the parts


def step(args: argparse.Namespace) -> dict[str, Any]:
    device = args.device
    model = classifier(args.model, args.device)
    x = images(model, args.batch, device)
    fast = "bf16" if device == "cuda" or args.quick else None
    names = [("NoAdapt", "noadapt"), ("TENT", "tent"), ("MGTTA", "mgtta")]
    who = [method_of(label, name, model, x, "fp32") for label, name in names]
    if device == "cpu":
        who.append(method_of("Eq. 7 with Adam", "eq7_adam", model, x, "fp32"))
        who.append(method_of("MGTTA+", "mgtta_plus", model, x, "fp32", mirror=True))
        who.append(method_of("MGTTA+ without twins", "mgtta_plus", model, x, "fp32", mirror=False))
    else:
        who += [method_of(label, name, model, x, "tf32") for label, name in (names[0], names[2])]
    if fast:
        who += [method_of(label, name, model, x, fast) for label, name in names]
        who += [method_of("MGTTA", "mgtta", model, x, "fp8")] if ViT.fits_float8(model) else []
        who.append(method_of("MGTTA, low memory", "mgtta", model, x, fast, low_memory=True))
        who.append(method_of("MGTTA+", "mgtta_plus", model, x, fast, mirror=True))
        who.append(method_of("MGTTA+ without twins", "mgtta_plus", model, x, fast, mirror=False))
        who.append(method_of("MGTTA+, low memory", "mgtta_plus", model, x, fast, mirror=True, low_memory=True))
        who.append(method_of("MGTTA, budget spent", "mgtta", model, x, fast, max_updates=0))
        who.append(method_of("MGTTA, schedule at rest", "mgtta", model, x, fast, schedule="auto"))
    pixels = x.float() / 255

    def usual(autocast: bool) -> Callable[[], object]:
        run = tent_as_usual(mgtta.load_model(model.net, mean=None, std=None).to(device).net, autocast, autocast)
        return lambda: run(pixels)

    who.append(Contender("TENT as usually written", lambda: usual(False), "fp32"))
    if device == "cuda":
        who.append(Contender("TENT as usually written, autocast and torch.compile", lambda: usual(True), "bf16"))
    who += [optimizer_step(model, way) for way in WAYS]
    n = sum(p.numel() for p in mgtta.norm_parameters(model))
    if args.only:
        who = [contender for contender in who if contender.name in args.only]
    rows = measure(who, args.rounds, device, args.deadline)
    return {"model": args.model, "batch": args.batch, "n": n, "rows": rows}


def growth(args: argparse.Namespace) -> dict[str, Any]:
    device = args.device
    rows = []
    names = (("NoAdapt", "noadapt"), ("MGTTA", "mgtta"))
    precision = "bf16" if device == "cuda" else "fp32"

    def at(name: str, batch: int) -> None:
        model = classifier(name, device)
        x = images(model, batch, device)
        who = [method_of(label, key, model, x, precision) for label, key in names]
        found = measure([*who, optimizer_step(model, WAYS[-1])], args.rounds, device)
        n = sum(p.numel() for p in mgtta.norm_parameters(model))
        rows.append({"model": name, "batch": batch, "n": n, "rows": found})

    models = SMALL if args.quick else MODELS
    for name in models:
        at(name, args.batch)
    for batch in (1, 4) if args.quick else (1, max(2, args.batch // 8), 4 * args.batch):
        at(models[2], batch)
    model = classifier(models[2], device)
    sizes = (2, 8) if args.quick else (4, 8, 16, 32)
    hidden = measure([optimizer_step(model, WAYS[-1], d) for d in sizes], args.rounds, device)
    return {"rows": rows, "hidden": [{**row, "hidden_size": d} for d, row in zip(sizes, hidden, strict=True)]}


def data(args: argparse.Namespace) -> dict[str, Any]:
    """Return the loader's rate from tars of JPEGs of 500 x 375 pixels, the average of ImageNet."""
    count, links = (256, 1) if args.quick else (8192, 4)
    device = torch.device(args.device)
    decoded = None
    if device.type == "cuda":
        try:
            decoded = decoding(_jpegs(), args.device)
        except Exception as error:  # not every torchvision has a decoder for the GPU
            decoded = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(decoded, file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        pattern = _write_tars(Path(folder), count, 2, links)
        rows = []
        many = (0, 1, 2) if args.quick else [k for k in (0, 4, 16) if k <= (os.cpu_count() or 1)]
        ways = [(workers, "cpu") for workers in many]
        if device.type == "cuda" and "rate" in (decoded or {}):
            ways += [(workers, "device") for workers in many]
        for workers, where in ways:
            few = min(count * links, 1024 * max(workers, 1))
            it = iter(stream(open_dataset(pattern), first=few, workers=workers, device=device, decode=where))
            for _ in range(max(workers, 1)):  # until all workers have begun
                next(it)
            began = now()
            seen = 0
            for batch in it:
                seen += len(batch.x)
            rows.append({"workers": workers, "decode": where, "images": seen, "rate": seen / (now() - began)})
            print(rows[-1], file=sys.stderr)
    decoder = "PIL" if simplejpeg is None else "simplejpeg"
    return {"cores": os.cpu_count(), "decoder": decoder, "rows": rows, "on the GPU": decoded}


def _jpegs() -> list[bytes]:
    """Return 16 JPEGs of 500 x 375 pixels."""
    from PIL import Image

    noise = torch.Generator().manual_seed(0)
    coarse = torch.rand(16, 3, 24, 32, generator=noise) * 255
    smooth = nn.functional.interpolate(coarse, (375, 500), mode="bicubic").clamp(0, 255)
    grainy = (smooth + 8 * torch.randn(smooth.shape, generator=noise)).clamp(0, 255).byte()
    files = []
    for picture in grainy:
        file = io.BytesIO()
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def _write_tars(folder: Path, count: int, shards: int, links: int = 1) -> str:
    """Write tars of `count` images in all, each under `links` names."""
    files = _jpegs()
    for k in range(shards):
        with tarfile.open(folder / f"speed-{k:05d}.tar", "w") as tar:
            for i in range(k, count, shards):
                add(tar, f"{i:06d}", files[i % len(files)], i % 1000)
        for link in range(1, links):
            os.link(folder / f"speed-{k:05d}.tar", folder / f"speed-{link * shards + k:05d}.tar")
    return str(folder / f"speed-{{00000..{links * shards - 1:05d}}}.tar")


def accuracy(args: argparse.Namespace) -> dict[str, Any]:
    import imagenet

    if args.data is None or args.checkpoint is None:
        raise SystemExit("accuracy needs --data and --checkpoint")
    device = args.device
    names = CORRUPTIONS[:2] if args.quick else CORRUPTIONS
    model = imagenet.deit_tiny(args.checkpoint, device)
    source = imagenet.source_of(model, imagenet.shard(args.data, 0))
    test = imagenet.shard(args.data, *((1,) if args.quick else (1, 2)))
    first = 128 if args.quick else None
    batches = list(stream(corrupted(test, names), batch_size=64, first=first, device=device))
    orders = [batches, *(shuffled(batches, seed) for seed in range(1, args.orders))]
    rows = []

    def run(label: str, name: str, reset: str, lr: float | None = None, **settings: Any) -> None:
        more = {} if lr is None else {"source": source, "lr": lr}
        method = mgtta.create(name, model, **more, **settings)
        for x in {batch.x.shape: batch.x for batch in batches}.values():  # a domain's last batch is smaller
            method.warm_up(x)
        found = []
        updates = []
        for order in orders:
            method.reset()
            records = mgtta.evaluate(method, order, reset=reset)
            found.append(100 * sum(sum(r.curve) for r in records) / sum(r.labelled for r in records))
            updates.append(sum(r.updates for r in records))
        rows.append(
            {
                "name": label,
                "reset": reset,
                "lr": lr,
                "top1": found,
                "updates": updates,
                "batches": len(batches),
                "seconds": _timed(method, batches) if reset == "never" else None,
                **settings,
            }
        )
        print(rows[-1], file=sys.stderr)

    for precision in ("fp32", "bf16"):
        run("NoAdapt", "noadapt", "domain", precision=precision)
        run("MGTTA", "mgtta", "domain", args.lr, precision=precision)
    run("MGTTA", "mgtta", "domain", args.lr, precision="fp8")
    run("NoAdapt", "noadapt", "never", precision="bf16")
    for lr in args.lr_always:
        run("MGTTA", "mgtta", "never", lr, precision="bf16")
    run("MGTTA, schedule", "mgtta", "never", args.lr, precision="bf16", schedule="auto")
    return {"images": first or len(test), "rows": rows}


def _timed(method: Any, batches: list[Any]) -> float:
    """Seconds of all batches, from the method's start on, each batch's predictions read before the next comes; the
    median of five times."""
    read = clock("cuda" if batches[0].x.is_cuda else "cpu")
    found = []
    for _ in range(5):
        method.reset()
        began = read()
        for batch in batches:
            method(batch.x).argmax(1).tolist()
        found.append(read() - began)
    return statistics.median(found)


RUN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "step": step,
    "plus": plus,
    "methods": methods,
    "networks": networks,
    "start": start,
    "single": single,
    "data": data,
    "evaluate": evaluation,
    "growth": growth,
    "accuracy": accuracy,
    "paths": paths,
    "twins": twins,
}


def _bounded(word: str) -> tuple[str, float]:
    """Return a part and its seconds from "part" or "part:seconds"."""
    name, _, seconds = word.partition(":")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"unknown part {name!r}; valid: {', '.join(PARTS)}")
    return name, float(seconds or math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part",
        nargs="+",
        type=_bounded,
        default=[(name, math.inf) for name in VISIT],
        metavar="PART[:SECONDS]",
        help=f"what is measured, and for how long at most: {', '.join(PARTS)}",
    )
    parser.add_argument("--model", default="vit_base_patch16_224", help="of `step`: a timm name, or a shipped one")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--only", nargs="+", help="of `step`, `plus`, `methods` and `paths`: names; the others are left out"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--data", type=Path, help="of `accuracy` and `paths`: the folder of the shards; CIFAR-10's .npz"
    )
    parser.add_argument("--checkpoint", type=Path, help="of `accuracy`: weights of deit_tiny_patch16_224")
    parser.add_argument(
        "--lr", type=float, default=5e-3, help="of `accuracy`: MGTTA's, with reset or with the schedule"
    )
    parser.add_argument(
        "--lr-always", type=float, nargs="+", default=[1e-3, 2e-3], help="of `accuracy`: MGTTA's without either"
    )
    parser.add_argument("--first", type=int, help="of `paths` and `twins`: only so many images of each domain")
    parser.add_argument("--orders", type=int, default=3, help="of `accuracy`: of the images in each domain")
    parser.add_argument(
        "--compile", nargs="+", default=[], help="of `networks`: names of those to compile too, half a minute each"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        default=[],
        help="of `plus`, `single`, `networks`, `methods`: names of those whose slowest kernels are kept, too",
    )
    parser.add_argument("--captured", action="store_true", help="of `plus`, `single`: captured, not compiled; a trial")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the visit; the rest is left out")
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--out", type=Path, help="the folder of speed.json, speed.md and the plots of growth")
    args = parser.parse_args()
    visit = Deadline(args.seconds)
    if args.device == "cpu":
        torch.set_num_threads(1)
    file = None if args.out is None else args.out / "speed.json"
    result = json.loads(file.read_text()) if file is not None and file.exists() else {}
    failed = []
    for part, seconds in args.part:
        began = time.perf_counter()
        args.deadline = Deadline(min(seconds, visit.left))
        try:
            found = RUN[part](args)
        except Exception:  # the other parts may still work
            traceback.print_exc()
            failed.append(part)
            continue
        about = {
            "command": shlex.join([*TUNED, "python", "benchmarks/speed.py", *sys.argv[1:]]),
            "where": torch.cuda.get_device_name() if args.device == "cuda" else "CPU, one thread",
            "gpu": args.device == "cuda",
            "torch": torch.__version__,
            "took": time.perf_counter() - began,
        }
        which = dict.fromkeys(("step", "plus"), f" {args.model} {args.batch} {args.device}")
        network = args.model
        if args.data is not None:
            network = "DeiT-Tiny" if args.data.is_dir() else "ResNet-56"
        which |= dict.fromkeys(("paths", "twins"), f" {network}")
        which |= dict.fromkeys(("growth", "start", "single", "evaluate"), f" {args.device}")
        key = part + which.get(part, "")
        result[key] = {**about, **found}
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if file is not None:  # after each part, in case the next one does not end well
            with atomic(file) as path:
                path.write_text(json.dumps(result, indent=1) + "\n")
            with atomic(args.out / "speed.md") as path:
                path.write_text(page(result))
            if part == "growth":
                plot(result[key], args.out / f"growth_{args.device}.svg")
    if file is None:
        print(page(result))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
