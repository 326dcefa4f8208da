import copy
import statistics

import pytest
import torch
from conftest import confident_vit, images, random_generator, vit

import mgtta
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import stream
from mgtta.evaluation.record import Record
from mgtta.learned.optimizer import generator_inputs
from mgtta.losses import objective
from mgtta.training.meta import _Trainer, shifted_images


def trainer_in_float64(generator, batch_size=2, lr=1e-2):
    model = mgtta.load_model(vit().double())
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    return _Trainer(model, source, images(8).double(), generator.double(), batch_size, lr, 1e-2, 0.4, seed=0)


def objective_after_one_update(trainer, theta, inputs, memory, x):
    """The objective at theta_{t-1} - lr * update_{t-1}(phi) on x: what phi is to lower. No graph, no shortcut."""
    before = trainer.generator.init_memory(len(inputs)) if memory is None else memory
    update, _ = trainer.generator(inputs, before)
    with torch.no_grad():
        flat = theta - trainer.lr * update
        for p, value in zip(trainer.theta, flat.split([p.numel() for p in trainer.theta]), strict=True):
            p.copy_(value.view_as(p))
        logits, features = trainer.model.features(x)
        return objective(logits, features, trainer.source.mean, trainer.source.std, trainer.trade_off).item()


@pytest.mark.parametrize("kind", ["gml", "lstm"])
@pytest.mark.parametrize("first", [True, False], ids=["fresh memory", "written memory"])
def test_the_meta_gradient_agrees_with_finite_differences(kind, first):
    trainer = trainer_in_float64(random_generator(3, kind))
    xs = trainer.images.split(2)
    n = sum(p.numel() for p in trainer.theta)
    zeros = torch.zeros(n, dtype=torch.float64)
    grad = trainer.gradient(xs[0])
    inputs, m, v = generator_inputs(grad, zeros, zeros, 1, (0.9, 0.99), 1e-8)
    memory = None
    if not first:  # one more update before the one that is examined
        memory = trainer.generate(inputs, None)
        trainer.move_theta()
        inputs, *_ = generator_inputs(trainer.gradient(xs[1]), m, v, 2, (0.9, 0.99), 1e-8)
    theta = torch.cat([p.detach().flatten() for p in trainer.theta]).clone()
    trainer.generate(inputs, memory)
    trainer.move_theta()
    start = copy.deepcopy(trainer.generator.state_dict())
    trainer.move_phi(trainer.gradient(xs[2]))
    analytic = [None if p.grad is None else p.grad.clone() for p in trainer.phi]
    trainer.generator.load_state_dict(start)
    used = 0
    for p, g in zip(trainer.phi, analytic, strict=True):
        for i in range(0, p.numel(), max(1, p.numel() // 3)):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    p.view(-1)[i] += step
                values.append(objective_after_one_update(trainer, theta, inputs, memory, xs[2]))
                with torch.no_grad():
                    p.view(-1)[i] -= step
            numeric = (values[0] - values[1]) / 2e-5
            assert (0.0 if g is None else g.view(-1)[i].item()) == pytest.approx(numeric, abs=1e-8, rel=1e-5)
            used += g is not None
    assert used > 10


def test_one_pass_agrees_with_a_slow_transcription_of_algorithm_1():
    """theta is rebuilt as a function of phi at every step and the whole thing differentiated by autograd."""
    generator = random_generator(3)
    fast = trainer_in_float64(copy.deepcopy(generator))
    list(fast.one_pass(4))

    slow = trainer_in_float64(copy.deepcopy(generator))  # for its parts: model, source, images
    phi = slow.generator
    outer = torch.optim.Adam(phi.parameters(), lr=1e-2)
    net, names = slow.model, [name for name, p in slow.model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in slow.theta]
    theta = torch.cat([p.detach().flatten() for p in slow.theta])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    m = v = torch.zeros_like(theta)
    memory, last = None, None
    for t, batch in enumerate(order.split(2), start=1):
        leaf = theta.clone().requires_grad_()
        live = leaf if last is None else leaf - slow.lr * (last - last.detach())  # value theta_t, graph to phi
        weights = dict(
            zip(names, [c.view_as(p) for c, p in zip(live.split(sizes), slow.theta, strict=True)], strict=True)
        )
        logits, features = torch.func.functional_call(
            _Features(net), {f"net.{k}": w for k, w in weights.items()}, (slow.images[batch],)
        )
        loss = objective(logits, features, slow.source.mean, slow.source.std, 0.4)
        outer.zero_grad()
        loss.backward()
        if last is not None:
            outer.step()
        g = leaf.grad
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        den = (v / (1 - 0.99 ** (t + 1))).sqrt() + 1e-8
        z = torch.stack([m / (1 - 0.9 ** (t + 1)) / den, g / den], 1)
        last, memory = phi(z, phi.init_memory(len(g)) if memory is None else memory.detach())
        theta = theta - slow.lr * last.detach()
    for a, b in zip(fast.generator.parameters(), phi.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in fast.theta]), theta, atol=1e-10, rtol=0)


