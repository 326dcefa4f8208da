"""What the parts of benchmarks/speed.py share: contenders, how they are timed, and TENT as it is commonly written."""

import gc
import itertools
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mgtta
from mgtta._lib.profile import now
from mgtta._lib.shipped import shipped
from mgtta._lib.timm import timm
from mgtta.adaptation.scheduled import Scheduled
from mgtta.bench.needs import needs_fisher, needs_source
from mgtta.fast.engine import FastEngine

TURN = 10  # batches that a contender takes on a GPU before another does
SLOW_SECONDS = 0.03  # of a batch, from which a turn is one batch
ENDED = "the time of this visit was over"


# --- what a user would pick instead


def tent_as_usual(net: nn.Module, autocast: bool = False, compiled: bool = False) -> Callable[[Tensor], Tensor]:
    """TENT as it is commonly written: gradients by backward(), torch's SGD over the norm layers' parameters.

    Args:
        autocast: in bfloat16 where torch deems it safe.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d)]
    net.requires_grad_(False)
    params = [p.requires_grad_() for m in norms for p in m.parameters()]
    for layer in norms:
        if isinstance(layer, nn.BatchNorm2d):  # by the statistics of the batch
            layer.train()
            layer.track_running_stats = False
            layer.running_mean = None
            layer.running_var = None
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    run = torch.compile(net, dynamic=False) if compiled else net

    def step(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            logits = run(x)
        logits = logits.float()
        loss = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean(0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach()

    return step


# --- measurement


@dataclass
class Contender:
    """Something to be timed.

    Attributes:
        make: prepares it, warmed up, and gives the function to time.
        graph_bytes: what CUDA graphs take, once it is made; True: what they have reserved.
        seconds: that it may take to make it; it is left out if there are fewer.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    precision: str = ""
    tf32: bool = False
    graph_bytes: Callable[[bool], int] = lambda _: 0
    seconds: float = 0.0


class Deadline:
    """The time of a visit: what does not fit in is left out, so that what was measured is kept."""

    def __init__(self, seconds: float):
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()


def measure(
    contenders: list[Contender], rounds: int, device: str, deadline: Deadline | None = None
) -> list[dict[str, Any]]:
    """Return the median and the least seconds of each and, on a GPU, its bytes; they take turns.

    A contender that fails, or for which there is no time left, has an `error` instead.
    """
    rows = [_made(contender, device, deadline) for contender in contenders]
    turns = [(contender, row, []) for contender, row in zip(contenders, rows, strict=True) if "error" not in row]
    read = clock(device)
    order = random.Random(0)
    for done in range(rounds):
        if done > 1 and deadline is not None and deadline.left < 0:
            break
        for contender, row, found in order.sample(turns, len(turns)):
            _precise(contender.tf32)
            batches = row["turn"]
            start = read()
            for _ in range(batches):
                row["step"]()
            found.append((read() - start) / batches)
    _precise(False)
    for _, row, found in turns:
        row.update(seconds=statistics.median(found), least=min(found))
        print({key: row[key] for key in ("name", "precision", "seconds", "peak")}, file=sys.stderr)
    return [{key: value for key, value in row.items() if key not in ("step", "turn")} for row in rows]


def _made(contender: Contender, device: str, deadline: Deadline | None) -> dict[str, Any]:
    """Return a row with a warm contender's `step`, and the number of batches of its `turn`."""
    row: dict[str, Any] = {"name": contender.name, "precision": contender.precision}
    if deadline is not None and deadline.left < contender.seconds:
        return {**row, "error": ENDED}
    began = time.perf_counter()
    try:
        _precise(contender.tf32)
        base = _allocated(device)
        step = contender.make()
        for _ in range(3 if device == "cuda" else 1):
            step()
        peak = _peak(step, device) - base + contender.graph_bytes(False)
        start = now()
        step()
        slow = now() - start > SLOW_SECONDS
    except Exception as error:  # the others may still work
        traceback.print_exc(limit=4)
        return {**row, "error": f"{type(error).__name__}: {error}"[:300]}
    row.update(
        peak=peak if device == "cuda" else None,
        ready=time.perf_counter() - began,
        step=step,
        turn=TURN if device == "cuda" and not slow else 1,
    )
    row["graphs hold"] = contender.graph_bytes(True)
    print(f"{contender.name} {contender.precision}: ready after {row['ready']:.0f} s", file=sys.stderr)
    return row


