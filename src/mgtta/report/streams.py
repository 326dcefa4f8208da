"""What a table of the experiment `streams` shows besides accuracy by kind: the rounds, and settings left out."""

from mgtta.report.summary import Figure, Section, unique


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


def left_out(section: Section) -> str:
    """Return which rows ran without settings that the others have, in a sentence; empty if none did."""
    found = {section.names[id(r)]: r["without"] for r in section.records if r.get("without")}
    if not found:
        return ""
    words = [f"{row} ({', '.join(names)})" for row, names in found.items()]
    return f" Without settings that these methods do not take: {', '.join(words)}."
