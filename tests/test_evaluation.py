import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conftest import images
from torch.utils.data import DataLoader, TensorDataset

import mgtta
from mgtta._lib.ranks import ALONE
from mgtta.evaluation import loop
from mgtta.evaluation.metrics import Tally
from mgtta.evaluation.record import Record, StoredRecord, checked


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor | None
    domain: str


def stream(domains=("a", "a", "b"), labels=True):
    return [Batch(images(4, seed=t), torch.arange(4) if labels else None, d) for t, d in enumerate(domains)]


def test_one_record_for_each_domain(model):
    records = mgtta.evaluate(mgtta.create("noadapt", model), stream())
    assert [(r.domain, r.images, r.batches) for r in records] == [("a", 8, 2), ("b", 4, 1)]
    hits = [int((model(b.x).argmax(1) == b.y).sum()) for b in stream()]
    assert records[0].curve == hits[:2]
    assert records[0].top1 == 100 * sum(hits[:2]) / 8
    assert records[1].top5 >= records[1].top1


def test_reset_policy(model):
    calls = []
    method = mgtta.create("tent", model)
    reset = method.reset
    method.reset = lambda: (calls.append(method.updates), reset())
    records = mgtta.evaluate(method, stream(), reset="domain")
    assert calls == [0, 2]
    assert [r.updates for r in records] == [2, 1]
    calls.clear()
    records = mgtta.evaluate(method, stream(), reset="never")
    assert calls == []
    assert [r.updates for r in records] == [2, 1]
    assert method.updates == 4
    with pytest.raises(ValueError, match="domain, never"):
        mgtta.evaluate(method, stream(), reset="batch")


def test_without_labels_and_with_progress(model):
    seen = []
    records = mgtta.evaluate(
        mgtta.create("tent", model),
        stream(labels=False),
        on_batch=lambda r, b, logits: seen.append((r.images, len(b.x), len(logits))),
    )
    assert [r.top1 for r in records] == [None, None]
    assert seen == [(4, 4, 4), (8, 4, 4), (4, 4, 4)]
    assert records[0].to_dict()["method"] == "tent"


@pytest.mark.parametrize("form", ["loader", "pairs", "lists"])
def test_a_data_loader_and_plain_pairs_are_streams(model, form):
    x = images(10)
    y = torch.arange(10) % 4
    pairs = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:])]
    forms = {
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "pairs": pairs,
        "lists": [[a, b.tolist()] for a, b in pairs],
    }
    seen = []
    [record] = mgtta.evaluate(
        mgtta.create("tent", model), forms[form], on_batch=lambda _, batch, logits: seen.extend(batch.index.tolist())
    )
    [expected] = mgtta.evaluate(mgtta.create("tent", model), [Batch(a, b, "test") for a, b in pairs])
    assert (record.domain, record.images, record.updates) == ("test", 10, 3)
    assert (record.top1, record.curve, record.sizes) == (expected.top1, expected.curve, expected.sizes)
    assert seen == list(range(10))


def test_images_without_labels_are_a_stream(model):
    [record] = mgtta.evaluate(mgtta.create("noadapt", model), [images(4), images(2)])
    assert (record.images, record.top1) == (6, None)
    [record] = mgtta.evaluate(mgtta.create("noadapt", model), [(images(4), None)])
    assert record.top1 is None


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ({"x": 1}, TypeError, "a pair (images, labels), or a tensor of images, not a dict"),
        ((1, 2, 3), TypeError, "not a tuple of int, int, int"),
        ((torch.rand(2, 3, 32, 32), torch.rand(2)), ValueError, "labels must be 2 class numbers"),
        ((torch.rand(2, 3, 32, 32), torch.tensor([[1, 0], [0, 1]])), ValueError, "labels must be 2 class numbers"),
        ((torch.rand(2, 3, 32, 32), torch.tensor([1, 5000])), ValueError, "scored classes, from 0 to"),
        ((torch.rand(2, 3, 32, 32), torch.tensor([-1, 1])), ValueError, "not -1; y=None is a batch without labels"),
    ],
)
def test_other_batches_are_refused(model, item, error, message):
    with pytest.raises(error, match=re.escape(message)):
        mgtta.evaluate(mgtta.create("noadapt", model), [item])


class Counted(list):
    """A list that counts how many of its values are read."""

    read = 0

    def __iter__(self):
        Counted.read += len(self)
        return super().__iter__()

    def __getitem__(self, which):
        found = super().__getitem__(which)
        Counted.read += len(found) if isinstance(which, slice) else 1
        return found


class Trivial:
    """The least that `evaluate` asks of a method: its images are its logits, and every batch is an event."""

    name = "trivial"
    updates = 0
    skipped = 0
    spent = False
    ranks = ALONE
    engine = SimpleNamespace(graph_bytes=0)

    def __init__(self):
        net = torch.nn.Linear(1, 1)
        self.model = SimpleNamespace(net=net, parameters=net.parameters)
        self.events = Counted()

    def reset(self): ...

    def __call__(self, x):
        self.events.append({"batch": len(self.events)})
        return x


@pytest.mark.parametrize("on_batch", [None, lambda record, batch, logits: record.top1])
def test_evaluate_costs_the_same_at_every_batch_of_a_long_stream(on_batch, monkeypatch):
    """Neither the curve, nor the sizes, nor the events of all batches before are read again at a batch."""

    class CountedTally(Tally):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.curve = Counted()
            self.sizes = Counted()

    monkeypatch.setattr(loop, "Tally", CountedTally)
    monkeypatch.setattr(Counted, "read", 0)
    batches = 3000
    x = torch.tensor([[0.0, 1.0, 2.0]])
    [record] = mgtta.evaluate(Trivial(), [Batch(x, torch.tensor([2]), "a")] * batches, on_batch=on_batch)
    assert Counted.read <= 2 * batches
    assert record.curve == [1] * batches
    assert record.sizes == [1] * batches
    assert len(record.events) == batches
    assert record.top1 == 100


def stored(**changes):
    record = Record("tent", "fog", images=4, top1=50.0, sizes=[4], curve=[2])
    return {**record.to_dict(), "experiment": "corruptions", "seed": 0, "settings": {}, "protocol": {}, **changes}


def test_a_record_knows_the_types_of_its_fields():
    records = [stored(), stored(top1=None, peak_memory=None, settings=None, something="else")]
    assert checked(records) is records
    older = {key: stored()[key] for key in ("experiment", "method", "domain", "seed", "images")}
    assert StoredRecord.problem(older) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"method": 3}, "method is not a text"),
        ({"seed": True}, "seed is not a count"),
        ({"images": -1}, "images is not a count"),
        ({"updates": None}, "updates is not a count"),
        ({"labelled": 2**60}, "labelled is not a count"),
        ({"top1": float("nan")}, "top1 is not a number"),
        ({"seconds": "1"}, "seconds is not a number"),
        ({"curve": [1, 2.5]}, "curve is not a list of counts"),
        ({"sizes": 4}, "sizes is not a list of counts"),
        ({"bins": [[1.0, 2.0]]}, "bins is not a list of three numbers each"),
        ({"events": ["reset"]}, "events is not a list of names and values"),
        ({"protocol": []}, "protocol is not a table of names and values"),
    ],
)
def test_a_damaged_record_is_named(changes, problem):
    with pytest.raises(ValueError, match=f"record 2 is damaged .{problem}"):
        checked([stored(), stored(**changes)])


def test_a_record_without_a_required_field_is_damaged():
    incomplete = stored()
    del incomplete["seed"]
    with pytest.raises(ValueError, match="seed is missing"):
        checked([incomplete])
