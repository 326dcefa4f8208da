"""The pages of benchmarks/speed.py: its figures as markdown and as a plot."""

from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from pages import table

from mgtta._lib.files import atomic

VISIT = ("step", "plus", "methods", "single", "start", "networks", "data", "evaluate")
PARTS = (*VISIT, "growth", "accuracy", "paths", "twins")
BATCHES = 782  # of 64 images: the 50,000 of one corruption
ALONE = "the generator's step"  # and three ways to take it
WAYS = ("as released, parameter by parameter", "batched", "fast path")


def page(result: dict[str, Any]) -> str:
    steps = [part for key, part in result.items() if part["gpu"] and key.startswith("step")]
    accuracy = partial(accuracy_page, steps=steps)
    makers = {
        "step": step_page,
        "plus": partial(step_page, title="MGTTA+ on the fast path"),
        "methods": methods_page,
        "networks": networks_page,
        "start": start_page,
        "single": single_page,
        "data": data_page,
        "evaluate": evaluate_page,
        "growth": growth_page,
        "accuracy": accuracy,
        "paths": paths_page,
        "twins": twins_page,
    }
    parts = [
        f"{makers[name](part)}\n\nCommand: `{part['command']}` ({part['where']}, torch {part['torch']})"
        for key, part in sorted(result.items(), key=lambda item: PARTS.index(item[0].split()[0]))
        for name in [key.split()[0]]
    ]
    return "\n\n".join(["# Speed", *parts]) + "\n"


def step_page(part: dict[str, Any], title: str = "A step") -> str:
    rows = measured(part["rows"])
    batch = part["batch"]
    gpu = part["gpu"]
    plain = {row["precision"]: row["seconds"] for row in rows if row["name"] == "NoAdapt"}
    plain["fp8"] = plain.get("bf16")  # the same forward pass
    lines = []
    for row in rows:
        alone = row["name"].startswith(ALONE)
        base = None if alone and gpu else plain.get(row["precision"])  # its own precision is none of the network's
        lines.append(
            [
                row["name"],
                row["precision"],
                *([f"{1e3 * row['seconds']:.2f}"] if gpu else []),
                "" if base is None else f"{row['seconds'] / base:.3f}",
                "" if alone else f"{batch / row['seconds']:,.0f}",
            ]
        )
        if gpu:
            lines[-1].append("" if alone else f"{row['peak'] / 1e6:,.0f}")
    times = ["ms", "times NoAdapt", "images/s", "peak MB"] if gpu else ["times NoAdapt", "images/s"]
    head = ["", "precision", *times]
    text = f"## {title}: {part['model']}, batch {batch}, n = {part['n']:,}\n\n{table(head, lines, right=True)}"
    return f"{text}\n\n{_bars(part)}{left_out(part['rows'])}"


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "error" not in row]


def left_out(rows: list[dict[str, Any]]) -> str:
    """Return what was not measured, and why."""
    found = [f"{row['name']} {row.get('precision', '')}: {row['error']}" for row in rows if "error" in row]
    return "".join(f"\n- Not measured: {line}" for line in found)


