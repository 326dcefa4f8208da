"""Streams made to break adaptation: each method as it is, and under a guard.

    python benchmarks/guard.py imagenet --data SHARDS --weights DEIT_TINY --workers 15 --out results
    python benchmarks/guard.py resnet50 --data SHARDS --weights RESNET50 --workers 15 --out results
    python benchmarks/guard.py characters --workers 2 --out results
    python benchmarks/guard.py settings --data SHARDS --weights DEIT_TINY --workers 15 --out results
    python benchmarks/guard.py page --out results

`imagenet` takes DeiT-Tiny and shards 1 and 2 under the fifteen corruptions; its source statistics and Fisher
information are of shard 0. `resnet50` takes a quarter of the cells; so does `characters`, with the embedded ones.
Each cell, one method at one rate on one stream, is a line of JSON in OUT/guard.jsonl as soon as it has finished; one
that is there is not run again. `page` writes OUT/guard.md from it. With --alone the benign cells run one at a time,
plain and guarded taking every batch in turn, so that the ratio of their times is of one run. `settings` changes one
setting of the guard at a time, on a few streams of shard 0 under the validation corruptions: there the guard is chosen.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import imagenet
import torch
from pages import read_lines, table
from processes import in_processes
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic
from mgtta._lib.names import spelled
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.glyphs import TRAIN_SEED, Glyphs
from mgtta.methods.registry import recipe

Row = tuple[str, int]  # a domain and an image of it; -1: an image without content, which is not scored
Cell = tuple[str, str, str]  # method, rate, stream
Settings = dict[str, float]  # of a guard
METHODS = ("tent", "eata", "sar", "deyo", "roid", "mgtta", "mgtta_plus")
TUNED = {  # learning rates of the README's table of version 0.1, chosen on validation images with resets
    "tent": 1e-3,
    "eata": 2.5e-3,
    "sar": 5e-3,
    "deyo": 5e-5,
    "roid": 2.5e-3,
    "mgtta": 5e-3,
    "mgtta_plus": 5e-3,
}
RATES = ("default", "tuned", "10 x")
FOUR = ("gaussian_noise", "fog", "contrast", "pixelate")
IMAGES = 2000  # of a stream, those without content not counted
CORRUPTED_AT_ONCE = 50  # images
UNSEEN = 19  # a seed of characters on which nothing was ever chosen
STREAMS = {
    "mixed 64": "15 corruptions mixed, batches of 64",
    "continual 64": "15 corruptions one after another, batches of 64",
    "labels 64": "the same, each sorted by class",
    "noise 64": "gaussian noise, batches of 64",
    "fog": "fog, batches of 16",
    "contrast": "contrast, batches of 16",
    "mixed": "4 corruptions mixed, batches of 16",
    "turns": "4 corruptions in turn, 3 rounds, batches of 16",
    "classes": "4 corruptions mixed, one class after another, batches of 16",
    "grey": "4 corruptions mixed, batches of 16 in which three of four images are plain grey",
    "noise": "the same with random pixels",
    "one": "4 corruptions mixed, batches of one",
    "clean one": "clean images, batches of one",
}
CHANGED: tuple[Settings, ...] = (  # of the guard, one at a time
    {},
    {"tolerance": 0.02},
    {"tolerance": 0.08},
    {"window": 128},
    {"window": 512},
    {"every": 256},
    {"every": 4096},
    {"slower": 0.5},
    {"slower": 0.02},
)
FEW_METHODS = ("tent", "eata", "roid", "mgtta", "mgtta_plus")  # that run with changed settings, default rates and 10 x
FEW_STREAMS = ("mixed", "turns", "continual 64")
TITLES = {
    "imagenet": "ImageNet images, DeiT-Tiny",
    "resnet50": "ImageNet images, ResNet-50",
    "characters": "Embedded characters, glyphs_vit",
}
BENIGN = ("mixed 64", "continual 64", "labels 64", "noise 64")  # at default rates
TIMED = ("mixed 64", "continual 64")  # of which the time is measured
LONG = ("one", "clean one", "grey", "noise")  # plain methods run there at default rates only


# --- streams


def plan(stream: str, labels: Tensor, four: Iterable[str], many: Iterable[str], seed: int = 0) -> list[list[Row]]:
    """Return the batches of a stream.

    Args:
        four: corruptions that are mixed, or come in turn.
        many: those of streams in batches of 64; the first is the noise.
    """
    random = torch.Generator().manual_seed(seed)
    four = list(four)
    many = list(many)

    def some(domain: str, images: int) -> list[Row]:
        return [(domain, i) for i in torch.randperm(len(labels), generator=random)[:images].tolist()]

    def mixed(domains: Iterable[str]) -> list[Row]:
        rows = [row for domain in domains for row in some(domain, len(labels))]
        return [rows[i] for i in torch.randperm(len(rows), generator=random)[:IMAGES].tolist()]

    def by_class(rows: list[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: int(labels[row[1]]))

    part = -(-IMAGES // len(many))
    turn = -(-IMAGES // (3 * len(four)))
    rows: dict[str, Callable[[], list[Row]]] = {
        "mixed": lambda: mixed(four),
        "turns": lambda: [row for _ in range(3) for name in four for row in some(name, turn)],
        "classes": lambda: by_class(mixed(four)),
        "one": lambda: mixed(four),
        "clean one": lambda: some("clean", IMAGES),
        "mixed 64": lambda: mixed(many),
        "continual 64": lambda: [row for name in many for row in some(name, part)],
        "labels 64": lambda: [row for name in many for row in by_class(some(name, part))],
        "noise 64": lambda: some(many[0], IMAGES),
    }
    if stream in ("grey", "noise"):
        found = [each for row in mixed(four) for each in (row, (stream, -1), (stream, -1), (stream, -1))]
    elif stream in rows:
        found = rows[stream]()
    else:
        found = some(stream, IMAGES)
    size = 16
    if stream.endswith("64"):
        size = 64
    if stream.endswith("one"):
        size = 1
    return [found[i : i + size] for i in range(0, len(found), size)]


class Bench:
    """A model, its images under all corruptions, and what the methods need."""

    def __init__(self, what: str, device: str, folder: Path):
        made = torch.load(folder / f"{what}.pt", mmap=True)
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        self.device = device
        self.labels = made["labels"]
        self.domains = made["domains"]
        self.sets = made["sets"]
        self.model = load(what, made["weights"], device)
        self.needs = {
            "source": mgtta.source_statistics(self.model, made["clean"].to(device)),
            "fisher": mgtta.fisher_information(self.model, made["clean"][:256].to(device)),
        }
        self.right = made["right"]

    def images(self, rows: list[Row]) -> Tensor:
        like = next(iter(self.sets.values()))
        found = []
        for name, i in rows:
            if i >= 0:
                found.append(self.sets[name][i])
            elif name == "grey":
                found.append(torch.full_like(like[0], 128))
            else:
                found.append(torch.randint_like(like[0], 256))
        return torch.stack(found).to(self.device)

    def method(self, name: str, rate: str, guard: Any) -> Any:
        settings: dict[str, Any] = {key: value for key, value in self.needs.items() if key in recipe(name).settings}
        if rate != "default":
            settings["lr"] = TUNED[name] * {"tuned": 1, "10 x": 10}[rate]
        if name == "mgtta_plus" and self.model.name == "glyphs_vit":
            settings["mirror"] = False
        return mgtta.create(name, self.model, guard=guard, precision="fp32", **settings)

    def run(self, cell: Cell, alone: bool, settings: Settings) -> dict[str, Any]:
        """Return the row of a cell.

        `error` is the standard error of guarded - NoAdapt, `asked` the share of images that the source model saw.
        """
        name, rate, stream = cell
        torch.manual_seed(0)
        methods = {"guarded": self.method(name, rate, mgtta.Guard(**settings))}
        if not settings and (rate == "default" or stream not in LONG):
            methods["plain"] = self.method(name, rate, False)
        asked = counted(methods["guarded"])
        right: dict[str, list[bool]] = {"noadapt": [], "guarded": [], "plain": []}
        times: dict[str, list[float]] = {"guarded": [], "plain": []}
        for turn, rows in enumerate(plan(stream, self.labels, *self.domains)):
            x = self.images(rows)
            known = [(k, i) for k, (_, i) in enumerate(rows) if i >= 0]
            for which in sorted(methods, reverse=turn % 2 == 0):
                began = self._now(alone)
                predicted = methods[which](x).argmax(1)
                times[which].append(self._now(alone) - began)
                found = predicted.tolist()
                right[which] += [found[k] == int(self.labels[i]) for k, i in known]
            right["noadapt"] += [bool(self.right[rows[k][0]][i]) for k, i in known]
        row: dict[str, Any] = {"method": name, "rate": rate, "stream": stream, "settings": settings, "alone": alone}
        row |= {"images": len(right["noadapt"]), "asked": sum(asked) / len(right["noadapt"])}
        row |= {which: 100 * statistics.fmean(own) for which, own in right.items() if own}
        gained = [int(a) - int(b) for a, b in zip(right["guarded"], right["noadapt"], strict=True)]
        row["error"] = 100 * statistics.stdev(gained) / len(gained) ** 0.5
        if alone:
            row["time"] = sum(times["guarded"][2:]) / sum(times["plain"][2:])
        guard = [event for event in methods["guarded"].events if event["action"] in ("slow", "rest", "trust")]
        return {**row, "alarms": sum(event["action"] != "trust" for event in guard), "events": guard[:20]}

    def _now(self, alone: bool) -> float:
        if alone and self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def counted(guarded: Any) -> list[int]:
    """Return a list to which the number of images is added whenever the guard asks the source model."""
    found: list[int] = []
    ask = guarded._ask

    def asking(model: mgtta.Classifier, x: Tensor) -> Tensor:
        found.append(len(x))
        return ask(model, x)

    guarded._ask = asking
    return found


def load(what: str, weights: str, device: str) -> mgtta.Classifier:
    if what == "characters":
        return mgtta.load_model("glyphs_vit")
    if what == "resnet50":
        return mgtta.load_model("keras_resnet50", checkpoint=weights).to(device)
    return imagenet.deit_tiny(Path(weights), device)


def right(model: mgtta.Classifier, x: Tensor, labels: Tensor, device: str) -> Tensor:
    """Return of which images the source model's prediction is right (n,)."""
    return torch.cat([model(part.to(device)).argmax(1).cpu() for part in x.split(250)]) == labels


