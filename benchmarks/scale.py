"""One process against two ranks on the same batches, what the ranks send, and what follows for more of them.

    python benchmarks/scale.py --records results/imagenet

measures on this machine's CPU, and writes results/scale.json, results/scale.md and the table between its marks in
docs/scale.md. The three ways to run are measured in turn, step by step, in the same processes: what else the machine
does falls on all of them alike. `--docs` writes the two pages again from results/scale.json.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pages import between, table

import mgtta
from mgtta._lib.files import atomic
from mgtta._lib.ranks import Ranks, share
from mgtta.bench.store import Store

ROOT = Path(__file__).parent.parent
BATCH = 64
MODELS = {"patterns_vit": (48, 20), "deit_tiny_patch16_224": (224, 4)}  # name -> side of the images, steps
COUNTED = (*MODELS, "vit_base_patch16_224")  # theirs is counted, not timed
METHODS = ("mgtta", "tent")
WAYS = ("one process", "two processes apart", "two ranks")

# assumed, not measured: there is no second GPU here
LATENCY = 50e-6  # seconds of a collective on a few kilobytes
BANDWIDTH = {"NVLink": 100e9, "10 Gbit/s Ethernet": 1.25e9}  # bytes a second into and out of each rank
RANKS = 8
STREAMS = 1000
RATE = 5.0  # images a second of each stream


# --- measurement


def classifier(name: str) -> mgtta.Classifier:
    """Return the model with random weights, except for the embedded one: speed does not depend on them."""
    torch.manual_seed(0)
    return mgtta.load_model(name) if name == "patterns_vit" else mgtta.load_model(name, pretrained=False)


def method_of(name: str, model: mgtta.Classifier, group: Any = None) -> Any:
    x = torch.rand(8, 3, *[model.input_size[0]] * 2, generator=torch.Generator().manual_seed(1))
    settings = {"source": mgtta.source_statistics(model, x)} if name == "mgtta" else {}
    return mgtta.create(name, model, process_group=group, **settings)


class Listening(Ranks):
    """Keeps the size of each message."""

    def _reduce(self, t: Any, how: Any = dist.ReduceOp.SUM) -> Any:
        self.sizes = [*getattr(self, "sizes", []), t.numel()]
        return super()._reduce(t, how)


def measure(rank: int, folder: str) -> None:
    os.setsid()  # a scheduling group of its own: processes of one group divide its share of a busy machine
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    rows = [compare(rank, name, method, *MODELS[name]) for name in MODELS for method in METHODS]
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))


def compare(rank: int, name: str, recipe: str, side: int, steps: int) -> dict[str, Any]:
    model = classifier(name)
    alone = method_of(recipe, model)
    shared = method_of(recipe, model, dist.group.WORLD)
    shared.ranks = Listening(dist.group.WORLD)
    x = torch.rand(BATCH, 3, side, side, generator=torch.Generator().manual_seed(0))
    mine = share(x, rank, 2)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    reductions = []
    for step in range(steps + 1):  # the first is a rehearsal
        for way in WAYS:
            dist.barrier()
            began = time.perf_counter()
            if way == WAYS[2]:
                shared.ranks.sizes = []
                shared(mine)
            elif way == WAYS[1]:
                alone(mine)
            elif rank == 0:
                alone(x)
            dist.barrier()
            if step:
                seconds[way].append(time.perf_counter() - began)
        reductions.append(messages(shared.ranks.sizes))
    return {
        "model": name,
        "method": recipe,
        "images/s": {way: [BATCH / s for s in found] for way, found in seconds.items()},
        "messages": len(shared.ranks.sizes),
        "numbers": shared.ranks.sizes,
        "reduction": reductions[1:],
    }


def messages(sizes: list[int]) -> float:
    """Return the seconds that the messages of one step take without anything else, one after another."""
    tensors = [torch.zeros(n) for n in sizes]
    dist.barrier()
    began = time.perf_counter()
    for t in tensors:
        dist.all_reduce(t)
    return time.perf_counter() - began


def counted(name: str) -> dict[str, Any]:
    """Return the sizes of theta, of a stream's state and of the frozen weights, and the time of a change of streams."""
    model = classifier(name)
    method = method_of("mgtta", model)
    side = model.input_size[0]
    method(torch.rand(2, 3, side, side))
    state = method.state_dict()
    times = []
    for _ in range(20):
        began = time.perf_counter()
        method.load_state_dict(state)
        state = method.state_dict()
        times.append(time.perf_counter() - began)
    return {
        "model": name,
        "theta": sum(p.numel() for p in method.adapted.values()),
        "statistics": 2 + 2 * sum(len(mu) for mu in method.source.mean),
        "weights": sum(p.nbytes for p in model.parameters()),
        "state": size(state),
        "swap": min(times),  # others' work on the machine only ever adds to it
    }


