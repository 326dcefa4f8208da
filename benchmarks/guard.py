"""Streams made to break adaptation, on the embedded characters: each method as it is, and under a guard.

For each stream and method, a cell, the plain and the guarded one take every batch in turn, so that their times (of the
process's CPU, on one thread) are of one run. Every cell is a process of its own, as many at a time as --jobs says, and
is in the file as soon as it has finished; one that is there already, with the same protocol, is not run again.

python benchmarks/guard.py --images 20000 --jobs 2 --out results
"""

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from pages import table

import mgtta
from mgtta._lib.files import atomic
from mgtta.adaptation.method import Method
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.glyphs import SIZE, TRAIN_SEED, Glyphs
from mgtta.data.streams import Batch, corrupted, stream

UNSEEN = 19  # a seed of characters on which nothing was ever chosen
RATES = {"tent": 1e-3, "eata": 2.5e-4, "mgtta": 1e-3}  # the papers' own
HOSTILE = {
    "rate x 10": "the 15 corruptions one after another, at ten times the learning rate",
    "rate x 100": "the same at a hundred times the learning rate",
    "one class": "the 15 corruptions mixed, one class after another",
    "batch of 1": "the 15 corruptions one after another, in batches of one image at the rate for 64",
    "noise": "stretches of 16 batches of random pixels, which are not scored, between those of the 15 corruptions",
    "alternating": "another corruption at every batch",
}
BENIGN = {
    "continual": "the 15 corruptions one after another",
    "mixed": "the 15 corruptions mixed",
}


def batches(name: str, images: int, seed: int) -> Iterator[Batch]:
    each = images // len(CORRUPTIONS) // (2 if name == "noise" else 1)
    domains = corrupted(Held(Glyphs(each, UNSEEN), Room(2**30)))
    size = 1 if name == "batch of 1" else 64
    if name == "one class":
        return iter(stream(domains, batch_size=size, mixed=True, imbalance=math.inf, seed=seed))
    if name == "mixed":
        return iter(stream(domains, batch_size=size, mixed=True, seed=seed))
    if name == "alternating":
        parts = [stream(domain, batch_size=size, seed=seed) for domain in domains]
        return (batch for turn in zip(*parts, strict=True) for batch in turn)
    plain = stream(domains, batch_size=size, seed=seed)
    return with_noise(plain, seed) if name == "noise" else iter(plain)


def with_noise(plain: stream, seed: int) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(seed)
    for i, batch in enumerate(plain):
        if i % 16 == 0:
            for _ in range(16):
                x = torch.randint(256, (64, 3, SIZE, SIZE), generator=random, dtype=torch.uint8)
                yield Batch(x, None, "noise", torch.arange(64))
        yield batch


def make(name: str, model: mgtta.Classifier, rate: float, guard: bool) -> Method:
    settings: dict = {"source": "glyphs_vit"} if name == "mgtta" else {}
    if name == "eata":
        settings["fisher"] = mgtta.fisher_information(model, Glyphs(512, seed=TRAIN_SEED).tensors()[0])
    return mgtta.create(name, model, lr=rate, guard=guard, **settings)


def run(stream_name: str, method_name: str, images: int, seed: int) -> dict:
    """Run one cell, and return its row."""
    torch.set_num_threads(1)
    model = mgtta.load_model("glyphs_vit")
    rate = RATES[method_name] * {"rate x 10": 10, "rate x 100": 100}.get(stream_name, 1)
    plain, guarded = (make(method_name, model, rate, guard) for guard in (False, True))
    right: dict[str, list[int]] = {"noadapt": [], "plain": [], "guarded": []}
    seconds = {"plain": 0.0, "guarded": 0.0}
    sizes = []
    for i, batch in enumerate(batches(stream_name, images, seed)):
        logits = {}
        for name, method in (
            (("plain", plain), ("guarded", guarded)) if i % 2 else (("guarded", guarded), ("plain", plain))
        ):
            began = time.process_time()
            logits[name] = method(batch.x)
            seconds[name] += time.process_time() - began
        if batch.y is None:
            continue
        with torch.no_grad():
            logits["noadapt"] = model(batch.x)
        sizes.append(len(batch.y))
        for name, y in logits.items():
            right[name].append(int((y.argmax(1) == batch.y).sum()))
    row = {"stream": stream_name, "method": method_name, "lr": rate, "images": images, "scored": sum(sizes)}
    quarter = 3 * len(sizes) // 4
    for name, counts in right.items():
        row[name] = 100 * sum(counts) / sum(sizes)
        row[f"{name}, last quarter"] = 100 * sum(counts[quarter:]) / sum(sizes[quarter:])
    return {**row, "time": seconds["guarded"] / seconds["plain"], "events": list(guarded.events)}


