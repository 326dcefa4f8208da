"""`mgtta tune` against the choice that labels would make.

Characters: the stream is one of the four validation corruptions, and estimates are calibrated on the other three. The
first half of the stream is the sample; accuracy is over the whole stream. ImageNet images: the cells of
benchmarks/estimate.py, each method at its defaults; each validation corruption's estimate is calibrated without it.

python benchmarks/tune.py --images 128 --out results
python benchmarks/tune.py --work FOLDER --out results
"""

import argparse
import json
from pathlib import Path

import estimate
import torch
from pages import table

import mgtta
from mgtta._lib.files import atomic
from mgtta.adaptation.estimate import probability
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.glyphs import TRAIN_SEED, Glyphs
from mgtta.running.calibrate import coefficients
from mgtta.running.tune import Candidate, tune

BATCH = 16
CLEAN_IMAGES = 32
CANDIDATES = [
    Candidate("noadapt"),
    *(Candidate("tent", {"lr": lr}) for lr in (1e-3, 1e-2)),
    *(Candidate("mgtta", {"lr": lr, "generator": "glyphs"}) for lr in (1e-3, 1e-2)),
    *(Candidate("mgtta_plus", {"lr": lr, "generator": "glyphs", "mirror": False}) for lr in (1e-3, 1e-2)),
]


def characters(images: int) -> list[dict]:
    """Return a row for each validation corruption."""
    model = mgtta.load_model("glyphs_vit")
    source = mgtta.load_source("glyphs_vit")
    clean, labels = Glyphs(CLEAN_IMAGES, seed=TRAIN_SEED + 1).tensors()
    x, y = Glyphs(images, seed=TRAIN_SEED + 2).tensors()
    rows = []
    for name in VALIDATION_CORRUPTIONS:
        shifted = corrupt(x, name, 5)
        others = [other for other in VALIDATION_CORRUPTIONS if other != name]
        found = tune(
            model,
            shifted[: images // 2],
            clean,
            labels,
            source=source,
            candidates=CANDIDATES,
            batch_size=BATCH,
            corruptions=others,
        )
        true = {str(c): accuracy(model, source, c, shifted, y) for c in CANDIDATES}
        estimates = {str(c): c.accuracy for c in found.candidates}
        rows.append(row("characters", name, str(found.best), true, estimates, found.sure))
        print(rows[-1], flush=True)
    return rows


def accuracy(model: mgtta.Classifier, source: object, candidate: Candidate, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the true accuracy of a candidate on the whole stream."""
    settings = dict(candidate.settings)
    if candidate.method.startswith("mgtta"):
        settings["source"] = source
    method = mgtta.create(candidate.method, model, **settings)
    logits = torch.cat([method(part) for part in x.split(BATCH)])
    return 100 * float((logits.argmax(1) == y).double().mean())


def from_cells(work: Path, part: str) -> list[dict]:
    """Return a row for each corruption of ImageNet images, from the methods whose calibration is finished."""
    every = estimate.METHODS["imagenet"]
    calibration = {m: estimate.read(work, "imagenet", "calibration", m) for m in every}
    methods = [m for m, cells in calibration.items() if estimate.is_complete(cells)]
    measured = {m: estimate.read(work, "imagenet", part, m) for m in methods}
    rows = []
    hardest = [f"{corruption}/5" for corruption in VALIDATION_CORRUPTIONS]
    for domain in (hardest, CORRUPTIONS)[part == "test"]:
        if not all(domain in cells for cells in measured.values()):
            continue
        true = {m: measured[m][domain].accuracy for m in methods}
        estimates = {}
        for m in methods:
            scale = estimate.clean_scale(calibration[m][estimate.CLEAN])
            known = estimate.by_corruption(calibration[m], scale)
            known.pop(domain.removesuffix("/5"), None)
            learned = coefficients(known.values())[0]
            estimates[m] = 100 * float(probability(learned, measured[m][domain].rows(scale).evidence[0]).mean())
        best = max(estimates, key=estimates.__getitem__)
        rows.append(row(f"ImageNet images, {part}", domain, best, true, estimates, None))
    return rows


def row(setting: str, domain: str, chosen: str, true: dict, estimates: dict, sure: bool | None) -> dict:
    return {
        "setting": setting,
        "domain": domain,
        "chosen": chosen,
        "labels' choice": max(true, key=true.__getitem__),
        "lost": max(true.values()) - true[chosen],
        "gain": true[chosen] - true["noadapt"],
        "sure": sure,
        "true": true,
        "estimates": estimates,
    }


def page(rows: list[dict]) -> str:
    parts = ["# Choosing a method without labels", __doc__.split("\n\n")[1].replace("\n", " ")]
    parts.append("`python benchmarks/tune.py --images 128 --out results`; ImageNet images: `--work FOLDER`, as above.")
    parts.append("Streams of characters have 128 images, so one image is 0.8 points; the cells have 384.")
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        lines = [
            [
                r["domain"],
                r["chosen"],
                r["labels' choice"],
                f"{r['true']['noadapt']:.1f}",
                f"{r['true'][r['chosen']]:.1f}",
                f"{max(r['true'].values()):.1f}",
                f"{r['lost']:.1f}",
            ]
            for r in mine
        ]
        head = ["corruption", "chosen", "best by labels", "NoAdapt", "chosen, %", "best, %", "lost"]
        lost = sum(r["lost"] for r in mine) / len(mine)
        gain = sum(r["gain"] for r in mine) / len(mine)
        words = f"On average {lost:.2f} points below the labelled choice, {gain:+.1f} points over NoAdapt."
        parts += [f"## {setting[0].upper()}{setting[1:]}", words, table(head, lines)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=128, help="of each stream of characters")
    parser.add_argument("--work", type=Path, help="folder of the cells of benchmarks/estimate.py")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = args.out / "tune.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    if args.work is None:
        new = characters(args.images)
    else:
        new = [*from_cells(args.work, "calibration"), *from_cells(args.work, "test")]
    replaced = {r["setting"] for r in new}
    rows = [*(r for r in rows if r["setting"] not in replaced), *new]
    with atomic(path) as temporary:
        temporary.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    with atomic(args.out / "tune.md") as temporary:
        temporary.write_text(page(rows))


if __name__ == "__main__":
    main()
