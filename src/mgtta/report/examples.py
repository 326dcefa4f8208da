"""Example images with predictions before and after adaptation: the embedded characters, or the user's own images."""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mgtta._lib.names import spelled
from mgtta._lib.shipped import shipped
from mgtta.adaptation.wrapper import Adapting
from mgtta.data.cache import Held, Room
from mgtta.data.corruptions import CORRUPTIONS, VALIDATION_CORRUPTIONS
from mgtta.data.datasets import open_dataset, synsets
from mgtta.data.embedded import EMBEDDED
from mgtta.data.streams import corrupted, stream
from mgtta.methods.create import create
from mgtta.methods.registry import FISHER, SOURCE, recipe, recipes
from mgtta.models.classifier import Classifier
from mgtta.models.loading import load_model
from mgtta.models.source import SourceStatistics, load_source, source_statistics
from mgtta.report.summary import Record, unique

SIDE = 224  # pixels, of a shown image at most
PHOTO = 96  # pixels, from which on an image is stored as a JPEG
HELD_BYTES = 2**27  # of decoded images
CLEAN_IMAGES = 256  # for source statistics
LOOKED_AT = 128  # images, among which examples are found
PREFERRED = ("mgtta_plus", "mgtta")  # shown if they are among the records


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

    @property
    def outcome(self) -> str:
        """What adaptation did to the prediction: corrected, spoiled, still right or still wrong."""
        if self.after.right:
            return "still right" if self.before.right else "corrected"
        return "spoiled" if self.before.right else "still wrong"


@dataclass(frozen=True)
class Pictures:
    """What examples are made of: the records' model, images that it scores, and the names of its classes."""

    model: Classifier
    images: Any
    names: Sequence[str]
    source: SourceStatistics | None


def embedded_examples(records: Sequence[Record], domains: int = 2, images: int = 96) -> list[Example]:
    """Return images with predictions before and after adaptation, if the records are of an embedded model."""
    own = [r for r in records if _reproducible(r.get("protocol") or {})]
    like = shown_method(own)
    if like is None:
        return []
    name = like["protocol"]["model"]
    rendered = EMBEDDED[name](min(images + LOOKED_AT, like["images"]))
    pictures = Pictures(load_model(name), rendered, rendered.classes, load_source(name))
    return examples_of(own, pictures, domains, images)


def own_examples(
    records: Sequence[Record],
    data: str,
    checkpoint: str | os.PathLike | None = None,
    source: str | None = None,
    clean: str | None = None,
) -> list[Example]:
    """Return images of `data` with predictions of the records' model before and after adaptation.

    Args:
        data: images as `mgtta bench --data` takes them.
        checkpoint: the weights of the records, if they are not the model's own.
        source, clean: source statistics, or clean images to compute them from; needed if the method needs them.
    """
    like = shown_method(records)
    if like is None:
        raise ValueError("no method of these records can be shown: examples need records of a corruption, with a reset")
    protocol = like.get("protocol") or {}
    images = Held(_opened(data, load_model(protocol["model"], checkpoint)), Room(HELD_BYTES))
    model = load_model(protocol["model"], checkpoint, classes=images.class_indices)
    if images.class_indices is None and model.fingerprint() != protocol.get("weights"):
        raise ValueError(f"--checkpoint is not the one of these records (weights {protocol.get('weights')})")
    if images.labels is None:
        raise ValueError(f"the images of {data} have no labels: examples need them, as class folders or in tars")
    statistics = None
    if SOURCE in recipe(like["method"]).needs:
        statistics = _source(model, like["method"], source, clean)
    return examples_of(records, Pictures(model, images, class_names(images, model), statistics))


def _opened(data: str, model: Classifier) -> Any:
    side, crop_pct = model.input_size
    return open_dataset(data, size=side, crop_pct=crop_pct)


def _source(model: Classifier, method: str, source: str | None, clean: str | None) -> SourceStatistics:
    if source is not None:
        return load_source(source)
    if clean is None:
        raise ValueError(f"{method} needs source statistics: --source FILE, or --clean IMAGES to compute them from")
    return source_statistics(model, stream(_opened(clean, model), first=CLEAN_IMAGES))


def class_names(images: Any, model: Classifier) -> list[str]:
    """Return a name for each class that is scored: ImageNet's words, the folders' names, or numbers."""
    names = images.classes
    if names is None and model.num_classes == len(synsets()):
        names = list(synsets())
    words = _words()
    known = [words.get(name, name) for name in names or ()]
    return known + [f"class {k}" for k in range(len(known), model.num_classes)]


def _words() -> dict[str, str]:
    """Return synset -> the first of its words."""
    from mgtta._lib.timm import timm

    info = timm.data.ImageNetInfo()
    return {name: info.index_to_description(k).split(",")[0] for name, k in synsets().items()}


