"""Records as tables: mean and standard deviation over seeds, the best in bold."""

import statistics
from collections.abc import Sequence
from typing import Any

SHORT = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impul", "defocus_blur": "defoc",
    "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "brightness": "brit", "contrast": "contr",
    "elastic_transform": "elast", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip


def name_of(record: dict[str, Any]) -> str:
    """What a record's row is called: the method, and what sets it apart within its experiment."""
    parts = [record["method"]]
    if record["experiment"] == "budgets":
        parts.append(f"{record['max_updates']} updates")
    if record["experiment"] == "small-batch":
        parts.append(f"batch {record['batch_size']}")
    if record["experiment"] == "learning-rate":
        parts.append(f"lr {record['settings']['lr']:g}")
    return ", ".join(parts)


def accuracies(records: Sequence[dict[str, Any]], figure: str = "top1") -> dict[str, dict[str, list[float]]]:
    """Row -> domain -> one figure a seed."""
    table: dict[str, dict[str, list[float]]] = {}
    for record in sorted(records, key=lambda r: r["seed"]):
        table.setdefault(name_of(record), {}).setdefault(record["domain"], []).append(record[figure])
    return table


def mean_over_domains(row: dict[str, list[float]]) -> tuple[float, float]:
    """Mean and, over seeds, standard deviation of the mean over domains (0 for one seed)."""
    by_seed = [statistics.mean(values) for values in zip(*row.values(), strict=True)]
    return statistics.mean(by_seed), statistics.stdev(by_seed) if len(by_seed) > 1 else 0.0


def markdown(records: Sequence[dict[str, Any]], figure: str = "top1") -> str:
    """One row a method, one column a domain, and the mean."""
    table = accuracies(records, figure)
    domains = list(next(iter(table.values())))
    means = {name: mean_over_domains(row) for name, row in table.items()}
    rows = {name: [statistics.mean(row[d]) for d in domains] for name, row in table.items()}
    best = [max(row[i] for row in rows.values()) for i in range(len(domains))]
    top = max(mean for mean, _ in means.values())
    lines = [f"| method | {' | '.join(SHORT.get(d, d) for d in domains)} | mean |", "|---" * (len(domains) + 2) + "|"]
    for name, row in rows.items():
        cells = [_bold(f"{value:.1f}", value == best[i]) for i, value in enumerate(row)]
        mean, spread = means[name]
        overall = f"{mean:.1f} ± {spread:.1f}" if spread else f"{mean:.1f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {_bold(overall, mean == top)} |")
    return "\n".join(lines)


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text