def kernels(step: Callable[[], object], most: int = 40) -> list[str]:
    """Return where a step's time on the GPU goes: milliseconds, calls and names of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return ["no GPU"]
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1000
    lines = [f"{row.self_device_time_total / 1000:8.3f} ms {row.count:5d} x {row.key[:110]}" for row in rows[:most]]
    return [f"{total:8.3f} ms in all, {sum(row.count for row in rows)} kernels", *lines]


def profiled(who: list[Contender], wanted: Sequence[str]) -> dict[str, list[str]]:
    """Return the kernels of those contenders on the fast path whose names are wanted, each made anew."""
    found = {}
    for contender in who:
        if contender.name not in wanted or contender.precision != "bf16":
            continue
        try:
            found[contender.name] = kernels(contender.make())
        except Exception:  # the figures are there already
            traceback.print_exc(limit=4)
    return found


def clock(device: str) -> Callable[[], float]:
    return time.process_time if device == "cpu" else now


def _precise(tf32: bool) -> None:
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _allocated(device: str) -> int:
    """Return allocated bytes without cuBLAS's workspaces, so that each contender is counted with only its own."""
    gc.collect()
    if device != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def _peak(step: Callable[[], object], device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def classifier(name: str, device: str) -> mgtta.Classifier:
    torch.manual_seed(0)
    with torch.device(device):
        net = name if name in shipped("models") else timm.create_model(name)
    return mgtta.load_model(net).to(device)


def images(model: mgtta.Classifier, batch: int, device: str) -> Tensor:
    side = model.input_size[0]
    return torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, device=device)


def method_of(
    label: str,
    name: str,
    model: mgtta.Classifier,
    x: Tensor,
    precision: str,
    compiled: bool = True,
    seconds: float = 0.0,
    **settings: Any,
) -> Contender:
    """Return a method as a contender.

    Args:
        compiled: False: its steps are captured, but not compiled.
    """
    kept: list[Any] = []
    stream = like(x)

    def make() -> Callable[[], object]:
        given = {**needed(name, model, x), **settings}
        method = mgtta.create(name, model, precision=precision.replace("tf32", "fp32"), **given)
        if isinstance(method.engine, FastEngine):
            method.engine.compiles = compiled
        method.warm_up(x)
        if isinstance(method, Scheduled):
            method.schedule.left = sys.maxsize  # as if it had just learned
        kept.append(method)
        batches = itertools.cycle(stream)
        return lambda: method(next(batches))

    def graph_bytes(reserved: bool) -> int:
        engine = kept[0].engine
        if reserved and isinstance(engine, FastEngine):
            return engine.graphs_hold
        return engine.graph_bytes

    return Contender(label, make, precision, precision == "tf32", graph_bytes, seconds)


_ALIKE: dict[Any, list[Tensor]] = {}  # of the latest batch that was asked for


def like(x: Tensor) -> list[Tensor]:
    """Return x and other batches of its kind, the same for all: a stream does not repeat itself."""
    key = (x.data_ptr(), x.shape)
    if key not in _ALIKE:
        _ALIKE.clear()
        _ALIKE[key] = _drawn_like(x)
    return _ALIKE[key]


def _drawn_like(x: Tensor) -> list[Tensor]:
    drawn = torch.Generator(x.device).manual_seed(1)
    others = [torch.randint(0, 256, x.shape, dtype=x.dtype, device=x.device, generator=drawn) for _ in range(4)]
    return [x, *others]


def needed(name: str, model: mgtta.Classifier, x: Tensor) -> dict[str, Any]:
    """Return what a method needs besides the model, made from images x."""
    few = x[:64] if len(x) > 1 else torch.cat([x, 255 - x])
    found: dict[str, Any] = {}
    if needs_source(name):
        found["source"] = mgtta.source_statistics(model, few)
    if needs_fisher(name):
        found["fisher"] = mgtta.fisher_information(model, few)
    return found
