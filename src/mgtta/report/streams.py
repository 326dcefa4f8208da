"""What a table of the experiment `streams` shows besides accuracy by kind: the rounds, and settings left out."""

import statistics
from collections.abc import Sequence

from mgtta.report.summary import MEAN, Figure, Record, Section, unique


def is_streams(section: Section) -> bool:
    """Return whether the columns are kinds of stream."""
    return section.axis == "kind"


def by_round(section: Section) -> dict[str, list[Figure]]:
    """Return row -> accuracy of each round, as the mean over its domains; rows that ran no rounds are left out."""
    found = {}
    for row in section.rows:
        mine = [r for r in section.of(row) if r.get("kind") == "rounds" and r.get("top1") is not None]
        seeds = [[r["top1"] for r in mine if r["seed"] == seed] for seed in unique(r["seed"] for r in mine)]
        domains = len({r["domain"] for r in mine})
        rounds = [
            Figure.of([sum(figures[k : k + domains]) / domains for figures in seeds])
            for k in range(0, min(map(len, seeds), default=0), domains)
        ]
        if len(rounds) > 1:
            found[row] = rounds
    return found


def of_last_round(section: Section, row: str) -> list[Record]:
    """Return the row's records; of a stream in rounds only those of the last round."""
    found = []
    for (kind, _), mine in _by_stream(section.of(row)).items():
        if kind == "rounds":
            mine = mine[-len({r["domain"] for r in mine}) :]
        found += mine
    return found


def by_kind_and_seed(section: Section, row: str, figure: str) -> dict[tuple[str, int], float]:
    """Return (kind, seed) -> the mean over visits, of `rounds` over those of the last round."""
    found = {}
    for stream, mine in _by_stream(of_last_round(section, row)).items():
        known = [r[figure] for r in mine if r.get(figure) is not None]
        if known:
            found[stream] = statistics.mean(known)
    return found


def over_kinds(section: Section, row: str, figure: str) -> dict[str, Figure]:
    """Return kind -> figure, with the last round for `rounds`, and the mean over kinds of the seeds that have all."""
    values: dict[str, dict[int, float]] = {}  # kind -> seed -> value
    for (kind, seed), measured in by_kind_and_seed(section, row, figure).items():
        values.setdefault(kind, {})[seed] = measured
    cells = {kind: Figure.of(list(values[kind].values())) for kind in section.columns if kind in values}
    if len(cells) == len(section.columns):
        seeds = set.intersection(*(set(by_seed) for by_seed in values.values()))
        means = [statistics.mean(by_seed[seed] for by_seed in values.values()) for seed in sorted(seeds)]
        if means:
            cells[MEAN] = Figure.of(means)
    return cells


def _by_stream(records: Sequence[Record]) -> dict[tuple[str, int], list[Record]]:
    found: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        found.setdefault((record["kind"], record["seed"]), []).append(record)
    return found


def left_out(section: Section) -> str:
    """Return which rows ran without settings that the others have, in a sentence; empty if none did."""
    found = {section.names[id(r)]: r["without"] for r in section.records if r.get("without")}
    if not found:
        return ""
    words = [f"{row} ({', '.join(names)})" for row, names in found.items()]
    return f" Without settings that these methods do not take: {', '.join(words)}."
