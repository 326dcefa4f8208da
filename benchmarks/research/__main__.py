"""Variants of the objective, of the optimizer and of its training, tried on DeiT-Tiny: docs/research.md is the log.

    python benchmarks/research STAGE --data SHARDS --checkpoint DEIT_TINY --out runs/research --workers 12
    python benchmarks/research page results/research/results.jsonl docs/research.md

A stage is a list of tasks, spread over processes; a finished task is not run again. Choices are made on shard 0 under
the four validation corruptions, on images that no generator was trained on, twice over with two draws of the
corruption, so that a stream is about as long as the test's. The test is shards 1 and 2 under the fifteen.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent.parent))  # what all benchmarks share

import imagenet
from laboratory import Lab
from pages import between
from stages import STAGES, Results
from tables import page
from tasks import key, short

from mgtta._lib.files import atomic
from mgtta.bench.executors.pool import spread
from mgtta.bench.executors.tasks import Tasks


def read(log: Path) -> Results:
    return {r["key"]: r for r in map(json.loads, log.read_text().splitlines())} if log.exists() else {}


def run(tasks: list[Any], args: argparse.Namespace) -> Results:
    """Return the results so far and those of the tasks; tasks in the file are not run again."""
    log = args.out / "results.jsonl"
    done = read(log)
    todo = [task for task in dict.fromkeys(tasks) if key(task) not in done]
    start = partial(Lab, str(args.data), str(args.checkpoint), args.device, args.out)
    if args.workers:
        results: Iterator[tuple[Any, Any]] = spread(Tasks(todo), start, args.workers)
    else:
        lab = start()
        results = ((task, lab(task)) for task in todo)
    for task, result in results:
        done[key(task)] = result
        with open(log, "a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result.get('mean', result.get('last')):8.3f}  {result['seconds']:6.1f} s  {short(task)}", flush=True)
    return done


def summary(stage: str, tasks: list[Any], results: Results) -> str:
    """Return the tasks, best first; those that differ only by their seed on one line, with the spread."""
    groups: dict[Any, list[float]] = {}
    for task in tasks:
        result = results[key(task)]
        alike = dataclasses.replace(task, seed=0)
        groups.setdefault(alike, []).append(result.get("mean", -result.get("last", 0.0)))
    lines = [f"{stage}, best first:"]
    for task, scores in sorted(groups.items(), key=lambda pair: -statistics.mean(pair[1])):
        spread_ = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        lines.append(f"{statistics.mean(scores):8.2f}{spread_}  {short(task)}")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["page"]:
        log, target = map(Path, sys.argv[2:])
        text = between(target.read_text(), "research", page(read(log)))
        with atomic(target) as path:
            path.write_text(text)
        return
    parser = imagenet.arguments(__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for stage in args.stages:
        tasks = STAGES[stage](read(args.out / "results.jsonl"))
        text = summary(stage, tasks, run(tasks, args))
        with atomic(args.out / f"{stage}.txt") as path:
            path.write_text(text + "\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
