"""SAR against its equations, its recovery, and the layers that it adapts."""

import copy
import math

import torch
from baselines import close, moved, params_of, unsure_vit
from conftest import CLASSES, NETS, confident_vit, images
from torch import nn
from transcription import entropy as H

import mgtta
from mgtta._lib.timm import timm
from mgtta.models.norms import early_norm_parameters, norm_layers


def slow_sar(model, x, params, margin, rho):
    """Eqs. 2, 4, 5: the second loss and its gradient."""
    rows = model(x)
    E0 = margin * math.log(rows.shape[1])
    first = [i for i, row in enumerate(rows.tolist()) if H(row) < E0]
    log_p = rows.log_softmax(-1)
    loss = -(log_p.exp() * log_p).sum(-1)[first].mean()
    g = torch.autograd.grad(loss, params)
    norm = math.sqrt(sum(v.square().sum().item() for v in g))
    with torch.no_grad():
        for p, v in zip(params, g, strict=True):
            p.add_(rho * v / norm)
    rows = model(x)
    second = [i for i in first if H(rows[i].tolist()) < E0]
    log_p = rows.log_softmax(-1)
    loss = -(log_p.exp() * log_p).sum(-1)[second].mean()
    return loss.item(), torch.autograd.grad(loss, params), first, second


def test_sar_against_its_equations():
    model = unsure_vit()
    x = images(32).double()
    method = mgtta.create("sar", model, margin=0.62, rho=0.3, lr=1e-2)  # so far that the filter changes
    twin = copy.deepcopy(method)
    start = params_of(method)
    loss, grads, first, second = slow_sar(twin.model, x, list(twin.adapted.values()), 0.62, 0.3)
    assert 0 < len(second) < len(first) < 32
    method(x)
    for (name, p), grad in zip(method.adapted.items(), grads, strict=True):
        close(p.detach(), start[name] - 1e-2 * grad)
    close(method.average, loss)
    method(images(32, seed=1).double())
    before = params_of(method)
    twin.load_state_dict(method.state_dict())
    average = method.average
    x = images(32, seed=2).double()
    loss = slow_sar(twin.model, x, list(twin.adapted.values()), 0.62, 0.3)[0]
    method(x)
    close(method.average, 0.9 * average + 0.1 * loss)
    assert moved(method, before)


def test_sar_recovers_when_the_second_loss_is_low():
    model = mgtta.load_model(confident_vit())  # its entropies are all but 0
    for recovery, times in ((0.0, 0), (math.log(CLASSES), 3)):
        method = mgtta.create("sar", model, margin=1.1, recovery=recovery)
        start = params_of(method)
        for t in range(3):
            method(images(8, seed=t))
        assert method.updates == 3
        assert method.recoveries == times
        assert moved(method, start) == (times == 0)
        if times:
            assert method.average is None
            assert not method.optimizer.state_dict()["state"]
        method.reset()
        assert method.recoveries == 0


def test_sar_leaves_the_last_quarter_alone():
    torch.manual_seed(0)

    def adapts(net):
        own = {id(p): name for name, p in net.named_parameters()}
        return {own[id(p)].rpartition(".")[0] for p in early_norm_parameters(net)}

    deep = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=8, depth=12, num_heads=1, num_classes=2)
    assert adapts(deep) == {f"blocks.{i}.norm{k}" for i in range(9) for k in (1, 2)}

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = deep

    assert adapts(Wrapped()) == {f"inner.blocks.{i}.norm{k}" for i in range(9) for k in (1, 2)}
    block = timm.models.resnet.BasicBlock
    resnet = timm.models.ResNet(block, [1, 1, 1, 1], num_classes=2, channels=(4, 4, 4, 4), stem_width=4)
    assert adapts(resnet) == {name for name in norm_layers(resnet) if not name.startswith("layer4")}
    convnext = timm.models.ConvNeXt(depths=(1, 1, 1, 1), dims=(4, 4, 4, 4), num_classes=2)
    assert adapts(convnext) == {n for n in norm_layers(convnext) if not n.startswith(("stages.3", "head", "norm"))}
    assert adapts(NETS["groupnorm"]()) == {"1"}
    assert adapts(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2))) == {"0"}
