"""Parts of benchmarks/speed.py: other methods and networks, the first batches, batches of one, decoding, accuracy."""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import evaluate
import torch
from speed_tools import (
    Contender,
    classifier,
    clock,
    images,
    kernels,
    like,
    measure,
    method_of,
    needed,
    profiled,
    tent_as_usual,
)
from torch import Tensor

import mgtta
from mgtta._lib.profile import now
from mgtta._lib.timm import timm
from mgtta.adaptation.wrapper import innermost
from mgtta.bench.needs import needs_fisher, needs_source
from mgtta.data.datasets import open_dataset
from mgtta.data.embedded import images_for
from mgtta.data.images import read_image
from mgtta.data.streams import corrupted, stream
from mgtta.fast.vit import ViT
from mgtta.models.norms import batch_norms

EVERY_IMAGE = {"margin": 1.1, "redundancy": 1.1}  # random weights are unsure of all images: filters let them pass
METHODS: dict[str, dict[str, Any]] = {
    "eata": EVERY_IMAGE,
    "sar": {"margin": 1.1, "recovery": 0.0},
    "deyo": {"entropy_threshold": 1.1, "plpd_threshold": -1.0},
    "roid": {},
    "eta": EVERY_IMAGE,
    "eata_come": EVERY_IMAGE,
    "tent_come": {},
    "rdumb": EVERY_IMAGE,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet50": {},
    "convnext_tiny": {},
    "swin_tiny_patch4_window7_224": {},
    "vit_small_patch16_224": {"global_pool": "avg"},
    "vit_base_patch16_224": {"reg_tokens": 4},
}
SMALL_NETWORKS: dict[str, dict[str, Any]] = {"test_vit": {"reg_tokens": 2}}  # with --quick
PATH_CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "contrast", "jpeg_compression")
PATH_SETTINGS: dict[str, dict[str, Any]] = {  # learning rates as in benchmarks/streams.py
    "mgtta_plus": {},
    "eata": {"lr": 2.5e-3},
    "sar": {"lr": 1.5e-3},
    "roid": {"lr": 7.5e-4},
    "deyo": {"lr": 1.5e-4},
}
CLEAN_SEED = 99  # of clean images, other ones than those of the test
COMPILE_SECONDS = 30.0  # that are left for a network that is compiled
CAPTURED = 10  # batches of a shape after which it is captured
INTERVAL_SECONDS = 0.01  # between two images that come one by one
FIRST_BATCHES = 40  # of a stream


def plus(args: argparse.Namespace) -> dict[str, Any]:
    """MGTTA+ with pull, gather and recall, on the fast path, beside MGTTA."""
    model = classifier(args.model, args.device)
    x = images(model, args.batch, args.device)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("NoAdapt", "noadapt", {}),
        ("MGTTA", "mgtta", {}),
        ("MGTTA+", "mgtta_plus", {"mirror": True}),
        ("MGTTA+ without twins", "mgtta_plus", {"mirror": False}),
        ("MGTTA+, low memory", "mgtta_plus", {"seconds": 20.0, "mirror": True, "low_memory": True}),
    ]
    chosen = [case for case in cases if case[0] in (args.only or ())] or cases
    who = [
        method_of(label, name, model, x, "bf16", compiled=not args.captured, **settings)
        for label, name, settings in chosen
    ]
    n = sum(p.numel() for p in mgtta.norm_parameters(model))
    rows = measure(who, args.rounds, args.device, args.deadline)
    found = {"model": args.model, "batch": args.batch, "n": n, "rows": rows}
    return {**found, "kernels": profiled(who, args.profile)}


def methods(args: argparse.Namespace) -> dict[str, Any]:
    """Methods that choose images, in float32 and on the fast path, captured but not compiled."""
    model = classifier(args.model, args.device)
    x = images(model, args.batch, args.device)
    chosen = [name for name in METHODS if name in (args.only or ())] or list(METHODS)
    if args.quick:
        chosen = list(METHODS)[:2]
    who = [
        method_of(name, name, model, x, precision, compiled=False, seconds=10.0, **METHODS[name])
        for name in chosen
        for precision in ("fp32", "bf16")
    ]
    rows = measure(who, args.rounds, args.device, args.deadline)
    return {"model": args.model, "batch": args.batch, "rows": rows, "kernels": profiled(who, args.profile)}


