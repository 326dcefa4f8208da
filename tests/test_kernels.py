"""Backward passes: the formulas against autograd, and the kernels against the formulas."""

import pytest
import torch
from torch import nn

from mgtta.fast import attention, float8, mlp
from mgtta.fast.kernels import norm_backward, norm_forward, plain_norm_backward, plain_norm_forward, qkv_backward


def case(n, length, d, device="cpu", dtype=torch.float32):
    random = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(device)

    x, weight, bias = draw(n, length, d).requires_grad_(), draw(d).requires_grad_(), draw(d).requires_grad_()
    grad, through, tap = draw(n, length, d).to(dtype), draw(n, length, d).to(dtype), draw(n, d).float()
    h = torch.nn.functional.layer_norm(x, (d,), weight, bias, 1e-6)
    loss = (h * grad.double()).sum() + (x * through.double()).sum() + (h[:, 0] * tap.double()).sum()
    expected = torch.autograd.grad(loss, (x, weight, bias))
    scale = (x.detach().var(-1, keepdim=True, correction=0) + 1e-6).rsqrt()
    z = (x.detach() - x.detach().mean(-1, keepdim=True)) * scale
    return (grad, z.float(), scale.float(), weight.detach().float(), through, tap), expected


def test_backward_pass_of_queries_keys_and_values():
    random = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(*shape, generator=random) for shape in ((2, 5, 8), (24, 8)))
    h.requires_grad_()
    parts = (h @ weight.T).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
    grads = [torch.randn(part.shape, generator=random) for part in parts]
    [expected] = torch.autograd.grad(parts, h, grads)
    torch.testing.assert_close(qkv_backward(*grads, weight), expected)
    torch.library.opcheck(qkv_backward, (*grads, weight), test_utils=("test_schema", "test_faketensor"))


def test_layer_norm_backward_formulas_agree_with_autograd():
    given, expected = case(3, 5, 24)
    for found, value in zip(plain_norm_backward(*given), expected, strict=True):
        torch.testing.assert_close(found.double(), value, atol=1e-5, rtol=1e-5)
    *given, tap = given
    for a, b in zip(plain_norm_backward(*given, None), plain_norm_backward(*given, 0 * tap), strict=True):
        assert torch.equal(a, b)
    *given, through = given
    nothing = torch.zeros_like(through)
    for a, b in zip(plain_norm_backward(*given, None, tap), plain_norm_backward(*given, nothing, tap), strict=True):
        assert torch.equal(a, b)


def test_layer_norm_forward_formulas_agree_with_torch():
    random = torch.Generator().manual_seed(0)
    x, weight, bias, shift = (torch.randn(shape, generator=random) for shape in ((3, 5, 24), (24,), (24,), (24,)))
    shifted = plain_norm_forward(x, weight, bias, 1e-6, torch.float64, shift=shift)
    torch.testing.assert_close(shifted.y, torch.nn.functional.layer_norm(x + shift, (24,), weight, bias, 1e-6))
    assert torch.equal(shifted.x, x)
    normed = plain_norm_forward(x, weight, bias, 1e-6, torch.float64)
    expected = torch.nn.functional.layer_norm(x, (24,), weight, bias, 1e-6)
    torch.testing.assert_close(normed.y, expected)
    torch.testing.assert_close(normed.first, expected[:, 0])
    torch.testing.assert_close(normed.z.float() * weight + bias, expected)
    torch.testing.assert_close(normed.scale, (x.var(-1, keepdim=True, correction=0) + 1e-6).rsqrt())


def test_gelu_and_its_slope_agree_with_autograd():
    x = torch.linspace(-9, 9, 4001, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x)
    [slope] = torch.autograd.grad(expected.sum(), x)
    z = x.detach().float()
    y, kept = mlp.plain_gelu_and_slope(z)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-6)
    assert (kept.double() / mlp.STEPS + mlp.LOWEST - slope).abs().max() < 0.003


def frozen_mlp(d=16, hidden=48, bias=True):
    torch.manual_seed(0)
    layers = nn.Linear(d, hidden, bias=bias), nn.Linear(hidden, d, bias=bias)
    return [layer.requires_grad_(False) for layer in layers]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rounded", "tolerance"), [(False, 0.005), (True, 0.1)])
