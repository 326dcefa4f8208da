"""MGTTA+'s answer by kernels, on a GPU, is the plain one."""

import copy

import pytest
import torch
from conftest import confident_vit, images, random_generator

import mgtta
from mgtta.adaptation.step import Pass
from mgtta.adaptation.wrapper import innermost
from mgtta.fast.answer import MOST_IMAGES, has_answer_kernels


def test_kernels_are_for_a_gpu():
    assert not has_answer_kernels(torch.zeros(2, 10))
    assert not has_answer_kernels(torch.zeros(2, 10, dtype=torch.float64))


def test_methods_have_a_plain_answer_unless_they_say_otherwise():
    model = mgtta.load_model(confident_vit())
    seen = Pass(torch.zeros(2, 10), [])
    assert mgtta.create("tent", model).quick_answer(seen, True) is None
    source = mgtta.source_statistics(model, images(16))
    plus = innermost(mgtta.create("mgtta_plus", model, source=source, generator=random_generator(), recentre=0))
    assert plus.quick_answer(seen, True) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mirror", [True, False])
@pytest.mark.parametrize("classes", [None, [1, 3, 5, 8]])
@pytest.mark.parametrize("n", [1, 8, MOST_IMAGES])
def test_the_answer_by_kernels_is_the_plain_one(n, classes, mirror):
    model = mgtta.load_model(confident_vit(), classes=classes).cuda()
    source = mgtta.source_statistics(model, images(64, seed=99))
    settings = {"generator": random_generator(), "mirror": mirror, "gather": 0, "recall": 0, "precision": "fp32"}
    method = innermost(mgtta.create("mgtta_plus", model, source=source, **settings))
    twin = copy.deepcopy(method)
    for seed in range(5):
        x = images(n, seed=seed).cuda()
        if seed == 3:
            x[0, 0, 0, 0] = float("nan")
        for observe in (False, True):
            with torch.no_grad():
                seen = method.look(x)
                expected = method.answer(seen, observe)
                assert has_answer_kernels(seen.logits)
                found = twin.quick_answer(seen, observe)
            torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-3, rtol=1e-3)
            own = dict(method.named_buffers())
            for name, value in twin.named_buffers():
                torch.testing.assert_close(value, own[name], atol=1e-4, rtol=1e-4)
    assert not torch.equal(expected, seen.logits)
