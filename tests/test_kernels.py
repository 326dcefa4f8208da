"""Ways back: the formulas against autograd, and the kernels against the formulas."""

import pytest
import torch

from mgtta import gelu
from mgtta.kernels import norm_backward, plain_norm_backward, qkv_backward


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


def test_queries_keys_and_values_on_their_way_back():
    random = torch.Generator().manual_seed(0)
    h, weight = (torch.randn(*shape, generator=random) for shape in ((2, 5, 8), (24, 8)))
    h.requires_grad_()
    parts = (h @ weight.T).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
    grads = [torch.randn(part.shape, generator=random) for part in parts]
    [expected] = torch.autograd.grad(parts, h, grads)
    torch.testing.assert_close(qkv_backward(*grads, weight), expected)
    torch.library.opcheck(qkv_backward, (*grads, weight), test_utils=("test_schema", "test_faketensor"))


def test_the_formulas_are_autograds():
    given, expected = case(3, 5, 24)
    for found, value in zip(plain_norm_backward(*given), expected, strict=True):
        torch.testing.assert_close(found.double(), value, atol=1e-5, rtol=1e-5)
    *given, tap = given
    for a, b in zip(plain_norm_backward(*given, None), plain_norm_backward(*given, 0 * tap), strict=True):
        assert torch.equal(a, b)


def test_gelu_and_its_slope():
    x = torch.linspace(-9, 9, 4001, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x)
    [slope] = torch.autograd.grad(expected.sum(), x)
    z = x.detach().float()
    y, kept = gelu.plain_gelu_and_slope(z)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=1e-6)
    assert (kept.double() / gelu.STEPS + gelu.LOWEST - slope).abs().max() < 0.003


def test_a_layer_with_gelu_behind_it():
    random = torch.Generator().manual_seed(0)
    h, weight, bias, grad = (torch.randn(*s, generator=random) for s in ((2, 5, 8), (24, 8), (24,), (2, 5, 24)))
    h.requires_grad_()
    for b in (bias, None):
        expected, found = (
            torch.nn.functional.gelu(h @ weight.T + (0 if b is None else b)),
            gelu.gelu_linear(h, weight, b),
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        (a,), (e,) = (torch.autograd.grad(y, h, grad) for y in (found, expected))
        assert (a - e).norm() < 0.005 * e.norm()
        with torch.no_grad():
            assert torch.equal(gelu.gelu_linear(h, weight, b), found)
    for sloped in (True, False):
        given = (h.detach(), weight, bias, sloped)
        torch.library.opcheck(gelu.gelu_and_slope, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 197, 768)])
def test_gelus_kernel_is_its_plain_twin(shape):
    random = torch.Generator("cuda").manual_seed(0)
    h = 3 * torch.randn(*shape, generator=random, device="cuda", dtype=torch.bfloat16)
    weight = torch.eye(shape[-1], device="cuda", dtype=torch.bfloat16)
    (y, slope), (expected, kept) = gelu.gelu_and_slope(h, weight, None, True), gelu.plain_gelu_and_slope(h)
    torch.testing.assert_close(y, expected)
    assert torch.equal(gelu.gelu_and_slope(h, weight, None, False)[0], y)
    assert (slope.int() - kept.int()).abs().max() <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(3, 5, 24), (64, 197, 192), (2, 1, 768), (5, 197, 1024)])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_kernel_is_its_plain_twin(shape, kept):
    (grad, z, *more, tap), _ = case(*shape, device="cuda", dtype=torch.bfloat16)
    for last in (tap, None):
        found, expected = (f(grad, z.to(kept), *more, last) for f in (norm_backward, plain_norm_backward))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=2e-2)
