"""A long run in small batches on the embedded characters: are memory and step time flat, and a frozen model frozen?

MGTTA under a guard takes an endless stream of corrupted characters, two at a time. Memory is what the process holds
(resident, after a collection) and time the median of a step, in the first and the last quarter of the run. A machine
that others use as well is now faster, now slower, so at every tenth batch a frozen model predicts it too, and a step is
also given in units of that. The frozen model predicts the same four images now and then: bit for bit the same.

python benchmarks/soak.py --batches 20000 --out results
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch

import mgtta
from mgtta._lib.files import atomic
from mgtta.adaptation.method import Method
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream

WARM = 0.05  # of the run, which is left out: caches fill


def resident() -> int:
    """Return the bytes of main memory that this process holds now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def endless(images: int, batch_size: int):
    domains = corrupted(Held(Glyphs(images), Room(2**30)), CORRUPTIONS)
    while True:
        yield from stream(domains, batch_size=batch_size)


def soak(method: Method, frozen: Method, batches: int, batch_size: int, images: int = 64, samples: int = 200) -> dict:
    seconds = []
    relative = []
    memory = []
    drift = 0.0
    probe = Glyphs(4).tensors()[0]
    expected = frozen(probe)
    every = max(1, batches // samples)
    for i, batch in zip(range(batches), endless(images, batch_size), strict=False):
        began = time.process_time()
        method(batch.x)
        seconds.append(time.process_time() - began)
        if i % 10 == 0:
            began = time.process_time()
            frozen(batch.x)
            relative.append(seconds[-1] / (time.process_time() - began))
        if i % every == 0:
            memory.append(resident())
            drift = max(drift, float((frozen(probe) - expected).abs().max()))
    return {
        "batches": batches,
        "batch_size": batch_size,
        "memory": _quarters(memory),
        "seconds": _quarters(seconds),
        "relative": _quarters(relative),
        "drift": drift,
        "updates": method.updates,
        "events": len(method.events),
    }


def _quarters(values: list) -> dict:
    """Return medians of the first and the last quarter, and by how many percent the last is above the first."""
    values = values[int(WARM * len(values)) :]
    n = max(1, len(values) // 4)
    first = statistics.median(values[:n])
    last = statistics.median(values[-n:])
    return {"first": first, "last": last, "growth": 100 * (last / first - 1)}


def page(found: dict) -> str:
    memory = found["memory"]
    seconds = found["seconds"]
    relative = found["relative"]
    model = found["model"]
    if model == "glyphs_plain":  # the command now takes glyphs_vit
        model += ", an embedded ViT of 0.1"
    return (
        f"# A long run\n\n`{found['command']}`\n\n{found['method']} under a guard, {found['batches']:,} batches of "
        f"{found['batch_size']}, {model}; medians of the first and the last quarter.\n\n"
        "| | first quarter | last quarter | growth, % |\n|---|---|---|---|\n"
        f"| memory, MiB | {memory['first'] / 2**20:.1f} | {memory['last'] / 2**20:.1f} | {memory['growth']:+.2f} |\n"
        f"| step, ms of CPU | {1e3 * seconds['first']:.2f} | {1e3 * seconds['last']:.2f} "
        f"| {seconds['growth']:+.2f} |\n"
        f"| step, in predictions of a frozen model | {relative['first']:.2f} | {relative['last']:.2f} "
        f"| {relative['growth']:+.2f} |\n\n"
        f"Largest change of a frozen model's logits: {found['drift']:g}. Updates: {found['updates']:,}. "
        f"Alarms: {found['events']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = mgtta.load_model("glyphs_vit")
    method = mgtta.create("mgtta", model, source="glyphs_vit", lr=1e-4, guard=True, gather=0)
    found = soak(method, mgtta.create("noadapt", model), args.batches, args.batch_size)
    found |= {
        "method": method.name,
        "model": model.name,
        "weights": model.fingerprint(),
        "command": f"python benchmarks/soak.py --batches {args.batches} --out results",
    }
    print(json.dumps(found))
    for name, text in (("soak.json", json.dumps(found, indent=1) + "\n"), ("soak.md", page(found))):
        with atomic(args.out / name) as path:
            path.write_text(text)


if __name__ == "__main__":
    main()