def networks(args: argparse.Namespace) -> dict[str, Any]:
    """TENT and MGTTA on other networks, beside TENT as it is commonly written; first captured, then compiled too."""
    cases = []
    for compiled in (False, True):
        for name, changed in (SMALL_NETWORKS if args.quick else NETWORKS).items():
            if compiled and name not in args.compile:
                continue
            if args.deadline.left < (COMPILE_SECONDS if compiled else 8.0):
                break
            try:
                cases.append(_network(args, name, changed, compiled))
            except Exception:  # the others may still work
                traceback.print_exc(limit=4)
            torch._dynamo.reset()
    return {"batch": args.batch, "cases": cases}


def _network(args: argparse.Namespace, name: str, changed: dict[str, Any], compiled: bool) -> dict[str, Any]:
    device = args.device
    torch.manual_seed(0)
    model = mgtta.load_model(timm.create_model(name, **changed).to(device)).to(device)
    x = images(model, args.batch, device)
    pixels = x.float() / 255

    def usual() -> Callable[[], object]:
        net = timm.create_model(name, **changed).to(device).eval()
        run = tent_as_usual(net, autocast=True)
        return lambda: run(pixels)

    how = "compiled and captured" if compiled else "captured"
    who = [Contender("TENT as usually written, autocast", usual, "bf16")]
    who.append(method_of(f"TENT, {how}", "tent", model, x, "bf16", compiled=compiled))
    if not compiled:
        who.append(method_of(f"MGTTA, {how}", "mgtta", model, x, "bf16", compiled=False))
    if not compiled and batch_norms(model.net):  # by blended statistics
        who.append(method_of(f"MGTTA+ without twins, {how}", "mgtta_plus", model, x, "bf16", False, mirror=False))
    label = " ".join([name, *(f"{key}={value}" for key, value in changed.items())])
    found = {"model": label, "blocks": ViT.fits(model), "rows": measure(who, args.rounds, device, args.deadline)}
    if name in args.profile:
        found["kernels"] = profiled(who, [contender.name for contender in who])
    return found


