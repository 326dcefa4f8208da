import copy
import pickle
import sys
import warnings

import pytest
import torch
from conftest import CLASSES, convnet, images, vit
from safetensors.torch import save_file
from torch import nn

import mgtta
from mgtta._lib.timm import timm

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": CLASSES}


def test_a_timm_name_brings_its_own_normalisation():
    model = mgtta.load_model("deit_tiny_patch16_224", pretrained=False, **SMALL)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    x = images(4)
    expected = model.net((x - model.mean) / model.std)
    assert torch.equal(model(x), expected)
    assert mgtta.load_model("vit_tiny_patch16_224", pretrained=False, **SMALL).std.flatten().tolist() == [0.5] * 3


def test_a_users_module_is_copied_and_takes_images_as_they_are():
    net = convnet("group")
    model = mgtta.load_model(net)
    x = images(4)
    assert torch.equal(model(x), net(x))
    with torch.no_grad():
        model.net[0].weight.zero_()
    assert net[0].weight.abs().sum() > 0


def test_feature_layers_of_a_vit_are_the_papers(model):
    """Class token after the next block's first norm; after the final norm for the last layer."""
    x = images(4)
    logits, features = model.features(x)
    net = model.net
    tokens = net.norm_pre(net._pos_embed(net.patch_embed(x)))
    expected = []
    for i, block in enumerate(net.blocks):
        if i > 0:
            expected.append(block.norm1(tokens)[:, 0])
        tokens = block(tokens)
    expected.append(net.norm(tokens)[:, 0])
    assert len(features) == len(expected) == 3
    for f, e in zip(features, expected, strict=True):
        torch.testing.assert_close(f, e)
    assert torch.equal(logits, model(x))


def test_features_without_a_class_token_average_the_tokens():
    model = mgtta.load_model("vit_tiny_patch16_224", pretrained=False, class_token=False, global_pool="avg", **SMALL)
    x = images(4)
    _, features = model.features(x)
    assert model._taps[-1].name == "fc_norm"
    torch.testing.assert_close(features[-1], model.net.forward_head(model.net.forward_features((x - 0.5) / 0.5), True))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("convnext_atto", 17),
        ("resnet18", 20),
        ("resnet26d", 31),
        ("swin_tiny_patch4_window7_224", 29),
        ("mixer_s32_224", 8),
    ],
)
@pytest.mark.slow
def test_features_of_timm_families(name, layers):
    model = mgtta.load_model(name, pretrained=False, num_classes=7)
    logits, features = model.use_batch_statistics().features(torch.rand(2, 3, 224, 224))
    assert logits.shape == (2, 7)
    assert len(features) == layers
    assert all(f.ndim == 2 and len(f) == 2 and f.isfinite().all() for f in features)


def test_class_subset():
    keep = [7, 2, 5]
    model, whole = mgtta.load_model(vit(), classes=keep), mgtta.load_model(vit())
    x = images(4)
    assert torch.equal(model(x), whole(x)[:, keep])


@pytest.mark.parametrize("classes", [[0, CLASSES], [1], [0, 0, 1], [-1, 2], [0.5, 1.7], "12"])
def test_an_invalid_class_subset_is_refused(classes):
    with pytest.raises(ValueError, match="classes"):
        mgtta.load_model(vit(), classes=classes)


def test_a_class_subset_of_a_module_that_does_not_tell_its_classes():
    model = mgtta.load_model(convnet("group"), classes=[0, 99])
    with pytest.raises(ValueError, match="the model has 10 classes"):
        model(images(2))


def test_uint8_images_are_scaled(model):
    x = (images(4) * 255).to(torch.uint8)
    torch.testing.assert_close(model(x), model(x.float() / 255))


def test_dropout_stays_off_and_batch_statistics_on():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    model = mgtta.load_model(net).use_batch_statistics()
    x = torch.rand(6, 3, 2, 2)
    running = net[2].running_mean.clone()
    hidden = net[1](x.flatten(1))
    normed = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
    for switched in (model, model.train(), model.eval()):
        torch.testing.assert_close(switched(x), net[4](normed))
    assert torch.equal(model.net[2].running_mean, running)
    assert model.net[2].num_batches_tracked == 0
    one = (hidden[:1] - running) / (net[2].running_var + 1e-5).sqrt()
    torch.testing.assert_close(model(x[:1]), net[4](one))  # one value a channel: running statistics serve


