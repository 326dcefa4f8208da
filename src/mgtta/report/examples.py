"""Example images with predictions before and after adaptation."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mgtta._lib.shipped import shipped
from mgtta.adaptation.wrapper import Adapting
from mgtta.data.cache import Held, Room
from mgtta.data.embedded import EMBEDDED
from mgtta.data.streams import Batch, corrupted, stream
from mgtta.methods.create import create
from mgtta.methods.registry import SOURCE, recipe
from mgtta.models.classifier import Classifier
from mgtta.models.loading import load_model
from mgtta.models.source import load_source
from mgtta.report.summary import Record, unique


@dataclass(frozen=True)
class Prediction:
    name: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class Example:
    """An image, clean and corrupted, as data URIs, with what was predicted before and after a method adapted."""

    method: str
    domain: str
    label: str
    clean: str
    corrupted: str
    before: Prediction
    after: Prediction


def embedded_examples(records: Sequence[Record], domains: int = 2, images: int = 96) -> list[Example]:
    """Return images with predictions before and after adaptation, if the records are of an embedded model.

    The method is MGTTA if it is among the records, and the model that of its first record. The domains are those in
    which its accuracy differs most from NoAdapt's, up or down. It adapts to `images` images by the records' protocol.
    Of the next batch there is up to one image that it corrects, one that it spoils, and one of which neither is true.
    """
    own = [r for r in records if r["experiment"] == "corruptions" and _reproducible(r.get("protocol") or {})]
    methods = sorted({r["method"] for r in own} - {"noadapt"}, key=lambda m: (m != "mgtta", m))
    if not methods:
        return []
    like = next(r for r in own if r["method"] == methods[0])
    name = like["protocol"]["model"]
    model = load_model(name)
    method = _method(like, model)
    clean = Held(EMBEDDED[name](min(images + like["batch_size"], like["images"])), Room(2**27))
    found = []
    for domain in _most_changed(own, like["method"])[:domains]:
        batches = stream(corrupted(clean, [domain], like["severity"]), batch_size=like["batch_size"], seed=like["seed"])
        method.reset()
        for batch in batches:
            after = method(batch.x)
        found += _examples(like["method"], domain, clean, batch, model(batch.x).detach(), after)
    return found


def _reproducible(protocol: dict[str, Any]) -> bool:
    """Return whether the records' model, images and generator are available here."""
    if protocol.get("model") not in EMBEDDED or protocol.get("checkpoint") is not None:
        return False
    if protocol.get("data") != EMBEDDED[protocol["model"]].title:
        return False
    generator = protocol.get("generator")
    return generator is None or generator in shipped("generators") or Path(generator).is_file()


def _method(like: Record, model: Classifier) -> Adapting:
    settings = dict(like.get("settings") or {})
    if SOURCE in recipe(like["method"]).needs:
        settings["source"] = load_source(like["protocol"]["model"])
    if "generator" in recipe(like["method"]).settings and like["protocol"].get("generator"):
        settings.setdefault("generator", like["protocol"]["generator"])
    return create(like["method"], model, **settings)


def _most_changed(records: Sequence[Record], method: str) -> list[str]:
    """Return the method's domains, those first in which its accuracy differs most from NoAdapt's."""
    top1 = {(r["method"], r["domain"]): r["top1"] or 0.0 for r in records}
    names = unique(r["domain"] for r in records if r["method"] == method)
    return sorted(names, key=lambda d: -abs(top1[method, d] - top1.get(("noadapt", d), top1[method, d])))


def _examples(method: str, domain: str, clean: Held, batch: Batch, before: Tensor, after: Tensor) -> list[Example]:
    labels = torch.as_tensor(batch.y)
    was = before.argmax(1).eq(labels)
    now = after.argmax(1).eq(labels)
    kinds = (~was & now, was & ~now, was == now)  # corrected, spoiled, neither
    names = list(clean.classes or [])

    def prediction(logits: Tensor, i: int) -> Prediction:
        confidence, k = logits[i].softmax(0).max(0)
        return Prediction(names[int(k)], float(confidence), int(k) == int(labels[i]))

    return [
        Example(
            method,
            domain,
            names[int(labels[i])],
            data_uri(clean[int(batch.index[i])][0]),
            data_uri(batch.x[i]),
            prediction(before, i),
            prediction(after, i),
        )
        for i in (int(kind.nonzero()[0]) for kind in kinds if kind.any())
    ]


def data_uri(image: Tensor) -> str:
    """Return an image (3, H, W), uint8 or float in [0, 1], as a PNG that a page can hold."""
    if image.is_floating_point():
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image.cpu().permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
