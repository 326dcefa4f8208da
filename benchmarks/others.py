"""The table "other networks": ResNet-50, ResNet-56 on CIFAR-10-C, and DeiT-Tiny on PACS, with published errors beside.

    python benchmarks/others.py --resnet50 results/resnet50 --cifar10 results/cifar10 --pacs results/pacs --out results

reads the records of `benchmarks/streams.py run --network resnet50` (and of efficientnet_lite0 and cifar10), and those
of benchmarks/pacs.py, and writes others.md: all methods, the learned optimizer beside Adam, and published figures. A
folder that is not given is left out. With --readme, the first table also
goes between the marks `others:start` and `others:end` of README.md, without single images, `all by class` and
EfficientNet-Lite0, and with the best methods only.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import between, read_lines, table
from stream_images import NETWORKS

from mgtta._lib.files import atomic
from mgtta.bench.store import Store
from mgtta.report.summary import spelled

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]
Records = list[Record]
Found = dict[str, dict[str, Records]]  # column -> method -> records


def _stream(kind: str) -> Callable[[Record], bool]:
    """Return what chooses the records of a kind of stream."""
    return lambda record: record["kind"] == kind


def _pacs(domain: str, experiment: str = "pacs") -> Callable[[Record], bool]:
    """Return what chooses the records of a style, by default as it comes: those without a guard."""

    def belongs(record: Record) -> bool:
        return (record["experiment"], record["domain"]) == (experiment, domain) and not record["settings"].get("guard")

    return belongs


def _streams(words: str, *kinds: str) -> dict[str, Callable[[Record], bool]]:
    return {f"{words}, {KINDS[kind]}": _stream(kind) for kind in kinds}


KINDS = {
    "reset": "reset",
    "continual": "never reset",
    "mixed": "mixed",
    "labels": "by class",
    "classes": "all by class",
    "one": "single images",
}
COLUMNS = {  # folder -> column -> its records
    "resnet50": _streams("ResNet-50", *KINDS),
    "cifar10": _streams("CIFAR-10-C", *KINDS),
    "pacs": {
        "PACS, art": _pacs("art"),
        "PACS, cartoons": _pacs("cartoon"),
        "PACS, art by class": _pacs("art", "pacs-labels"),
        "PACS, cartoons by class": _pacs("cartoon", "pacs-labels"),
    },
    "efficientnet_lite0": _streams("EfficientNet-Lite0", *KINDS),
}
SAME_OBJECTIVE = (("mgtta_plus", "plus_adam"), ("mgtta", "eq7_adam"))  # the learned optimizer, and Adam
OPTIMIZERS = """The learned optimizer, whose generator was trained on DeiT-Tiny only, beside Adam on the same objective
and the same orders of the images. `mgtta+` has its default settings; the other three have the best of their rates on
validation images."""
README_ROWS = 9  # besides NoAdapt's
ONLY_ON_THE_PAGE = (
    "single images",
    "all by class",
    "EfficientNet-Lite0",
)  # parts of titles of columns that README leaves out


def columns(folders: dict[str, Path | None]) -> Found:
    """Return the records of each column that has some, by method."""
    found: Found = {}
    for name, folder in folders.items():
        records = _records(name, folder) if folder is not None else []
        for title, belongs in COLUMNS[name].items():
            for record in filter(belongs, records):
                found.setdefault(title, {}).setdefault(record["method"], []).append(record)
    return found


def _records(name: str, folder: Path) -> Records:
    if name == "pacs":
        return Store(folder).records()
    return read_lines(folder / "streams.jsonl")


def short(found: Found) -> Found:
    """Return the columns for README."""
    return {title: rows for title, rows in found.items() if not any(part in title for part in ONLY_ON_THE_PAGE)}


def figure(records: Records) -> tuple[float, str]:
    """Return the mean over domains and seeds, and the text of it with the standard deviation over seeds."""
    seeds = sorted({r["seed"] for r in records})
    means = [statistics.mean(r["top1"] for r in records if r["seed"] == seed) for seed in seeds]
    mean = statistics.mean(means)
    if len(means) == 1:
        return mean, f"{mean:.1f}"
    return mean, f"{mean:.1f} ± {statistics.stdev(means):.1f}"


def measured(found: Found, most: int | None = None) -> str:
    """Return the table of top-1, the best row of the first column first; the best of each column is bold.

    Args:
        most: rows besides NoAdapt's; by default all.
    """
    figures = {title: {m: figure(records) for m, records in rows.items()} for title, rows in found.items()}
    methods = dict.fromkeys(method for rows in figures.values() for method in rows)
    first = next(iter(figures.values()))
    best = {title: max(rows.values()) for title, rows in figures.items()}
    ranked = sorted(methods, key=lambda method: first.get(method, (0.0, "")), reverse=True)
    shown_methods = [method for k, method in enumerate(ranked) if most is None or k < most or method == "noadapt"]
    rows = []
    for method in shown_methods:
        cells = []
        for title, column in figures.items():
            shown = column.get(method)
            if shown is None:
                cells.append("")
            else:
                cells.append(f"**{shown[1]}**" if shown == best[title] else shown[1])
        rows.append([spelled(method), *cells])
    return table(["top-1, %", *figures], rows, right=True)


def optimizers(found: Found) -> str:
    """Return the table of the learned optimizer and of Adam on the same objective, with their difference; "" if none.

    Of records of several orders only the orders that both have count.
    """
    rows = []
    for title, column in found.items():
        row = [title]
        for learned, adam in SAME_OBJECTIVE:
            row += _paired(column.get(learned, []), column.get(adam, []))
        if any(row[1:]):
            rows.append(row)
    if not rows:
        return ""
    head = ["top-1, %"]
    for pair in SAME_OBJECTIVE:
        head += [*map(spelled, pair), "ahead by"]
    return f"{OPTIMIZERS}\n\n{table(head, rows, right=True)}"


def _paired(learned: Records, adam: Records) -> list[str]:
    """Return the figures of both over the orders that both have, and their difference; "" if there are none."""
    orders = {record["seed"] for record in learned} & {record["seed"] for record in adam}
    if not orders:
        return ["", "", ""]
    means = [figure([record for record in own if record["seed"] in orders]) for own in (learned, adam)]
    return [means[0][1], means[1][1], f"{round(means[0][0] - means[1][0], 1) + 0.0:+.1f}"]


def beside(found: Found) -> str:
    """Return published top-1 beside ours, and the footing of each published column."""
    data = json.loads((Path(__file__).parent / "published_networks.json").read_text(encoding="utf-8"))
    tables = [each for each in data["tables"] if each["column"] in found]
    if not tables:
        return ""
    head = ["top-1, %"]
    for each in tables:
        head += [each["column"], "published"]
    methods = dict.fromkeys(method for each in tables for method in each["error"])
    rows = []
    for method in methods:
        row = [spelled(method)]
        for each in tables:
            ours = found[each["column"]].get(method)
            row += [figure(ours)[1] if ours else "", f"{100 - each['error'][method]:.1f}"]
        rows.append(row)
    footing = "\n".join(f"- {each['column']}: {each['footing']}" for each in tables)
    words = f"Published: 100 minus the {data['figure']}. {data['source']}."
    return f"{table(head, rows, right=True)}\n\n{words}\n\n{footing}"


def protocol(found: Found) -> str:
    """Return a line for each column: network, images, batch size, seeds."""
    networks = {title: NETWORKS[name] for name, own in COLUMNS.items() for title in own}
    lines = []
    for title, rows in found.items():
        records = [record for records in rows.values() for record in records]
        seeds = {len({record["seed"] for record in own}) for own in rows.values()}
        images = " or ".join(f"{n:,}" for n in sorted({record["images"] for record in records}))
        network = networks[title]
        batch = 1 if "single" in title else network.batch
        words = f"{network.words}, batches of {batch}"
        each = "in one stream" if "mixed" in title else "of each domain"
        lines.append(f"- {title}: {words}, {images} images {each}, orders of a method: {_span(seeds)}")
    return "\n".join(lines)


def _span(counts: set[int]) -> str:
    least = min(counts)
    most = max(counts)
    if least == most:
        return str(most)
    return f"{least} to {most}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in COLUMNS:
        parser.add_argument(f"--{name}", type=Path, help=f"folder of the records of {name}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md, too")
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in COLUMNS}
    found = columns(given)
    if not found:
        raise SystemExit(
            f"none of the folders has records: name them with {', '.join(f'--{name}' for name in COLUMNS)}"
        )
    words = " ".join(f"--{name} {folder}" for name, folder in given.items() if folder is not None)
    command = f"`python benchmarks/others.py {words} --out {args.out}`"
    parts = ["# Other networks", command, measured(found), protocol(found), optimizers(found), beside(found)]
    with atomic(args.out / "others.md") as path:
        path.write_text("\n\n".join(part for part in parts if part) + "\n")
    if args.readme:
        readme = ROOT / "README.md"
        text = between(readme.read_text(), "others", measured(short(found), README_ROWS))
        with atomic(readme) as path:
            path.write_text(text)
    print(measured(found))


if __name__ == "__main__":
    main()