@pytest.mark.parametrize("kind", ["safetensors", "pth", "wrapped", "dataparallel"])
def test_checkpoints(tmp_path, kind):
    state = vit(seed=3).state_dict()
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "dataparallel":
        torch.save({"model": {f"module.{k}": v for k, v in state.items()}}, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "wrapped" else state, path)
    x = images(2)
    assert torch.equal(mgtta.load_model(vit(), checkpoint=path)(x), vit(seed=3)(x))


def prefixed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize("kind", ["lightning", "averaged", "timm ema", "deit ema", "lightning ema", "nested"])
def test_checkpoints_of_other_trainers(tmp_path, kind):
    """Averaged weights come first, as in timm; a loss beside the network is left out."""
    state = vit(seed=3).state_dict()
    other = vit(seed=4).state_dict()
    loss = {"criterion.weight": torch.ones(3)}
    saved = {
        "lightning": {"state_dict": {**prefixed(state, "model."), **loss}, "epoch": 3},
        "averaged": {**prefixed(state, "module."), "n_averaged": torch.tensor(7)},
        "timm ema": {"state_dict": other, "state_dict_ema": state, "arch": "vit"},
        "deit ema": {"model": other, "model_ema": state, "optimizer": {"state": {}}},
        "lightning ema": {"state_dict": {**prefixed(other, "model."), **prefixed(state, "model_ema.module.")}},
        "nested": {"model": prefixed(state, "module._orig_mod.")},
    }
    torch.save(saved[kind], tmp_path / "w.pth")
    x = images(2)
    assert torch.equal(mgtta.load_model(vit(), checkpoint=tmp_path / "w.pth")(x), vit(seed=3)(x))


def test_a_prefixed_checkpoint_is_loaded_strictly(tmp_path):
    state = prefixed(vit().state_dict(), "model.")
    torch.save({"state_dict": {**state, "model.extra": torch.ones(1)}}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"unknown: extra"):
        mgtta.load_model(vit(), checkpoint=tmp_path / "w.pth")
    del state["model.norm.weight"]
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"missing: norm\.weight"):
        mgtta.load_model(vit(), checkpoint=tmp_path / "w.pth")


def test_bad_checkpoints(tmp_path):
    good = tmp_path / "good.safetensors"
    save_file(vit().state_dict(), good)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        mgtta.load_model(vit(), checkpoint=tmp_path / "nowhere.safetensors")
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        mgtta.load_model(vit(), checkpoint=truncated)
    renamed = tmp_path / "renamed.safetensors"
    torch.save(vit().state_dict(), renamed)
    with pytest.raises(ValueError, match="another format than its name says"):
        mgtta.load_model(vit(), checkpoint=renamed)
    pickled = tmp_path / "pickled.pth"
    torch.save({"state_dict": vit(), "x": print}, pickled)
    with pytest.raises(ValueError, match="never unpickled"):
        mgtta.load_model(vit(), checkpoint=pickled)
    garbage = tmp_path / "garbage.pth"
    garbage.write_bytes(b"\x00garbage" * 20)
    with pytest.raises(ValueError, match="damaged"):
        mgtta.load_model(vit(), checkpoint=garbage)
    a_list = tmp_path / "list.pth"
    torch.save([torch.zeros(2)], a_list)
    with pytest.raises(ValueError, match="list"):
        mgtta.load_model(vit(), checkpoint=a_list)


def test_a_checkpoint_of_another_model_names_the_difference(tmp_path):
    other = timm.models.VisionTransformer(**{**SMALL, "num_classes": 4})
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"head.weight is \(4, 16\), the model's is \(10, 16\).*num_classes"):
        mgtta.load_model(vit(), checkpoint=tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="missing: "):
        mgtta.load_model(convnet("group"), checkpoint=tmp_path / "w.safetensors")


def test_names_and_arguments():
    with pytest.raises(ValueError, match="deit_tiny_patch16_224"):
        mgtta.load_model("deit_tiny_patch16_22")
    with pytest.raises(ValueError, match="no_such_thing"):
        mgtta.load_model("deit_tiny_patch16_224", pretrained=False, no_such_thing=1)
    with pytest.raises(ValueError, match="only for a timm name"):
        mgtta.load_model(vit(), num_classes=3)
    with pytest.raises(TypeError, match="int"):
        mgtta.load_model(3)
    with pytest.raises(ValueError, match="already"):
        mgtta.load_model(mgtta.load_model(vit()))
    with pytest.raises(ValueError, match="both or neither"):
        mgtta.load_model(vit(), mean=[0.5, 0.5, 0.5])


