"""Models of Hugging Face: outputs are unwrapped, processors are read, and methods adapt them. No download."""

import json

import pytest
import torch
from conftest import CLASSES, convnet, images, random_generator
from torch import nn

import mgtta
import mgtta._lib.timm  # torchvision must be imported in this way where its operators cannot be loaded
from mgtta.models.processor import preprocessing

transformers = pytest.importorskip("transformers")

TRANSFORMER = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
STAGES = {"depths": [1, 1], "image_size": 32, "num_labels": CLASSES}


def vit():
    config = transformers.ViTConfig(**TRANSFORMER, intermediate_size=32, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


def dinov2():
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**TRANSFORMER, num_labels=CLASSES))


def convnext():
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], num_stages=2, **STAGES)
    return transformers.ConvNextForImageClassification(config)


def swin():
    config = transformers.SwinConfig(patch_size=2, embed_dim=8, num_heads=[1, 2], window_size=4, **STAGES)
    return transformers.SwinForImageClassification(config)


NETS = [vit, dinov2, convnext, swin]


@pytest.fixture(params=NETS, ids=lambda make: make.__name__)
def net(request):
    torch.manual_seed(0)
    return request.param().eval()


def test_methods_adapt_and_resume_and_export(net):
    model = mgtta.load_model(net)
    x = images(6)
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x).logits)
    assert model.num_classes == CLASSES
    assert model.input_size[0] == 32
    source = mgtta.source_statistics(model, images(16, seed=99))
    assert source.head_layer == "classifier"
    plus = {"source": source, "generator": random_generator(), "gather": 0, "recall": 0}
    for name, settings in {"tent": {}, "mgtta+": plus}.items():
        method = mgtta.create(name, model, **settings)
        first = [method(x) for _ in range(2)]
        assert method.updates == 2
        assert not torch.equal(*first)
        state = method.state_dict()
        following = method(x)
        method.reset()
        assert torch.equal(method(x), first[0])
        method.load_state_dict(state)
        assert torch.equal(method(x), following)
        exported = method.export()
        assert type(exported) is type(net)
        assert exported(x).logits.shape == (6, CLASSES)
    fast = mgtta.create("mgtta+", model, precision="bf16", **settings)
    assert fast(x).dtype == torch.float32


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.net = convnet("group")
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(self.net(x))


@pytest.mark.parametrize(
    "wrap",
    [lambda y: {"logits": y, "loss": None}, lambda y: (y, y + 1), lambda y: [y]],
    ids=["dict", "tuple", "list"],
)
def test_outputs_in_dicts_and_tuples_are_unwrapped(wrap):
    x = images(4)
    model = mgtta.load_model(Returns(wrap))
    assert torch.equal(model(x), model.net.net(x))
    assert mgtta.source_statistics(model, x).head_layer == "net.8"


@pytest.mark.parametrize("wrap", [lambda y: {"scores": y}, lambda y: None, lambda y: ()], ids=["dict", "None", "empty"])
def test_outputs_without_logits_are_refused(wrap):
    with pytest.raises(ValueError, match="one tensor of logits"):
        mgtta.load_model(Returns(wrap))(images(2))


def test_the_layers_of_a_channels_first_convnext_are_pooled_over_places():
    """(N, d, H, W) -> (N, d): the norms between stages take channels first, those in blocks channels last."""
    model = mgtta.load_model(convnext())
    _, features = model.features(images(4))
    widths = [model.net.get_submodule(tap.name).weight.numel() for tap in model._taps]
    assert [f.shape for f in features] == [(4, d) for d in widths]


# --- processors


def test_a_processors_normalisation_and_size(tmp_path):
    config = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "size": {"height": 32, "width": 32}}
    model = mgtta.load_model(vit(), processor=config)
    x = images(4)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("image_mean", "image_std"))
    torch.testing.assert_close(model.prepare(x), (x - mean) / std)
    assert model.input_size == (32, 1.0)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "preprocessor_config.json"):
        assert preprocessing(path) == preprocessing(config)
    own = mgtta.load_model(vit(), processor=config, mean=[0.0] * 3, std=[1.0] * 3)
    assert own.mean.flatten().tolist() == [0.0] * 3
    with pytest.raises(TypeError, match="processor must be an image processor"):
        mgtta.load_model(vit(), processor=3)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224}}, (224, 0.875)),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, (224, 0.875)),
        ({"size": 384}, (384, 1.0)),
        ({"size": [96, 96]}, (96, 1.0)),
        ({"do_normalize": True}, None),
    ],
)
def test_sizes_in_processors(config, size):
    assert preprocessing(config).size == size


def test_rescaling_in_processors_is_part_of_the_normalisation():
    """EfficientNet's processor: pixels / 127.5 - 1, then mean and std."""
    config = {"image_mean": [0.1] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 127.5, "rescale_offset": True}
    found = preprocessing(config)
    x = torch.tensor([0.0, 0.25, 1.0])
    expected = ((255 * x / 127.5 - 1) - 0.1) / 0.5
    torch.testing.assert_close((x - found.mean[0]) / found.std[0], expected)
    assert preprocessing({"do_normalize": False, "image_mean": [0.1] * 3}).mean is None


@pytest.mark.parametrize("name", ["ViTImageProcessor", "ConvNextImageProcessor", "CLIPImageProcessor"])
def test_processors_of_transformers(name):
    processor = getattr(transformers, name)()
    found = preprocessing(processor)
    pixels = torch.randint(0, 256, (3, found.size[0], found.size[0]), dtype=torch.uint8)
    whole = {"do_resize": False, "do_center_crop": False, "input_data_format": "channels_first"}
    [given] = processor(pixels.numpy(), return_tensors="pt", **whole)["pixel_values"]
    model = mgtta.load_model(convnet("group"), processor=processor)
    torch.testing.assert_close(model.prepare(pixels[None])[0], torch.as_tensor(given), atol=1e-5, rtol=1e-5)