def size(node: Any) -> int:
    """Return the bytes of the tensors of a nested state."""
    if isinstance(node, torch.Tensor):
        return node.nbytes
    values = ()
    if isinstance(node, dict):
        values = node.values()
    elif isinstance(node, list | tuple):
        values = node
    return sum(map(size, values))


def on_a_gpu(folder: Path) -> list[dict[str, Any]]:
    """Return time and memory of MGTTA's batches in records of a GPU that other processes shared."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for r in Store(folder).records():
        wanted = (r["experiment"], r["batch_size"]) in (("learning-rate", 64), ("small-batch", 4))
        own = f" bench {r['experiment']} " in r["protocol"]["command"]  # and not run for another experiment before
        if wanted and own and r["method"] == "mgtta":
            found.setdefault((r["experiment"], r["batch_size"]), []).append(r)
    return [
        {
            "experiment": experiment,
            "batch": batch,
            "model": records[0]["protocol"]["model"],
            "device": records[0]["protocol"]["device"],
            "processes": int(records[0]["protocol"]["command"].split("--workers ")[1].split()[0]),
            "records": len(records),
            "seconds": statistics.median(r["seconds"] / r["batches"] for r in records),
            "memory": statistics.median(r["peak_memory"] for r in records),
        }
        for (experiment, batch), records in sorted(found.items())
    ]


# --- pages


def figures(values: list[float]) -> str:
    """Return the median, the range between the quartiles, and the best."""
    low, middle, high = statistics.quantiles(values, n=4)
    digits = 0 if middle >= 100 else 1
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f}), {max(values):.{digits}f}"


def tables(result: dict[str, Any]) -> str:
    lines = []
    messages = []
    for row in result["rows"]:
        rates = [row["images/s"][way] for way in WAYS]
        cells = [figures(rate) for rate in rates]
        one, apart, ranks = (statistics.median(rate) for rate in rates)
        cells += [f"× {ranks / one:.2f}", f"× {apart / one:.2f}", f"× {ranks / apart:.2f}"]
        lines.append([row["model"], row["method"], *cells])
    for row in result["rows"]:
        step = BATCH / statistics.median(row["images/s"][WAYS[2]])
        alone = statistics.median(row["reduction"])
        numbers = " + ".join(f"{n:,}" for n in row["numbers"])
        kilobytes = 4 * sum(row["numbers"]) / 1000
        sent = [str(row["messages"]), numbers, f"{kilobytes:.1f}", f"{1000 * alone:.1f}", f"{100 * alone / step:.1f} %"]
        messages.append([row["model"], row["method"], *sent])
    head = [f"model, batch of {BATCH}", "method", *WAYS, "ranks / one", "apart / one", "ranks / apart"]
    sent = ["messages of a step", "numbers in them", "kB (float32)", "ms by themselves", "of a step"]
    return f"{table(head, lines)}\n\n{table(['model', 'method', *sent], messages)}"


def page(result: dict[str, Any]) -> str:
    about = result["protocol"]
    counts = {row["model"]: len(row["images/s"][WAYS[0]]) for row in result["rows"]}
    steps = " and ".join(f"{n} ({name})" for name, n in counts.items())
    if "glyphs_plain" in counts:  # the command now takes patterns_vit in its place
        steps += "; glyphs_plain was an embedded ViT of 0.1 with LayerNorm only and 3.6 M parameters"
    return f"""# One process against two ranks

