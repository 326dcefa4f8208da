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
from pathlib import Path
from typing import Any

import imagenet
import torch
from guard_page import line, page
from guard_streams import BENIGN, CHANGED, FOUR, IMAGES, LONG, SINGLE, TUNED, Cell, Row, Settings, cells, plan
from pages import read_lines
from processes import in_processes
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.glyphs import TRAIN_SEED, Glyphs
from mgtta.methods.registry import recipe

CORRUPTED_AT_ONCE = 50  # images
UNSEEN = 19  # a seed of characters on which nothing was ever chosen


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
        return mgtta.create(name, self.model, guard=guard, precision="fp32", **settings)

    def run(self, cell: Cell, alone: bool, settings: Settings, plain: float | None = None) -> dict[str, Any]:
        """Return the row of a cell; `plain` is the result without a guard, if it is known.

        `error` is the standard error of guarded - NoAdapt, `asked` the share of images that the source model saw.
        """
        name, rate, stream = cell
        torch.manual_seed(0)
        methods = {"guarded": self.method(name, rate, mgtta.Guard(**settings))}
        run_plain = stream not in LONG or (rate == "default" and stream not in SINGLE)
        if plain is None and not settings and run_plain:
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
        if plain is not None:
            row["plain"] = plain
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
    for model in guarded.reference.children():
        model.register_forward_pre_hook(lambda _, inputs: found.append(len(inputs[0])))
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


def work(job: tuple[Cell, bool, Settings, float | None]) -> dict[str, Any]:
    assert _BENCH is not None
    return _BENCH.run(*job)


def measure(args: argparse.Namespace) -> None:
    path = args.out / "guard.jsonl"
    rows = read_lines(path)
    changed = CHANGED if args.what == "settings" and not args.alone else ({},)
    earlier = known(args)
    jobs = [(cell, args.alone, settings, earlier.get(cell)) for settings in changed for cell in cells(args)]
    done = [(row["data"], [row["method"], row["rate"], row["stream"]], row["alone"], row["settings"]) for row in rows]
    todo = [job for job in jobs if (args.what, list(job[0]), *job[1:3]) not in done]
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


def known(args: argparse.Namespace) -> dict[Cell, float]:
    """Return what plain methods reached in an earlier run; benign cells, to be compared closely, run again."""
    if args.plain is None or args.alone:
        return {}
    rows = [row for row in read_lines(args.plain) if row["data"] == args.what and not row["alone"] and "plain" in row]
    found = {(row["method"], row["rate"], row["stream"]): row["plain"] for row in rows}
    return {cell: plain for cell, plain in found.items() if cell[1] != "default" or cell[2] not in BENIGN}


def command(args: argparse.Namespace) -> str:
    weights = {"imagenet": "DEIT_TINY", "settings": "DEIT_TINY", "resnet50": "RESNET50"}
    data = f" --data SHARDS --weights {weights[args.what]}" if args.what in weights else ""
    how = " --alone" if args.alone else f" --workers {args.workers}"
    if args.plain is not None and not args.alone:
        how += " --plain EARLIER"
    return f"python benchmarks/guard.py {args.what}{data}{how} --out results"


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
    parser.add_argument("--plain", type=Path, help="guard.jsonl of an earlier run: its plain methods do not run again")
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
