"""The fast path: close to float32, with the same contract; on a GPU compiled and captured."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, images, random_generator, vit

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta._lib.timm import timm
from mgtta.adaptation.state import own_buffers
from mgtta.adaptation.wrapper import innermost
from mgtta.data.embedded import EMBEDDED
from mgtta.data.streams import Batch, corrupted, stream
from mgtta.fast import choice, graphed
from mgtta.fast import engine as fast
from mgtta.fast import vit as plain
from mgtta.fast.captured import as_it_is, kept_if_broken
from mgtta.fast.flat import FlatStep
from mgtta.fast.remembered import is_remembered, remember
from mgtta.fast.rounded import RoundedEngine
from mgtta.losses import entropy
from mgtta.methods._descent import Descent
from mgtta.methods.registry import FISHER, GENERATOR, SOURCE, recipe
from mgtta.methods.tent import Tent

NAMES = ("noadapt", "tent", "eq7_sgd", "eq7_adam", "mgtta", "mgtta_lstm")
CHOOSING = ("eta", "eata", "eata_come", "rdumb")  # methods that choose images, by masks
ROUNDED = ("sar", "sar_come", "deyo", "roid", "cmf")  # methods whose own steps run over rounded weights
FOLLOWING = ("mgtta_plus", *CHOOSING)  # methods with running means of their own
CPU = torch.device("cpu")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own; ours is looked for by hand
]


def make(name, net=None, device="cpu", precision="bf16", **settings):
    model = mgtta.load_model(net or confident_vit()).to(device)
    needs = recipe(name).needs
    if GENERATOR in needs:
        settings.setdefault("generator", random_generator(memory="lstm" if "lstm" in name else "gml"))
    if SOURCE in needs:
        settings["source"] = mgtta.source_statistics(model, images(16, seed=99))
    if FISHER in needs:
        settings["fisher"] = mgtta.fisher_information(model, images(16, seed=99))
    return mgtta.create(name, model, precision=precision, **settings)


def batches(n=4, size=8):
    return [images(size, seed=t) for t in range(n)]


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", NAMES)
def test_close_to_float32(name, net, low_memory):
    exact, quick = (
        make(name, NETS[net](), precision=p, **more) for p, more in (("fp32", {}), ("bf16", {"low_memory": low_memory}))
    )
    assert (exact.precision, quick.precision) == ("fp32", "bf16")
    for x in batches():
        expected, found = exact(x), quick(x)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
    assert (quick.updates, quick.skipped) == (exact.updates, exact.skipped)
    assert all(p.dtype == torch.float32 for p in quick.adapted.values())
    assert quick.model.fingerprint() != exact.model.fingerprint()
    assert quick.fingerprint == exact.fingerprint  # states and statistics are the source model's


def followed(method):
    """Return the running means of a method."""
    return {name: t for name, t in own_buffers(innermost(method)).items() if not name.startswith("statistics")}


@pytest.mark.parametrize("name", FOLLOWING)
def test_running_means_follow_as_in_float32(name):
    """Of the images that a filter keeps, and not of batches that are not finite or that teach nothing."""
    open_filters = {"margin": 0.9, "redundancy": 0.999} if name in CHOOSING else {"gather": 3}
    exact, quick = (make(name, lr=1e-4, precision=p, **open_filters) for p in ("fp32", "bf16"))
    bad = images(8)
    bad[0, 0, 0, 0] = float("nan")
    for x in [*batches(3), bad, *batches(3, size=5), *images(4).split(1)]:
        expected, found = exact(x), quick(x)
        if x is not bad:
            assert close(found, expected)
    assert (quick.updates, quick.skipped) == (exact.updates, exact.skipped)
    for key, value in followed(quick).items():
        torch.testing.assert_close(value, followed(exact)[key], atol=0.05, rtol=0.05)
        assert value.any()


@pytest.mark.parametrize("name", CHOOSING)
def test_a_batch_that_teaches_nothing_is_neither_an_update_nor_skipped(name):
    method = make(name, vit())  # random weights: every entropy is near ln C
    before = method.state_dict()["params"]
    for x in batches(2):
        method(x)
    assert (method.updates, method.skipped) == (0, 0)
    assert all(torch.equal(t, before[key]) for key, t in method.state_dict()["params"].items())
    assert not method.probs.any()


@pytest.mark.parametrize("name", ROUNDED)
def test_steps_of_their_own_run_over_rounded_weights(name):
    settings = {"sar": {"margin": 1.1}, "sar_come": {"margin": 1.1}}.get(name, {})
    settings = {"deyo": {"entropy_threshold": 1.1, "plpd_threshold": -1.0}}.get(name, settings)
    exact, quick = (make(name, precision=p, lr=1e-4, **settings) for p in ("fp32", "bf16"))
    assert type(quick.engine) is RoundedEngine
    for x in batches(3):
        expected, found = exact(x), quick(x)
        assert found.dtype == torch.float32
        assert close(found, expected)
    assert (quick.updates, quick.skipped) == (exact.updates, exact.skipped)
    assert quick.updates == 3
    assert all(p.dtype == torch.float32 for p in quick.adapted.values())
    with pytest.raises(ValueError, match=f"low_memory .* {name}"):
        make(name, low_memory=True)
    with pytest.raises(ValueError, match=f"'fp8' is not for {name}.*take precision='bf16'"):
        make(name, precision="fp8")
    with pytest.raises(TypeError, match="precision='fp32'"):
        quick.double()


@pytest.mark.parametrize("name", ROUNDED)
def test_passes_are_filled_up_to_the_batch(name, monkeypatch):
    """With a stand-in for a graph that runs the network on so many images: the result is the same."""
    settings = {"deyo": {"entropy_threshold": 0.8, "plpd_threshold": -1.0}}.get(name, {})
    method, twin = (make(name, lr=1e-4, **settings) for _ in range(2))
    made = []

    class Filled:
        def __init__(self, run, x, params):
            made.append(len(x))
            self.run, self.x = run, x

        def __call__(self, x):
            return self.run(torch.cat([x, torch.zeros_like(self.x[len(x) :])]))[: len(x)]

    monkeypatch.setattr(graphed, "_Pass", Filled)
    monkeypatch.setattr(graphed, "CAPTURE_BATCHES", 1)
    expected = [twin(x) for x in batches(4)]
    monkeypatch.setattr(graphed, "DEVICE", "cpu")
    for x, logits in zip(batches(4), expected, strict=True):
        torch.testing.assert_close(method(x), logits, atol=1e-2, rtol=1e-2)
    assert made
    assert set(made) == {8}
    assert method.updates == twin.updates > 0
    assert "forward" not in vars(method.model.net)


def test_a_graph_finds_buffers_that_a_reset_or_a_load_has_replaced():
    method = make("mgtta_plus", gather=0, recall=0)
    engine = method.engine
    memory = method.neighbours
    method(images(8))
    engine._hold_buffers(images(8))  # as a capture does
    held = memory.values
    state = method.state_dict()
    method.reset()
    assert memory.values is not held
    expected = memory.values.clone()
    engine._follow_buffers()
    assert memory.values is held
    assert torch.equal(held, expected)
    method.load_state_dict(state)
    engine._follow_buffers()
    assert memory.values is held
    assert torch.equal(held, state["buffers"]["neighbours.values"])
    method.reset()
    engine._hold_buffers(images(8))  # another capture, after a reset
    assert memory.values is held
    assert torch.equal(held, expected)


def test_a_graph_finds_buffers_that_get_their_size_from_a_batch():
    method = make("eta", margin=1.1, redundancy=1.1)
    method(images(8))
    method.reset()
    method.engine._hold_buffers(images(8))
    held = method.probs
    assert held.shape == (CLASSES,)
    assert not held.any()
    method(images(8))
    assert held.any()
    method.reset()
    method.engine._follow_buffers()
    assert method.probs is held
    assert not held.any()


def test_what_was_compiled_before_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert not is_remembered("a step")
    remember("a step")
    assert is_remembered("a step")
    assert not is_remembered("another")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/nowhere")
    remember("a step")  # where nothing can be written, nothing is noted
    assert not is_remembered("a step")


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_8_bits(name, low_memory):
    method, rounded = (make(name, precision=p, low_memory=low_memory) for p in ("bf16", "fp8"))
    assert rounded.precision == copy.deepcopy(rounded).precision == "fp8"
    x, *more = batches()
    assert torch.equal(rounded(x), method(x))  # the way there is the same
    for x in more:
        found, expected = rounded(x), method(x)
        assert (found - expected).norm() < 0.03 * expected.norm()
    a, b = (
        torch.cat([p.flatten() for p in m.state_dict()["params"].values()] or [torch.ones(1)])
        for m in (rounded, method)
    )
    assert torch.equal(a, b) == (name == "noadapt")


@pytest.mark.parametrize("name", EMBEDDED)
def test_on_embedded_images_it_predicts_what_float32_does(name):
    model, source = mgtta.load_model(name), mgtta.load_source(name)
    found = []
    for kind in ("fp32", "bf16"):
        method = mgtta.create("mgtta", model, source=source, lr=5e-3, precision=kind)
        found.append([method(b.x) for b in stream(corrupted(EMBEDDED[name](96), ["fog"]), batch_size=32)])
    agree = torch.cat([a.argmax(1) == b.argmax(1) for a, b in zip(*found, strict=True)])
    assert agree.float().mean() > 0.95


def test_who_may_take_it(model, source, monkeypatch):
    assert mgtta.create("tent", model).precision == "fp32"
    assert mgtta.create("tent", model, precision="auto").precision == "fp32"  # there is no GPU

    class Other(Tent):
        def loss(self, x):
            """A step of its own, which may do anything."""
            return super().loss(x)

    with pytest.raises(ValueError, match="values in a batch"):
        choice.fits(Other(model, Descent(0.1).factory()), "bf16")
    for name, message in (("spa", "values in a batch"), ("cotta", "values"), ("lame", "values")):
        with pytest.raises(ValueError, match=message):
            mgtta.create(name, model, precision="bf16")
    narrow = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2)
    for other in (mgtta.load_model("glyphs_vit"), mgtta.load_model(narrow)):
        with pytest.raises(ValueError, match=r"'fp8' is not for tent: that is for a plain ViT.*take .*'bf16'"):
            mgtta.create("tent", other, precision="fp8")
    monkeypatch.setattr(plain, "multiplies_float8", lambda device: False)
    with pytest.raises(ValueError, match="where 8-bit floats can be multiplied; take precision='bf16'"):
        mgtta.create("tent", mgtta.load_model(vit()), precision="fp8")
    monkeypatch.undo()
    moved = make("tent", precision="fp8")
    monkeypatch.setattr(plain, "multiplies_float8", lambda device: False)
    with pytest.raises(ValueError, match="precision='fp8' is not for tent there"):
        moved(images(8))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="not float32"):
        mgtta.create("tent", copy.deepcopy(model).double(), precision="bf16")
    with pytest.raises(ValueError, match=r"unknown precision 'fp16'; valid: auto, bf16, fp32, fp8"):
        mgtta.create("tent", model, precision="fp16")
    with pytest.raises(ValueError, match="low_memory belongs to the fast path"):
        mgtta.create("tent", model, low_memory=True)
    for change in (torch.nn.Module.double, torch.nn.Module.float, torch.nn.Module.bfloat16):
        with pytest.raises(TypeError, match="precision='fp32'"):
            change(mgtta.create("tent", model, precision="bf16"))


# --- the contract


@pytest.mark.parametrize("name", [*NAMES, *FOLLOWING])
def test_reset_and_resume_are_bit_exact(name, tmp_path):
    method, xs = make(name), batches(6)
    start = copy.deepcopy(method.model.state_dict())
    straight = [method(x) for x in xs]
    method.reset()
    assert method.updates == method.skipped == 0
    assert all(torch.equal(t, start[key]) for key, t in method.model.state_dict().items())
    assert all(torch.equal(a, method(x)) for a, x in zip(straight[:3], xs[:3], strict=True))
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = make(name)
    other(images(8, seed=77))  # somewhere else entirely
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert other.updates == method.updates
    assert all(torch.equal(a, other(x)) for a, x in zip(straight[3:], xs[3:], strict=True))
    for twin in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert twin.updates == method.updates
        assert torch.equal(twin(xs[3]), straight[3])
    assert torch.equal(method(xs[3]), straight[3])  # which its copies have left alone


@pytest.mark.parametrize("name", ["tent", "eq7_adam", "mgtta"])
def test_states_go_from_one_precision_to_the_other(name):
    exact, quick = make(name, precision="fp32"), make(name)
    for x in batches(3):
        exact(x)
    quick.load_state_dict(exact.state_dict())
    x = images(8, seed=50)
    torch.testing.assert_close(quick(x), exact(x), atol=0.1, rtol=0.05)
    exact.load_state_dict(quick.state_dict())
    assert exact.updates == quick.updates == 4
    states = [m.optimizer.state_dict()["state"].get(0, {}) for m in (exact, quick)]
    assert states[0].keys() == states[1].keys()


@pytest.mark.parametrize("name", ["tent", "mgtta", *FOLLOWING])
def test_nothing_waits_for_the_device_but_what_must(name, monkeypatch):
    waits = []
    settle = FlatStep.settle
    monkeypatch.setattr(FlatStep, "settle", lambda self: waits.append(1) or settle(self))
    method, (first, *more) = make(name), batches()
    method(first)
    waits.clear()  # of the start, which a reset comes back to
    for x in more:
        method(x)
    assert not waits
    assert method.updates == {"tent": 4, "mgtta": 4, "mgtta_plus": 2}.get(name, method.updates)
    assert len(waits) == 1


@pytest.mark.parametrize("reset", ["domain", "never"])
def test_evaluate_waits_for_the_device_once_a_domain(reset, monkeypatch):
    waits = []
    settle = FlatStep.settle
    monkeypatch.setattr(FlatStep, "settle", lambda self: waits.append(1) or settle(self))
    domains = zip(batches(5), ("fog", "fog", "fog", "snow", "snow"), strict=True)
    unlabelled = [Batch(x, None, domain, torch.arange(len(x))) for x, domain in domains]
    unlabelled[1].x[0, 0, 0, 0] = float("nan")
    waited = []  # as each batch was done
    records = mgtta.evaluate(make("mgtta"), unlabelled, reset, on_batch=lambda *_: waited.append(len(waits)))
    assert waited == [0, 0, 0, 1, 1]
    assert len(waits) == 2
    assert [(r.updates, r.skipped) for r in records] == [(2, 1), (2, 0)]


@pytest.mark.parametrize("name", ["tent", "mgtta"])
def test_a_bad_batch_is_predicted_skipped_and_counted(name):
    method = make(name)
    method(images(8))
    before = method.state_dict()
    x = images(8, seed=1)
    x[1, 0, 5, 5] = float("nan")
    assert method(x).shape == (8, CLASSES)
    assert (method.updates, method.skipped) == (1, 1)
    after = method.state_dict()
    assert all(torch.equal(t, before["params"][key]) for key, t in after["params"].items())
    for p, moments in before["optimizer"]["state"].items():
        assert all(torch.equal(t, after["optimizer"]["state"][p][key]) for key, t in moments.items())
    assert method(images(8, seed=2)).isfinite().all()
    assert (method.updates, method.skipped) == (2, 1)


def test_budgets_guards_and_images_that_do_not_fit():
    method = make("mgtta", max_updates=2)
    for x in batches(4):
        method(x)
    assert method.updates == 2
    guarded = make("mgtta", guard=True)
    for x in batches(3):
        assert guarded(x).isfinite().all()
    state = guarded.state_dict()
    expected = guarded(images(8, seed=9))
    guarded.load_state_dict(state)
    assert torch.equal(guarded(images(8, seed=9)), expected)
    for bad in (torch.rand(0, 3, 32, 32), torch.rand(2, 5, 32, 32), torch.rand(2, 3, 40, 40)):
        with pytest.raises(ValueError):
            method(bad)
        method.reset()
        with pytest.raises(ValueError):
            method(bad)
    assert method.updates == 0


def test_a_changed_learning_rate_counts():
    method = make("eq7_sgd", lr=0.0)
    start = method.state_dict()["params"]
    method(images(8))
    assert all(torch.equal(t, start[key]) for key, t in method.state_dict()["params"].items())
    method.optimizer.param_groups[0]["lr"] = 0.1
    method(images(8))
    assert not all(torch.equal(t, start[key]) for key, t in method.state_dict()["params"].items())


@pytest.mark.parametrize("name", ["tent", "mgtta"])
def test_a_falling_rate_falls_by_updates_on_the_device(name):
    """A reset, a skipped batch and a load count as they do in float32."""
    exact, quick = make(name, precision="fp32", lr=1e-3), make(name, lr=1e-3)
    bad = images(8)
    bad[0, 0, 0, 0] = float("nan")
    for method in (exact, quick):
        method.decay = 2.0
        for x in [*batches(2), bad, *batches(2)]:
            method(x)
    way = {}
    for method in (exact, quick):
        start = method.start["params"]
        way[method] = sum(float((p.detach() - start[key]).square().sum()) for key, p in method.adapted.items()) ** 0.5
    assert way[quick] == pytest.approx(way[exact], rel=0.05)
    assert float(quick.engine.flat.age) == quick.updates == 4
    quick.reset()
    quick(images(8))
    assert float(quick.engine.flat.age) == quick.updates == 1
    quick.engine.updates = 7
    quick(images(8))
    assert float(quick.engine.flat.age) == quick.updates == 8


# --- the pieces


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.Adam(ps, lr=0.01),
        lambda ps: mgtta.MGG(ps, random_generator(), lr=0.01),
        lambda ps: mgtta.MGG(ps, random_generator(memory="lstm"), lr=0.01),
    ],
)
def test_flat_steps_are_the_optimizers_own(make_optimizer):
    torch.manual_seed(0)
    own, twins = ([torch.nn.Parameter(torch.linspace(0, 1, n)) for n in (3, 5)] for _ in range(2))
    plain_one, flat = make_optimizer(own), FlatStep(make_optimizer(twins), twins, twins)
    for t in range(4):
        grads = [torch.randn_like(p) for p in own]
        for p, grad in zip(own, grads, strict=True):
            p.grad = grad
        plain_one.step()
        flat.take_in()
        flat.step(grads, torch.tensor(True))
        flat.step([g * float("nan") for g in grads], torch.tensor(True))
        flat.step(grads, torch.tensor(False))
        if t == 1:  # a state that was saved and loaded
            flat.settle()
            flat.optimizer.load_state_dict(copy.deepcopy(flat.optimizer.state_dict()))
    assert flat.settle() == (2, 4)
    for a, b in zip(own, twins, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        for key, value in plain_one.state[a].items():
            if value is not None:
                torch.testing.assert_close(flat.optimizer.state[b][key], value, atol=1e-6, rtol=1e-4)


def test_an_update_that_is_not_finite_is_left_out():
    """Also if the gradients are: a broken moment must not reach the parameters, which it would never leave."""
    params = [torch.nn.Parameter(torch.ones(3))]
    flat = FlatStep(torch.optim.Adam(params, lr=0.01), params, params)
    flat.take_in()
    flat.step([torch.ones(3)], torch.tensor(True))
    before = params[0].clone()
    flat.state[1].fill_(float("nan"))
    assert not flat.step([torch.ones(3)], torch.tensor(True))
    torch.testing.assert_close(params[0], before)
    assert flat.settle() == (1, 1)


def test_a_graph_that_failed_is_never_freed():
    class Graph:
        pass

    sound, broken = Graph(), Graph()
    left = [weakref.ref(sound), weakref.ref(broken)]
    with kept_if_broken(sound):
        pass
    with pytest.raises(RuntimeError, match="capture"), kept_if_broken(broken):
        raise RuntimeError("capture")
    del sound, broken
    gc.collect()
    assert [ref() is None for ref in left] == [True, False]


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


@pytest.mark.filterwarnings("ignore")  # torch's, about itself
@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    ("name", "precision"), [("mgtta", "bf16"), ("mgtta", "fp8"), *((name, "bf16") for name in FOLLOWING)]
)
def test_it_compiles_in_one_piece_each(name, low_memory, precision):
    """By torch's tracer, without a compiler, which would take long: no graph breaks."""
    compiled = {}

    def how(function):
        return compiled.setdefault(function, torch.compile(function, dynamic=False, backend="eager", fullgraph=True))

    method, x = innermost(make(name, precision=precision, low_memory=low_memory)), images(8)
    twin = copy.deepcopy(method)
    expected = [method(x) for _ in range(2)]
    twin.engine._lay_out(x)
    twin.engine.flat.take_in()
    for logits in expected:
        found = twin.engine._step(fast.Part(True, True, False), x, how)
        torch.testing.assert_close(found.logits, logits, atol=1e-2, rtol=1e-2)


