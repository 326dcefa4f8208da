from dataclasses import dataclass

import pytest
import torch
from conftest import images

import mgtta


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
