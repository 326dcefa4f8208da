"""Example images with predictions before and after adaptation."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from mgtta.data.glyphs import CLASSES, Glyphs
from mgtta.data.streams import Batch, corrupted, stream
from mgtta.experiments import EMBEDDED
from mgtta.models import load_model
from mgtta.recipes import create, needs_source, recipe_settings
from mgtta.report.summary import Record, unique
from mgtta.source import load_source

CHARACTERS = "rendered characters"  # what bench calls the embedded data


@dataclass(frozen=True)
class Prediction:
    name: str
    confidence: float
    right: bool


@dataclass(frozen=True)
class Example:
    """An image, clean and corrupted, as data URIs, with what was predicted before and after adaptation."""

    domain: str
    label: str
    clean: str
    corrupted: str
    before: Prediction
    after: Prediction


def embedded_examples(records: Sequence[Record], domains: int = 3, images: int = 192) -> list[Example]:
    """Characters with predictions of the embedded model as it is and adapted, where the records are of these two.

    In each of some domains the method, MGTTA if it is among the records, adapts to `images` images as the records'
    protocol says; of its last batch up to one image is taken that it set right, one that it spoiled, and one that
    stayed as it was.
    """
    own = [
        r
        for r in records
        if (r.get("protocol") or {}).get("model") == EMBEDDED
        and r["protocol"].get("data") == CHARACTERS
        and r["experiment"] == "corruptions"
    ]
    methods = sorted({r["method"] for r in own} - {"noadapt"}, key=lambda m: (m != "mgtta", m))
    if not methods:
        return []
    mine = [r for r in own if r["method"] == methods[0]]
    names = unique(r["domain"] for r in mine)
    model, like = load_model(EMBEDDED), mine[0]
    settings = dict(like.get("settings") or {})
    if needs_source(like["method"]):
        settings["source"] = load_source(EMBEDDED)
    if "generator" in recipe_settings(like["method"]) and like["protocol"].get("generator"):
        settings.setdefault("generator", like["protocol"]["generator"])
    method = create(like["method"], model, **settings)
    characters = Glyphs(min(images, like["images"]))
    found = []
    for domain in names[:: max(1, len(names) // domains)][:domains]:
        batches = stream(
            corrupted(characters, [domain], like["severity"]), batch_size=like["batch_size"], seed=like["seed"]
        )
        method.reset()
        for batch in batches:
            after = method(batch.x)
        found += _examples(domain, characters, batch, model(batch.x).detach(), after)
    return found


def _examples(domain: str, clean: Glyphs, batch: Batch, before: Tensor, after: Tensor) -> list[Example]:
    labels = torch.as_tensor(batch.y)
    was, now = before.argmax(1).eq(labels), after.argmax(1).eq(labels)
    kinds = (~was & now, was & ~now, was == now)  # set right, spoiled, as it was

    def prediction(logits: Tensor, i: int) -> Prediction:
        confidence, k = logits[i].softmax(0).max(0)
        return Prediction(CLASSES[int(k)], float(confidence), int(k) == int(labels[i]))

    return [
        Example(
            domain,
            CLASSES[int(labels[i])],
            data_uri(clean[int(batch.index[i])][0]),
            data_uri(batch.x[i]),
            prediction(before, i),
            prediction(after, i),
        )
        for i in (int(kind.nonzero()[0]) for kind in kinds if kind.any())
    ]


def data_uri(image: Tensor) -> str:
    """An image (3, H, W), uint8 or float in [0, 1], as a PNG that a page can hold."""
    if image.is_floating_point():
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(image.cpu().permute(1, 2, 0).numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