@pytest.mark.filterwarnings("ignore")  # torch's, about itself
@pytest.mark.parametrize(("name", "net"), [("tent", "resnet10t"), ("tent", "convnext_atto"), ("mgtta+", "resnet10t")])
def test_other_networks_compile_in_one_piece(name, net):
    """By torch's tracer, as above; with the stream's statistics of BatchNorm layers."""
    torch._dynamo.reset()  # it traces a function a few times at most
    torch.manual_seed(0)
    bare = {"gather": 0, "recall": 0} if name == "mgtta+" else {}
    method = make(name, timm.create_model(net, num_classes=CLASSES), **bare)
    method(images(8))
    twin = copy.deepcopy(method)
    expected = method(images(8, seed=1))
    x = images(8, seed=1)
    twin.engine._lay_out(x)
    twin.engine.flat.take_in()
    compiled = partial(torch.compile, dynamic=False, backend="eager", fullgraph=True)
    found = twin.engine._step(fast.Part(True, twin.engine.answers, True), x, compiled)
    assert close(found.logits, expected)
    theirs = dict(method.named_buffers())
    for name, value in twin.named_buffers():
        torch.testing.assert_close(value, theirs[name], atol=0.01, rtol=0.01)
    exported = method.export()
    assert all(not getattr(vars(module).get("forward"), "is_mgtta_hook", False) for module in exported.modules())
    assert exported(x).isfinite().all()