class _Features(torch.nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net.features(x)


def shifted(seed, n=32):
    return (images(n, seed=seed) * 0.4 + 0.5).clamp(0, 1)


def test_meta_train_lowers_the_objective_more_than_no_training():
    """Three seeds: mean objective at the end of a fresh stream, trained against untrained and not adapted."""
    for seed in range(3):
        model = mgtta.load_model(confident_vit(seed))
        source = mgtta.source_statistics(model, images(64, seed=50 + seed))
        trained = mgtta.meta_train(
            model, source, shifted(seed), steps=96, lr=3e-3, batch_size=4, seed=seed, progress=False
        )
        torch.manual_seed(seed)
        untrained = mgtta.MetaGradientGenerator()
        final = []
        for generator, lr in ((trained, 1e-3), (untrained, 1e-3), (untrained, 0.0)):
            method = mgtta.create("mgtta", model, source=source, generator=generator, lr=lr)
            losses = []
            for t in range(24):
                x = shifted(1000 + 100 * seed + t, n=8)
                losses.append(method.loss(x)[1].item())
                method(x)
            final.append(statistics.mean(losses[-6:]))
        assert final[0] < 0.85 * final[1]
        assert final[0] < 0.85 * final[2]


@pytest.mark.parametrize("validated", [False, True])
def test_meta_train_resumes_from_its_checkpoint_bit_for_bit(tmp_path, model, source, validated):
    validation = [Labelled(images(4, seed=t), torch.arange(4), "d") for t in range(2)] if validated else None
    options = {"steps": 20, "validation": validation, "progress": False, "seed": 3}
    x = shifted(0, n=8)
    straight = mgtta.meta_train(model, source, x, **options)

    class KilledError(Exception):
        pass

    saves = []

    def save_then_die(trainer, path, protocol, save=_Trainer.save):
        save(trainer, path, protocol)
        saves.append(path)
        if len(saves) == 2:
            raise KilledError

    checkpoint = tmp_path / "run.safetensors"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(_Trainer, "save", save_then_die)
        mgtta.meta_train(model, source, x, checkpoint=checkpoint, **options)
    resumed = mgtta.meta_train(model, source, x, checkpoint=checkpoint, **options)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert straight.about == resumed.about
    with pytest.raises(ValueError, match="other settings"):
        mgtta.meta_train(model, source, x, checkpoint=checkpoint, **{**options, "lr": 0.5})


class Labelled(tuple):
    def __new__(cls, x, y, domain):
        return super().__new__(cls, (x, y))

    def __init__(self, x, y, domain):
        self.x, self.y, self.domain = x, y, domain


@pytest.mark.parametrize("scores", [[1.0, 5.0, 2.0, 4.0], [float("nan"), 5.0, 5.0, 4.0]])
def test_meta_train_returns_the_best_generator(model, source, monkeypatch, scores):
    """The judging is real but for the figure that the evaluation gives."""
    figures = iter(scores)
    seen = []

    def evaluated(method, validation):
        seen.append(copy.deepcopy(method.optimizer.generator.state_dict()))
        return [Record("mgtta", "d", top1=next(figures))]

    monkeypatch.setattr("mgtta.training.meta.evaluate", evaluated)
    best = mgtta.meta_train(model, source, images(4), steps=8, validation=["batches"], progress=False)
    assert best.about["best"] == {"step": 4, "score": 5.0}
    assert all(torch.equal(t, seen[1][name]) for name, t in best.state_dict().items())


def test_meta_train_checkpoint_belongs_to_its_images_and_starting_weights_and_takes_more_steps(tmp_path, model, source):
    run = tmp_path / "run"
    options = {"checkpoint": run, "progress": False}
    mgtta.meta_train(model, source, shifted(0, 8), steps=4, **options)
    for change in ({"images": shifted(1, 8)}, {"images": shifted(0, 8), "generator": random_generator()}):
        with pytest.raises(ValueError, match="other settings"):
            mgtta.meta_train(model, source, change.pop("images"), steps=4, **change, **options)
    longer = mgtta.meta_train(model, source, shifted(0, 8), steps=8, **options)
    straight = mgtta.meta_train(model, source, shifted(0, 8), steps=8, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(longer.parameters(), straight.parameters(), strict=True))


def test_shifted_images_are_different_ones_of_many_classes():
    data = Glyphs(300)
    x = shifted_images(data, 40, seed=1)
    assert x.shape == (40, 3, 48, 48)
    assert torch.equal(x, shifted_images(data, 40, seed=1))
    assert not torch.equal(x, shifted_images(data, 40, seed=2))
    order = torch.cat([batch.index for batch in stream(data, batch_size=40, first=40, seed=1)])
    for i, name in enumerate(VALIDATION_CORRUPTIONS):  # ten images each, none of them twice
        mine = order[i::4]
        clean = torch.stack([data[int(j)][0] for j in mine])
        assert torch.equal(x[10 * i : 10 * i + 10], corrupt(clean, name, index=mine, seed=1))
    assert len(order.unique()) == 40
    assert len(data.labels[order].unique()) > 10


def test_meta_train_is_seeded_and_changes_neither_model_nor_generator(model, source):
    weights = copy.deepcopy(model.state_dict())
    start = random_generator()
    kept = copy.deepcopy(start.state_dict())
    torch.manual_seed(1)
    a = mgtta.meta_train(model, source, shifted(0, 8), steps=6, seed=5, progress=False)
    torch.manual_seed(2)
    b = mgtta.meta_train(model, source, shifted(0, 8), steps=6, seed=5, progress=False)
    c = mgtta.meta_train(model, source, shifted(0, 8), steps=6, seed=6, progress=False)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a.parameters(), c.parameters(), strict=True))
    mgtta.meta_train(model, source, shifted(0, 8), generator=start, steps=6, progress=False)
    assert all(torch.equal(t, kept[name]) for name, t in start.state_dict().items())
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())


def test_meta_train_skips_and_counts_bad_batches(model, source):
    x = shifted(0, 8)
    x[3] = float("nan")
    generator = mgtta.meta_train(model, source, x, steps=8, progress=False)
    assert generator.about["skipped"] == 2
    assert all(p.isfinite().all() for p in generator.parameters())


def test_meta_train_rejects_invalid_arguments(model, source):
    with pytest.raises(ValueError, match="at least one image"):
        mgtta.meta_train(model, source, torch.rand(0, 3, 32, 32))
    with pytest.raises(ValueError, match="steps must be at least 1"):
        mgtta.meta_train(model, source, images(4), steps=0)
    with pytest.raises(ValueError, match="finite objective"):
        mgtta.meta_train(model, source, images(4) * float("nan"), steps=2, progress=False)
    with pytest.raises(ValueError, match="batch_size"):
        mgtta.meta_train(model, source, images(4), batch_size=0)
    with pytest.raises(ValueError, match="other weights"):
        mgtta.meta_train(mgtta.load_model(vit(seed=1)), source, images(4))
    with pytest.raises(ValueError, match="iterated more than once"):
        mgtta.meta_train(model, source, images(4), steps=2, validation=iter([]), progress=False)
