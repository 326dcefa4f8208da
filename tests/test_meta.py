import copy
import statistics
import sys

import pytest
import torch
from conftest import confident_vit, images, random_generator, vit
from PIL import Image

import mgtta
from mgtta import cli
from mgtta.data.corruptions import VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import stream
from mgtta.evaluation.record import Record
from mgtta.learned.optimizer import generator_inputs
from mgtta.losses import objective
from mgtta.training.episodes import KINDS, Passes, Streams
from mgtta.training.meta import _Trainer, shifted_domains, shifted_images


def trainer_in_float64(generator, batch_size=2, lr=1e-2):
    model = mgtta.load_model(vit().double())
    source = mgtta.source_statistics(model, images(16, seed=9).double())
    episodes = Passes(images(8).double(), batch_size, seed=0)
    return _Trainer(model, source, episodes, generator.double(), batch_size, lr, 1e-2, 0.4, seed=0)


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
    xs = trainer.episodes.images.split(2)
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
            _Features(net), {f"net.{k}": w for k, w in weights.items()}, (slow.episodes.images[batch],)
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
    with pytest.raises(ValueError, match="pull is a share"):
        mgtta.meta_train(model, source, images(4), pull=1.0)
    with pytest.raises(ValueError, match=r"unknown kind of episodes 'stream'.*streams"):
        mgtta.meta_train(model, source, images(4), episodes="stream")
    with pytest.raises(ValueError, match="one tensor of at least one image"):
        mgtta.meta_train(model, source, [images(4)])
    for wrong in (images(4), [], [images(4), "images"]):
        with pytest.raises(ValueError, match="a list of images, one tensor"):
            mgtta.meta_train(model, source, wrong, episodes="streams")
    with pytest.raises(ValueError, match="at least batch_size images"):
        mgtta.meta_train(model, source, [images(8), images(3)], batch_size=4, episodes="streams")
    with pytest.raises(ValueError, match="episode_steps"):
        mgtta.meta_train(model, source, [images(4)], episodes="streams", episode_steps=0)


# --- the regime of deployment: pull, mirrored views, episodes of streams


def test_meta_train_without_the_new_options_is_as_before():
    """Norms of the weights as the code of 0.1 trains them, and its protocol, which old checkpoints must have."""
    model = mgtta.load_model(the_same_on_every_cpu(vit()))
    source = mgtta.source_statistics(model, images(32, seed=99).double())
    start = the_same_on_every_cpu(mgtta.MetaGradientGenerator())

    def train(**options):
        x = shifted(0, 8).double()
        settings = {"generator": start, "steps": 10, "lr": 3e-3, "seed": 3, "progress": False}
        return mgtta.meta_train(model, source, x, **settings, **options)

    trained = train()
    norms = [p.detach().norm().item() for p in trained.parameters()]
    assert norms == pytest.approx(NORMS_OF_0_1, rel=1e-6)
    assert trained.about["scores"] == pytest.approx([-2.0766094424, -2.0611240243, -2.0585596601], rel=1e-8)
    assert trained.about["training"].keys().isdisjoint({"pull", "mirror", "episodes", "episode_steps"})
    again = train(pull=0.0, mirror=False, episodes="passes")
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters(), strict=True))
    assert trained.about == again.about


def the_same_on_every_cpu(module):
    """Return the module in float64, with uniform random numbers as its matrices.

    Normal ones, as modules begin with, differ in their last digits from one kind of CPU to another, and Adam's first
    steps, which divide small gradients by themselves, make that large.
    """
    random = torch.Generator().manual_seed(0)
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.copy_(torch.rand(p.shape, generator=random, dtype=p.dtype) - 0.5)
    return module


NORMS_OF_0_1 = [
    0.9094558232,
    2.296757886,
    0.01223324532,
    0.1086946842,
    0.07886294118,
    0.07888462192,
    0.992540584,
    1.143416848,
    2.830990647,
    0.06530066322,
    2.930048643,
    0.09556547077,
    0.7666838085,
]


