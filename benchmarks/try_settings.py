"""Trials of settings on validation streams, for many processes on one GPU.

    python benchmarks/try_settings.py SPEC.json --network NAME --data DATA --checkpoint WEIGHTS --out OUT

SPEC.json is a list of {"method": ..., "settings": {...}, "kinds": [...], "seeds": [...]}. Each job appends one line to
OUT/trials.jsonl: split, network, method, kind, seed, settings, top-1, of streams of several rounds also that of the
last, and how often the normalisation changed (adaptation/turns.py). What is there is not run again. Networks, images
and kinds of stream are those of benchmarks/streams.py. `--streams test` shows what a choice does on the test images.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from pages import read_lines
from processes import in_processes
from stream_images import NETWORKS, make
from streams import Bench, by_round

from mgtta.methods import _neighbours

Job = tuple[str, str, int, dict[str, Any]]  # method, kind, seed, settings
_BENCH: Bench | None = None


def begin(*setup: Any) -> None:
    global _BENCH
    _BENCH = Bench(*setup)


def work(job: Job) -> list[dict[str, Any]]:
    assert _BENCH is not None
    method, kind, seed, settings = job
    return _BENCH.run(method, kind, seed, {name: _tuple(value) for name, value in settings.items()})


def _tuple(value: Any) -> Any:
    """Return the value as settings have it: JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value


def jobs(spec: list[dict[str, Any]], done: set[str]) -> list[Job]:
    """Return the jobs that are not done, by kind, so that long ones do not come last."""
    found = []
    for entry in spec:
        for seed in entry["seeds"]:
            for kind in entry["kinds"]:
                job = (entry["method"], kind, seed, entry["settings"])
                if key(*job) not in done:
                    found.append(job)
    longest = ["rounds", "one", "long", "continual", "mixed", "classes", "labels", "reset", "gradual", "clean"]
    return sorted(found, key=lambda job: (job[2], longest.index(job[1])))


def key(method: str, kind: str, seed: int, settings: dict[str, Any]) -> str:
    return json.dumps([method, kind, seed, settings], sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path)
    parser.add_argument("--network", choices=list(NETWORKS), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("runs/streams"), help="for the corrupted images")
    parser.add_argument("--images", type=int, help="the first so many images under each corruption; by default all")
    parser.add_argument("--streams", choices=["validation", "test"], default="validation")
    parser.add_argument("--singles", type=int, default=200, help="images of each corruption in batches of one")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "trials.jsonl"
    there = [r for r in read_lines(store) if r["network"] == args.network and r["split"] == args.streams]
    done = {key(r["method"], r["kind"], r["seed"], r["settings"]) for r in there}
    todo = jobs(json.loads(args.spec.read_text()), done)
    args.kinds = ",".join({kind for _, kind, _, _ in todo})
    setup = (make(args), args.device, args.precision, _neighbours.ALIKE, args.singles)
    for (method, kind, seed, settings), records in in_processes(todo, work, begin, setup, args.workers, args.seconds):
        top1 = statistics.fmean(record["top1"] for record in records)
        line = {"split": args.streams, "network": args.network, "method": method, "kind": kind, "seed": seed}
        line |= {"settings": settings, "turns": records[-1]["turns"]}
        line |= {"top1": round(top1, 3), "ece": round(statistics.fmean(record["ece"] for record in records), 3)}
        if kind in ("rounds", "long"):
            line["last"] = round(by_round(records)[-1], 3)
        with open(store, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(args.network, method, kind, seed, settings, f"{top1:.2f}", flush=True)


if __name__ == "__main__":
    main()
