"""A plain ViT, block by block: the same as the network run module by module."""

import copy

import pytest
import torch
from conftest import CLASSES, confident_vit, images, vit
from fast_path import close, make

import mgtta
from mgtta._lib.timm import timm
from mgtta.fast import vit as plain
from mgtta.fast.captured import as_it_is
from mgtta.losses import entropy


def test_a_plain_vit_is_the_same_block_by_block():
    """In float32, where nothing is rounded, up to what the gradient keeps in a few bits."""
    model = mgtta.load_model(confident_vit(), classes=[1, 4, 6])
    x = images(8)
    params = mgtta.norm_parameters(model)

    def gradient(logits, features):
        loss = entropy(logits).mean() + sum(f.square().mean() for f in features)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])

    expected = model.features(x)
    to = torch.Tensor.to
    with pytest.MonkeyPatch.context() as patch:  # the one place where it rounds
        patch.setattr(torch.Tensor, "to", lambda t, d, *a, **k: t if d is torch.bfloat16 else to(t, d, *a, **k))
        rounding, exactly = plain.mlp, lambda h, first, second, *_: second(torch.nn.functional.gelu(first(h)))
        patch.setattr(plain, "RECOMPUTED_IMAGES", 3)  # of 8
        for recompute, keep in ((True, None), (False, None), (False, torch.float8_e4m3fn), (True, torch.float32)):
            patch.setattr(plain, "mlp", exactly if keep is None else rounding)
            found = plain.ViT(model, recompute)
            found.keep = keep
            logits, features = found(x, lambda function: function, lambda x: x)
            torch.testing.assert_close(logits, expected[0])
            for a, b in zip(features, expected[1], strict=True):
                torch.testing.assert_close(a, b)
            a, b = gradient(logits, features), gradient(*model.features(x))
            tolerance = {None: 1e-5, torch.float32: 1e-2, torch.float8_e4m3fn: 3e-2}[keep]
            assert (a - b).norm() < tolerance * b.norm()


def test_which_networks_go_block_by_block():
    assert plain.ViT.fits(mgtta.load_model(vit()))
    assert not plain.ViT.fits(mgtta.load_model("glyphs_vit"))  # its stem has BatchNorm
    assert not plain.ViT.fits(mgtta.load_model("patterns_vit"))  # its tokens come from convolutions, and are averaged
    for more in (
        {"global_pool": "map"},
        {"global_pool": "avg", "final_norm": False},
        {"pre_norm": True},
        {"qk_norm": True},
        {"act_layer": torch.nn.ReLU},
        {"dynamic_img_size": True},
        {"norm_layer": timm.layers.RmsNorm},
    ):
        net = timm.models.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=CLASSES, **more
        )
        assert not plain.ViT.fits(mgtta.load_model(net)), more
        method = make("tent", net)
        assert method(images(4)).isfinite().all()
        assert (method.updates, method.skipped) == (1, 0)


ENDS = [
    {},
    {"reg_tokens": 2},
    {"global_pool": "avg"},
    {"global_pool": "avg", "fc_norm": False, "reg_tokens": 1},
    {"global_pool": "avg", "class_token": False},
]


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("more", ENDS, ids=str)
def test_block_by_block_with_registers_and_average_pooling(more, low_memory):
    """Logits, features and gradients are those of the network run module by module."""
    torch.manual_seed(0)
    net = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=CLASSES, **more
    )
    assert plain.ViT.fits(mgtta.load_model(net))
    exact, quick = (make("mgtta", copy.deepcopy(net), precision=p) for p in ("fp32", "bf16"))
    quick.engine.low_memory = low_memory
    x = images(6)
    found = []
    for method, look in ((exact, exact.look), (quick, lambda x: quick.engine._look(x, as_it_is))):
        seen = look(x)
        grads = torch.autograd.grad(method.objective(*seen), list(method.adapted.values()), allow_unused=True)
        found.append((seen, torch.cat([g.flatten() for g in grads if g is not None])))
    (expected, expected_grad), (seen, grad) = found
    assert close(seen.logits, expected.logits)
    assert len(seen.features) == len(expected.features)
    assert all(close(a, b) for a, b in zip(seen.features, expected.features, strict=True))
    assert (grad - expected_grad).norm() < 0.12 * expected_grad.norm()  # as for a class token without registers