def _bars(part: dict[str, Any]) -> str:
    """Return the figures that follow from the rows."""
    found = {(row["name"], row["precision"]): row for row in measured(part["rows"])}
    precision = "bf16" if ("MGTTA", "bf16") in found else "fp32"
    if not {("MGTTA", precision), ("NoAdapt", precision)} <= found.keys():
        return ""
    whole = found["MGTTA", precision]["seconds"]
    plain = found["NoAdapt", precision]["seconds"]
    ratios = f"{whole / plain:.2f} times NoAdapt"
    if ("TENT", precision) in found:
        ratios += f", {whole / found['TENT', precision]['seconds']:.3f} times TENT"
    absolute = f"{1e3 * whole:.2f} ms a batch, 50,000 images in {whole * 50000 / part['batch']:.1f} s; "
    lines = [f"MGTTA in {precision}: {absolute if part['gpu'] else ''}{ratios}."]
    generator = found.get((f"{ALONE}, {WAYS[-1]}", "fp32"))
    if generator:
        lines.append(f"The optimizer takes {100 * generator['seconds'] / whole:.1f} % of the step.")
    small = found.get(("MGTTA", "fp8"))
    if part["gpu"] and small:
        lines.append(
            f"With gradients in 8 bits (fp8) {1e3 * small['seconds']:.2f} ms, {small['seconds'] / plain:.2f} times "
            "NoAdapt."
        )
    lines += _plus(found, precision)
    spent = found.get(("MGTTA, budget spent", precision))
    if spent:
        limited = (50 * whole + (BATCHES - 50) * spent["seconds"]) / (BATCHES * plain)
        lines.append(
            f"With `max_updates=50`, {BATCHES} batches take {limited:.3f} times NoAdapt: (50 steps + {BATCHES - 50} "
            "predictions) / NoAdapt, from the medians."
        )
    low = found.get(("MGTTA, low memory", precision))
    if low:
        held = found["MGTTA", precision]["graphs hold"], low["graphs hold"]
        lines += [
            f"With low memory a step takes {low['seconds'] / whole:.2f} times as long.",
            f"The CUDA graphs of a step and of a prediction have {held[0] / 1e6:,.0f} MB reserved, gaps included; with "
            f"low memory {held[1] / 1e6:,.0f} MB.",
        ]
    return "\n".join(f"- {line}" for line in lines)


def _plus(found: dict[tuple[str, str], dict[str, Any]], precision: str) -> list[str]:
    """Return what MGTTA+ costs, with pull, gather and recall."""
    whole = found["MGTTA", precision]["seconds"]
    usual = found.get(("TENT", precision))
    lines = []
    for name in ("MGTTA+", "MGTTA+ without twins", "MGTTA+, low memory"):
        row = found.get((name, precision))
        if row is None:
            continue
        line = f"{name}: {row['seconds'] / whole:.3f} times MGTTA"
        if usual:
            line += f", {row['seconds'] / usual['seconds']:.3f} times TENT"
        if row["peak"]:
            line += f", peak {row['peak'] / 1e6:,.0f} MB"
        lines.append(f"{line}.")
    return lines


def methods_page(part: dict[str, Any]) -> str:
    found = {(row["name"], row["precision"]): row for row in measured(part["rows"])}
    lines = []
    for name in dict.fromkeys(row["name"] for row in part["rows"]):
        exact = found.get((name, "fp32"))
        quick = found.get((name, "bf16"))
        if exact is None or quick is None:
            continue
        ratio = exact["seconds"] / quick["seconds"]
        peak = [""] * 2
        if part["gpu"]:
            peak = [f"{row['peak'] / 1e6:,.0f}" for row in (exact, quick)]
        lines.append([name, *(f"{1e3 * row['seconds']:.2f}" for row in (exact, quick)), f"{ratio:.2f}", *peak])
    head = ["", "fp32, ms", "bf16, ms", "times as fast", "fp32, peak MB", "bf16, peak MB"]
    title = f"## Methods that choose images: {part['model']}, batch {part['batch']}"
    return f"{title}\n\n{table(head, lines, right=True)}\n{left_out(part['rows'])}".rstrip()


def networks_page(part: dict[str, Any]) -> str:
    lines = []
    missing = ""
    for case in part["cases"]:
        missing += left_out([{**row, "name": f"{case['model']}: {row['name']}"} for row in case["rows"]])
        rows = measured(case["rows"])
        usual = next((row["seconds"] for row in rows if "usually" in row["name"]), None)
        for row in rows:
            ratio = "" if usual is None else f"{usual / row['seconds']:.2f}"
            peak = f"{row['peak'] / 1e6:,.0f}" if row["peak"] else ""
            lines.append([case["model"], row["name"], f"{1e3 * row['seconds']:.2f}", ratio, peak])
    head = ["network", "", "ms", "times as fast as the usual TENT", "peak MB"]
    title = f"## Other networks, bf16, batch {part['batch']}"
    return f"{title}\n\n{table(head, lines, right=True)}\n{missing}".rstrip()