def make(args: argparse.Namespace) -> None:
    """Write the images under all corruptions for the processes to read."""
    domains = (FOUR, CORRUPTIONS)
    if args.what == "characters":
        x, labels = Glyphs(IMAGES, UNSEEN).tensors()
        clean = Glyphs(512, seed=TRAIN_SEED).tensors()[0]
    else:
        first = imagenet.shard(args.clean or args.data, 0)
        if args.what == "settings":
            held = first.part(imagenet.CHOOSING)
            clean = first.part(imagenet.TRAINING).x
            domains = (VALIDATION_CORRUPTIONS, VALIDATION_CORRUPTIONS)
        else:
            held = imagenet.shard(args.data, 1, 2)
            clean = first.x
        x = held.x
        labels = held.labels
    x = x.to(args.device)
    sets = {"clean": x.cpu()}
    for name in domains[1]:
        parts = zip(x.split(CORRUPTED_AT_ONCE), torch.arange(len(x)).split(CORRUPTED_AT_ONCE), strict=True)
        sets[name] = torch.cat([corrupt(part, name, index=index).cpu() for part, index in parts])
    weights = str(args.weights)
    model = load(args.what, weights, args.device)
    made = {"sets": sets, "labels": labels, "clean": clean, "weights": weights, "domains": domains}
    with torch.no_grad():
        made["right"] = {name: right(model, x, labels, args.device) for name, x in sets.items()}
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.save(made, args.folder / f"{args.what}.pt")