def test_mlp_forward_and_backward_agree_with_autograd(bias, rounded, tolerance):
    first, second = frozen_mlp(bias=bias)
    weights = float8.float8_weights(first.weight, second.weight) if rounded else None
    random = torch.Generator().manual_seed(1)
    h, grad = (torch.randn(2, 5, 16, generator=random) for _ in range(2))
    grad *= torch.logspace(-20, 3, 5)[:, None]  # tokens differ by orders of magnitude
    h.requires_grad_()
    expected, found = second(nn.functional.gelu(first(h))), mlp.mlp(h, first, second, weights)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(mlp.mlp(h, first, second, weights), found)
    unseen = mlp.mlp(h, first, second, weights, unseen=True)
    assert unseen.shape == found.shape
    assert not unseen.any()
    a, same, e = (torch.autograd.grad(y, h, grad)[0] for y in (found, unseen, expected))
    assert torch.equal(a, same)
    assert ((a - e).norm(dim=-1) < tolerance * e.norm(dim=-1)).all()  # each token's


def test_float8_backward_of_any_gradient_is_finite():
    """The scale of a row is known before the row: no value exceeds it, and zeros stay zeros."""
    first, second = frozen_mlp()
    weights = float8.float8_weights(first.weight, second.weight)
    steepest = torch.full((1, 16, 48), 255, dtype=torch.uint8)
    along = second.weight.T[second.weight.norm(dim=0).argmax()] * 1e6  # parallel to the longest column
    grads = torch.stack([along, torch.zeros(16), torch.full((16,), 1e-38), *1e30 * torch.eye(16)[:13]])[None]
    assert mlp.float8_backward(grads, steepest, weights).isfinite().all()
    assert not mlp.float8_backward(grads, steepest, weights)[0, 1].any()
    assert mlp.float8_backward(grads * float("nan"), steepest, weights).isnan().all()
    none = float8.float8_weights(first.weight, 0 * second.weight)
    assert not mlp.float8_backward(grads, steepest, none).any()


def test_float8_values_that_round_up_do_not_overflow():
    """The largest possible product: g parallel to a column of W2, both with values that are rounded up."""
    column = torch.full((16,), 1.07 * 256)  # to 288; the largest value is exact
    column[0] = 448.0
    w2 = column[:, None].expand(16, 16).contiguous()
    weights = float8.float8_weights(torch.eye(16), w2)
    g, ratio, later_scale = float8.plain_scaled_rows(column[None], weights.reach)
    product = (g.float() * ratio) @ (weights.second.float() * weights.second_scale)
    assert (product * later_scale).max() > column.square().sum()  # than what is not rounded
    assert (product * (255 / mlp.STEPS + mlp.LOWEST)).max() <= float8.LARGEST


def query_and_pairs(n, length, heads, size, device="cpu", dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    shapes = ((n, 1, heads, size), (n, length, 2, heads, size), (n, heads, size))
    q, kv, grad = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
    return q.requires_grad_(), kv.requires_grad_(), grad


def test_attention_of_one_query_is_torchs():
    q, kv, grad = query_and_pairs(2, 7, 3, 8)
    k, v = (t.transpose(1, 2) for t in kv.unbind(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v)[:, :, 0]
    found = attention.attention_of_one(q, kv)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(y, (q, kv), grad) for y in (found, expected))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(2, 7, 3, 8), (64, 201, 12, 64), (3, 130, 2, 24)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_attention_of_one_query_by_kernels(shape, dtype, near):
    q, kv, grad = query_and_pairs(*shape, device="cuda", dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (q, kv)]
    k, v = exact[1].unbind(2)
    weights = (exact[0] * k).sum(-1, keepdim=True).mul(shape[-1] ** -0.5).softmax(1)
    expected = (weights * v).sum(1)
    found = attention.attention_of_one(q, kv)
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, (q, kv), grad), torch.autograd.grad(expected, exact, grad.double()), strict=True
    )
    for a, b in pairs:
        assert (a.double() - b).norm() < near * b.norm()
    with torch.no_grad():
        assert torch.equal(attention.attention_of_one(q, kv), found)