def shown(rows: list[dict]) -> str:
    names = ("noadapt", "plain", "guarded")
    head = [
        "stream",
        "method",
        "images",
        "NoAdapt",
        "plain",
        "guarded",
        "guarded - NoAdapt",
        "last quarter: NoAdapt",
        "plain",
        "guarded",
        "alarms",
        "time, guarded / plain",
    ]
    lines = [
        [
            row["stream"],
            row["method"],
            f"{row['images']:,}",
            *(f"{row[name]:.1f}" for name in names),
            f"{row['guarded'] - row['noadapt']:+.1f}",
            *(f"{row[f'{name}, last quarter']:.1f}" for name in names),
            str(len(row["events"])),
            f"{row['time']:.3f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def summary(rows: list[dict]) -> str:
    """Return what was required, and what was found."""
    hostile = [row for row in rows if row["stream"] in HOSTILE]
    benign = [row for row in rows if row["stream"] in BENIGN]
    lines = []
    if hostile:
        worst = min(hostile, key=lambda row: row["guarded"] - row["noadapt"])
        broken = sorted({row["stream"] for row in hostile if row["plain"] < row["noadapt"] - 3})
        lines.append(
            f"- Hostile streams, {len(hostile)} cells: the guarded method's worst distance from NoAdapt is "
            f"{worst['guarded'] - worst['noadapt']:+.2f} points ({worst['stream']}, {worst['method']}); the plain ones "
            f"lose more than 3 points on {len(broken)} of the streams ({', '.join(broken)})."
        )
    if benign:
        cost = max(row["plain"] - row["guarded"] for row in benign)
        slow = max(row["time"] for row in benign)
        lines.append(
            f"- Benign streams, {len(benign)} cells: the guard costs at most {cost:.2f} points and "
            f"{100 * (slow - 1):.1f} % time."
        )
    return "\n".join(lines)


def page(ran: str, protocol: dict, rows: list[dict]) -> str:
    what = "\n".join(f"- {name}: {text}" for name, text in {**HOSTILE, **BENIGN}.items())
    return (
        f"# The guard on streams made to break adaptation\n\n`{ran}`\n\n{summary(rows)}\n\n"
        f"Top-1 in percent, over the whole stream and over its last quarter; embedded characters, {protocol['model']} "
        f"({protocol['weights']}).\n\n{shown(rows)}\n\n{what}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000, help="of each stream")
    parser.add_argument("--methods", default="mgtta,tent,eata")
    parser.add_argument("--streams", default=",".join([*HOSTILE, *BENIGN]))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cells that run at a time, a process and a thread each")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    model = mgtta.load_model("glyphs_vit")
    protocol = {
        "model": model.name,
        "weights": model.fingerprint(),
        "characters": UNSEEN,
        "seed": args.seed,
        "images": args.images,
        "batch_size": 64,
        "corruptions": "the 15, severity 5",
        "versions": {"mgtta": mgtta.__version__, "torch": torch.__version__},
    }
    ran = command(args, parser)
    path = args.out / "guard.json"
    rows = known(path, protocol)
    done = [(row["stream"], row["method"]) for row in rows]
    cells = [(s, m) for s in args.streams.split(",") for m in args.methods.split(",") if (s, m) not in done]
    cells.sort(key=lambda cell: cell[0] != "batch of 1")  # which takes longest, first
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, *cell, args.images, args.seed) for cell in cells]):
            row = future.result()
            print(shown([row]).splitlines()[-1], flush=True)
            rows = sorted([*rows, row], key=place)
            found = {"command": ran, "protocol": protocol, "rows": rows}
            with atomic(path) as temporary:
                temporary.write_text(json.dumps(found, indent=1) + "\n")
            with atomic(args.out / "guard.md") as temporary:
                temporary.write_text(page(ran, protocol, rows))
    print(summary(rows))


def command(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    words = ["python benchmarks/guard.py"]
    for name, value in vars(args).items():
        if value != parser.get_default(name) or name in ("images", "out"):
            words += [f"--{name}", f'"{value}"' if " " in str(value) else str(value)]
    return " ".join([*words[:-1], "results"])


def known(path: Path, protocol: dict) -> list[dict]:
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["rows"] if found.get("protocol") == protocol else []


def place(row: dict) -> tuple:
    return [*HOSTILE, *BENIGN].index(row["stream"]), list(RATES)[::-1].index(row["method"])


if __name__ == "__main__":
    main()