def test_weights_that_cannot_be_downloaded_name_the_remedy(monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(timm, "create_model", no_network)
    with pytest.raises(RuntimeError, match="checkpoint="):
        mgtta.load_model("deit_tiny_patch16_224")


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.rand(3, 32, 32), ValueError, "unsqueeze"),
        (torch.rand(2, 1, 32, 32), ValueError, r"refuses images of shape \(2, 1, 32, 32\)"),
        (torch.rand(0, 3, 32, 32), ValueError, "empty"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.int64), TypeError, "int64"),
        (torch.rand(2, 3, 48, 48), ValueError, "refuses images"),
        ([[1.0]], TypeError, "list"),
    ],
)
def test_bad_images(model, x, error, message):
    with pytest.raises(error, match=message):
        model(x)


def test_shapes_are_checked_before_the_network_where_the_normalisation_tells_them():
    model = mgtta.load_model("vit_tiny_patch16_224", pretrained=False, **SMALL)
    with pytest.raises(ValueError, match=r"\(N, 3, H, W\), not \(2, 1, 32, 32\)"):
        model(torch.rand(2, 1, 32, 32))
    with pytest.raises(TypeError, match="NoneType"):
        model.features(None)


def test_other_numbers_of_channels():
    with pytest.raises(ValueError, match=r"takes 1 channels.*mean="):
        mgtta.load_model("vit_tiny_patch16_224", pretrained=False, in_chans=1, **SMALL)
    grey = mgtta.load_model("vit_tiny_patch16_224", pretrained=False, in_chans=1, mean=[0.5], std=[0.5], **SMALL)
    assert grey(torch.rand(2, 1, 32, 32)).shape == (2, CLASSES)


class Odd(nn.Module):
    """Its first convolution is not its first layer, and it takes images without a channel axis."""

    def __init__(self):
        super().__init__()
        self.late = nn.Conv2d(8, 8, 1)
        self.stem = nn.Conv2d(1, 8, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.unused = nn.LayerNorm(5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.late(self.norm(self.stem(x.unsqueeze(1)))))
        return self.head(x.mean((2, 3)))


def test_odd_user_modules():
    model = mgtta.load_model(Odd())
    x = torch.rand(4, 9, 9)
    source = mgtta.source_statistics(model, x)
    assert len(source.mean) == 1  # the shared norm counts once, the unused one not at all
    method = mgtta.create("eq7_sgd", model, source=source)
    method(x)
    assert method.updates == 1


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)  # (N, L, 8)
        out = self.encoder(tokens if self.batch_first else tokens.transpose(0, 1))
        return self.head(out.mean(1 if self.batch_first else 0))


def test_features_of_a_sequence_first_transformer_equal_those_of_a_batch_first_one():
    x = torch.rand(4, 8, 3, 3)
    first, second = (mgtta.load_model(Encoder(b)).features(x)[1] for b in (True, False))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


def test_a_vit_inside_a_users_module_keeps_the_papers_layers(model):
    wrapped = mgtta.load_model(nn.Sequential(vit()))
    x = images(4)
    for a, b in zip(wrapped.features(x)[1], model.features(x)[1], strict=True):
        assert torch.equal(a, b)


def test_the_shipped_model_takes_no_arguments_that_do_not_apply(tmp_path):
    with pytest.raises(FileNotFoundError):
        mgtta.load_model("glyphs_vit", checkpoint=tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="num_classes"):
        mgtta.load_model("glyphs_vit", num_classes=3)
    assert mgtta.load_model("glyphs_vit", mean=[0.0] * 3, std=[1.0] * 3).mean.flatten().tolist() == [0.0] * 3


@pytest.mark.parametrize("legacy", [False, True])
def test_every_truncation_of_a_torch_file_is_named(tmp_path, legacy):
    path = tmp_path / "w.pth"
    torch.save(convnet("group").state_dict(), path, _use_new_zipfile_serialization=not legacy)
    data = path.read_bytes()
    for cut in range(0, len(data), len(data) // 40):
        path.write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"w\.pth"):
            mgtta.load_model(convnet("group"), checkpoint=path)


