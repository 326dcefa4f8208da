"""Writes the files of this folder, with the version of mgtta at hand: run once for a release, never over old files.

python tests/golden/make.py tests/golden/0.1
"""

import io
import json
import sys
import tarfile
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import mgtta
from mgtta.adaptation.guarded import Guarded
from mgtta.bench.store import Store


def net() -> nn.Module:
    """Weights by formula, so that they are the same whatever a version of torch draws."""
    model = nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((torch.arange(p.numel()) * 0.7).sin().view_as(p) + (p.ndim == 1))
    return model


def images(n: int = 4) -> torch.Tensor:
    return ((torch.arange(n * 3 * 8 * 8) * 1.3).sin() / 2 + 0.5).view(n, 3, 8, 8)


def generator() -> mgtta.MetaGradientGenerator:
    made = mgtta.MetaGradientGenerator(hidden_size=2)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_((torch.arange(p.numel()) + 1.0).cos().view_as(p))
    return made


def method(folder: Path) -> Guarded:
    settings = {"source": folder / "source.safetensors", "generator": folder / "generator.safetensors"}
    return mgtta.create("mgtta", mgtta.load_model(net()), guard=True, gather=0, **settings)


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    model = mgtta.load_model(net())
    source = mgtta.source_statistics(model, images())
    mgtta.save_source(source, folder / "source.safetensors")
    mgtta.save_fisher(mgtta.fisher_information(model, images()), folder / "fisher.safetensors")
    mgtta.save_generator(generator(), folder / "generator.safetensors", note="golden")
    running = method(folder)
    running(images())
    mgtta.save_state(running, folder / "state.safetensors", {"position": 1})
    expected = {"logits": running(images()).tolist()}
    mgtta.meta_train(
        model,
        source,
        images(),
        generator=generator(),
        steps=2,
        checkpoint=folder / "training.safetensors",
        progress=False,
    )
    record = mgtta.Record("tent", "fog", images=4, labelled=4, batches=1, top1=50.0, sizes=[4], curve=[2])
    row = {"experiment": "corruptions", "seed": 0, "settings": {}, "protocol": {}, **record.to_dict()}
    Store(folder).add("golden", [row])
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    picture = Image.fromarray((images(1)[0].permute(1, 2, 0) * 255).byte().numpy())
    with tarfile.open(folder / "images.tar", "w") as tar:
        for name, content in (("0.png", _encoded(picture)), ("0.cls", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _encoded(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