def test_streams_are_episodes_of_one_domain_of_changing_and_of_mixed_domains():
    domains = [torch.full((6, 3, 2, 2), float(d)) + torch.arange(6).view(-1, 1, 1, 1) / 10 for d in range(3)]
    streams = Streams(domains, batch_size=4, seed=1, steps=8)
    episodes = [streams.episode(k) for k in range(60)]
    seen = {kind: [] for kind in KINDS}
    for episode in episodes:
        batches = list(episode.batches)
        assert [x.shape for x in batches] == [(4, 3, 2, 2)] * 8
        assert all(len(x[:, 0, 0, 0].unique()) == 4 for x in batches)
        seen[episode.kind].append([set(x[:, 0, 0, 0].int().tolist()) for x in batches])
    assert all(len(found) > 10 for found in seen.values())
    assert 30 < sum(episode.from_source for episode in episodes) < 55
    for found in seen["domain"]:
        assert len(set.union(*found)) == 1
    for found in seen["changing"]:
        assert all(found[k] == found[k + 1] and len(found[k]) == 1 for k in (0, 2, 4, 6))
    assert max(len(set.union(*found)) for found in seen["changing"]) > 1
    assert all(max(map(len, found)) > 1 for found in seen["mixed"])
    again = streams.episode(7)
    assert all(torch.equal(a, b) for a, b in zip(again.batches, streams.episode(7).batches, strict=True))


