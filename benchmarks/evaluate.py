"""What `evaluate` adds to a method: seconds for many batches of one, whose method costs nothing; on a CPU, CPU time.

    python benchmarks/evaluate.py [--batches 100000] [--device cuda]

Prints a row for each number of batches, with and without a function that is called after each batch.
"""

import argparse
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mgtta._lib.profile import now
from mgtta._lib.ranks import ALONE
from mgtta.evaluation.loop import OnBatch, evaluate


class Free:
    """A method whose images are its logits."""

    name = "free"
    updates = 0
    skipped = 0
    events = ()
    spent = False
    ranks = ALONE
    engine = SimpleNamespace(graph_bytes=0)

    def __init__(self, device: str):
        net = nn.Linear(1, 1).to(device)
        self.model = SimpleNamespace(net=net, parameters=net.parameters)

    def reset(self) -> None: ...

    def __call__(self, x: Tensor) -> Tensor:
        return x


def seconds(batches: int, device: str, on_batch: OnBatch | None) -> float:
    x = torch.randn(1, 1000, device=device)
    y = torch.tensor([1], device=device)
    method: Any = Free(device)
    stream = [SimpleNamespace(x=x, y=y, domain="one")] * batches
    read = time.process_time if device == "cpu" else now
    began = read()
    evaluate(method, stream, on_batch=on_batch)
    return read() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| batches of one | seconds | seconds, with on_batch |")
    print("|---:|---:|---:|")
    for batches in (args.batches // 10, args.batches):
        alone = seconds(batches, args.device, None)
        told = seconds(batches, args.device, lambda record, batch, logits: None)
        print(f"| {batches:,} | {alone:.2f} | {told:.2f} |", flush=True)


if __name__ == "__main__":
    main()