def test_a_module_that_is_called_module_loads_its_own_weights(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = vit(seed=3)

        def forward(self, x):
            return self.module(x)

    torch.save(Wrapper().state_dict(), tmp_path / "w.pth")
    x = images(2)
    assert torch.equal(mgtta.load_model(Wrapper(), checkpoint=tmp_path / "w.pth")(x), Wrapper()(x))
    torch.save({f"_orig_mod.{k}": v for k, v in vit(seed=3).state_dict().items()}, tmp_path / "c.pth")
    assert torch.equal(mgtta.load_model(vit(), checkpoint=tmp_path / "c.pth")(x), vit(seed=3)(x))


def test_models_without_norm_layers_or_classes_are_refused():
    with pytest.raises(ValueError, match="no normalisation layer"):
        mgtta.load_model(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    with pytest.raises(ValueError, match="no normalisation layer"):
        mgtta.norm_parameters(nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)))
    segmenter = mgtta.load_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)))
    with pytest.raises(ValueError, match="one tensor of logits"):
        segmenter(images(2))
    with pytest.raises(ValueError, match="no classes"):
        mgtta.load_model("vit_tiny_patch16_224", pretrained=False, **{**SMALL, "num_classes": 0})


def test_norm_parameters_of_deit_tiny_are_9600():
    params = mgtta.norm_parameters(timm.create_model("deit_tiny_patch16_224"))
    assert len(params) == 50
    assert sum(p.numel() for p in params) == 9600


def test_fingerprint():
    model = mgtta.load_model(vit())
    assert model.fingerprint() == mgtta.load_model(vit()).fingerprint()
    assert model.fingerprint() == mgtta.load_model(vit().double()).fingerprint()
    assert model.fingerprint() != mgtta.load_model(vit(seed=1)).fingerprint()
    nudged = vit()
    with torch.no_grad():
        nudged.norm.weight[0] += 1e-4
    assert model.fingerprint() != mgtta.load_model(nudged).fingerprint()
    assert model.fingerprint() != mgtta.load_model(vit(), mean=[0.5] * 3, std=[0.5] * 3).fingerprint()


# --- images that are already normalised


def deit():
    return mgtta.load_model("deit_tiny_patch16_224", pretrained=False, **SMALL)


def warned_by(model, x):
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(x)
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    "x",
    [(images(4) - 0.45) / 0.22, images(4) * 255, images(4) * 2 - 1],
    ids=["normalised", "0-255", "-1 to 1"],
)
def test_float_images_outside_0_1_are_warned_about_once(x):
    model = deit()
    with pytest.warns(UserWarning, match=r"outside \[0, 1\].*uint8.*load_model\(\.\.\., normalised=True\)"):
        model(x)
    assert not warned_by(model, x)
    with pytest.warns(UserWarning, match="outside"):
        deit().features(x)


def test_images_as_they_should_be_bring_no_warning(recwarn):
    model = deit()
    model(images(4))
    model((images(4) * 255).to(torch.uint8))
    model(images(4) + 0.1 * torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)).clamp(-1, 1))
    mgtta.load_model(vit())((images(4) - 0.45) / 0.22)  # no mean and std are known
    for value in (float("inf"), float("nan")):
        deit()(torch.full((2, 3, 32, 32), value))  # not finite: another matter
    assert not recwarn.list


def test_only_the_first_batches_are_looked_at():
    model = deit()
    for _ in range(3):
        assert not warned_by(model, images(2))
    assert not warned_by(model, images(2) * 255)
    late = deit()
    assert not warned_by(late, images(2))
    with pytest.warns(UserWarning, match="outside"):
        late(images(2) * 255)


def test_a_method_warns_about_normalised_images():
    method = mgtta.create("tent", deit())
    x = (images(4) - 0.45) / 0.22
    with pytest.warns(UserWarning, match="outside"):
        method(x)
    assert method.updates == 1
    assert not warned_by(method, x)


def test_normalised_images_go_to_the_network_as_they_are():
    plain = deit()
    torch.manual_seed(0)
    model = mgtta.load_model("deit_tiny_patch16_224", pretrained=False, normalised=True, **SMALL)
    model.net.load_state_dict(plain.net.state_dict())
    x = images(4)
    given = (x - plain.mean) / plain.std
    assert model.mean is None
    assert model.std is None
    assert model.normalised
    assert torch.equal(model(given), plain(x))
    assert copy.deepcopy(model).normalised
    assert pickle.loads(pickle.dumps(model)).normalised
    with pytest.raises(TypeError, match="uint8 images are not normalised"):
        model((x * 255).to(torch.uint8))
    with pytest.raises(ValueError, match="normalised=True"):
        mgtta.load_model(vit(), mean=[0.5] * 3, std=[0.5] * 3, normalised=True)
    method = mgtta.create("tent", model)
    method(given)
    assert method.updates == 1


