"""The README's figures, from the records of `mgtta bench corruptions` and other streams, and from results/speed.json.

    python benchmarks/headline.py results/imagenet

writes them between their marks in README.md, and headline.svg beside the records.
"""

import json
import statistics
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

from pages import between, table

from mgtta._lib.files import atomic
from mgtta.bench.store import Store

ROOT = Path(__file__).parent.parent
LINES = {  # those drawn, and in which colour
    "mgtta_plus": "#7b241c",
    "mgtta": "#c0392b",
    "eq7_adam": "#2166ac",
    "eq7_sgd": "#67a9cf",
    "roid": "#7b5aa6",
    "eata": "#b8860b",
    "foa": "#3a8f5c",
    "tent": "#8c6d4f",
    "noadapt": "#777777",
}
WINDOW = 5  # batches
STREAMS = {  # title -> what its records have
    "continual": {"experiment": "continual"},
    "mixed": {"experiment": "mixed"},
    "batches of 2": {"experiment": "small-batch", "batch_size": 2},
    "batches of 4": {"experiment": "small-batch", "batch_size": 4},
    "clean images": {"experiment": "variants", "domain": "clean"},
}


def by_method(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for record in Store(folder).records():
        if record["experiment"] == "corruptions":
            found[record["method"]].append(record)
    if not found:
        raise SystemExit(f"{folder} has no records of `mgtta bench corruptions`")
    return dict(found)


def mean_over_domains(records: list[dict[str, Any]]) -> dict[int, float]:
    """Return top-1 of each seed, the mean over the corruptions."""
    seeds = sorted({r["seed"] for r in records})
    return {seed: statistics.mean(r["top1"] for r in records if r["seed"] == seed) for seed in seeds}


def gain(records: list[dict[str, Any]], still: list[dict[str, Any]]) -> tuple[float, str]:
    """Return the least gain over `still` on any corruption, in points, and the corruption."""

    def means(found: list[dict[str, Any]]) -> dict[str, float]:
        return {d: statistics.mean(r["top1"] for r in found if r["domain"] == d) for d in {r["domain"] for r in found}}

    before = means(still)
    after = means(records)
    return min((after[d] - before[d], d) for d in after)


def part(records: list[dict[str, Any]], batches: slice) -> float:
    """Return top-1 on some of the batches of full streams."""
    hits, images = (sum(sum(r[key][batches]) for r in records) for key in ("curve", "sizes"))
    return 100 * hits / images


def headline(methods: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table in markdown, the lowest row first."""
    rows = []
    for name, records in methods.items():
        mean, shown = _mean_and_spread(records)
        least, where = gain(records, methods["noadapt"])
        rate = records[0]["settings"].get("lr", "")
        ece = statistics.mean(r["ece"] for r in records)
        worst = "" if name == "noadapt" else f"{least:+.1f} ({where.replace('_', ' ')})".replace("-", "−")
        ends = [f"{part(records, batches):.1f}" for batches in (slice(10), slice(-10, None))]
        rows.append((mean, [name, str(rate), shown, *ends, worst, f"{ece:.1f}"]))
    rows.sort()
    rows[-1][1][2] = f"**{rows[-1][1][2]}**"
    head = [
        "method",
        "learning rate",
        "top-1, %",
        "first 10 batches",
        "last 10",
        "worst against NoAdapt, points",
        "ECE, %",
    ]
    return table(head, [cells for _, cells in rows])


def streams(folder: Path) -> str:
    """Return a table of top-1 on other streams than the headline's, sorted by the first of them."""
    records = Store(folder).records()
    columns: dict[str, dict[str, tuple[float, str]]] = {}
    for title, asked in STREAMS.items():
        found = defaultdict(list)
        for r in records:
            if all(r[key] == value for key, value in asked.items()):
                found[r["method"]].append(r)
        columns[title] = {name: _mean_and_spread(its) for name, its in found.items()}
    first, *_ = columns.values()
    best = [max(column.values()) for column in columns.values()]
    rows = []
    for name in sorted(first, key=first.__getitem__):
        cells = [column.get(name, (0.0, "")) for column in columns.values()]
        rows.append([name, *(f"**{c[1]}**" if c == top else c[1] for c, top in zip(cells, best, strict=True))])
    return table(["method", *columns], rows)


def speed() -> str:
    """Return a sentence on the cost of a step of ViT-B on a GPU."""
    steps = json.loads((ROOT / "results" / "speed.json").read_text())
    [part] = [part for key, part in steps.items() if key.startswith("step vit_base") and part["gpu"]]
    rows = {(row["name"], row["precision"]): row for row in part["rows"]}
    fast = rows["MGTTA", "bf16"]
    exact = rows["MGTTA", "fp32"]
    low = rows["MGTTA, low memory", "bf16"]
    seconds = fast["seconds"]
    batch = part["batch"]
    words = [
        f"On an {part['where'].removeprefix('NVIDIA ')}, MGTTA takes {1e3 * seconds:.1f} ms for {batch} images with",
        f"ViT-B/16 in bfloat16: {seconds / rows['NoAdapt', 'bf16']['seconds']:.2f} times the forward pass alone,",
        f"50,000 images in {seconds * 50000 / batch:.1f} s, in {fast['peak'] / 1e6:,.0f} MB",
        f"({low['peak'] / 1e6:,.0f} MB at {low['seconds'] / seconds:.2f} times the time).",
        f"With gradients in 8 bits it takes {1e3 * rows['MGTTA', 'fp8']['seconds']:.1f} ms, in exact float32",
        f"{1e3 * exact['seconds']:.0f} ms. [Speed](docs/speed.md) says how,",
        "and [results/speed.md](results/speed.md) how it was measured.",
    ]
    return textwrap.fill(" ".join(words), 120)


def _mean_and_spread(records: list[dict[str, Any]]) -> tuple[float, str]:
    scores = list(mean_over_domains(records).values())
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return statistics.mean(scores), f"{statistics.mean(scores):.1f}{spread}"


def curve(records: list[dict[str, Any]]) -> list[float]:
    """Return accuracy in windows of batches, the mean over corruptions and seeds."""
    full = [r for r in records if len(r["curve"]) > WINDOW]
    length = min(len(r["curve"]) for r in full)
    hits = [sum(r["curve"][i] for r in full) for i in range(length)]
    images = [sum(r["sizes"][i] for r in full) for i in range(length)]
    starts = range(length - WINDOW + 1)
    return [100 * sum(hits[i : i + WINDOW]) / sum(images[i : i + WINDOW]) for i in starts]


def draw(methods: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "mgtta", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.9))
    curves = {name: curve(methods[name]) for name in LINES if name in methods}
    label = float("inf")
    for name, y in sorted(curves.items(), key=lambda item: -item[1][-1]):
        x = [WINDOW + i for i in range(len(y))]
        axes.plot(x, y, color=LINES[name], linewidth=2.4 if name.startswith("mgtta") else 1.4)
        label = min(y[-1], label - 1.1)  # below the last one's, where they would touch
        axes.annotate(name, (x[-1], label), xytext=(5, 0), textcoords="offset points", color=LINES[name], va="center")
    axes.set_xlabel(f"batches of 64 seen (windows of {WINDOW})")
    axes.set_ylabel("accuracy, %")
    axes.set_title("15 corruptions at severity 5, reset before each, mean over seeds", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    figure.subplots_adjust(left=0.09, right=0.87, bottom=0.14, top=0.91)
    with atomic(path) as part:
        figure.savefig(part, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    folder = Path(sys.argv[1])
    methods = by_method(folder)
    draw(methods, folder / "headline.svg")
    readme = ROOT / "README.md"
    page = between(readme.read_text(), "headline", headline(methods))
    page = between(page, "streams", streams(folder))
    page = between(page, "speed", speed())
    with atomic(readme) as path:
        path.write_text(page)
    print(headline(methods))


if __name__ == "__main__":
    main()
