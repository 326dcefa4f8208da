"""A natural change of style: DeiT-Tiny is fine-tuned on the photographs of PACS, and adapts on art and cartoons.

    python benchmarks/pacs.py train --data PACS --checkpoint deit_tiny.safetensors --out pacs
    python benchmarks/pacs.py adapt --data PACS --model pacs --out results/pacs --workers 12
    python benchmarks/pacs.py page --out results/pacs

PACS is the folder of pacs-photo.tar, pacs-art_painting.tar and pacs-cartoon.tar. `train` uses the first 1,370
photographs; the source statistics are theirs. The last 300, under the four validation corruptions, choose one learning
rate of every method for all streams, with seven tries each, and more if the best is at an edge. They also give EATA's
Fisher information. Art and cartoons are only tested on.

`adapt` runs four streams: every style as it comes, every style sorted by class, both mixed within each batch, and art,
then cartoons, without a reset. The methods of --guarded also run with the guard, with the first seed. It resumes from
its records, prints a table and writes it to --out, as `page` does with the records that are there. `--images 64
--seeds 1 --no-sweep`, and `train --steps 5`, show on a CPU whether it runs.
"""

import argparse
import dataclasses
import io
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pages import table, write_page
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic, write_tensors
from mgtta._lib.timm import timm
from mgtta.bench.cells import Cell, Setup
from mgtta.bench.run import run_cells, run_swept
from mgtta.bench.store import Store
from mgtta.data.datasets import open_dataset
from mgtta.methods.registry import recipe
from mgtta.report.summary import spelled

MODEL = "deit_tiny_patch16_224"
CLASSES = 7
CHOICES = 300  # the last photographs
STYLES = {"art": "pacs-art_painting.tar", "cartoon": "pacs-cartoon.tar"}
WEIGHTS = "deit_tiny_photo.safetensors"
SOURCE = "source.safetensors"
CHOICES_TAR = "choices.tar"
WEIGHT_DECAY = 0.05
WARM_UP = 0.1  # share of the steps
SMALLEST_CROP = 0.5  # share of the area
METHODS = (
    "noadapt,t3a,lame,neo,foa_shift,foa,tent,tent_come,shot,sar,sar_come,eta,eata,eata_come,deyo,spa,spa_eata,actmad,"
    "rdumb,cmf,roid,cotta,eq7_sgd,eq7_adam,mgtta,mgtta_plus"
)
GUARDED = "tent,sar,eata,roid,eq7_adam,mgtta,mgtta_plus"
COLUMNS = {  # experiment in the records -> the title of its columns, for each domain
    "pacs": "{}",
    "pacs-labels": "{}, sorted by class",
    "pacs-mixed": "{}",
    "pacs-continual": "{}, without a reset",
}


# --- train


def train(args: argparse.Namespace) -> None:
    """Fine-tune on photographs; write weights, source statistics and the photographs for choices."""
    torch.manual_seed(args.seed)
    photos = open_dataset(str(args.data / "pacs-photo.tar"))
    x = torch.stack([image for image, _ in photos]).to(args.device)  # uint8, 250 MB
    y = photos.labels.to(args.device)
    model = _pretrained(args.checkpoint).to(args.device)
    _fine_tune(model, x[:-CHOICES], y[:-CHOICES], args)
    right = [accuracy(model, x[part], y[part]) for part in (slice(-CHOICES), slice(-CHOICES, None))]
    about = {
        "format": "pt",
        "command": f"python benchmarks/pacs.py train --steps {args.steps} --batch {args.batch} --lr {args.lr}",
        "seed": str(args.seed),
        "top1_training": f"{right[0]:.2f}",
        "top1_choices": f"{right[1]:.2f}",
    }
    write_tensors(args.out / WEIGHTS, model.net.state_dict(), about)
    mgtta.save_source(mgtta.source_statistics(model, x[:-CHOICES]), args.out / SOURCE)
    _write_tar(photos, range(len(photos) - CHOICES, len(photos)), args.out / CHOICES_TAR)
    print(f"{args.out}: top-1 {right[0]:.1f} % on the training photographs, {right[1]:.1f} % on {CHOICES} others")


def _pretrained(checkpoint: Path) -> mgtta.Classifier:
    """Return the ImageNet classifier with a new head for the seven classes."""
    net = timm.create_model(MODEL, num_classes=CLASSES)
    known = mgtta.load_model(MODEL, checkpoint=checkpoint).net.state_dict()
    body = {name: value for name, value in known.items() if not name.startswith("head.")}
    missing, extra = net.load_state_dict(body, strict=False)
    assert not extra
    assert missing == ["head.weight", "head.bias"]
    return mgtta.load_model(net)


