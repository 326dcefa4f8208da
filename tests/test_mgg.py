import copy
import io
import pickle

import pytest
import torch
from conftest import images, random_generator, vit
from torch import nn
from transcription import SlowMGG, phi_of

import mgtta
from mgtta.learned.optimizer import PER_COORDINATE, generator_inputs
from mgtta.losses import objective


def parameters(*sizes, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def test_inputs_agree_with_the_transcription():
    grads = torch.randn(6, 3, dtype=torch.float64)
    slow = [SlowMGG(0.0, phi_of(random_generator()), 0.0) for _ in range(3)]
    m = v = torch.zeros(3, dtype=torch.float64)
    for t, grad in enumerate(grads, start=1):
        z, m, v = generator_inputs(grad, m, v, t, (0.9, 0.99), 1e-8)
        expected = torch.tensor([s.inputs(g) for s, g in zip(slow, grad.tolist(), strict=True)], dtype=torch.float64)
        torch.testing.assert_close(z, expected, atol=1e-13, rtol=0)


def test_first_inputs_use_the_power_two():
    z, _, _ = generator_inputs(
        torch.ones(1).double(), torch.zeros(1).double(), torch.zeros(1).double(), 1, (0.9, 0.99), 0.0
    )
    scale = ((1 - 0.99) / (1 - 0.99**2)) ** 0.5
    torch.testing.assert_close(z, torch.tensor([[0.1 / (1 - 0.81) / scale, 1 / scale]], dtype=torch.float64))


def test_a_trajectory_on_a_tiny_vit_agrees_with_the_transcription():
    """50 steps, two models, each with its own gradients: theta, moments and memory to 1e-10 in float64."""
    generator = random_generator(3).double()
    fast, slow = (mgtta.load_model(vit().double()) for _ in range(2))
    source = mgtta.source_statistics(fast, images(16, seed=9).double())
    params, twins = mgtta.norm_parameters(fast), mgtta.norm_parameters(slow)
    sizes = [p.numel() for p in params]
    start = flat(params)
    optimizer = mgtta.MGG(params, generator, lr=1e-3)
    coordinates = [SlowMGG(value, phi_of(generator), 1e-3) for value in start.tolist()]
    for t in range(50):
        x = images(4, seed=t).double()
        for model, theta in ((fast, params), (slow, twins)):
            logits, features = model.features(x)
            loss = objective(logits, features, source.mean, source.std)
            for p, grad in zip(theta, torch.autograd.grad(loss, theta), strict=True):
                p.grad = grad
        optimizer.step()
        for coordinate, grad in zip(coordinates, torch.cat([p.grad.flatten() for p in twins]).tolist(), strict=True):
            coordinate.step(grad)
        moved = torch.tensor([c.theta for c in coordinates], dtype=torch.float64)
        with torch.no_grad():
            for p, values in zip(twins, moved.split(sizes), strict=True):
                p.copy_(values)
    state = [optimizer.state[p] for p in params]
    close = {"atol": 1e-10, "rtol": 0.0}
    torch.testing.assert_close(flat(params), moved, **close)
    for name, expected in (("exp_avg", [c.m for c in coordinates]), ("exp_avg_sq", [c.v for c in coordinates])):
        torch.testing.assert_close(flat([s[name] for s in state]), torch.tensor(expected, dtype=torch.float64), **close)
    memory = torch.tensor([sum(c.W, []) + c.b for c in coordinates], dtype=torch.float64)
    torch.testing.assert_close(torch.cat([s["memory"] for s in state]), memory, **close)
    assert (moved - start).abs().max() > 1e-2


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def test_single_steps_in_float32():
    generator = random_generator()
    phi = phi_of(generator)
    params = parameters(5, dtype=torch.float32)
    start = params[0].detach().double().tolist()
    optimizer = mgtta.MGG(params, generator, lr=1e-2)
    set_grads(params, 1)
    slow = [SlowMGG(value, phi, 1e-2) for value in start]
    for s, g in zip(slow, params[0].grad.double().tolist(), strict=True):
        s.step(g)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.tensor([s.theta for s in slow]), atol=1e-5, rtol=0)


