"""Paired differences and their intervals."""

import math
import statistics

import pytest
from made_up import LEVEL, fake, table_1

from mgtta.data.corruptions import CORRUPTIONS
from mgtta.report import sections
from mgtta.report.paired import differences, t_quantile
from mgtta.report.words import headline


def test_t_quantiles_are_scipys():
    stats = pytest.importorskip("scipy.stats")
    for df in (1, 2, 3, 4, 7, 14, 29, 100, 999):
        assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)
    assert t_quantile(14, 0.99) == pytest.approx(stats.t.ppf(0.995, 14), rel=1e-9)


def test_differences_are_paired_and_their_interval_is_students_over_domains():
    [section] = sections(table_1(seeds=3))
    found = {(d.row, d.against): d for d in differences(section)}
    assert set(found) == {(a, b) for a in LEVEL for b in ("noadapt", "mgtta") if a != b}
    top1 = {(r["method"], r["domain"], r["seed"]): r["top1"] for r in section.records}
    units = [
        sum(top1["tent", d, s] - top1["noadapt", d, s] for s in range(3)) / 3 for d in CORRUPTIONS
    ]  # one figure a domain: its seeds are not independent
    mean = sum(units) / 15
    variance = sum((u - mean) ** 2 for u in units) / 14
    half = 2.1447866879 * math.sqrt(variance / 15)  # t at 0.975 with 14 degrees of freedom
    d = found["tent", "noadapt"]
    assert (d.mean, d.low, d.high, d.pairs) == pytest.approx((mean, mean - half, mean + half, 45))


def test_differences_with_one_domain_are_over_seeds_and_with_one_pair_without_interval():
    values = {"noadapt": (50.0, 52.0), "mgtta": (60.0, 64.0)}
    [section] = sections([fake(m, seed=s, top1=v) for m, vs in values.items() for s, v in enumerate(vs)])
    d = next(d for d in differences(section) if d.row == "mgtta")
    half = 12.7062047362 * statistics.stdev([10, 12]) / math.sqrt(2)
    assert (d.mean, d.low, d.high) == pytest.approx((11, 11 - half, 11 + half))
    assert headline(section)[1] == "mgtta against noadapt: +11.00 points, too few pairs for a 95 % interval."
    [alone] = sections([fake("noadapt", top1=50.0), fake("mgtta", top1=60.0)])
    assert differences(alone)[0].low is None
    assert headline(alone)[1] == "mgtta against noadapt: +10.00 points, too few pairs for a 95 % interval."


@pytest.mark.parametrize(("seeds", "domains"), [(5, ["fog"]), (1, list(CORRUPTIONS)[:5])])
def test_a_sentence_has_an_interval_from_five_on(seeds, domains):
    records = [
        fake(m, d, s, 50.0 + (s + i) % 2 * (1 if m == "mgtta" else -1))
        for m in ("noadapt", "mgtta")
        for i, d in enumerate(domains)
        for s in range(seeds)
    ]
    assert ": no clear difference." in headline(sections(records)[0])[1]
    fewer = [r for r in records if (r["seed"] if seeds > 1 else domains.index(r["domain"])) < 4]
    assert "too few pairs for a 95 % interval" in headline(sections(fewer)[0])[1]
    three_seeds = [{**r, "seed": s} for r in fewer for s in range(3)] if seeds == 1 else fewer
    assert "too few" in headline(sections(three_seeds)[0])[1]  # seeds of a domain are not independent


def test_visits_are_averaged_and_costs_not_compared():
    def visits(method, values):
        own = {"cell": method, "experiment": "continual", "reset": "never", "domains": ["fog", "snow", "fog"]}
        domains = enumerate(zip(own["domains"], values, strict=True))
        return [fake(method, d, top1=v, part=i, **own) for i, (d, v) in domains]

    [d, _] = differences(sections([*visits("noadapt", [10.0, 20.0, 30.0]), *visits("mgtta", [20.0, 30.0, 60.0])])[0])
    assert (d.row, d.mean, d.pairs) == ("mgtta", 15.0, 2)
    assert differences(sections(table_1(experiment="runtime"))[0]) == []


def test_differences_skip_what_has_no_partner():
    records = [fake("noadapt", "fog", top1=50.0), fake("tent", "fog", top1=51.0), fake("tent", "snow", top1=99.0)]
    [d] = differences(sections(records)[0])
    assert (d.mean, d.pairs) == (1.0, 1)