def _fine_tune(model: mgtta.Classifier, x: Tensor, y: Tensor, args: argparse.Namespace) -> None:
    """Train all parameters with AdamW, a warm-up and a cosine, on cropped and mirrored images."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=args.lr, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=WARM_UP)
    for step in range(args.steps):
        chosen = torch.randint(len(x), (args.batch,), device=x.device)
        loss = F.cross_entropy(model(augmented(x[chosen])), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


def augmented(x: Tensor) -> Tensor:
    """Return a random crop of each image at its full size, half of them mirrored, as floats in [0, 1]."""
    n = len(x)
    side = (SMALLEST_CROP + (1 - SMALLEST_CROP) * torch.rand(n, device=x.device)).sqrt()
    mirror = torch.where(torch.rand(n, device=x.device) < 0.5, -1.0, 1.0)
    shift = (2 * torch.rand(n, 2, device=x.device) - 1) * (1 - side)[:, None]
    affine = torch.zeros(n, 2, 3, device=x.device)
    affine[:, 0, 0] = side * mirror
    affine[:, 1, 1] = side
    affine[:, :, 2] = shift
    grid = F.affine_grid(affine, list(x.shape), align_corners=False)
    return F.grid_sample(x / 255, grid, padding_mode="reflection", align_corners=False).clamp(0, 1)


@torch.no_grad()
def accuracy(model: mgtta.Classifier, x: Tensor, y: Tensor) -> float:
    """Return top-1 in percent."""
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(64), y.split(64), strict=True))
    return 100 * right / len(x)


def _write_tar(data: Any, numbers: range, path: Path) -> None:
    """Write some images of a WebDataset as another one."""
    with atomic(path) as temporary, tarfile.open(temporary, "w") as archive:
        for i in numbers:
            image, _ = data.encoded(i)
            for suffix, content in (("jpg", image), ("cls", str(int(data.labels[i])).encode())):
                member = tarfile.TarInfo(f"{data.name(i)}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


# --- adapt


def cells(data: Path, methods: list[str], seeds: int) -> list[Cell]:
    """Return each method on each stream of the two styles."""
    sets = tuple((name, str(data / file)) for name, file in STYLES.items())
    streams: list[dict[str, Any]] = []
    for one in sets:
        streams.append({"experiment": "pacs", "sets": (one,)})
        streams.append({"experiment": "pacs-labels", "sets": (one,), "by_class": True})
    streams.append({"experiment": "pacs-mixed", "sets": sets, "mixed": True})
    streams.append({"experiment": "pacs-continual", "sets": sets, "reset": "never"})
    return [
        Cell(method=method, seed=seed, severity=0, domains=tuple(name for name, _ in stream["sets"]), **stream)
        for stream in streams
        for seed in range(seeds)
        for method in methods
    ]


def guarded(cell: Cell) -> Cell:
    """Return the same cell with the guard."""
    return dataclasses.replace(cell, settings=tuple(sorted({**dict(cell.settings), "guard": True}.items())))


def adapt(args: argparse.Namespace) -> None:
    setup = Setup(
        MODEL,
        str(args.model / WEIGHTS),
        data=str(args.data / "pacs-{art_painting,cartoon}.tar"),
        validation=str(args.model / CHOICES_TAR),
        source=str(args.model / SOURCE),
        generator=args.generator,
        images=args.images,
        device=args.device,
        precision="auto",
        tf32=True,
        num_classes=CLASSES,
    )
    try:
        _run(setup, args)
    except TimeoutError as error:
        print(f"{error}: the same command takes up what is missing", flush=True)
    show(args)


def _run(setup: Setup, args: argparse.Namespace) -> None:
    """Choose learning rates, then run all cells, those of the first seed first."""
    store = Store(args.out)
    ends = time.monotonic() + args.seconds

    def more() -> dict[str, Any]:
        return {"title": "pacs", "workers": args.workers, "seconds": max(0.0, ends - time.monotonic())}

    plain = cells(args.data, args.methods.split(","), args.seeds)
    if args.sweep:  # on single styles as they come, with one seed
        first = [cell for cell in plain if cell.experiment == "pacs" and cell.seed == 0]
        plain = _at_one_rate(plain, run_swept(first, setup, store, **more())[0])
    asked = args.guarded.split(",")
    watched = [guarded(cell) for cell in plain if cell.method in asked and cell.seed == 0]
    by_seed = sorted([*plain, *watched], key=lambda cell: cell.seed)
    run_cells(by_seed, setup, store, **more())


def _at_one_rate(plain: list[Cell], swept: list[Cell]) -> list[Cell]:
    """Return the cells at the settings that were found best for their method."""
    best = {cell.method: cell for cell in swept}
    return [
        dataclasses.replace(cell, settings=best[cell.method].settings, chosen_from=best[cell.method].chosen_from)
        for cell in plain
    ]


def show(args: argparse.Namespace) -> None:
    """Write the table of the records that are there."""
    write_page(args.out, "pacs.md", COLUMNS, page, "adapt")


def page(records: list[dict[str, Any]]) -> str:
    """Return the page: top-1 of each method on each stream, without and with the guard."""
    protocol = records[0]["protocol"]
    machines = {f"{r['protocol']['device']}, torch {r['protocol']['versions']['torch']}" for r in records}
    swept = any(record["protocol"]["chosen_from"] for record in records)
    tuned = "the recipes' own"
    if swept:
        tuned = "chosen on 300 photographs under the validation corruptions"
        own = {r["method"] for r in records if recipe(r["method"]).descent and not r["protocol"]["chosen_from"]}
        if own:
            tuned += f" (of {', '.join(sorted(map(spelled, own)))} the recipe's own)"
    seeds = len({record["seed"] for record in records})
    words = (
        f"Top-1 in percent, up to {seeds} seeds (mean ± standard deviation), batches of 64; weights "
        f"{protocol['weights']}, learning rates {tuned}; {'; '.join(sorted(machines))}. "
        "After the slash: with the guard, one seed. ▼: more than a standard deviation below NoAdapt."
    )
    asked = f"python benchmarks/pacs.py adapt --data PACS --model pacs --seeds {seeds}"
    if not swept:
        asked += " --no-sweep"
    return f"# PACS: from photographs to art and cartoons\n\n`{asked}`\n\n{words}\n\n{page_table(records)}\n"


def page_table(records: list[dict[str, Any]]) -> str:
    """Return a row for each method, sorted by its mean over the streams without the guard."""
    columns: dict[tuple[str, str], str] = {}
    scores: dict[tuple[str, bool, tuple[str, str]], list[float]] = {}
    for r in records:
        column = (r["experiment"], r["domain"])
        columns[column] = COLUMNS[r["experiment"]].format(r["domain"])
        scores.setdefault((r["method"], "guard" in r["settings"], column), []).append(r["top1"])
    methods = dict.fromkeys(r["method"] for r in records)

    def mean(method: str) -> float | None:
        """Return the mean over the streams; None if one is missing."""
        own = [scores.get((method, False, column), []) for column in columns]
        return statistics.mean(statistics.mean(each) for each in own) if all(own) else None

    rows = []
    for method in sorted(methods, key=lambda method: mean(method) or 0.0):
        shown = []
        for column in columns:
            still = scores.get(("noadapt", False, column), [])
            found = [scores.get((method, guard, column)) for guard in (False, True)]
            shown.append(" / ".join(_shown(each, still) for each in found if each))
        whole = mean(method)
        rows.append([spelled(method), *shown, "" if whole is None else f"{whole:.1f}"])
    return table(["method", *columns.values(), "mean"], rows, right=True)


def _shown(found: list[float], still: list[float]) -> str:
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    text = f"{statistics.mean(found):.1f}"
    if len(found) > 1:
        text += f" ± {spread:.1f}"
    if still and statistics.mean(found) < statistics.mean(still) - spread:
        text += " ▼"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    training = verbs.add_parser("train", help="fine-tune DeiT-Tiny on photographs")
    training.set_defaults(do=train)
    training.add_argument("--checkpoint", type=Path, required=True, help="ImageNet weights of deit_tiny_patch16_224")
    training.add_argument("--steps", type=int, default=600)
    training.add_argument("--batch", type=int, default=64)
    training.add_argument("--lr", type=float, default=1e-4)
    training.add_argument("--seed", type=int, default=0)
    running = verbs.add_parser("adapt", help="adapt on art and cartoons")
    running.set_defaults(do=adapt)
    running.add_argument("--model", type=Path, required=True, help="the folder that `train` wrote")
    running.add_argument("--methods", default=METHODS)
    running.add_argument("--guarded", default=GUARDED, help="methods that run with the guard, too")
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--images", type=int, help="of each style; by default all")
    running.add_argument("--generator", default=Setup.generator)
    running.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True)
    running.add_argument("--workers", type=int, default=0)
    running.add_argument("--seconds", type=float, default=1e6, help="with --workers: nothing begins after so long")
    for verb in (training, running):
        verb.add_argument("--data", type=Path, required=True, help="folder of the three tars")
        verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    showing = verbs.add_parser("page", help="make the table from the records")
    showing.set_defaults(do=show)
    for verb in (training, running, showing):
        verb.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
