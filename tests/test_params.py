"""Which parameters adapt if a user says so (`params`), and norm layers of a user's own class (`norm_types`)."""

import pytest
import torch
from conftest import CLASSES, convnet, images, random_generator, vit
from torch import nn

import mgtta
from mgtta._lib.timm import timm


def moved(method):
    """The names of the parameters that an adaptation moved, as the user's network has them."""
    for t in range(2):
        method(images(8, seed=t))
    pairs = zip(method.adapted.items(), method.origin, strict=True)
    return {name.removeprefix("net.") for (name, p), origin in pairs if not torch.equal(p, origin)}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ("norm", {"norm.weight", "norm.bias"}),
        (["norm.bias", "blocks.1.norm1.weight"], {"norm.bias", "blocks.1.norm1.weight"}),
        ("blocks.*.norm2.bias, head.bias", {f"blocks.{i}.norm2.bias" for i in range(3)} | {"head.bias"}),
        (lambda net: net.blocks[2].norm1.parameters(), {"blocks.2.norm1.weight", "blocks.2.norm1.bias"}),
        (lambda net: [net.blocks[0].mlp.fc1.weight], {"blocks.0.mlp.fc1.weight"}),
    ],
    ids=["module", "names", "patterns", "function", "matrix"],
)
@pytest.mark.parametrize("name", ["tent", "mgtta", "sar"])
def test_only_the_chosen_parameters_move(name, params, expected):
    model = mgtta.load_model(vit())
    settings = {}
    if name == "mgtta":
        settings = {"source": mgtta.source_statistics(model, images(16, seed=99)), "generator": random_generator()}
    if name == "sar":
        settings = {"margin": 2.0}
    method = mgtta.create(name, model, lr=0.1, params=params, **settings)
    assert {full.removeprefix("net.") for full in method.adapted} == expected
    found = moved(method)
    assert found == expected if name != "tent" else found <= expected
    method.reset()
    exported = method.export()
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), vit().parameters(), strict=True))
    assert model.adapts is None  # the user's model stays as it is


def test_choices_that_cannot_be_are_told():
    model = mgtta.load_model(vit())
    with pytest.raises(ValueError, match=r"no parameter is named 'nrom'.*named_parameters"):
        mgtta.create("tent", model, params="nrom")
    with pytest.raises(ValueError, match="chooses no parameter"):
        mgtta.create("tent", model, params=lambda net: [])
    with pytest.raises(ValueError, match="parameters of the network that it was given"):
        mgtta.create("tent", model, params=lambda net: [nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="names, patterns or a function"):
        mgtta.create("tent", model, params=[3])
    with pytest.raises(ValueError, match="noadapt adapts no parameters"):
        mgtta.create("noadapt", model, params="norm")
    with pytest.raises(ValueError, match="outside normalisation layers, which would be rounded"):
        mgtta.create("tent", model, params="head", precision="bf16")
    assert mgtta.create("tent", model, params="norm", precision="bf16").precision == "bf16"
    fisher = mgtta.fisher_information(model, images(8))
    with pytest.raises(ValueError, match=r"net\.head\.weight is none of them: take eta"):
        mgtta.create("eata", model, fisher=fisher, params="head")


def test_a_state_of_other_parameters_is_refused():
    model = mgtta.load_model(vit())
    state = mgtta.create("tent", model, params="norm").state_dict()
    with pytest.raises(ValueError, match="parameters have other names"):
        mgtta.create("tent", model).load_state_dict(state)


class Scale(nn.Module):
    """A norm layer of a user's own class, channels first."""

    def __init__(self, channels):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        return x / x.square().mean((1, 2, 3), keepdim=True).sqrt() * self.gain + self.shift


def own_norms():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        Scale(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        Scale(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def test_norm_layers_of_your_own_class_adapt_and_are_read():
    with pytest.raises(ValueError, match=r"no normalisation layer.*norm_types=\[THE_CLASS\]"):
        mgtta.load_model(own_norms())
    model = mgtta.load_model(own_norms(), norm_types=[Scale])
    _, features = model.features(images(4))
    assert [f.shape for f in features] == [(4, 8), (4, 16)]
    torch.testing.assert_close(features[0], model.net[:2](images(4)).mean((2, 3)))
    expected = {"1.gain", "1.shift", "4.gain", "4.shift"}
    source = mgtta.source_statistics(model, images(16, seed=99))
    for precision in ("fp32", "bf16"):
        method = mgtta.create("mgtta+", model, source=source, generator=random_generator(), precision=precision)
        assert moved(method) == expected
    assert moved(mgtta.create("tent", own_norms(), norm_types=Scale, lr=0.1)) == expected
    assert len(mgtta.create("sar", model).adapted) == 2  # the first of two norm layers
    with pytest.raises(ValueError, match=r"give norm_types to mgtta\.load_model"):
        mgtta.create("tent", mgtta.load_model(convnet("group")), norm_types=Scale)
    with pytest.raises(TypeError, match="norm_types are classes"):
        mgtta.load_model(own_norms(), norm_types=["Scale"])


def test_resmlp_adapts_by_its_affine_layers():
    mixer = timm.models.mlp_mixer
    small = {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 16, "mlp_ratio": 4, "num_classes": CLASSES}
    net = mixer.MlpMixer(block_layer=mixer.ResBlock, norm_layer=mixer.Affine, **small)
    torch.nn.init.normal_(net.head.weight)  # timm's is zero
    model = mgtta.load_model(net, norm_types=mixer.Affine)
    _, features = model.features(images(4))
    assert {f.shape for f in features} == {(4, 16)}
    assert moved(mgtta.create("tent", model, lr=0.1))