def test_the_inner_loop_of_training_is_the_deployed_step(model, source):
    """One update of the trainer, pulled and mirrored, is one update of mgtta+ with the same generator."""
    generator = random_generator()
    episodes = Streams([images(8)], batch_size=8, seed=0, steps=1)
    trainer = _Trainer(model, source, episodes, copy.deepcopy(generator), 8, 5e-3, 1e-2, 0.8, 0, 0.25, True)
    list(trainer.one_pass(2))
    [x] = episodes.episode(0).batches
    settings = {"lr": 5e-3, "pull": 0.25, "gather": 0, "recall": 0, "class_mix": False}
    method = mgtta.create("mgtta+", model, source=source, generator=generator, **settings)
    method(x)
    for a, b in zip(trainer.theta, method.adapted.values(), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(trainer.theta[0], trainer.origin[0])


def test_the_meta_gradient_passes_the_pull():
    """phi's gradient by finite differences through theta = (1 - pull) * (theta - lr * update) + pull * source."""
    trainer = trainer_in_float64(random_generator(3))
    trainer.pull = 0.3
    first, second, *_ = trainer.episodes.images.split(2)
    n = sum(p.numel() for p in trainer.theta)
    zeros = torch.zeros(n, dtype=torch.float64)
    inputs, *_ = generator_inputs(trainer.gradient(first), zeros, zeros, 1, (0.9, 0.99), 1e-8)
    start = copy.deepcopy(trainer.generator.state_dict())
    trainer.generate(inputs, None)
    trainer.move_theta()
    trainer.move_phi(trainer.gradient(second))
    analytic = trainer.generator.o_proj.weight.grad.flatten()[0].item()
    values = []
    for step in (1e-5, -1e-5):
        trainer.generator.load_state_dict(start)
        trainer.return_to_source()
        with torch.no_grad():
            trainer.generator.o_proj.weight.view(-1)[0] += step
        trainer.generate(inputs, None)
        trainer.move_theta()
        with torch.no_grad():
            logits, features = trainer.model.features(second)
        values.append(objective(logits, features, trainer.source.mean, trainer.source.std, 0.4).item())
    assert analytic == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_meta_train_on_streams_lowers_the_objective():
    """Three seeds: the objective at the end of streams of new images, deployed as trained, against no training."""
    for seed in range(3):
        model = mgtta.load_model(confident_vit(seed))
        source = mgtta.source_statistics(model, images(64, seed=50 + seed))
        domains = [shifted(seed), (images(32, seed=70 + seed) * 0.5).clamp(0, 1)]
        deployed = {"lr": 3e-3, "pull": 0.05}
        trained = mgtta.meta_train(
            model,
            source,
            domains,
            episodes="streams",
            episode_steps=16,
            steps=128,
            batch_size=4,
            mirror=True,
            trade_off=0.8,
            seed=seed,
            progress=False,
            **deployed,
        )
        about = trained.about["training"]
        assert (about["episodes"], about["pull"], about["mirror"]) == ("streams", 0.05, True)
        assert trained.about["best"]["step"] == 128
        assert len(trained.about["scores"]) == 1
        torch.manual_seed(seed)
        untrained = mgtta.MetaGradientGenerator()
        final = []
        for generator in (trained, untrained):
            method = mgtta.create("mgtta+", model, source=source, generator=generator, **deployed, gather=0, recall=0)
            losses = []
            for t in range(24):
                x = shifted(1000 + 100 * seed + t, n=8)
                losses.append(method.loss(x)[1].item())
                method(x)
            final.append(statistics.mean(losses[-6:]))
        assert final[0] < 0.9 * final[1]


@pytest.mark.parametrize("validated", [False, True])
def test_meta_train_on_streams_resumes_from_its_checkpoint_bit_for_bit(tmp_path, model, source, validated):
    validation = [Labelled(images(4, seed=t), torch.arange(4), "d") for t in range(2)] if validated else None
    options = {
        "steps": 22,
        "episodes": "streams",
        "episode_steps": 4,
        "pull": 0.1,
        "mirror": True,
        "batch_size": 2,
        "validation": validation,
        "progress": False,
        "seed": 3,
    }
    domains = [shifted(0, n=8), shifted(1, n=6)]
    straight = mgtta.meta_train(model, source, domains, **options)

    class KilledError(Exception):
        pass

    saves = []

    def save_then_die(trainer, path, protocol, save=_Trainer.save):
        save(trainer, path, protocol)
        saves.append(path)
        if len(saves) == 3:
            raise KilledError

    checkpoint = tmp_path / "run.safetensors"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(_Trainer, "save", save_then_die)
        mgtta.meta_train(model, source, domains, checkpoint=checkpoint, **options)
    resumed = mgtta.meta_train(model, source, domains, checkpoint=checkpoint, **options)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert straight.about == resumed.about
    for change in ({"steps": 30}, {"pull": 0.2}, {"mirror": False}, {"episode_steps": 5}):
        with pytest.raises(ValueError, match="other settings"):
            mgtta.meta_train(model, source, domains, checkpoint=checkpoint, **{**options, **change})


def test_shifted_domains_are_the_same_images_under_each_corruption():
    data = Glyphs(60)
    found = shifted_domains(data, 12, seed=1)
    [batch] = stream(data, batch_size=12, first=12, seed=1)
    assert len(found) == len(VALIDATION_CORRUPTIONS)
    for x, name in zip(found, VALIDATION_CORRUPTIONS, strict=True):
        assert torch.equal(x, corrupt(batch.x, name, index=batch.index, seed=1))


def test_set_takes_inf_so_that_a_rate_need_not_fall():
    assert cli.options.settings(["decay=inf", "lr=5e-3", "generator=inf.safetensors"]) == {
        "decay": float("inf"),
        "lr": 5e-3,
        "generator": "inf.safetensors",
    }


def test_set_takes_true_and_false_as_python_and_as_shells_write_them():
    found = cli.options.settings(["alike=true", "balance=false", "class_mix=False", "mirror=auto"])
    assert found == {"alike": True, "balance": False, "class_mix": False, "mirror": "auto"}


def test_the_command_trains_on_streams(tmp_path, monkeypatch):
    glyphs = Glyphs(20)
    (tmp_path / "images").mkdir()
    for i in range(20):
        Image.fromarray(glyphs[i][0].permute(1, 2, 0).numpy()).save(tmp_path / "images" / f"{i:02}.png")
    words = f"--model glyphs_vit --source glyphs_vit --device cpu --corrupt --streams --images 16 --out {tmp_path}/g"
    for more, expected in (
        ("--steps 3", {"batch_size": 16, "lr": 5e-3, "pull": 0.05, "trade_off": 0.4, "domains": 4, "images": 64}),
        ("--steps 2 --mirror --pull 0 --batch-size 4", {"batch_size": 4, "mirror": True, "trade_off": 0.8}),
    ):
        monkeypatch.setattr("sys.argv", ["mgtta", "train", str(tmp_path / "images"), *words.split(), *more.split()])
        with pytest.raises(SystemExit) as stop:
            sys.exit(cli.main())
        assert not stop.value.code
        training = mgtta.load_generator(tmp_path / "g").about["training"]
        assert training["episodes"] == "streams"
        assert expected.items() <= training.items()
