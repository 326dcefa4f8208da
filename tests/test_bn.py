"""Batch statistics mixed with the source's, against a slow transcription, in float64."""

import copy
import math

import pytest
import torch
from conftest import NETS, convnet, images
from gradient_free import model
from torch import nn

import mgtta
from mgtta.methods.bn import mixed


def slow_bn(net, x, prior):
    """Schneider's mixture in every BatchNorm layer, (h - mu) / sqrt(var + eps) gamma + beta."""
    h, n = x.double(), len(x)
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            channels = []
            for c, values in enumerate(h.transpose(0, 1)):  # (N, H, W)
                values = values.flatten().tolist()
                mu_t = sum(values) / len(values)
                var_t = sum((v - mu_t) ** 2 for v in values) / len(values)
                mu = prior / (prior + n) * layer.running_mean[c] + n / (prior + n) * mu_t
                var = prior / (prior + n) * layer.running_var[c] + n / (prior + n) * var_t
                scale = layer.weight[c] / (var + layer.eps).sqrt()
                channels.append((h[:, c] - mu) * scale + layer.bias[c])
            h = torch.stack(channels, 1)
        else:
            h = layer(h)
    return h


def lively(net):
    """Running statistics and affine parameters that are no ones and zeros."""
    torch.manual_seed(0)
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
    return net


@pytest.mark.parametrize("prior", [0, 3.5, 16])
@pytest.mark.parametrize("n", [1, 5])
@torch.no_grad()
def test_bn_agrees_with_the_transcription(n, prior):
    classifier = model(net=lively(convnet("batch")))
    before = copy.deepcopy(classifier.state_dict())
    method = mgtta.create("bn", classifier, prior=prior)
    torch.testing.assert_close(method(images(n)), slow_bn(classifier.net, images(n), prior))
    assert all(torch.equal(t, before[name]) for name, t in method.model.state_dict().items())


def test_bn_between_the_batch_alone_and_the_source_alone():
    classifier = model(net=lively(convnet("batch")))
    batch = copy.deepcopy(classifier).use_batch_statistics()(images(6))
    torch.testing.assert_close(mgtta.create("bn", classifier)(images(6)), batch)
    torch.testing.assert_close(mgtta.create("bn", classifier, prior=1e15)(images(6)), classifier(images(6)))
    assert not torch.allclose(batch, classifier(images(6)), atol=1e-2)


def test_bn_with_one_value_a_channel():
    mean, var, h = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([[5.0, 6.0]])
    assert mixed(h, mean, var, 0.0, 1) == (mean, var)
    torch.testing.assert_close(mixed(h, mean, var, 3.0, 1), (torch.tensor([2.0, 3.0]), torch.tensor([2.25, 3.0])))


def test_bn_gives_the_other_images_of_a_bad_batch_the_source_statistics():
    classifier, x = model(net=lively(convnet("batch"))), images(5)
    x[0] = math.nan
    method = mgtta.create("bn", classifier)
    torch.testing.assert_close(method(x)[1:], classifier(x)[1:])
    assert (method.updates, method.skipped) == (0, 1)


def test_bn_puts_the_running_statistics_back_when_the_model_fails():
    method = mgtta.create("bn", model(net=lively(convnet("batch"))))
    before = copy.deepcopy(method.model.state_dict())
    with pytest.raises(ValueError, match="refuses images"):
        method(torch.rand(2, 3, 2, 2))  # too small for the second convolution
    assert all(torch.equal(t, before[name]) for name, t in method.model.state_dict().items())


def test_bn_needs_batchnorm():
    for name in ("vit", "groupnorm"):
        with pytest.raises(ValueError, match="no BatchNorm"):
            mgtta.create("bn", NETS[name]())
    with pytest.raises(ValueError, match="prior"):
        mgtta.create("bn", NETS["batchnorm"](), prior=-1)