# --- outputs that are not logits, and wrapped modules


def test_a_head_of_one_logit_names_the_remedy():
    net = convnet("group")
    net[-1] = nn.Linear(16, 1)
    with pytest.raises(ValueError, match=r"one logit.*torch\.cat\(\[-z, z\], dim=1\) / 2"):
        mgtta.load_model(net)(images(2))
    with pytest.raises(ValueError, match="one logit"):
        mgtta.load_model("vit_tiny_patch16_224", pretrained=False, **{**SMALL, "num_classes": 1})


def test_the_remedy_for_one_logit_is_right():
    z = torch.tensor([[-3.0], [0.2], [5.0]])
    torch.testing.assert_close((torch.cat([-z, z], dim=1) / 2).softmax(1)[:, 1:], z.sigmoid())


def test_softmax_outputs_are_warned_about_once():
    model = mgtta.load_model(nn.Sequential(*convnet("group"), nn.Softmax(1)))
    with pytest.warns(UserWarning, match="look like softmax probabilities.*logarithm"):
        model(images(4))
    assert not warned_by(model, images(4))
    logarithms = mgtta.load_model(nn.Sequential(*convnet("group"), nn.LogSoftmax(1)))
    assert not warned_by(logarithms, images(4))


def test_a_compiled_module_is_unwrapped():
    net = convnet("group")
    own = mgtta.load_model(net)
    compiled, compiled_classifier = (torch.compile(module, backend="eager") for module in (net, own))
    model = mgtta.load_model(compiled)
    assert type(model.net) is nn.Sequential
    assert torch.equal(model(images(4)), net(images(4)))
    assert type(mgtta.create("tent", compiled_classifier).model) is mgtta.Classifier
    with pytest.raises(ValueError, match="already"):
        mgtta.load_model(compiled_classifier)


def test_a_torchscript_module_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about TorchScript
        traced = torch.jit.trace(convnet("group"), images(2))
    with pytest.raises(ValueError, match=r"TorchScript module cannot adapt.*give the nn\.Module"):
        mgtta.load_model(traced)


# --- your own function as the model's name


BUILDERS = """
import torch
from torch import nn
import mgtta

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4, 5))

def classifier():
    return mgtta.load_model(net(), mean=[0.5] * 3, std=[0.25] * 3, processor={"size": 24}, classes=[0, 2])

def number():
    return 3
"""


@pytest.fixture
def builders(tmp_path, monkeypatch):
    (tmp_path / "my_builders.py").write_text(BUILDERS)
    (tmp_path / "my_broken.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_builders", None)


def test_a_function_of_yours_is_a_name(builders):
    model = mgtta.load_model("my_builders:net")
    assert model.name == "Sequential"
    assert model.mean is None
    assert model(images(2)).shape == (2, 5)
    own = mgtta.load_model("my_builders:classifier")
    assert own(images(2)).shape == (2, 2)
    assert own.input_size == (24, 1.0)
    assert own.std.flatten().tolist() == [0.25] * 3
    assert mgtta.load_model("my_builders:classifier", classes=[1, 2, 3])(images(2)).shape == (2, 3)


def test_a_function_that_cannot_be_called_is_told(builders):
    with pytest.raises(ValueError, match="no module 'nowhere'"):
        mgtta.load_model("nowhere.models:build")
    with pytest.raises(ValueError, match="my_builders has no 'bild'"):
        mgtta.load_model("my_builders:bild")
    with pytest.raises(TypeError, match="returned a int"):
        mgtta.load_model("my_builders:number")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        mgtta.load_model("my_broken:build")
    with pytest.raises(ValueError, match=r"returned a Classifier.*leave out mean, std"):
        mgtta.load_model("my_builders:classifier", mean=[0.0] * 3, std=[1.0] * 3)
    with pytest.raises(ValueError, match="num_classes: only for a timm name"):
        mgtta.load_model("my_builders:net", num_classes=5)