# --- cells

_BENCH: Bench | None = None


def begin(what: str, device: str, folder: Path) -> None:
    global _BENCH
    _BENCH = Bench(what, device, folder)


def work(job: tuple[Cell, bool, Settings]) -> dict[str, Any]:
    assert _BENCH is not None
    return _BENCH.run(*job)


def turn(cell: Cell) -> int:
    """Return when a cell is run: what matters most is first, in case time ends."""
    _, rate, stream = cell
    if stream in BENIGN and rate == "default":
        return 0
    if stream == "noise" or (stream in LONG and rate == "tuned"):
        return 4
    if stream in LONG:
        return 2
    if stream in BENIGN:
        return 3
    return 1


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return the cells; a tuned rate that is the default is left out."""
    found = [
        (method, rate, stream)
        for stream in STREAMS
        for method in METHODS
        for rate in RATES
        if rate != "tuned" or TUNED[method] != recipe(method).settings["lr"]
    ]
    if args.what == "settings":
        few = [cell for cell in found if cell[0] in FEW_METHODS and cell[2] in FEW_STREAMS]
        return [cell for cell in few if cell[1] != "tuned"]
    if args.alone:
        return [cell for cell in found if cell[1] == "default" and cell[2] in TIMED]
    if args.what != "imagenet":  # a quarter of them
        found = found[::4]
    return sorted(found, key=turn)


def measure(args: argparse.Namespace) -> None:
    path = args.out / "guard.jsonl"
    rows = read_lines(path)
    changed = CHANGED if args.what == "settings" else ({},)
    jobs = [(cell, args.alone, settings) for settings in changed for cell in cells(args)]
    done = [(row["data"], [row["method"], row["rate"], row["stream"]], row["alone"], row["settings"]) for row in rows]
    todo = [job for job in jobs if (args.what, list(job[0]), *job[1:]) not in done]
    began = time.monotonic()
    if not args.keep:
        make(args)
    workers = 1 if args.alone else args.workers
    setup = (args.what, args.device, args.folder)
    seconds = args.seconds - (time.monotonic() - began)
    for _, result in in_processes(todo, work, begin, setup, workers, seconds):
        row = {"data": args.what, "device": args.device, **result, "command": command(args)}
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)


def command(args: argparse.Namespace) -> str:
    weights = {"imagenet": "DEIT_TINY", "settings": "DEIT_TINY", "resnet50": "RESNET50"}
    data = f" --data SHARDS --weights {weights[args.what]}" if args.what in weights else ""
    alone = " --alone" if args.alone else f" --workers {args.workers}"
    return f"python benchmarks/guard.py {args.what}{data}{alone} --out results"


# --- the page


def line(row: dict[str, Any]) -> str:
    figures = " ".join(f"{which} {row[which]:.1f}" for which in ("noadapt", "plain", "guarded") if which in row)
    return f"{row['data']} {row['stream']} {spelled(row['method'])} {row['rate']}: {figures}, {row['alarms']} alarms"


def gain(row: dict[str, Any], which: str = "guarded") -> float:
    """Return the points above NoAdapt."""
    return row[which] - row["noadapt"]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return what was required and what was found, for the rows of one data set."""
    below = [row for row in rows if gain(row) < -1]
    surely = [row for row in below if gain(row) + 2 * row["error"] < -1]
    worst = min(rows, key=gain)
    paired = [row for row in rows if "plain" in row]
    plain = [row for row in paired if gain(row, "plain") < -1]
    found = [
        f"- {len(rows)} cells. Guarded methods are more than 1.0 point below NoAdapt in {len(below)} of them, and by "
        f"more than two standard errors in {len(surely)}; plain ones are in {len(plain)} of {len(paired)}. The worst "
        f"guarded one is {gain(worst):+.1f} ({worst['stream']}, {spelled(worst['method'])}, {worst['rate']})."
    ]
    gaining = [row for row in paired if gain(row, "plain") > 1]
    if gaining:
        kept = [gain(row) / gain(row, "plain") for row in gaining]
        whole = sum(gain(row) for row in gaining) / sum(gain(row, "plain") for row in gaining)
        found.append(
            f"- Where plain adaptation gains more than 1 point ({len(gaining)} cells), the guarded one keeps "
            f"{100 * whole:.0f} % of the sum of the gains; at least 90 % in {sum(k >= 0.9 for k in kept)} cells; the "
            f"median is {100 * statistics.median(kept):.0f} %."
        )
    benign = [row for row in rows if row["rate"] == "default" and row["stream"] in BENIGN]
    if benign:
        cost = max(benign, key=lambda row: row["plain"] - row["guarded"])
        mean = statistics.fmean(row["plain"] - row["guarded"] for row in benign)
        found.append(
            f"- Benign streams (default rates, batches of 64, {len(benign)} cells): the guard costs {mean:.2f} points "
            f"on average and at most {cost['plain'] - cost['guarded']:.2f} ({cost['stream']}, "
            f"{spelled(cost['method'])})."
        )
    return found