# --- the first batches


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Run the first batches of a stream as if nothing was compiled before, and in a process that finds compiled code.

    Between them this process compiles a step, as a first run does after many batches or by `warm_up`.
    """
    found: dict[str, Any] = {"model": args.model, "batch": args.batch}
    runs = found["runs"] = [first_batches(args.model, args.batch, args.device, new=True)]
    print(runs, file=sys.stderr)
    if args.deadline.left < 2 * COMPILE_SECONDS:
        return found
    model = classifier(args.model, args.device)
    x = images(model, args.batch, args.device)
    method = mgtta.create("mgtta", model, precision="bf16", **needed("mgtta", model, x))
    began = now()
    method.warm_up(x)
    found["compiling"] = now() - began
    print(found["compiling"], file=sys.stderr)
    words = [sys.executable, __file__, args.model, str(args.batch), args.device]
    limit = max(args.deadline.left, COMPILE_SECONDS)
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
    print(done.stderr[-1500:], file=sys.stderr)
    if not done.returncode:
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return found


def first_batches(name: str, batch: int, device: str, new: bool = False) -> dict[str, Any]:
    """Return the seconds of the first batches of MGTTA, each until its predictions are read.

    Args:
        new: as if no code was on disk, so that nothing is compiled.
    """
    model = classifier(name, device)
    x = images(model, batch, device)
    method = mgtta.create("mgtta", model, precision="bf16", **needed("mgtta", model, x))
    if new:
        method.engine.compiles = False
    found = []
    for _ in range(FIRST_BATCHES):
        began = now()
        method(x).argmax(1).tolist()
        found.append(now() - began)
    return {"seconds": found, "compiled": [captured.compiled for captured in method.engine.graphs.values()]}


# --- batches of one


def single(args: argparse.Namespace) -> dict[str, Any]:
    """Return how long a caller waits for the prediction of one image, as images come one by one and in a row."""
    model = classifier(args.model, args.device)
    x = images(model, 1, args.device)
    calls = 20 if args.quick else 320
    fast_precision = "bf16" if args.device == "cuda" else "fp32"
    rows = []
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("NoAdapt", "noadapt", {}),
        ("MGTTA+", "mgtta_plus", {"mirror": True}),
        ("MGTTA+ without twins", "mgtta_plus", {"mirror": False}),
        ("MGTTA, gather=16", "mgtta", {"gather": 16}),
    ]
    for label, name, settings in cases[:2] if args.captured else cases:
        if args.deadline.left < (8 if args.captured else 30):
            break
        try:
            method = mgtta.create(name, model, precision=fast_precision, **needed(name, model, x), **settings)
            if args.captured:
                method.engine.compiles = False
            method.warm_up(x)
            for _ in range(16 * CAPTURED + 2):  # so many windows, after which all is captured
                method(x)
            ways = (INTERVAL_SECONDS, 0.0) if args.device == "cuda" else (0.0,)
            times = {way: _latencies(method, x, calls, way) for way in ways}
            if label in args.profile:
                times[ways[0]]["kernels"] = kernels(partial(method, x))
        except Exception as error:  # the others may still work
            traceback.print_exc(limit=4)
            rows.append({"name": label, "error": f"{type(error).__name__}: {error}"[:300]})
            continue
        for way, found in times.items():
            rows.append({"name": label, "interval": way, **found})
            print(rows[-1], file=sys.stderr)
    return {"model": args.model, "calls": calls, "rows": rows}


def _latencies(method: Any, x: Tensor, calls: int, interval: float) -> dict[str, Any]:
    """Return median and 99th percentile of the seconds until a prediction is read, and the mean seconds of a call.

    Also the calls that took more than twice the median, by their number.

    Args:
        interval: seconds between two images; 0: each comes when the one before it is predicted.
    """
    read = time.perf_counter if x.is_cuda else time.process_time
    found = []
    returned = []
    began = read()
    batches = itertools.cycle(like(x))
    for i in range(calls):
        x = next(batches)
        while read() < began + i * interval:
            pass
        start = read()
        logits = method(x)
        returned.append(read() - start)
        logits.argmax(1).tolist()
        found.append(read() - start)
    updates = method.updates  # waits for the last one
    total = read() - began
    cuts = statistics.quantiles(found, n=100)
    slow = {i: round(1000 * seconds, 2) for i, seconds in enumerate(found) if seconds > 2 * cuts[49]}
    back = statistics.quantiles(returned, n=100)
    calls_took = {"median": cuts[49], "p99": cuts[98], "mean": total / calls, "updates": updates, "slow, ms": slow}
    return {**calls_took, "until it returns": {"median": back[49], "p99": back[98]}}


# --- decoding


def decoding(files: list[bytes], device: str) -> dict[str, Any]:
    """Return the rate at which torchvision decodes JPEGs on the GPU, and how its pixels differ from the CPU's."""
    from torchvision.io import decode_jpeg

    data = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    batch = (data * (64 // len(data) + 1))[:64]
    decode_jpeg(batch, device=device)
    began = now()
    for _ in range(16):
        there = decode_jpeg(batch, device=device)
    seconds = now() - began
    here = torch.tensor(read_image(files[0], name="a JPEG")).permute(2, 0, 1)
    apart = (there[0].cpu().float() - here.float()).abs()
    return {
        "rate": 16 * len(batch) / seconds,
        "largest": float(apart.max()),
        "mean": float(apart.mean()),
        "differing": float((apart > 0).float().mean()),
    }


# --- accuracy


def paths(args: argparse.Namespace) -> dict[str, Any]:
    """Return accuracies of methods on the fast path beside float32.

    Without --data it takes an embedded model and its images; with an .npz of CIFAR-10, a ResNet-56.
    """
    model, given, orders, told = _domains(args)
    rows: list[dict[str, Any]] = []

    def run(name: str, precision: str) -> None:
        if args.deadline.left < 15:
            return
        own = {key: given[key] for key, needs in (("source", needs_source), ("fisher", needs_fisher)) if needs(name)}
        rates = PATH_SETTINGS.get(name, {}) if args.data is not None and args.data.is_dir() else {}
        plain = {"mirror": False} if name == "mgtta_plus" else {}
        method = mgtta.create(name, model, precision=precision, **own, **rates, **plain)
        found = [_right(method, order, None) for order in orders]
        rows.append({"name": name, "precision": precision, "top1": found, **plain})
        print(rows[-1], file=sys.stderr)

    for name in args.only or PATH_SETTINGS:
        for precision in ("fp32", "bf16"):
            run(name, precision)
    return {**told, "rows": rows}


def twins(args: argparse.Namespace) -> dict[str, Any]:
    """Return accuracy and time of MGTTA+ with mirrored twins at every batch, at the first of a domain, and at none.

    The benchmark knows where a domain begins: a detector can only do worse.
    """
    model, given, orders, told = _domains(args)
    read = clock(args.device)
    precision = "bf16" if args.device == "cuda" else "fp32"
    rows = []
    for mirror, at_first in ((True, None), (True, 4), (True, 2), (False, None)):
        if args.deadline.left < 15:
            break
        method = mgtta.create("mgtta_plus", model, source=given["source"], precision=precision, mirror=mirror)
        _right(method, orders[0][:2], at_first)
        began = read()
        found = [_right(method, order, at_first) for order in orders]
        seconds = (read() - began) / len(orders)
        rows.append({"mirror": mirror, "at first": at_first, "top1": found, "seconds": seconds})
        print(rows[-1], file=sys.stderr)
    return {**told, "precision": precision, "rows": rows}


def _domains(args: argparse.Namespace) -> tuple[mgtta.Classifier, dict[str, Any], list[list[Any]], dict[str, Any]]:
    """Return the model, what methods need, the batches of all domains in several orders, and what they are."""
    made = _on_embedded
    constants = "imagenet"
    if args.data is not None and args.data.is_dir():
        made = _on_imagenet
    elif args.data is not None:
        made = _on_cifar
        constants = "cifar"
    model, given, test = made(args)
    names = PATH_CORRUPTIONS[:1] if args.quick else PATH_CORRUPTIONS
    domains = corrupted(test, names, constants=constants)
    batches = list(stream(domains, batch_size=64, first=args.first, device=args.device))
    orders = [batches, *(shuffled(batches, seed) for seed in range(1, args.orders))]
    images = min(len(test), args.first or len(test))
    told = {"model": model.name, "images": images, "corruptions": list(names), "batches": len(batches)}
    return model, given, orders, told


def _on_imagenet(args: argparse.Namespace) -> tuple[mgtta.Classifier, dict[str, Any], Any]:
    """Return DeiT-Tiny, what methods need, and the test images."""
    import imagenet

    if args.checkpoint is None:
        raise SystemExit("paths on ImageNet needs --checkpoint")
    model = imagenet.deit_tiny(args.checkpoint, args.device)
    clean = imagenet.shard(args.data, 0)
    given = {"source": imagenet.source_of(model, clean), "fisher": mgtta.fisher_information(model, clean.x[:512])}
    return model, given, imagenet.shard(args.data, 1, 2)


def _on_cifar(args: argparse.Namespace) -> tuple[mgtta.Classifier, dict[str, Any], Any]:
    """Return a ResNet-56 with BatchNorm layers, what methods need, and the test images."""
    model = mgtta.load_model("cifar_resnet56", checkpoint=args.checkpoint).to(args.device)
    test = open_dataset(args.data, size=32)
    some = torch.stack([test[i][0] for i in range(256)])  # clean ones, the same for both precisions
    given = {"source": mgtta.source_statistics(model, some), "fisher": mgtta.fisher_information(model, some)}
    return model, given, test


def _on_embedded(args: argparse.Namespace) -> tuple[mgtta.Classifier, dict[str, Any], Any]:
    """Return an embedded model, what methods need, and the test images."""
    model = mgtta.load_model(args.model).to(args.device)
    images_of = images_for(args.model)
    clean = images_of(64 if args.quick else 512, seed=CLEAN_SEED).tensors()[0]
    given = {"source": mgtta.load_source(args.model), "fisher": mgtta.fisher_information(model, clean)}
    return model, given, images_of(64 if args.quick else 512)


def _right(method: Any, batches: list[Any], twins: int | None) -> float:
    """Return the accuracy, in percent, over domains that each begin with the source model.

    Args:
        twins: batches at the start of each domain whose images are mirrored too; None: as the method says.
    """
    inner = innermost(method)
    if twins is not None:
        inner.engine.captures = False  # a graph has them, or has not
    seen: dict[str, int] = {}
    right = 0
    for batch in batches:
        if batch.domain not in seen:
            method.reset()
        seen[batch.domain] = seen.get(batch.domain, 0) + 1
        if twins is not None:
            inner.mirror = seen[batch.domain] <= twins
        right += int((method(batch.x).argmax(1) == batch.y.to(batch.x.device)).sum())
    return 100 * right / sum(len(batch.x) for batch in batches)


def shuffled(batches: list[Any], seed: int) -> list[Any]:
    """Return the same images in another order within their domains, which keep their places."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for domain in dict.fromkeys(batch.domain for batch in batches):
        some = [batch for batch in batches if batch.domain == domain]
        x, y, index = (torch.cat([getattr(batch, name) for batch in some]) for name in ("x", "y", "index"))
        for chosen in torch.randperm(len(y), generator=random).split(len(some[0].y)):
            there = chosen.to(x.device)
            found.append(some[0]._replace(x=x[there], y=y[there], index=index[chosen.to(index.device)]))
    return found


# --- evaluate


def evaluation(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `evaluate` adds to batches of one whose method costs nothing."""
    most = 1000 if args.quick else 100_000
    rows = [{"batches": n, "seconds": evaluate.seconds(n, args.device, None)} for n in (most // 10, most)]
    return {"rows": rows}


if __name__ == "__main__":
    model_name, batch_size, on = sys.argv[1:]
    if on == "cpu":
        torch.set_num_threads(1)
    print(json.dumps(first_batches(model_name, int(batch_size), on)))
    sys.exit(0)
