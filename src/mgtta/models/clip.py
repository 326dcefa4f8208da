"""CLIP as a zero-shot classifier: class names become text features once, and these become a linear head.

Shapes: N images, C classes, T templates, D features of the common space.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mgtta.models.classifier import Classifier
from mgtta.models.loading import load_model

TEMPLATES = ("a photo of a {}.",)
MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's own
STD = (0.26862954, 0.26130258, 0.27577711)
TEXTS_AT_ONCE = 256


class ZeroShot(nn.Module):
    """Images -> logits (N, C): the cosine of image and text features, times CLIP's scale.

    Only the image encoder is kept. The head is linear on features of unit length, so methods that read or replace a
    head work.
    """

    def __init__(self, encoder: nn.Module, text_features: Tensor, scale: Tensor, bias: Tensor | None = None):
        super().__init__()
        classes, width = text_features.shape
        self.encoder = encoder
        self.head = nn.Linear(width, classes, bias=bias is not None)
        with torch.no_grad():
            self.head.weight.copy_(scale * text_features)
            if bias is not None:
                self.head.bias.fill_(float(bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.normalize(self.encoder(x), dim=-1))


class _ImageEncoder(nn.Module):
    """The image encoder of a transformers model: images -> features (N, D)."""

    def __init__(self, model: Any):
        super().__init__()
        self.vision_model = model.vision_model
        self.visual_projection = getattr(model, "visual_projection", nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.visual_projection(self.vision_model(pixel_values=x).pooler_output)


def zero_shot(
    model: nn.Module,
    class_names: Sequence[str],
    tokenizer: Callable[..., Any],
    *,
    templates: Sequence[str] = TEMPLATES,
    processor: Any = None,
    **options: Any,
) -> Classifier:
    """Return a Classifier of these classes, from a copy of the image encoder.

    Args:
        model: a CLIPModel or SiglipModel of transformers, or a CLIP of open_clip.
        class_names: in the order of the labels.
        tokenizer: the model's own; in open_clip, what `open_clip.get_tokenizer` returned.
        templates: sentences with {} for a class name; the text features of a class are their mean.
        processor: as in `load_model`. Without it, images are normalised as CLIP's are, or as open_clip's model says.
        options: passed to `load_model`, such as mean, std or normalised.
    """
    if len(class_names) < 2 or isinstance(class_names, str):
        raise ValueError("class_names must be at least two names")
    if any("{}" not in template for template in templates) or not templates:
        raise ValueError("templates must be at least one sentence, each with {} for the class name")
    clip: Any = copy.deepcopy(model).eval()
    with torch.no_grad():
        texts = [template.format(name) for name in class_names for template in templates]
        features = F.normalize(_text_features(clip, texts, tokenizer), dim=-1)  # (C T, D)
        features = features.unflatten(0, (len(class_names), len(templates))).mean(1)  # (C, D)
        net = ZeroShot(_encoder(clip), F.normalize(features, dim=-1), clip.logit_scale.exp(), _bias(clip))
    if processor is None:
        processor = _preprocessing(clip, options)
    return load_model(net.to(features.device), processor=processor, **options)


def _text_features(model: Any, texts: list[str], tokenizer: Callable[..., Any]) -> Tensor:
    """Return the features of texts, one row each."""
    device = next(model.parameters()).device
    found = []
    for i in range(0, len(texts), TEXTS_AT_ONCE):
        some = texts[i : i + TEXTS_AT_ONCE]
        if hasattr(model, "encode_text"):  # open_clip
            found.append(model.encode_text(tokenizer(some).to(device)))
            continue
        tokens: Mapping[str, Tensor] = tokenizer(some, padding=True, truncation=True, return_tensors="pt")
        features = model.get_text_features(**{name: t.to(device) for name, t in tokens.items()})
        found.append(features if isinstance(features, Tensor) else features.pooler_output)
    return torch.cat(found)


def _encoder(model: Any) -> nn.Module:
    if hasattr(model, "encode_text"):
        return model.visual
    if not hasattr(model, "vision_model"):
        raise TypeError(f"{type(model).__name__} is not a CLIP of transformers or open_clip: it has no image encoder")
    return _ImageEncoder(model)


def _bias(model: Any) -> Tensor | None:
    """Return the bias of all logits, which SigLIP has and CLIP has not."""
    return getattr(model, "logit_bias", None)


def _preprocessing(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a processor: the size that the model tells, its normalisation, or CLIP's own."""
    visual = getattr(model, "visual", None)
    size = getattr(visual, "image_size", None)
    if size is None:
        size = getattr(getattr(getattr(model, "config", None), "vision_config", None), "image_size", None)
    config: dict[str, Any] = {"size": size}
    if "mean" not in options and not options.get("normalised"):
        config["image_mean"] = list(getattr(visual, "image_mean", None) or MEAN)
        config["image_std"] = list(getattr(visual, "image_std", None) or STD)
    return config