def test_grouping_does_not_change_the_result(generator):
    one, many = (
        parameters(12),
        [nn.Parameter(p.detach().clone()) for p in parameters(12)[0].detach().split([5, 4, 3])],
    )
    together, apart = mgtta.MGG(one, generator.double()), mgtta.MGG(many, generator.double())
    for t in range(4):
        set_grads(one, t)
        for p, grad in zip(many, one[0].grad.split([5, 4, 3]), strict=True):
            p.grad = grad.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(torch.cat([p.detach() for p in many]), one[0].detach(), atol=1e-15, rtol=0)


def test_groups_have_their_own_lr(generator):
    a, b = parameters(3, 3, dtype=torch.float32)
    before = [a.detach().clone(), b.detach().clone()]
    optimizer = mgtta.MGG([{"params": [a], "lr": 1e-2}, {"params": [b]}], generator, lr=0.0)
    a.grad = b.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(a, before[0])
    assert torch.equal(b, before[1])


def test_in_place_and_without_grad_skipped_and_added_later(generator):
    a, b, c = parameters(3, 4, 5, dtype=torch.float32)
    optimizer = mgtta.MGG([a, b], generator)
    pointers = [a.data_ptr(), b.data_ptr()]
    a.grad = torch.ones(3)
    kept = b.detach().clone()
    optimizer.step()
    assert [a.data_ptr(), b.data_ptr()] == pointers
    assert torch.equal(b, kept)
    assert b not in optimizer.state
    optimizer.add_param_group({"params": [c], "lr": 0.1})
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in (a, b, c)] == [2, 1, 1]
    optimizer.zero_grad()
    assert a.grad is None


def test_a_parameter_added_later_moves_as_if_it_were_the_only_one(generator):
    a, b = parameters(4, 4)
    alone = nn.Parameter(b.detach().clone())
    optimizer, single = mgtta.MGG([a, b], generator.double()), mgtta.MGG([alone], generator.double())
    a.grad = torch.ones_like(a)
    optimizer.step()
    for t in range(3):
        set_grads([a, b], t)
        alone.grad = b.grad.clone()
        optimizer.step()
        single.step()
    torch.testing.assert_close(alone.detach(), b.detach(), atol=1e-15, rtol=0)


def test_closure(generator):
    [p] = parameters(3, dtype=torch.float32)
    optimizer = mgtta.MGG([p], generator)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.square().sum().item()
    with torch.no_grad():
        assert optimizer.step(closure).item() == pytest.approx(before)
    assert int(optimizer.state[p]["step"]) == 1


def test_resume_is_bit_exact(generator):
    def run(optimizer, params, times):
        for t in times:
            set_grads(params, t)
            optimizer.step()

    straight = parameters(6, 3, dtype=torch.float32)
    run(mgtta.MGG(straight, generator), straight, range(20))
    params = parameters(6, 3, dtype=torch.float32)
    first = mgtta.MGG(params, generator)
    run(first, params, range(11))
    saved = copy.deepcopy(first.state_dict())
    second = mgtta.MGG(params, generator, lr=123.0)
    second.load_state_dict(saved)
    run(second, params, range(11, 20))
    for a, b in zip(straight, params, strict=True):
        assert torch.equal(a, b)


def test_the_generator_is_copied_and_frozen(generator):
    [p] = parameters(3, dtype=torch.float32)
    optimizer = mgtta.MGG([p], generator)
    with torch.no_grad():
        generator.o_proj.weight.zero_()
    assert optimizer.generator.o_proj.weight.abs().sum() > 0
    assert not any(w.requires_grad for w in optimizer.generator.parameters())
    assert all(w.requires_grad for w in generator.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps"),
    ],
)
def test_bad_settings(generator, settings, message):
    with pytest.raises(ValueError, match=message):
        mgtta.MGG(parameters(2), generator, **settings)
    with pytest.raises(ValueError, match=message):
        mgtta.MGG([{"params": parameters(2), **settings}], generator)


def test_something_else_for_a_generator():
    with pytest.raises(TypeError, match="load_generator"):
        mgtta.MGG(parameters(2), "imagenet")


