import json
import multiprocessing
import os

from mgtta.bench.store import Store
from mgtta.evaluation.record import complete_records


def test_cells_come_back_whole_and_once(tmp_path):
    store = Store(tmp_path / "runs")
    assert store.records() == []
    assert store.add("a", [{"top1": 1.0}, {"top1": 2.0}])
    assert store.add("b", [{"top1": 3.0}])
    assert not store.add("a", [{"top1": 9.0}, {"top1": 9.0}])
    assert [(r["cell"], r["top1"]) for r in store.records()] == [("a", 1.0), ("a", 2.0), ("b", 3.0)]
    assert Store(tmp_path / "runs").cells() == {"a", "b"}


def test_every_kill_in_mid_write_leaves_a_consistent_store(tmp_path):
    whole = Store(tmp_path / "whole")
    whole.add("a", [{"top1": 1.0}])
    before = whole.path.stat().st_size
    whole.add("b", [{"top1": 2.0}, {"top1": 3.0}])
    content = whole.path.read_bytes()
    for cut in range(before, len(content)):
        store = Store(tmp_path / str(cut))
        store.path.write_bytes(content[:cut])
        complete = cut >= len(content) - 1  # all but the last newline is there
        assert store.cells() == ({"a", "b"} if complete else {"a"})
        assert store.add("b", [{"top1": 2.0}, {"top1": 3.0}]) != complete
        assert store.add("c", [{"top1": 4.0}])
        assert [r["top1"] for r in store.records()] == [1.0, 2.0, 3.0, 4.0]


def _write(folder, worker):
    store = Store(folder)
    for i in range(40):
        store.add(f"cell{i}", [{"worker": worker, "text": "x" * 2000}, {"worker": worker}])


def test_two_runs_into_one_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    runs = [context.Process(target=_write, args=(tmp_path, worker)) for worker in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0]
    records = Store(tmp_path).records()
    assert len(records) == 80
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == 80
    assert all(json.loads(line) for line in lines)


def test_invalid_lines_are_ignored(tmp_path):
    store = Store(tmp_path)
    store.path.write_bytes(os.urandom(64).replace(b"\n", b"") + b'\n[1]\n{}\n"x"\n')
    assert store.records() == []
    assert store.add("a", [{}])
    assert store.cells() == {"a"}


def test_a_store_reads_only_what_is_new(tmp_path, monkeypatch):
    """Thousands of cells are added one by one: a file that is read again each time takes longer and longer."""
    sizes = []

    def reading(content):
        sizes.append(len(content))
        return complete_records(content)

    monkeypatch.setattr("mgtta.bench.store.complete_records", reading)
    ours = Store(tmp_path)
    theirs = Store(tmp_path)
    assert ours.add("a", [{"text": "x" * 1000}])
    assert theirs.add("b", [{"text": "x" * 1000}])
    assert not ours.add("b", [{}])
    assert ours.add("c", [{}])
    assert sizes[0] == 0
    assert max(sizes) < 1200
    assert sizes[-1] == 1  # the last byte, which may be the end of a line
    ours.path.write_text("")
    assert ours.add("a", [{}])
