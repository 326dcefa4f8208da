"""CoTTA against its equations: the teacher, its views, and the restored weights."""

import copy

import pytest
import torch
from baselines import close, cross, mean, params_of, unsure_vit
from conftest import images, vit

import mgtta
from mgtta.methods._augment import random_view


@pytest.mark.parametrize("symmetric", [True, False])
def test_cotta_against_its_equations(symmetric):
    model = unsure_vit()
    method = mgtta.create(
        "cotta", model, confidence=0.0, ema=0.9, restore=0.3, lr=0.1, momentum=0.0, symmetric=symmetric
    )
    theta0 = {name: p.detach().clone() for name, p in model.named_parameters()}
    method.teacher.net.head.bias.data += 1.0  # a teacher that differs, or Eq. 5 has no gradient
    teacher = {name: p.detach().clone() for name, p in method.teacher.named_parameters()}
    student = copy.deepcopy(model).requires_grad_(True)
    for t in range(2):
        x = images(8, seed=t).double()
        target = torch.func.functional_call(model, teacher, (x,))
        rows = student(x)
        expected = mean([cross(a, b) for a, b in zip(target.tolist(), rows.tolist(), strict=True)])
        if symmetric:
            back = mean([cross(b, a) for a, b in zip(target.tolist(), rows.tolist(), strict=True)])
            expected = (expected + back) / 2
        close(method.loss(x)[1].detach(), expected)  # Eqs. 1, 5
        p, q = target.detach().log_softmax(-1), rows.log_softmax(-1)
        loss = -(p.exp() * q).sum(-1).mean()
        if symmetric:
            loss = (loss - (q.exp() * p).sum(-1).mean()) / 2
        grads = torch.autograd.grad(loss, list(student.parameters()))
        random = torch.Generator().manual_seed(0)
        random.set_state(method.random.get_state())
        close(method(x), target.detach())  # the teacher's, from before the update
        random = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=random)))
        with torch.no_grad():
            for (name, p), grad in zip(student.named_parameters(), grads, strict=True):
                new = p - 0.1 * grad
                teacher[name] = 0.9 * teacher[name] + 0.1 * new  # Eq. 2
                M = (torch.rand(p.shape, generator=random) < 0.3).double()  # Eq. 7
                p.copy_(M * theta0[name] + (1 - M) * new)  # Eq. 8
                close(method.model.get_parameter(name).detach(), p.detach())
                close(method.teacher.get_parameter(name).detach(), teacher[name])


def test_cotta_needs_the_symmetric_loss_where_the_anchor_is_sure():
    """Eq. 5's gradient is the difference of two equal predictions."""
    for symmetric in (True, False):
        method = mgtta.create("cotta", unsure_vit(), confidence=0.0, restore=0.0, symmetric=symmetric)
        before = params_of(method)
        method(images(8).double())
        way = max((p.detach() - before[name]).abs().max().item() for name, p in method.adapted.items())
        assert way > 1e-5 if symmetric else way < 1e-12


def test_cotta_restores_a_share_of_the_weights():
    model = mgtta.load_model(vit().double())
    shares = []
    for restore in (0.0, 0.25, 1.0):
        method = mgtta.create("cotta", model, confidence=0.0, restore=restore)
        method(images(4).double())
        pairs = [(p, model.get_parameter(n)) for n, p in method.adapted.items() if p.ndim > 1 and "qkv" in n]
        same = torch.cat([(p == p_0).flatten() for p, p_0 in pairs])
        shares.append(same.double().mean().item())
    assert shares[0] < 0.02
    assert abs(shares[1] - 0.25) < 0.03
    assert shares[2] == 1.0


def test_cotta_averages_views_where_the_anchor_is_unsure():
    """Eqs. 3 and 4."""
    model = mgtta.load_model(vit())
    x = images(4)
    confidence = model(x).softmax(-1).amax(-1).mean().item()
    sure = mgtta.create("cotta", model, confidence=confidence - 1e-4, augmentations=3)
    assert torch.equal(sure(x), model(x))
    unsure = mgtta.create("cotta", model, confidence=confidence + 1e-4, augmentations=3, seed=5)
    random = torch.Generator().manual_seed(5)
    views = [model(random_view(x, random)) for _ in range(3)]
    torch.testing.assert_close(unsure(x), torch.stack(views).mean(0))
    with pytest.raises(ValueError, match="augmentations"):
        mgtta.create("cotta", model, augmentations=0)
