"""Paired differences: every row against NoAdapt and against MGTTA, with confidence intervals."""

import math
import statistics
from dataclasses import dataclass
from functools import cache

from mgtta.report.summary import COSTS, MEAN, Section, measure

REFERENCES = ("noadapt", "mgtta")


@dataclass(frozen=True)
class Difference:
    """How far a row lies above the reference, in points, with a 95 % confidence interval where there can be one."""

    row: str
    column: str
    against: str
    mean: float
    low: float | None
    high: float | None
    pairs: int
    units: int  # that the interval is over: domains, or seeds of one


def differences(section: Section) -> list[Difference]:
    """Return every row's difference from NoAdapt and from MGTTA, paired over domain and seed.

    Where columns are not domains, there is one for each column. The interval is Student's, at 95 %, over domains, each
    the mean over its seeds, since seeds of one domain are not independent of each other; with one domain it is over
    seeds. One pair has no interval. Learning rates are not compared, since the same one means little to two methods;
    nor are costs.
    """
    found: list[Difference] = []
    if section.axis == "lr" or section.experiment in COSTS:
        return found
    for column in [MEAN] if section.axis == "domain" else section.columns:
        visits: dict[str, dict[tuple[str, int], list[float]]] = {row: {} for row in section.rows}
        for record in section.records:
            found_there = measure(record, section.figure)
            if found_there is not None and column in (MEAN, section.column(record)):
                mine = visits[section.names[id(record)]]
                mine.setdefault((record["domain"], record["seed"]), []).append(found_there)
        values = {row: {key: statistics.mean(vs) for key, vs in by.items()} for row, by in visits.items()}
        for method in REFERENCES:
            for against in [row for row, its in section.rows.items() if its == method]:
                for row in section.rows:
                    pairs = {key: v - values[against][key] for key, v in values[row].items() if key in values[against]}
                    if row != against and pairs:
                        found.append(paired_difference(row, column, against, pairs))
    return found


def paired_difference(row: str, column: str, against: str, pairs: dict[tuple[str, int], float]) -> Difference:
    """Return the difference of a row from another: pairs of (domain, seed), by which the interval goes over domains."""
    by_domain: dict[str, list[float]] = {}
    for (domain, _), d in pairs.items():
        by_domain.setdefault(domain, []).append(d)
    units = [statistics.mean(ds) for ds in by_domain.values()]
    if len(units) == 1:
        units = list(pairs.values())
    mean = statistics.mean(units)
    if len(units) < 2:
        return Difference(row, column, against, mean, None, None, len(pairs), 1)
    half = t_quantile(len(units) - 1) * statistics.stdev(units) / math.sqrt(len(units))
    return Difference(row, column, against, mean, mean - half, mean + half, len(pairs), len(units))


@cache
def t_quantile(df: int, confidence: float = 0.95) -> float:
    """Return t with P(|T| < t) = confidence for Student's T with `df` degrees of freedom."""
    low = 0.0
    high = 1.0
    while _t_within(high, df) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_within(middle, df) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_within(t: float, df: int) -> float:
    """Return P(|T| < t), by the finite sums of Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(df))
    sin = math.sin(theta)
    cos = math.cos(theta)
    odd = df % 2
    total = 0.0
    term = 1.0
    if odd:
        term = cos
    for k in range(1, df // 2 + 1):
        total += term
        term *= cos**2 * (2 * k - 1 + odd) / (2 * k + odd)
    if odd:
        return (theta + sin * total) * 2 / math.pi
    return sin * total
