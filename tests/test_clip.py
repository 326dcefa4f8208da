"""CLIP as a zero-shot classifier: its logits are CLIP's own, and methods adapt it. Tiny random weights, no download."""

import pytest
import torch
import torch.nn.functional as F
from conftest import images, random_generator
from torch import nn

import mgtta
import mgtta._lib.timm  # torchvision must be imported in this way where its operators cannot be loaded
from mgtta.models.clip import MEAN, zero_shot

transformers = pytest.importorskip("transformers")

NAMES = ["cat", "dog", "fire engine", "owl", "tench"]
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**TOWER, "vocab_size": 99, "max_position_embeddings": 40, "bos_token_id": 97, "eos_token_id": 98}
VISION = {**TOWER, "image_size": 32, "patch_size": 8}


def tokenizer(texts, **_):
    """Letters as tokens, then the end of the text."""
    width = max(map(len, texts)) + 1
    rows = [[ord(c) % 97 for c in text] + [98] * (width - len(text)) for text in texts]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)
    return transformers.CLIPModel(config).eval()


def test_its_logits_are_clips_own(clip):
    model = zero_shot(clip, NAMES, tokenizer)
    x = images(4)
    tokens = tokenizer([f"a photo of a {name}." for name in NAMES])
    with torch.no_grad():
        expected = clip(pixel_values=model.prepare(x), **tokens).logits_per_image
    torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    assert model.input_size == (32, 1.0)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor(MEAN))
    assert not any("text" in name for name, _ in model.named_parameters())


def test_templates_are_averaged(clip):
    sentences = ["a photo of a {}.", "a drawing of a {}."]
    both = zero_shot(clip, NAMES, tokenizer, templates=sentences)
    scale = clip.logit_scale.exp()
    rows = [F.normalize(zero_shot(clip, NAMES, tokenizer, templates=[s]).head.weight, dim=1) for s in sentences]
    expected = scale * F.normalize(sum(rows) / 2, dim=1)
    torch.testing.assert_close(both.head.weight, expected)


@pytest.mark.parametrize("name", ["noadapt", "tent", "eata", "t3a", "mgtta", "mgtta+", "neo", "sar", "lame"])
def test_methods_adapt_it(clip, name):
    model = zero_shot(clip, NAMES, tokenizer)
    source = mgtta.source_statistics(model, images(16, seed=99))
    assert source.head_layer == "head"
    settings = {
        "eata": {"fisher": mgtta.fisher_information(model, images(8)), "margin": 10.0},
        "mgtta": {"source": source, "generator": random_generator()},
        "mgtta+": {"source": source, "generator": random_generator()},
    }
    method = mgtta.create(name, model, **settings.get(name, {}))
    for t in range(2):
        logits = method(images(6, seed=t))
        assert logits.shape == (6, len(NAMES))
        assert logits.isfinite().all()
    state = method.state_dict()
    expected = method(images(6, seed=3))
    method.load_state_dict(state)
    assert torch.equal(method(images(6, seed=3)), expected)
    if name != "lame":
        assert method.export()(model.prepare(images(6))).shape == (6, len(NAMES))


class OpenClip(nn.Module):
    """The interface of open_clip's models, as far as it is used."""

    def __init__(self, clip):
        super().__init__()
        self.text = clip
        self.visual = Visual(clip)
        self.logit_scale = clip.logit_scale

    def encode_text(self, tokens):
        features = self.text.get_text_features(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        return getattr(features, "pooler_output", features)


class Visual(nn.Module):
    image_size = (32, 32)
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.25, 0.25, 0.25)

    def __init__(self, clip):
        super().__init__()
        self.tower = clip.vision_model
        self.proj = clip.visual_projection

    def forward(self, x):
        return self.proj(self.tower(pixel_values=x).pooler_output)


def test_the_interface_of_open_clip(clip):
    model = zero_shot(OpenClip(clip), NAMES, lambda texts: tokenizer(texts)["input_ids"])
    assert model.mean.flatten().tolist() == [0.5] * 3
    assert model.input_size == (32, 1.0)
    same = zero_shot(clip, NAMES, tokenizer, mean=[0.5] * 3, std=[0.25] * 3)
    torch.testing.assert_close(model(images(4)), same(images(4)))


def test_siglip_has_a_bias():
    torch.manual_seed(0)
    config = transformers.SiglipConfig(text_config={**TEXT, "projection_size": 16}, vision_config=VISION)
    siglip = transformers.SiglipModel(config).eval()
    model = zero_shot(siglip, NAMES, tokenizer, processor={"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    tokens = tokenizer([f"a photo of a {name}." for name in NAMES])
    with torch.no_grad():
        expected = siglip(pixel_values=model.prepare(images(4)), **tokens).logits_per_image
    torch.testing.assert_close(model(images(4)), expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_is_told(clip):
    with pytest.raises(ValueError, match="at least two names"):
        zero_shot(clip, ["cat"], tokenizer)
    with pytest.raises(ValueError, match=r"each with \{\}"):
        zero_shot(clip, NAMES, tokenizer, templates=["a photo"])
    with pytest.raises(TypeError, match="no image encoder"):
        wrong = nn.Linear(2, 2)
        wrong.get_text_features = lambda **_: torch.zeros(len(NAMES), 3)
        wrong.logit_scale = nn.Parameter(torch.ones(()))
        zero_shot(wrong, NAMES, tokenizer)
