"""Whether this machine's CPU runs torch's bfloat16 kernels, found out in a child process.

Some CPUs advertise instructions (AMX) that the machine, often a virtual one, forbids. torch picks its bfloat16 kernels
by what the CPU advertises, and then the process dies with "Illegal instruction", which no `except` can catch.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

LIMIT = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"  # the environment variable that keeps torch away from AMX
TIMEOUT_SECONDS = 300.0

# The layers of a small ViT, large enough that torch hands them to oneDNN.
PROBE = """
import torch
from torch import nn

torch.set_num_threads(1)
images = torch.randn(4, 3, 64, 64, dtype=torch.bfloat16)
patches = nn.Conv2d(3, 96, 8, stride=8, dtype=torch.bfloat16)
linear = nn.Linear(96, 96, dtype=torch.bfloat16)
conv = nn.Conv2d(96, 96, 3, padding=1, dtype=torch.bfloat16)
features = patches(images)
tokens = linear(features.flatten(2).mT)
heads = tokens.unflatten(2, (2, 48)).transpose(1, 2)
attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
loss = attended.square().mean() + conv(features).square().mean()
loss.backward()
"""


def check_bfloat16(command: Sequence[str] | None = None) -> None:
    """Raise a RuntimeError if bfloat16 layers do not run on this CPU.

    The layers are tried once per process, in a child process, which takes some seconds; the answer is remembered.

    Args:
        command: the program that tries them, for tests; by default this Python with PROBE.
    """
    if command is None:
        if not sys.executable or getattr(sys, "frozen", False):
            return  # this Python is embedded in another program: there is no interpreter to start
        command = (sys.executable, "-P", "-c", PROBE)
    reason = _failure(tuple(command))
    if reason is not None:
        raise RuntimeError(
            f"torch's bfloat16 kernels do not work on this CPU: the process that tried them {reason}. "
            f'Use precision="fp32", or set {LIMIT} in the environment before Python starts'
        )


@cache
def _failure(command: tuple[str, ...]) -> str | None:
    """Return how the child process ended, or None if it ended well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # the same torch as here
    try:
        child = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {TIMEOUT_SECONDS:.0f} seconds"
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        number = -child.returncode
        return f"was killed by {signal.Signals(number).name} ({signal.strsignal(number)})"
    lines = child.stderr.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return f"failed with exit code {child.returncode} ({last})"