def test_state_of_another_generator_is_refused_and_nothing_changes(generator):
    params = parameters(3, dtype=torch.float32)
    small = mgtta.MGG(params, random_generator(4))
    set_grads(params, 0)
    small.step()
    optimizer = mgtta.MGG(params, generator)
    optimizer.step()
    memory = optimizer.state[params[0]]["memory"].clone()
    with pytest.raises(ValueError, match="hidden size 8"):
        optimizer.load_state_dict(small.state_dict())
    assert torch.equal(optimizer.state[params[0]]["memory"], memory)
    adam = torch.optim.Adam(params)
    adam.step()
    with pytest.raises(ValueError, match="not written by MGG"):
        optimizer.load_state_dict(adam.state_dict())


def test_sparse_gradients_are_refused(generator):
    [p] = parameters(3, dtype=torch.float32)
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match="dense"):
        mgtta.MGG([p], generator).step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_parameters_that_would_round_updates_away_are_refused(generator, dtype):
    with pytest.raises(TypeError, match="float32 or float64"):
        mgtta.MGG([nn.Parameter(torch.ones(3, dtype=dtype))], generator)


def test_both_precisions_in_one_optimizer(generator):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    optimizer = mgtta.MGG(params, generator)
    for _ in range(5):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(params[0].double(), params[1], atol=1e-5, rtol=0)
    for a, b in zip(optimizer.generator.parameters(), generator.parameters(), strict=True):
        assert torch.equal(a.to(b), b)


def test_a_state_for_parameters_of_another_size_is_refused(generator):
    five, six = parameters(5, dtype=torch.float32), parameters(6, dtype=torch.float32)
    saved = mgtta.MGG(six, generator)
    set_grads(six, 0)
    saved.step()
    with pytest.raises(ValueError, match="these parameters"):
        mgtta.MGG(five, generator).load_state_dict(saved.state_dict())
    sgd = torch.optim.SGD(five, lr=0.1)
    with pytest.raises(ValueError, match="other settings"):
        mgtta.MGG(five, generator).load_state_dict(sgd.state_dict())


def test_pickled_and_copied(generator):
    params = parameters(4, dtype=torch.float32)
    optimizer = mgtta.MGG(params, generator)
    set_grads(params, 0)
    optimizer.step()
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        [p] = twin.param_groups[0]["params"]
        p.grad = torch.ones(4)
        twin.step()
        assert int(twin.state[p]["step"]) == 2


def views_of_one_storage(optimizer):
    """Let the states be views of one vector each, as the fast path lays them out."""
    for name in PER_COORDINATE:
        states = list(optimizer.state.values())
        whole = torch.cat([state[name].flatten() for state in states])
        parts = whole.split([state[name].numel() for state in states])
        for state, part in zip(states, parts, strict=True):
            state[name] = part.view_as(state[name])


@pytest.mark.parametrize("laid_out", [False, True], ids=["own storage", "views"])
def test_pickled_size_is_the_size_of_the_state(generator, laid_out):
    params = parameters(*[64] * 20, dtype=torch.float32)
    optimizer = mgtta.MGG(params, generator)
    set_grads(params, 0)
    optimizer.step()
    if laid_out:
        views_of_one_storage(optimizer)
    floats = 20 * 64 * (1 + 2 + 72)  # parameters, moments and memory
    dumped = pickle.dumps(optimizer)
    assert len(dumped) < 4 * floats + 200_000
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    assert saved.tell() < 4 * floats + 100_000
    twins = pickle.loads(dumped), copy.deepcopy(optimizer)
    set_grads(params, 1)
    optimizer.step()
    for twin in twins:
        own = twin.param_groups[0]["params"]
        set_grads(own, 1)
        twin.step()
        assert all(torch.equal(p, q) for p, q in zip(params, own, strict=True))


@pytest.mark.slow
def test_pickled_size_of_a_used_method(generator):
    model = mgtta.load_model("vit_tiny_patch16_224", pretrained=False, img_size=32)
    method = mgtta.create("mgtta", model, source=mgtta.source_statistics(model, images(4)), generator=generator)
    method(images(4))
    weights = sum(p.numel() for p in model.parameters())
    n = sum(p.numel() for p in mgtta.norm_parameters(model))
    assert len(pickle.dumps(method)) < 1.1 * 4 * (weights + n * (1 + 2 + 72)) + 1_000_000
