"""The bars that show how far a run is."""

from small_bench import FEW

from mgtta.cli.progress import Bars
from mgtta.evaluation.record import Record


def test_bars_time_the_batches_that_they_see_begin_and_end(monkeypatch):
    shown, clock = [], iter([10.0, 12.0, 20.0])
    monkeypatch.setattr("mgtta.cli.progress.time.perf_counter", lambda: next(clock))
    bars = Bars()
    monkeypatch.setattr(bars, "_show", lambda text, part: shown.append(text))
    cell = FEW[0]
    for sizes, top1 in (([3], 50.0), ([3, 4], 75.0)):
        bars.batch(cell, Record("noadapt", "contrast", sizes=sizes, top1=top1), 0.5)
    bars.batch(FEW[1], Record("eq7_sgd", "contrast", sizes=[3]), 0.5)
    assert shown == ["noadapt on contrast: 50.0 %", "noadapt on contrast: 75.0 %, 2 images/s", "eq7_sgd on contrast"]