def times(rows: list[dict[str, Any]]) -> list[str]:
    """Return what the guard costs in time, for the rows of cells that ran alone."""
    if not rows:
        return []
    ratios = [row["time"] for row in rows]
    return [
        f"- Time of the guarded method over the plain one, same run, batches in turn, benign streams of "
        f"{IMAGES:,} images: {statistics.fmean(ratios):.3f} on average, {statistics.median(ratios):.3f} in the median, "
        f"at most {max(ratios):.3f} ({len(rows)} cells, {rows[0]['device']}; `{rows[0]['command']}`)."
    ]


def page(rows: list[dict[str, Any]]) -> str:
    text = ["# The guard on streams made to break adaptation", ""]
    text += [
        "Top-1 in percent; one seed. Rates: default, the recipe's own; tuned, the best on validation images with "
        "resets; and ten times that. ± is the standard error of guarded - NoAdapt, over the images. The guard was "
        "chosen on shard 0 under the validation corruptions (the steadiness of the source on recordings only), and was "
        "not changed after the test. Plain methods are left "
        f"out in long streams ({', '.join(LONG)}) but for default rates.",
        "",
    ]
    for data, title in TITLES.items():
        own = [row for row in rows if row["data"] == data and not row["alone"]]
        if not own:
            continue
        alone = [row for row in rows if row["data"] == data and row["alone"]]
        text += [f"## {title}", "", f"`{own[0]['command']}`", "", *summary(own), *times(alone)]
        text += ["", cell_table(own), ""]
    text += effects([row for row in rows if row["data"] == "settings"])
    text += [*(f"- {name}: {what}" for name, what in STREAMS.items()), ""]
    return "\n".join(text)