def start_page(part: dict[str, Any]) -> str:
    lines = []
    for name, run in zip(("first", "second"), part["runs"], strict=False):
        times = run["seconds"]
        steady = [median(times[i:j]) for i, j in ((2, 8), (10, len(times)))]
        after = "compiled" if any(run["compiled"]) else "captured"
        lines.append(
            [name, f"{times[0]:.2f}", f"{1e3 * steady[0]:.2f}", f"{times[8]:.2f}", f"{1e3 * steady[1]:.2f}", after]
        )
    head = ["run", "first batch, s", "batches 3-8, ms", "9th batch, s", "from the 11th on, ms", "by then"]
    title = f"## The first batches: MGTTA, {part['model']}, batch {part['batch']}, {part['where']}"
    compiling = ""
    if "compiling" in part:
        compiling = f" Compiling took {part['compiling']:.0f} s."
    told = (
        "Each batch until its predictions are read, which is a wait for the GPU. At its 9th batch a step is captured; "
        "the second run finds compiled code on disk, and compiles there. Without it, a step is compiled after 20,000 "
        f"batches or by `warm_up`.{compiling}"
    )
    return f"{title}\n\n{table(head, lines, right=True)}\n\n{told}"


def single_page(part: dict[str, Any]) -> str:
    rows = measured(part["rows"])
    plain = {row["interval"]: row for row in rows if row["name"] == "NoAdapt"}
    lines = []
    for row in [row for row in rows if row["interval"] in plain]:
        way = "in a row" if not row["interval"] else f"every {1e3 * row['interval']:.0f} ms"
        base = plain[row["interval"]]
        ratios = [f"{row[key] / base[key]:.2f}" for key in ("median", "p99")]
        times = [f"{1e3 * row[key]:.3f}" for key in ("median", "p99", "mean")]
        if not part["gpu"]:
            times = [f"{row[key] / base['median']:.2f}" for key in ("median", "p99", "mean")]
        lines.append([row["name"], way, *times, *ratios])
    unit = "ms" if part["gpu"] else "times NoAdapt's median"
    head = [
        "",
        "images come",
        f"median, {unit}",
        "99th percentile",
        "mean of a call",
        "median / NoAdapt",
        "99th / NoAdapt",
    ]
    title = f"## Batches of one: {part['model']}, {part['where']}"
    return f"{title}\n\n{table(head, lines, right=True)}\n{left_out(part['rows'])}".rstrip()


def evaluate_page(part: dict[str, Any]) -> str:
    rows = [[f"{row['batches']:,}", f"{row['seconds']:.2f}"] for row in part["rows"]]
    title = f"## What `evaluate` adds, {part['where']}"
    return f"{title}\n\n{table(['batches of one', 'seconds'], rows, right=True)}"


def paths_page(part: dict[str, Any]) -> str:
    found = {(row["name"], row["precision"]): row["top1"] for row in part["rows"]}
    lines = []
    for name in dict.fromkeys(row["name"] for row in part["rows"]):
        exact = found[name, "fp32"]
        quick = found.get((name, "bf16"))
        if quick is not None:
            label = f"{name}, mirror=False" if name == "mgtta_plus" else name
            lines.append([label, _spread(exact), _spread(quick), _difference(quick, mean(exact))])
    head = ["", "fp32, top-1, %", "bf16, top-1, %", "difference"]
    return f"## Accuracy by path: {_where(part)}\n\n{table(head, lines, right=True)}\n\n{_how(part)}"


