"""The clock and the memory of an evaluation: how long predicting and adapting take, and how much is held."""

import re
import resource
from pathlib import Path

import torch
from torch import Tensor

from mgtta._lib.profile import now
from mgtta.adaptation.wrapper import Adapting


class Clock:
    """Calls a method and times it: until the network has given its first logits, and from then on.

    Args:
        wait: wait for the GPU at each reading, so that times are true.
    """

    def __init__(self, method: Adapting, wait: bool = False):
        self.method = method
        self.wait = wait
        self._first: float | None = None

    def __enter__(self) -> "Clock":
        self._handle = self.method.model.net.register_forward_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, *_: object) -> None:
        if self._first is None:
            self._first = now(self.wait)

    def __call__(self, x: Tensor) -> tuple[Tensor, float, float]:
        """Return the method's logits, the seconds until the first logits, and the seconds after them."""
        self._first = None
        began = now(self.wait)
        logits = self.method(x)
        ended = now(self.wait)
        first = self._first or ended
        return logits, first - began, ended - first


def reset_peak_memory() -> None:
    """Start the count of `peak_memory` again."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(method: Adapting) -> int | None:
    """Return the most bytes that torch has held on the method's GPU; None on a CPU.

    Memory of CUDA graphs, which torch does not count, is added.
    """
    device = next(method.model.parameters()).device
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) + method.engine.graph_bytes


def process_peak_memory() -> int:
    """Return the most bytes of main memory that this process has held."""
    try:  # unlike ru_maxrss, VmHWM does not count what the parent process held
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found is None:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(found[1])
