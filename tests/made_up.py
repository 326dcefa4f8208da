"""Records of bench's schema, made up for the tests of the report."""

import random

from mgtta.data.corruptions import CORRUPTIONS

LEVEL = {"noadapt": 55.0, "tent": 60.0, "mgtta": 70.0}


def fake(method="noadapt", domain="fog", seed=0, top1=None, **changes):
    """A record of bench's schema; its accuracy is drawn by chance unless given."""
    rng = random.Random(f"{method} {domain} {seed} {sorted(changes.items())}")
    sizes = changes.pop("sizes", [64] * 8)
    chance = (LEVEL.get(method, 50.0) if top1 is None else top1) / 100
    curve = [sum(rng.random() < chance for _ in range(n)) for n in sizes]
    bins = [[float(n), n * (k + 0.5) / 15, n * (k + 0.3) / 15] for k, n in enumerate(rng.choices(range(1, 60), k=15))]
    record = {
        "method": method,
        "domain": domain,
        "images": sum(sizes),
        "labelled": sum(sizes),
        "batches": len(sizes),
        "updates": 0 if method == "noadapt" else len(sizes),
        "skipped": 0,
        "seconds": 1.0 + rng.random(),
        "peak_memory": None,
        "top1": 100 * sum(curve) / sum(sizes) if top1 is None else top1,
        "top5": 90.0,
        "ece": 5.0,
        "sizes": sizes,
        "curve": curve,
        "bins": bins,
        "experiment": "corruptions",
        "domains": [domain],
        "seed": seed,
        "settings": {},
        "batch_size": 64,
        "severity": 5,
        "mixed": False,
        "reset": "domain",
        "max_updates": None,
        "max_seconds": None,
        "split": "test",
        "protocol": {
            "model": "glyphs_vit",
            "weights": "0123456789abcdef",
            "mean": [0.5] * 3,
            "std": [0.5] * 3,
            "data": "rendered characters",
            "device": "cpu",
            "versions": {"mgtta": "0.1", "torch": "2"},
            "command": "mgtta bench corruptions --out runs",
        },
    }
    protocol = {**record["protocol"], **changes.pop("protocol", {})}
    return {**record, **changes, "protocol": protocol}


def table_1(methods=("noadapt", "tent", "mgtta"), seeds=2, domains=tuple(CORRUPTIONS), **changes):
    return [fake(m, d, s, **changes) for d in domains for s in range(seeds) for m in methods]


def budgets():
    limits = [{"max_updates": k} for k in (1, 10, 20)] + [{"max_seconds": s} for s in (0.5, 2.0)] + [{}]
    return [
        fake(m, d, experiment="budgets", **limit)
        for limit in limits
        for d in ("fog", "snow")
        for m in ("noadapt", "mgtta")
    ]