def twins_page(part: dict[str, Any]) -> str:
    whole = part["rows"][0]["seconds"]
    lines = []
    for row in part["rows"]:
        when = "every batch" if row["mirror"] else "no batch"
        if row["at first"] is not None:
            when = f"the first {row['at first']} of a domain"
        lines.append([when, _spread(row["top1"]), f"{row['seconds'] / whole:.2f}"])
    head = ["mirrored twins at", "top-1, %", "time"]
    return f"## MGTTA+ with fewer twins: {_where(part)}\n\n{table(head, lines, right=True)}\n\n{_how(part)}"


def _where(part: dict[str, Any]) -> str:
    return f"{part['model']}, {part['images']} images under each of {len(part['corruptions'])} corruptions"


def _how(part: dict[str, Any]) -> str:
    orders = len(part["rows"][0]["top1"])
    batches = part["batches"] // len(part["corruptions"])
    named = ", ".join(part["corruptions"])
    return (
        f"{named}; {batches} batches of each, and a reset before it. Mean and standard deviation of {orders} orders of "
        "the images."
    )


def growth_page(part: dict[str, Any]) -> str:
    """Return times on a GPU, or on a CPU the ratios to NoAdapt of the first case."""
    gpu = part["gpu"]
    cases = part["rows"]
    lines = []
    unit, digits = (1e-3, 2) if gpu else (cases[0]["rows"][0]["seconds"], 3)
    for case in cases:
        plain, whole, generator = (row["seconds"] for row in case["rows"])
        lines.append(
            [
                case["model"],
                str(case["batch"]),
                f"{case['n']:,}",
                f"{plain / unit:.{digits}f}",
                f"{whole / unit:.{digits}f}",
                f"{whole / plain:.2f}",
                f"{case['batch'] / whole:,.1f}",
                f"{generator / unit:.{digits + 1}f}",
                f"{100 * generator / whole:.2f}",
                *([f"{case['rows'][1]['peak'] / 1e6:,.0f}"] if gpu else []),
            ]
        )
    times = [f"{name}{', ms' if gpu else ''}" for name in ("NoAdapt", "MGTTA", "generator")]
    head = ["model", "batch", "n", *times[:2], "MGTTA / NoAdapt", "images/s", times[2], "its share, %"]
    head += ["peak MB"] if gpu else []
    sizes = [[str(row["hidden_size"]), f"{row['seconds'] / unit:.{digits + 1}f}"] for row in part["hidden"]]
    measure = "" if gpu else f"\n\nTimes are multiples of NoAdapt's with {cases[0]['model']}."
    return (
        f"## As work grows, {part['where']}\n\n{table(head, lines, right=True)}{measure}\n\n"
        f"![Growth](growth_{'cuda' if gpu else 'cpu'}.svg)\n\n"
        f"The generator's step for {cases[2]['model']}, by hidden size:\n\n"
        f"{table(['hidden size', 'ms' if gpu else 'time'], sizes, right=True)}"
    )


def data_page(part: dict[str, Any]) -> str:
    rows = []
    for row in part["rows"]:
        where = "the GPU" if row.get("decode") == "device" else part["decoder"]
        rows.append([str(row["workers"]), where, f"{row['rate']:,.0f}"])
    title = f"## From JPEG tars, {part['cores']} cores"
    text = f"{title}\n\n{table(['worker processes', 'decoded by', 'images/s'], rows, right=True)}"
    there = part.get("on the GPU")
    if there is None:
        return text
    if "error" in there:
        return f"{text}\n\nOn the GPU, torchvision decodes nothing: {there['error']}"
    return (
        f"{text}\n\nOn the GPU, torchvision's decoder gives {there['rate']:,.0f} images/s, without resizing. "
        f"{100 * there['differing']:.0f} % of its values differ from those of the CPU, by up to "
        f"{there['largest']:.0f} of 255."
    )


