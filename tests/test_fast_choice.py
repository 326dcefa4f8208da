"""Which methods and networks may take the fast path."""

import copy

import pytest
import torch
from conftest import images, vit
from fast_path import make

import mgtta
from mgtta._lib.timm import timm
from mgtta.fast import choice
from mgtta.fast import vit as plain
from mgtta.methods._descent import Descent
from mgtta.methods.tent import Tent


def test_who_may_take_it(model, source, monkeypatch):
    assert mgtta.create("tent", model).precision == "fp32"
    assert mgtta.create("tent", model, precision="auto").precision == "fp32"  # there is no GPU

    class Other(Tent):
        def loss(self, x):
            """A step of its own, which may do anything."""
            return super().loss(x)

    with pytest.raises(ValueError, match="values in a batch"):
        choice.fits(Other(model, Descent(0.1).factory()), "bf16")
    for name, message in (("spa", "values in a batch"), ("cotta", "values"), ("lame", "values")):
        with pytest.raises(ValueError, match=message):
            mgtta.create(name, model, precision="bf16")
    narrow = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2)
    for other in (mgtta.load_model("glyphs_vit"), mgtta.load_model(narrow)):
        with pytest.raises(ValueError, match=r"'fp8' is not for tent: that is for a plain ViT.*take .*'bf16'"):
            mgtta.create("tent", other, precision="fp8")
    monkeypatch.setattr(plain, "multiplies_float8", lambda device: False)
    with pytest.raises(ValueError, match="where 8-bit floats can be multiplied; take precision='bf16'"):
        mgtta.create("tent", mgtta.load_model(vit()), precision="fp8")
    monkeypatch.undo()
    moved = make("tent", precision="fp8")
    monkeypatch.setattr(plain, "multiplies_float8", lambda device: False)
    with pytest.raises(ValueError, match="precision='fp8' is not for tent there"):
        moved(images(8))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not float32"):
        mgtta.create("tent", copy.deepcopy(model).double(), precision="bf16")
    with pytest.raises(ValueError, match=r"unknown precision 'fp16'; valid: auto, bf16, fp32, fp8"):
        mgtta.create("tent", model, precision="fp16")
    with pytest.raises(ValueError, match="low_memory belongs to the fast path"):
        mgtta.create("tent", model, low_memory=True)
    for change in (torch.nn.Module.double, torch.nn.Module.float, torch.nn.Module.bfloat16):
        with pytest.raises(TypeError, match="precision='fp32'"):
            change(mgtta.create("tent", model, precision="bf16"))