def shown_method(records: Sequence[Record]) -> Record | None:
    """Return a record of the method that examples are of: mgtta+, MGTTA, or another that adapts; None without one."""
    known = (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)
    own = [
        r
        for r in records
        if r["experiment"] in ("corruptions", "streams") and r["domain"] in known and r.get("reset") == "domain"
    ]
    methods = {r["method"] for r in own if r["method"] in recipes() and FISHER not in recipe(r["method"]).needs}
    order = sorted(methods - {"noadapt"}, key=lambda m: (m not in PREFERRED, [*PREFERRED, m].index(m), m))
    return next((r for m in order for r in own if r["method"] == m), None)


def examples_of(records: Sequence[Record], pictures: Pictures, domains: int = 2, images: int = 96) -> list[Example]:
    """Return examples from the domain that gains most and from the one that gains least, or loses.

    The method adapts to `images` images by the records' protocol, and goes on. Of those that follow there is up to one
    image that it corrects, one that it spoils, and one of which neither is true.
    """
    like = shown_method(records)
    if like is None:
        return []
    method = _method(like, pictures)
    found = []
    for domain in _ends(_by_gain(records, like), domains):
        batches = stream(
            corrupted(pictures.images, [domain], like["severity"]),
            batch_size=like["batch_size"],
            seed=like["seed"],
            first=images + LOOKED_AT,
        )
        method.reset()
        seen = 0
        predicted = []  # batches with their logits
        later = []  # those of them that come after `images` images
        for batch in batches:
            predicted.append((batch, method(batch.x)))
            seen += len(batch.x)
            if seen > images:
                later.append(predicted[-1])
        found += _examples(spelled(like["method"]), domain, pictures, later or predicted[-1:])
    return found


def _reproducible(protocol: dict[str, Any]) -> bool:
    """Return whether the records' model, images and generator are available here."""
    if protocol.get("model") not in EMBEDDED or protocol.get("checkpoint") is not None:
        return False
    if protocol.get("data") != EMBEDDED[protocol["model"]].title:
        return False
    return _has_generator(protocol)


def _has_generator(protocol: dict[str, Any]) -> bool:
    generator = protocol.get("generator")
    return generator is None or generator in shipped("generators") or Path(generator).is_file()


def _method(like: Record, pictures: Pictures) -> Adapting:
    protocol = like["protocol"]
    takes = recipe(like["method"]).settings
    settings = dict(like.get("settings") or {})
    if SOURCE in recipe(like["method"]).needs:
        settings["source"] = pictures.source
    if "generator" in takes and protocol.get("generator"):
        settings.setdefault("generator", protocol["generator"])
    return create(like["method"], pictures.model, **settings)


def _by_gain(records: Sequence[Record], like: Record) -> list[str]:
    """Return the method's domains, those first in which it gains most over NoAdapt."""
    same = [r for r in records if r["experiment"] == like["experiment"] and r.get("reset") == "domain"]
    top1 = {(r["method"], r["domain"]): r["top1"] or 0.0 for r in same}
    names = unique(r["domain"] for r in same if r["method"] == like["method"])
    names = [name for name in names if name in (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)]
    method = like["method"]
    return sorted(names, key=lambda d: top1.get(("noadapt", d), top1[method, d]) - top1[method, d])


def _ends(names: list[str], count: int) -> list[str]:
    """Return so many names: the first ones, and the last one."""
    if len(names) <= count:
        return names
    return [*names[: count - 1], names[-1]]


def _examples(method: str, domain: str, pictures: Pictures, batches: Sequence[tuple[Any, Tensor]]) -> list[Example]:
    x = torch.cat([batch.x for batch, _ in batches])
    labels = torch.cat([batch.y for batch, _ in batches])
    index = torch.cat([batch.index for batch, _ in batches])
    after = torch.cat([logits for _, logits in batches])
    before = torch.cat([pictures.model(batch.x).detach() for batch, _ in batches])
    was = before.argmax(1).eq(labels)
    now = after.argmax(1).eq(labels)
    kinds = (~was & now, was & ~now, was == now)  # corrected, spoiled, neither

    def prediction(logits: Tensor, i: int) -> Prediction:
        confidence, k = logits[i].softmax(0).max(0)
        return Prediction(pictures.names[int(k)], float(confidence), int(k) == int(labels[i]))

    return [
        Example(
            method,
            domain,
            pictures.names[int(labels[i])],
            data_uri(pictures.images[int(index[i])][0]),
            data_uri(x[i]),
            prediction(before, i),
            prediction(after, i),
        )
        for i in (int(kind.nonzero()[0]) for kind in kinds if kind.any())
    ]


def data_uri(image: Tensor) -> str:
    """Return an image (3, H, W), uint8 or float in [0, 1], that a page can hold: a PNG, or a JPEG of a photo."""
    if image.is_floating_point():
        image = (255 * image.clamp(0, 1)).round().to(torch.uint8)
    picture = Image.fromarray(image.cpu().permute(1, 2, 0).numpy())
    kind = "jpeg" if max(picture.size) >= PHOTO else "png"
    picture.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, kind.upper())
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