def effects(rows: list[dict[str, Any]]) -> list[str]:
    """Return the section on the settings."""
    if not rows:
        return []
    head = ["setting", "guarded - NoAdapt, mean", "worst", "cells below -1.0", "kept of the gains, %", "asked, %"]
    plain = {(row["method"], row["rate"], row["stream"]): row.get("plain") for row in rows if not row["settings"]}
    lines = []
    for settings in CHANGED:
        own = [row for row in rows if row["settings"] == settings]
        gains = [gain(row) for row in own]
        theirs = [(plain.get((row["method"], row["rate"], row["stream"])) or 0) - row["noadapt"] for row in own]
        kept = [(mine, other) for mine, other in zip(gains, theirs, strict=True) if other > 1]
        if own:
            lines.append(
                [
                    ", ".join(f"{name}={value}" for name, value in settings.items()) or "default",
                    f"{statistics.fmean(gains):+.2f}",
                    f"{min(gains):+.1f}",
                    f"{sum(each < -1 for each in gains)} of {len(own)}",
                    f"{100 * sum(mine for mine, _ in kept) / max(sum(other for _, other in kept), 1e-9):.0f}",
                    f"{100 * statistics.fmean(row['asked'] for row in own):.0f}",
                ]
            )
    about = (
        f"DeiT-Tiny, shard 0 under the validation corruptions; {', '.join(FEW_METHODS)} at default rates and ten times "
        f"the tuned ones, streams {', '.join(FEW_STREAMS)}. `asked` is the share of images that the source model saw."
    )
    return ["## Settings, one changed at a time", "", f"`{rows[0]['command']}`", "", about, "", table(head, lines), ""]


def cell_table(rows: list[dict[str, Any]]) -> str:
    order = {name: k for k, name in enumerate([*STREAMS, *METHODS, *RATES])}
    rows = sorted(rows, key=lambda row: [order[row[key]] for key in ("stream", "method", "rate")])
    head = ["stream", "method", "rate", "images", "NoAdapt", "plain", "guarded", "guarded - NoAdapt", "±", "alarms"]
    lines = [
        [
            row["stream"],
            spelled(row["method"]),
            row["rate"],
            f"{row['images']:,}",
            *(f"{row[which]:.1f}" if which in row else "" for which in ("noadapt", "plain", "guarded")),
            f"{gain(row):+.1f}",
            f"{row['error']:.1f}",
            str(row["alarms"]),
        ]
        for row in rows
    ]
    return table(head, lines, right=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("imagenet", "resnet50", "characters", "settings", "page"))
    parser.add_argument("--data", type=Path, help="folder of the shards imagenet-val5k-0000{1,2}.tar")
    parser.add_argument("--clean", type=Path, help="folder of shard 0, if it is another")
    parser.add_argument("--weights", type=Path, help="of deit_tiny_patch16_224, or of keras_resnet50")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, default=Path("runs/guard"), help="for the corrupted images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="measure times: benign cells, one at a time")
    parser.add_argument("--keep", action="store_true", help="take the images that an earlier command made")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
    args = parser.parse_args()
    if args.what != "page":
        measure(args)
    with atomic(args.out / "guard.md") as temporary:
        temporary.write_text(page(read_lines(args.out / "guard.jsonl")))


if __name__ == "__main__":
    main()
