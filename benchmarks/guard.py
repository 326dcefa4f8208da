"""Streams made to break adaptation: each method as it is, and under a guard.

    python benchmarks/guard.py imagenet --data DATA --weights WEIGHTS --workers 15 --out results
    python benchmarks/guard.py resnet50 --data DATA --weights WEIGHTS --workers 15 --out results
    python benchmarks/guard.py cifar10 --data DATA --weights WEIGHTS --workers 2 --out results
    python benchmarks/guard.py characters --workers 2 --out results
    python benchmarks/guard.py settings --network deit_tiny --data DATA --weights WEIGHTS --workers 15 --out results
    python benchmarks/guard.py page --out results

`imagenet` takes DeiT-Tiny and shards 1 and 2 under the fifteen corruptions; its source statistics and Fisher
information are of shard 0. `resnet50` takes a quarter of the cells; so do `cifar10`, a ResNet-56 on the first 2,000
test images of CIFAR-10 (benchmarks/cifar.py), and `characters`, with the embedded ones.
Each cell, one method at one rate on one stream, is a line of JSON in OUT/guard.jsonl as soon as it has finished; one
that is there is not run again. `page` writes OUT/guard.md from it. With --alone the benign cells run one at a time,
plain and guarded taking every batch in turn, so that the ratio of their times is of one run. `settings` changes one
setting of the guard at a time, on a few streams of validation images under the validation corruptions.
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
from stream_images import NETWORKS, corrupted, held_images
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.glyphs import TRAIN_SEED, Glyphs
from mgtta.methods.registry import recipe

UNSEEN = 19  # a seed of characters on which nothing was ever chosen
NETWORK_OF = {"imagenet": "deit_tiny", "resnet50": "resnet50", "cifar10": "cifar10"}  # in stream_images.NETWORKS


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
        self.model = load(made["network"], made["weights"], device)
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


def load(network: str | None, weights: str, device: str) -> mgtta.Classifier:
    if network is None:
        return mgtta.load_model("glyphs_vit")
    return mgtta.load_model(NETWORKS[network].model, checkpoint=weights).to(device)


def right(model: mgtta.Classifier, x: Tensor, labels: Tensor, device: str) -> Tensor:
    """Return of which images the source model's prediction is right (n,)."""
    return torch.cat([model(part.to(device)).argmax(1).cpu() for part in x.split(250)]) == labels


def make(args: argparse.Namespace) -> None:
    """Write the images under all corruptions for the processes to read."""
    four, many = FOUR, CORRUPTIONS
    constants = "imagenet"
    if args.network is None:
        x, labels = Glyphs(IMAGES, UNSEEN).tensors()
        clean = Glyphs(512, seed=TRAIN_SEED).tensors()[0]
    else:
        args.streams = "validation" if args.what == "settings" else "test"
        first, held = held_images(args)
        if args.what == "settings":
            first = first.part(imagenet.TRAINING)
            four = many = VALIDATION_CORRUPTIONS
        clean = first.x
        x, labels = held.x[:IMAGES], held.labels[:IMAGES]
        constants = NETWORKS[args.network].constants
    sets = {"clean": x} | {name: corrupted(x, name, 5, constants, args.device) for name in many}
    weights = str(args.weights)
    model = load(args.network, weights, args.device)
    made = {"sets": sets, "labels": labels, "clean": clean, "weights": weights, "domains": (four, many)}
    made["network"] = args.network
    with torch.no_grad():
        made["right"] = {name: right(model, images, labels, args.device) for name, images in sets.items()}
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
    args.out.mkdir(parents=True, exist_ok=True)
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
        row = {"data": args.what, "network": args.network, "device": args.device, **result, "command": command(args)}
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
    data = "" if args.network is None else " --data DATA --weights WEIGHTS"
    if args.what == "settings":
        data += f" --network {args.network}"
    how = " --alone" if args.alone else f" --workers {args.workers}"
    if args.plain is not None and not args.alone:
        how += " --plain EARLIER"
    return f"python benchmarks/guard.py {args.what}{data}{how} --out results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*NETWORK_OF, "characters", "settings", "page"))
    parser.add_argument("--data", type=Path, help="folder of the shards, or of CIFAR-10's .npz files")
    parser.add_argument("--weights", type=Path, help="the network's weights")
    parser.add_argument("--network", choices=NETWORK_OF.values(), default="deit_tiny", help="of `settings`")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--folder", type=Path, default=Path("runs/guard"), help="for the corrupted images")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plain", type=Path, help="guard.jsonl of an earlier run: its plain methods do not run again")
    parser.add_argument("--alone", action="store_true", help="measure times: benign cells, one at a time")
    parser.add_argument("--keep", action="store_true", help="take the images that an earlier command made")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
    args = parser.parse_args()
    if args.what != "settings":
        args.network = NETWORK_OF.get(args.what)
    if args.what != "page":
        measure(args)
    with atomic(args.out / "guard.md") as temporary:
        temporary.write_text(page(read_lines(args.out / "guard.jsonl")))


if __name__ == "__main__":
    main()