def accuracy_page(part: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    """Return the table, and the cost of the schedule there and at the times of `steps`."""
    rows = part["rows"]
    plain = {r["precision"]: r["seconds"] for r in rows if r["name"] == "NoAdapt" and r["seconds"] is not None}
    lines = [
        [
            r["name"],
            r["precision"],
            "" if r["lr"] is None else f"{r['lr']:g}",
            "before each" if r["reset"] == "domain" else "never",
            _spread(r["top1"]),
            f"{mean(r['updates']):g} of {r['batches']}",
            *([f"{r['seconds']:.3f}", f"{r['seconds'] / plain[r['precision']]:.2f}"] if r["seconds"] else ["", ""]),
        ]
        for r in rows
    ]
    head = ["", "precision", "lr", "reset", "top-1, %", "updates", "seconds", "times NoAdapt"]
    always = [r["top1"] for r in rows if r["reset"] == "never" and r["name"] == "MGTTA"]
    schedule = rows[-1]
    share = mean(schedule["updates"]) / schedule["batches"]
    exact = next(mean(r["top1"]) for r in rows if (r["name"], r["precision"]) == ("MGTTA", "fp32"))
    resets = [r for r in rows if (r["name"], r["reset"]) == ("MGTTA", "domain") and r["precision"] != "fp32"]
    orders = len(schedule["top1"])
    text = f"Mean and standard deviation of {orders} orders of the images in each domain. " if orders > 1 else ""
    text += ", ".join(f"{r['precision']} ends {_difference(r['top1'], exact)} points" for r in resets) + " from fp32. "
    text += (
        f"The schedule learns from {100 * share:.1f} % of the batches, and ends "
        f"{_difference(schedule['top1'], max(map(mean, always)))} points from the best that learns always."
    )
    for step in steps:
        found = {row["name"]: row["seconds"] for row in step["rows"] if row["precision"] == "bf16"}
        cost = (share * found["MGTTA"] + (1 - share) * found["MGTTA, schedule at rest"]) / found["NoAdapt"]
        text += f" At the times of {step['model']} above, so many steps and rests take {cost:.3f} times NoAdapt."
    title = f"## Accuracy: DeiT-Tiny, {part['images']} ImageNet images under each corruption"
    return f"{title}\n\n{table(head, lines, right=True)}\n\n{text}"


def _difference(values: list[float], other: float) -> str:
    return f"{round(mean(values) - other, 2) + 0.0:+.2f}"


def _spread(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def plot(part: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    gpu = part["gpu"]
    cases = part["rows"]
    batch = part["rows"][0]["batch"]
    unit, time = (1e-3, "ms a batch") if gpu else (cases[0]["rows"][0]["seconds"], "time a batch")
    by_model = cases[:4]
    by_batch = sorted([by_model[2], *cases[4:]], key=lambda case: case["batch"])
    figure, axes = pyplot.subplots(1, 3 + gpu, figsize=(3.6 * (3 + gpu), 3.2))
    for i, label in ((0, "NoAdapt"), (1, "MGTTA")):
        for axis, x, some in ((axes[0], "batch", by_batch), (axes[1], "n", by_model)):
            axis.plot([c[x] for c in some], [c["rows"][i]["seconds"] / unit for c in some], "o-", label=label)
        if gpu:
            axes[3].plot([c["n"] for c in by_model], [c["rows"][i]["peak"] / 1e6 for c in by_model], "o-")
    share = [100 * c["rows"][2]["seconds"] / c["rows"][1]["seconds"] for c in by_model]
    axes[2].plot([c["n"] for c in by_model], share, "o-", color="black")
    n = {"xscale": "log", "xlabel": "n, adapted parameters"}
    axes[0].set(xscale="log", yscale="log", xlabel="batch size", ylabel=time, title=by_model[2]["model"])
    axes[1].set(**n, yscale="log", ylabel=time, title=f"batch {batch}")
    axes[2].set(**n, ylabel="%", title="the generator's share", ylim=(0, None))
    if gpu:
        axes[3].set(**n, yscale="log", ylabel="peak MB", title=f"batch {batch}")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    with atomic(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    pyplot.close(figure)