Command: `{about["command"]}`

Images a second that are predicted and learned from: the median, the range between the quartiles, and the best step.
Steps: {steps}. The ways take turns, step by step, in the same two processes of one thread each:

- one process: the whole batch, while the other process waits;
- two processes apart: half of the batch each, and each learns for itself, without a message. That is what the machine
  gives to two processes at that moment;
- two ranks: half of the batch each, and both learn as one process does from all of it.

{about["machine"]}, {about["cores"]} cores, torch {about["torch"]}, gloo. Other work ran on the machine at the same time
(load average {about["load"][0]:.1f} at the start, {about["load"][1]:.1f} at the end), so that a second process does not
find a second core free: "apart / one" says how much it finds, and "ranks / apart" what sharing costs. The ratios are
those of the medians. Each process is a scheduling group of its own (setsid): Linux divides a busy machine among such
groups first, and within one group the second process found next to nothing, as a rank or apart.

{tables(result)}

"By themselves": the same messages sent again, one after another, with nothing to compute in between; on a busy machine
most of it is waiting for a turn. Beside sending, ranks lose the time that one waits for the other, and each computes
the update of all parameters for itself.
"""


def projection(result: dict[str, Any]) -> str:
    """Return what more ranks and many streams would cost: each figure with the formula and the inputs it comes from."""
    sizes = {row["model"]: row for row in result["sizes"]}
    large = next(g for g in result["gpu"] if g["batch"] == 64)
    small = next(g for g in result["gpu"] if g["batch"] == 4)
    who = sizes[large["model"]]
    rows = [*_inputs(large, small, who), *_one_stream(large, small, who), *_many_streams(large, who)]
    sent = [
        [
            row["model"],
            f"{row['theta']:,}",
            f"{row['statistics']:,}",
            f"{(4 * (row['theta'] + row['statistics']) + 8) / 1e3:.1f}",
        ]
        for row in result["sizes"]
    ]
    head = ["what a rank sends for a step of MGTTA", "theta", "statistics", "kB (float32)"]
    return f"{table(['figure', 'from', 'value'], map(list, rows))}\n\n{table(head, sent)}"


def _inputs(large: dict[str, Any], small: dict[str, Any], who: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        ("**Inputs**", "", ""),
        (
            f"step of {large['batch']} images",
            f"`{large['experiment']}`, {large['model']} on one {large['device']}, {large['processes']} processes at a "
            f"time, median of {large['records']} records",
            f"{1e3 * large['seconds']:.1f} ms",
        ),
        (
            f"step of {small['batch']} images",
            f"`{small['experiment']}`, the same, {small['processes']} processes at a time, {small['records']} records",
            f"{1e3 * small['seconds']:.1f} ms",
        ),
        ("GPU memory", f"the same records, batch of {large['batch']}", f"{large['memory'] / 1e6:,.0f} MB"),
        ("", f"batch of {small['batch']}", f"{small['memory'] / 1e6:,.0f} MB"),
        ("theta", "counted", f"{who['theta']:,} numbers"),
        ("statistics of Eq. 7", "2 + 2 × the widths of the layers", f"{who['statistics']:,} numbers"),
        ("a stream's state", "parameters, moments, memory: counted", f"{who['state'] / 1e6:.1f} MB"),
        ("frozen weights", "counted", f"{who['weights'] / 1e6:.1f} MB"),
        ("change of a stream", "load one state and take another, on the CPU", f"{1e3 * who['swap']:.1f} ms"),
    ]


def _one_stream(large: dict[str, Any], small: dict[str, Any], who: dict[str, Any]) -> list[tuple[str, str, str]]:
    sent = 4 * (who["theta"] + who["statistics"]) + 8
    ring = 2 * (RANKS - 1) / RANKS * sent
    wait = {link: 3 * LATENCY + ring / speed for link, speed in BANDWIDTH.items()}
    fast, slow = wait.values()
    all_small = RANKS * small["batch"]
    all_large = RANKS * large["batch"]
    links = [f"{1e3 * seconds:.2f} ms over {link}" for link, seconds in wait.items()]

    def rate(batch: int, per_rank: float, waiting: float) -> str:
        return f"{batch / (per_rank + waiting):,.0f} images/s"

    return [
        (f"**One stream, {RANKS} GPUs**", "", ""),
        ("sent by a rank for a step", "4 (theta + statistics) + 8", f"{sent / 1e3:.1f} kB"),
        ("moved by a rank", f"2 × {RANKS - 1} / {RANKS} of that, around a ring", f"{ring / 1e3:.1f} kB"),
        ("waiting", f"3 × {1e6 * LATENCY:.0f} µs + moved / bandwidth", "; ".join(links)),
        (
            f"batch of {all_large}, {large['batch']} a GPU",
            f"{all_large} / (step of {large['batch']} + waiting)",
            f"{rate(all_large, large['seconds'], fast)}; over Ethernet {rate(all_large, large['seconds'], slow)}",
        ),
        (
            f"batch of {all_small}, {small['batch']} a GPU",
            f"{all_small} / (step of {small['batch']} + waiting)",
            f"{rate(all_small, small['seconds'], fast)}; over Ethernet {rate(all_small, small['seconds'], slow)}",
        ),
        ("one GPU, for comparison", f"{large['batch']} / step", rate(large["batch"], large["seconds"], 0)),
        ("memory of each GPU", "as one process with that share", f"{large['memory'] / 1e6:,.0f} MB"),
        (
            "traffic of each GPU",
            "moved / (step + waiting)",
            f"{ring / (large['seconds'] + fast) / 1e6:.2f} MB/s",
        ),
    ]


def _many_streams(large: dict[str, Any], who: dict[str, Any]) -> list[tuple[str, str, str]]:
    together = large["processes"] * large["batch"] / large["seconds"]
    asked = STREAMS * RATE
    image = 3 * 224 * 224
    return [
        (f"**{STREAMS:,} independent streams**", "", ""),
        ("images that come", f"{STREAMS:,} × {RATE:g} images/s", f"{asked:,.0f} images/s"),
        (
            "one GPU takes",
            f"{large['processes']} processes × {large['batch']} / step, as measured",
            f"{together:,.0f} images/s",
        ),
        ("GPUs", "images that come / what one takes", f"{asked / together:.1f}"),
        ("memory, a copy of the model each", "streams × (weights + state)", _gigabytes(who, both=True)),
        ("memory, one model that changes streams", "weights + streams × state", _gigabytes(who, both=False)),
        (
            "of the time, changing streams",
            f"change / (change + step of {large['batch']})",
            f"{100 * who['swap'] / (who['swap'] + large['seconds']):.0f} %",
        ),
        ("traffic in", f"images × {image:,} bytes (uint8)", f"{asked * image / 1e6:,.0f} MB/s"),
        ("traffic between streams", "they share nothing", "0"),
    ]


def _gigabytes(who: dict[str, Any], both: bool) -> str:
    total = STREAMS * (who["weights"] + who["state"]) if both else who["weights"] + STREAMS * who["state"]
    return f"{total / 1e9:.1f} GB"


def write(result: dict[str, Any]) -> None:
    docs = ROOT / "docs" / "scale.md"
    projected = between(docs.read_text(), "scale", projection(result))
    for path, text in ((ROOT / "results" / "scale.md", page(result)), (docs, projected)):
        with atomic(path) as temporary:
            temporary.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=ROOT / "results" / "imagenet", help="of `mgtta bench` on a GPU")
    parser.add_argument("--docs", action="store_true", help="only write the pages again")
    arguments = parser.parse_args()
    out = ROOT / "results" / "scale.json"
    if arguments.docs:
        write(json.loads(out.read_text()))
        return
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=measure, args=(rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        rows = json.loads(Path(folder, "rows").read_text())
    result = {
        "protocol": {
            "command": shlex.join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "load": [before, os.getloadavg()[0]],
        },
        "rows": rows,
        "sizes": [counted(name) for name in COUNTED],
        "gpu": on_a_gpu(arguments.records),
    }
    with atomic(out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    write(result)


if __name__ == "__main__":
    main()