def test_warm_up_leaves_no_trace():
    for precision in ("fp32", "bf16"):
        method, twin = make("mgtta", precision=precision), make("mgtta", precision=precision)
        method.warm_up(images(8, seed=5))
        assert method.updates == 0
        assert torch.equal(method(images(8)), twin(images(8)))


# --- on a GPU


def close(a, b):
    """Up to what bfloat16 rounds: single logits of so sharp a model may differ by more."""
    return (a - b).norm() < 0.05 * b.norm()


def on_gpu(name, net=None, **more):
    return make(name, net, device="cuda", **more)


@pytest.fixture
def patient(monkeypatch):
    """Compile a shape at its third batch."""
    monkeypatch.setattr(fast, "COMPILE_BATCHES", 2)


class TestOnTheGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("low_memory", [False, True])
    @pytest.mark.parametrize(
        ("name", "precision"), [*((name, "bf16") for name in (*NAMES, *FOLLOWING)), ("mgtta", "fp8")]
    )
    def test_captured_steps_are_the_uncaptured_ones(self, name, precision, low_memory, monkeypatch):
        settings = {"margin": 0.9, "redundancy": 0.999} if name in CHOOSING else {"gather": 0, "recall": 0}
        if name == "noadapt":
            settings = {}
        method, twin = (on_gpu(name, precision=precision, low_memory=low_memory, **settings) for _ in range(2))
        xs = batches(6)
        monkeypatch.setattr(fast, "COMPILE_BATCHES", 10**6)
        expected = [twin(x) for x in xs]
        monkeypatch.setattr(fast, "COMPILE_BATCHES", 2)
        for x, logits in zip(xs, expected, strict=True):
            assert close(method(x), logits)
        assert [captured.compiled for captured in method.engine.graphs.values()] == [True]  # it did not give up
        assert not twin.engine.graphs
        assert (method.updates, method.skipped) == (twin.updates, twin.skipped)
        for key, value in followed(method).items():
            assert close(value, followed(twin)[key])

    @pytest.mark.parametrize("name", ["mgtta_plus", "eata", "tent"])
    def test_a_step_is_captured_before_it_is_compiled(self, name, monkeypatch):
        monkeypatch.setattr(fast, "CAPTURE_BATCHES", 2)
        monkeypatch.setattr(fast, "is_remembered", lambda step: False)
        settings = {"margin": 0.9, "redundancy": 0.999} if name == "eata" else {"gather": 0, "recall": 0}
        method, exact = (on_gpu(name, precision=p, lr=1e-4, **settings) for p in ("bf16", "fp32"))
        for x in batches(6):
            assert close(method(x), exact(x))
        assert [captured.compiled for captured in method.engine.graphs.values()] == [False]
        assert (method.updates, method.skipped) == (exact.updates, exact.skipped)
        state = method.state_dict()
        expected = method(images(8, seed=50))
        first = [m.reset() or m(batches(1)[0]) for m in (method, exact)]
        assert close(*first)
        method.load_state_dict(state)
        assert close(method(images(8, seed=50)), expected)

    @pytest.mark.parametrize("name", ["tent", "mgtta+"])
    @pytest.mark.parametrize("net", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
    def test_other_networks_are_captured(self, net, name, monkeypatch):
        monkeypatch.setattr(fast, "CAPTURE_BATCHES", 1)
        monkeypatch.setattr(fast, "is_remembered", lambda step: False)
        torch.manual_seed(0)
        more = {"global_pool": "avg", "depth": 2} if "vit" in net else {}
        built = timm.create_model(net, num_classes=CLASSES, **more)
        side = 224 if "vit" in net else 64
        bare = {"gather": 0, "recall": 0} if name == "mgtta+" else {}
        method, exact = (on_gpu(name, copy.deepcopy(built), precision=p, lr=1e-4, **bare) for p in ("bf16", "fp32"))
        for seed in range(4):
            x = torch.rand(8, 3, side, side, generator=torch.Generator().manual_seed(seed))
            expected = exact(x)
            assert (method(x) - expected).norm() < 0.1 * expected.norm()
        assert len(method.engine.graphs) == 1
        assert method.updates == 4
        if method.statistics is not None:
            theirs = dict(exact.statistics.named_buffers())
            for name, value in method.statistics.named_buffers():
                torch.testing.assert_close(value, theirs[name], atol=0.05, rtol=0.05)
        assert method.export()(x.cuda()).isfinite().all()

    @pytest.mark.parametrize("name", ["sar", "deyo", "roid", "cmf"])
    def test_passes_of_steps_of_their_own_are_captured(self, name, monkeypatch):
        settings = {"sar": {"margin": 1.1}, "deyo": {"entropy_threshold": 1.1, "plpd_threshold": -1.0}}.get(name, {})
        method, twin = (on_gpu(name, lr=1e-3, **settings) for _ in range(2))
        twin.engine.step(images(8).cuda(), True, True, True)
        twin.reset()
        twin.engine.graphs.captures = False
        monkeypatch.setattr(graphed, "CAPTURE_BATCHES", 1)
        for seed in range(5):
            x = images(8, seed=seed).cuda()
            assert close(method(x), twin(x))
        assert method.updates == twin.updates == 5
        assert len(method.engine.graphs.passes) >= 2
        assert "forward" not in vars(method.model.net)
        assert method.engine.graphs.captures
        moved = torch.cat([p.flatten() for p in method.adapted.values()])
        expected = torch.cat([p.flatten() for p in twin.adapted.values()])
        start = torch.cat([p.flatten() for p in method.origin])
        assert (moved - expected).norm() < 0.1 * (expected - start).norm()
        assert close(copy.deepcopy(method)(images(8).cuda()), method(images(8).cuda()))
        bad = images(8)
        bad[0, 0, 0, 0] = float("nan")
        method(bad.cuda())
        assert method.skipped == 1
        assert method(images(5).cuda()).isfinite().all()

    def test_gathered_images_are_learned_from_apart(self, monkeypatch):
        monkeypatch.setattr(fast, "CAPTURE_BATCHES", 2)
        monkeypatch.setattr(fast, "is_remembered", lambda step: False)
        settings = {"gather": 4, "recall": 2, "lr": 1e-4, "mirror": True}
        method, exact = (on_gpu("mgtta_plus", precision=p, **settings) for p in ("bf16", "fp32"))
        for i, x in enumerate(images(40).cuda().split(1)):
            assert close(method(x), exact(x))
            if i == 20:
                method.load_state_dict(method.state_dict())
                assert method.waiting == 1
        assert len(method.engine.graphs) == 2
        assert (method.updates, method.skipped) == (exact.updates, exact.skipped) == (10, 0)
        method(torch.full((1, 3, 32, 32), float("nan"), device="cuda"))
        assert (method.waiting, method.skipped) == (0, 1)
        for x in images(3).cuda().split(1):
            method(x)
        method(torch.full((1, 3, 32, 32), float("nan"), device="cuda"))
        assert (method.waiting, method.skipped, method.updates) == (3, 2, 10)
        method(images(1).cuda())
        assert (method.waiting, method.skipped, method.updates) == (0, 2, 11)

    def test_what_was_loaded_is_not_overwritten_before_it_is_read(self):
        """The state is read apart, on a stream that is far behind; meanwhile the caller fills what memory is free."""
        method = on_gpu("mgtta_plus", precision="bf16", gather=4, recall=0, lr=1e-4)
        for x in images(8).cuda().split(1):
            method(x)
        state = method.state_dict()
        found = []
        for disturbed in (False, True):
            method.load_state_dict(state)
            first, *others = images(4, seed=1).cuda().split(1)
            last = others.pop()
            for x in (first, *others):
                method(x)
            if disturbed:
                with torch.cuda.stream(method.engine.beside):
                    torch.cuda._sleep(10**8)
            method(last)
            if disturbed:
                _ = [torch.full_like(p, float("nan")) for p in method.adapted.values() for _ in range(50)]
            found.append(torch.cat([p.flatten() for p in method.state_dict()["method"]["params"].values()]))
        assert found[1].isfinite().all()
        assert close(found[1], found[0])

    def test_reset_and_load_keep_the_graph(self, patient):
        method, xs = on_gpu("mgtta"), batches(6)
        for x in xs:
            method(x)
        [graph] = method.engine.graphs.values()
        start = method.start
        method.reset()
        after = method.state_dict()
        assert all(torch.equal(t, start["params"][key]) for key, t in after["params"].items())
        assert method.updates == 0
        first = [method(x) for x in xs]
        state = method.state_dict()
        assert state["counters"]["updates"] == 6
        assert {float(s["step"]) for s in state["optimizer"]["state"].values()} == {6.0}
        more = method(images(8, seed=50))
        method.reset()
        for x, logits in zip(xs, first, strict=True):
            assert close(method(x), logits)
        method.load_state_dict(state)
        assert close(method(images(8, seed=50)), more)
        assert list(method.engine.graphs.values()) == [graph]

    def test_a_smaller_last_batch_and_images_of_another_type(self, patient):
        method = on_gpu("mgtta")
        for _ in range(3):
            for x in [*batches(4), images(3, seed=9), (255 * images(8)).byte()]:
                assert method(x).shape == (len(x), CLASSES)
        assert method.updates == 18
        assert len(method.engine.graphs) <= fast.KEPT_GRAPHS

    def test_copies_and_moves_capture_for_themselves(self, patient):
        method, xs = on_gpu("mgtta"), batches(5)
        for x in xs:
            method(x)
        twin = copy.deepcopy(method)
        assert not twin.engine.graphs
        assert twin.updates == method.updates
        before = method.state_dict()["params"]
        for x in xs:
            twin(x)
        assert all(torch.equal(t, before[key]) for key, t in method.state_dict()["params"].items())
        method.to("cpu")
        assert method(xs[0]).device == CPU
        method.to("cuda")
        assert method(xs[0]).is_cuda
        assert method.updates == 7

    def test_captured_predictions_follow_what_was_learned(self, monkeypatch):
        method, (x, *more) = on_gpu("mgtta", lr=0.1), batches(5)
        method.warm_up(x)
        before = method.predict(x)
        for other in more:
            method(other)
        found = method.predict(x)
        method.engine.graphs.clear()
        monkeypatch.setattr(fast, "COMPILE_BATCHES", 10**6)
        assert close(found, method.predict(x))
        assert not close(found, before)

    def test_a_bad_batch_within_a_graph(self, patient):
        method = on_gpu("mgtta")
        for x in batches(4):
            method(x)
        before = method.state_dict()
        x = images(8, seed=1)
        x[1, 0, 5, 5] = float("nan")
        method(x)
        after = method.state_dict()
        assert (method.updates, method.skipped) == (4, 1)
        assert all(torch.equal(t, before["params"][key]) for key, t in after["params"].items())
        assert method(images(8)).isfinite().all()

    def test_guard_budget_and_schedule(self, patient):
        guarded = on_gpu("mgtta", guard=True)
        limited = on_gpu("mgtta", max_updates=4)
        scheduled = on_gpu("mgtta", schedule="auto")
        for x in batches(12):
            assert guarded(x).isfinite().all()
            assert limited(x).isfinite().all()
            assert scheduled(x).isfinite().all()
        assert limited.updates == 4
        assert 3 <= scheduled.updates < 12

    def test_warm_up_compiles_at_once(self):
        method = on_gpu("mgtta")
        twin = copy.deepcopy(method)
        method.warm_up(images(8))
        assert len(method.engine.graphs) == 2
        assert method.updates == 0
        assert close(method(images(8)), twin(images(8)))
        assert method.engine.graph_bytes > 0

    def test_auto_takes_it(self):
        assert mgtta.create("tent", mgtta.load_model(vit()).to("cuda")).precision == "bf16"
        for name in NAMES:
            assert on_gpu(name, precision="auto").precision == "bf16"
            assert on_gpu(name, precision="fp32").precision == "fp32"
        assert on_gpu("tent", NETS["batchnorm"](), precision="auto").precision == "fp32"
        assert on_gpu("tent", precision="auto", max_seconds=1.0).precision == "fp32"
        for name in (*FOLLOWING, *ROUNDED):
            assert on_gpu(name, precision="auto").precision == "bf16"
        assert on_gpu("cotta", precision="auto").precision == "fp32"
        for net in ("resnet10t", "convnext_atto"):
            assert on_gpu("tent", timm.create_model(net), precision="auto").precision == "bf16"
