"""The constants of schedule="auto", on the validation corruptions: DeiT-Tiny, the images for choosing, no reset.

    python benchmarks/schedule.py --data SHARDS --checkpoint DEIT_TINY --jobs 2 --out results

A stream has the four validation corruptions one after another, and all of them once more; each lasts for two passes
over the images, each in an order of its own, so that a rest has time to pay. Learning always stands beside, at rates
for a stream without reset. A row is in the file as soon as it has finished; one that is there already, with the same
protocol, is not run again.
"""

import json
import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import imagenet
import torch
from pages import table

import mgtta
from mgtta._lib.files import atomic
from mgtta.adaptation import scheduled as schedule
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS
from mgtta.data.streams import Batch, corrupted, stream

TURNS = 2
PASSES = 2
LR = 5e-3
LR_ALWAYS = (1e-3, 2e-3)
GRID = ((3, 16, 1), (4, 16, 1), (5, 32, 1), (5, 32, 2), (6, 32, 2))  # burst, rest, skip


def ways() -> list[dict[str, Any]]:
    """Return the settings to compare, the slowest first."""
    always = [{"lr": lr, "schedule": "always"} for lr in LR_ALWAYS]
    return [*always, *({"lr": LR, "schedule": "auto", "constants": list(constants)} for constants in GRID)]


def batches(part: imagenet.Held, order: int, device: str) -> Iterator[Batch]:
    for turn in range(TURNS):
        for corruption in VALIDATION_CORRUPTIONS:
            for again in range(PASSES):
                seed = 100 * order + PASSES * turn + again
                yield from stream(corrupted(part, [corruption]), batch_size=64, seed=seed, device=device)


def run(way: dict[str, Any], data: Path, checkpoint: Path, device: str, orders: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = imagenet.deit_tiny(checkpoint, device)
    shard = imagenet.shard(data, 0)
    if "constants" in way:
        schedule.BURST, schedule.REST, schedule.SKIP = way["constants"]
    source = imagenet.source_of(model, shard)
    method = mgtta.create("mgtta", model, source=source, lr=way["lr"], schedule=way["schedule"])
    top1 = []
    share = []
    for order in range(orders):
        method.reset()
        records = mgtta.evaluate(method, batches(shard.part(imagenet.CHOOSING), order, device), reset="never")
        top1.append(100 * sum(sum(r.curve) for r in records) / sum(r.labelled for r in records))
        share.append(method.updates / sum(r.batches for r in records))
    return {**way, "top1": top1, "share": statistics.mean(share), "precision": method.precision}


def missing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that have no row yet."""
    return [way for way in ways() if not any(way.items() <= row.items() for row in rows)]


def page(found: dict[str, Any]) -> str:
    rows = []
    for row in sorted(found["rows"], key=lambda row: -statistics.mean(row["top1"])):
        constants = map(str, row.get("constants", [""] * 3))
        top1 = f"{statistics.mean(row['top1']):.2f}"
        spread = f" ± {statistics.stdev(row['top1']):.2f}" if len(row["top1"]) > 1 else ""
        rows.append([row["schedule"], f"{row['lr']:g}", *constants, top1 + spread, f"{100 * row['share']:.1f}"])
    head = ["schedule", "lr", "burst", "rest", "skip", "top-1, %", "batches learned from, %"]
    return f"""# The schedule's constants

{table(head, rows, right=True)}

Protocol: {json.dumps(found["protocol"])}. In use: burst {schedule.BURST}, rest {schedule.REST}, skip {schedule.SKIP}.

Command: `{found["command"]}`
"""


def main() -> None:
    parser = imagenet.arguments(__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, a process and a thread each")
    parser.add_argument("--orders", type=int, default=1, help="of the images")
    args = parser.parse_args()
    protocol = {
        "corruptions": list(VALIDATION_CORRUPTIONS),
        "severity": 5,
        "images": "128 to 999 of shard 0",
        "batch size": 64,
        "turns": TURNS,
        "passes": PASSES,
        "orders": args.orders,
        "device": args.device,
        "torch": torch.__version__,
    }
    command = "python benchmarks/schedule.py --data SHARDS --checkpoint DEIT_TINY"
    command += f" --device {args.device} --jobs {args.jobs} --orders {args.orders} --out results"
    path = args.out / "schedule.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("protocol") != protocol:
        found = {"command": command, "protocol": protocol, "rows": []}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        given = args.data, args.checkpoint, args.device, args.orders
        for future in as_completed([pool.submit(run, way, *given) for way in missing(found["rows"])]):
            found["rows"].append(future.result())
            print(found["rows"][-1], flush=True)
            with atomic(path) as temporary:
                temporary.write_text(json.dumps(found, indent=1) + "\n")
            with atomic(args.out / "schedule.md") as temporary:
                temporary.write_text(page(found))


if __name__ == "__main__":
    main()
