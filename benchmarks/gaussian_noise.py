"""DeiT-Tiny under Gaussian noise, severity 5: entropy, Eq. 7 with SGD, with Adam, and MGTTA.

Every learning rate is chosen on shard 0 under the four validation corruptions, from seven tries for every method;
the test is shards 1 and 2, 2,000 images in batches of 64, three orders.

python benchmarks/gaussian_noise.py --data SHARDS --checkpoint DEIT_TINY --out results
"""

import json
import statistics
from pathlib import Path

import imagenet
import torch

import mgtta
from mgtta.data.streams import corrupted, stream
from mgtta.files import atomic
from mgtta.methods.base import Method

SEEDS = (0, 1, 2)
START, END = "<!-- gaussian_noise:start -->", "<!-- gaussian_noise:end -->"
TRIES = {
    "noadapt": (),
    "tent": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "eq7_sgd": (5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5),
    "eq7_adam": (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2),
    "mgtta": (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2),
    "mgtta_lstm": (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2),
}


def accuracy(method: Method, batches: list) -> float:
    return statistics.mean(record.top1 for record in mgtta.evaluate(method, batches))


def table(rows: list[dict]) -> str:
    """The rows as markdown: the README's table."""
    lines = ["| method | learning rate | top-1, % |", "|---|---|---|"]
    best = max(statistics.mean(row["top1"]) for row in rows)
    for row in rows:
        mean = statistics.mean(row["top1"])
        figure = f"{mean:.1f} ± {statistics.stdev(row['top1']):.1f}"
        figure = f"**{figure}**" if mean == best else figure
        lines.append(f"| {row['method']} | {row['lr'] or ''} | {figure} |")
    return "\n".join(lines)


def write_readme(readme: Path, text: str) -> None:
    """Put the table between its marks in the README."""
    before, rest = readme.read_text().split(START)
    _, after = rest.split(END)
    readme.write_text(f"{before}{START}\n{text}\n{END}{after}")


def main() -> None:
    parser = imagenet.arguments(__doc__)
    parser.add_argument("--readme", type=Path, help="a README to put the table into")
    args = parser.parse_args()
    model = imagenet.deit_tiny(args.checkpoint, args.device)
    shard0 = imagenet.shard(args.data, 0)
    source = imagenet.source_of(model, shard0)
    validation = imagenet.validation_batches(shard0, args.device)
    noisy = corrupted(imagenet.shard(args.data, 1, 2), ["gaussian_noise"])
    tests = {seed: list(stream(noisy, batch_size=64, seed=seed, device=args.device)) for seed in SEEDS}

    def make(name: str, **settings) -> Method:
        return mgtta.create(name, model, **settings, **({} if name in ("noadapt", "tent") else {"source": source}))

    rows = []
    for name, tries in TRIES.items():
        tried = {lr: accuracy(make(name, lr=lr), validation) for lr in tries}
        lr = max(tried, key=tried.get) if tried else None
        scores = [accuracy(make(name, **({"lr": lr} if lr else {})), tests[seed]) for seed in SEEDS]
        row = {"method": name, "lr": lr, "tried": tried, "top1": scores}
        rows.append(row)
        print(json.dumps(row), flush=True)
    protocol = {
        "model": "deit_tiny_patch16_224", "weights": model.fingerprint(), "corruption": "gaussian_noise, severity 5",
        "images": 2000, "batch_size": 64, "order": f"seeds {SEEDS}", "source": "1,000 clean images of shard 0",
        "chosen on": "shard 0, images 128-999, speckle noise, spatter, gaussian blur, saturate at severity 5",
        "versions": {"mgtta": mgtta.__version__, "torch": torch.__version__}, "device": args.device,
        "command": "python benchmarks/gaussian_noise.py --data SHARDS --checkpoint DEIT_TINY --out results",
    }  # fmt: skip
    with atomic(args.out / "gaussian_noise.json") as path:
        path.write_text(json.dumps({"protocol": protocol, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    if args.readme:
        write_readme(args.readme, table(rows))


if __name__ == "__main__":
    main()