def test_gelu_operator_declares_its_outputs():
    first, _ = frozen_mlp()
    for sloped in (True, False):
        given = (torch.randn(2, 5, 16), first.weight, first.bias, sloped)
        found = torch.library.opcheck(mlp.gelu_and_slope, given, test_utils=("test_schema", "test_faketensor"))
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 197, 768)])
def test_gelu_kernel_agrees_with_the_plain_version(shape):
    random = torch.Generator("cuda").manual_seed(0)
    h = 3 * torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16)
    weight = torch.eye(shape[-1], device="cuda", dtype=torch.bfloat16)
    (y, slope), (expected, kept) = mlp.gelu_and_slope(h, weight, None, True), mlp.plain_gelu_and_slope(h)
    torch.testing.assert_close(y, expected)
    assert torch.equal(mlp.gelu_and_slope(h, weight, None, False)[0], y)
    assert (slope.int() - kept.int()).abs().max() <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(3, 5, 24), (64, 197, 192), (1, 70001, 96), (9, 7, 384), (5, 197, 1024)])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_layer_norm_kernel_agrees_with_the_plain_version(shape, kept):
    (grad, z, *more, tap), _ = case(*shape, device="cuda", dtype=torch.bfloat16)
    for last in (tap, torch.cat([tap, tap], 1)[:, : shape[-1]], tap[:1, :1].expand_as(tap), None):  # of any strides
        found, expected = (f(grad, z.to(kept), *more, last) for f in (norm_backward, plain_norm_backward))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(3, 5, 24), (8, 197, 192), (1, 4097, 96), (9, 7, 384), (5, 197, 1024)])
@pytest.mark.parametrize("keep", [torch.bfloat16, torch.float8_e4m3fn, None])
def test_layer_norm_forward_kernel_agrees_with_the_plain_version(shape, keep):
    random = torch.Generator("cuda").manual_seed(0)
    x = (3 * torch.randn(*shape, generator=random, device="cuda") + 1).bfloat16()
    weight, bias = (torch.randn(shape[-1], generator=random, device="cuda") for _ in range(2))
    found, expected = (f(x, weight, bias, 1e-6, keep) for f in (norm_forward, plain_norm_forward))
    added = torch.randn(*shape, generator=random, device="cuda").bfloat16()
    summed = norm_forward(x, weight, bias, 1e-6, keep, added)
    assert torch.equal(summed.x, x + added)
    assert torch.equal(summed.y, norm_forward(x + added, weight, bias, 1e-6, keep).y)
    shift = torch.randn(shape[-1], generator=random, device="cuda")
    shifted = [f(x, weight, bias, 1e-6, keep, shift=shift) for f in (norm_forward, plain_norm_forward)]
    torch.testing.assert_close(shifted[0].y.float(), shifted[1].y.float(), atol=0.02, rtol=0.02)
    assert torch.equal(shifted[0].x, x)
    for name in ("y", "first") if keep is None else ("y", "first", "z", "scale"):
        a, b = (getattr(normed, name) for normed in (found, expected))
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.float(), b.float(), atol=0.07 if name == "z" else 0.02, rtol=0.02)
    grads = [f(x, *expected[:2], weight, None, None) for f in (norm_backward, plain_norm_backward) if keep is not None]
    for a, b in zip(*grads, strict=True) if grads else ():
        torch.testing.assert_close(a.float(), b.float(), atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float8_products_agree_with_the_plain_version():
    if not float8.multiplies_float8(torch.device("cuda")):
        assert torch.cuda.get_device_capability() != (9, 0), "an H100 does"
        pytest.skip("this GPU does not")
    first, second = (layer.bfloat16() for layer in frozen_mlp(192, 768))
    random = torch.Generator().manual_seed(1)
    grad = torch.randn(3, 197, 192, generator=random).bfloat16()
    slope = torch.randint(256, (3, 197, 768), generator=random, dtype=torch.uint8)
    expected = mlp.float8_backward(grad, slope, float8.float8_weights(first.weight, second.weight))
    there = float8.float8_weights(first.weight.cuda(), second.weight.cuda())
    found = mlp.float8_backward(grad.cuda(), slope.cuda(), there).cpu()
    assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "d", "hidden"), [((3, 197), 192, 768), ((1, 5), 16, 48), ((2, 129), 208, 336)])
def test_fused_sloped_product_agrees_with_the_plain_version(rows, d, hidden):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is for a Hopper")
    random = torch.Generator("cuda").manual_seed(0)
    grad = torch.randn(*rows, d, generator=random, device="cuda").bfloat16()
    weight = torch.randn(d, hidden, generator=random, device="cuda").bfloat16()
    slope = torch.randint(256, (*rows, hidden), generator=random, device="cuda", dtype=torch.uint8)
    both = mlp.fused_sloped_product, mlp.plain_sloped_product
    found, expected = (f(grad, weight, slope, None, None) for f in both)
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    scales = torch.rand(*rows, 1, device="cuda"), torch.rand(1, hidden, device="cuda")
    given = grad.to(float8.FLOAT8), weight.to(float8.FLOAT8).t().contiguous().t(), slope, *scales
    found, expected = (f(*given).float() for f in both)
    assert (found - expected).norm() < 0.05 * expected.norm()  # values round to either side
