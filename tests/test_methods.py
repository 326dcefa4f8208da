"""The contract, over the whole registry of recipes and each kind of model."""

import copy
import pickle

import pytest
import torch
from conftest import CLASSES, NETS, confident_vit, images, random_generator, vit

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta.methods.bn import BatchNormStatistics
from mgtta.methods.cotta import CoTTA
from mgtta.methods.foa import FOA
from mgtta.methods.foa_shift import FOAShift
from mgtta.methods.lame import LAME
from mgtta.methods.memo import MEMO
from mgtta.methods.mgtta_plus import MGTTAPlus
from mgtta.methods.neo import NEO
from mgtta.methods.registry import REQUIRED, recipes
from mgtta.methods.roid import ROID
from mgtta.methods.rotta import RoTTA
from mgtta.methods.t3a import T3A

GRADIENT_FREE = (BatchNormStatistics, FOA, FOAShift, LAME, MEMO, NEO, T3A)  # their logits are not the plain model's
OWN_LOGITS = (CoTTA, MGTTAPlus, ROID, RoTTA)  # nor those of a teacher; the others correct theirs
RECIPES = recipes()
GRADIENT = [name for name, recipe in RECIPES.items() if recipe.descent is not None]
OPEN = {  # filters that let all images pass, since random weights leave none; and CoTTA with views, but few
    "eta": {"margin": 1.1, "redundancy": 1.1},
    "cotta": {"confidence": 1.0, "augmentations": 2},
    "deyo": {"entropy_threshold": 1.1, "plpd_threshold": -1.0},
    "eata": {"margin": 1.1, "redundancy": 1.1},
    "eata_come": {"margin": 1.1, "redundancy": 1.1},
    "foa_interval": {"interval": 4},
    "memo": {"augmentations": 2},
    "rdumb": {"margin": 1.1, "redundancy": 1.1, "every": 2},
    "rotta": {"frequency": 4},
    "sar": {"margin": 1.1, "recovery": 0.0},
    "sar_come": {"margin": 1.1, "recovery": 0.0},
    "spa_eata": {"margin": 1.1, "redundancy": 1.1},
    "spa_eta": {"margin": 1.1, "redundancy": 1.1},
}
CANNOT = {
    *(("bn", "vit"), ("bn", "groupnorm")),
    *(("rotta", "vit"), ("rotta", "groupnorm")),
    *(("foa", "batchnorm"), ("foa", "groupnorm")),
    *(("foa_interval", "batchnorm"), ("foa_interval", "groupnorm")),
    *(("foa_shift", "batchnorm"), ("foa_shift", "groupnorm")),
    *(("mgtta_plus", "batchnorm"), ("mgtta_plus", "groupnorm")),  # re-centring: see test_mgtta_plus.py
}


def make(name, model, **settings):
    """Return a method without the options that recipes have by default: their wrappers have tests of their own."""
    parameters = RECIPES[name].settings
    for option in ("gather", "recall"):
        settings.setdefault(option, 0)
    if parameters.get("source") is REQUIRED:
        settings.setdefault("source", mgtta.source_statistics(model, images(16, seed=99)))
    if parameters.get("fisher") is REQUIRED:
        settings.setdefault("fisher", mgtta.fisher_information(model, images(16, seed=99)))
    if "generator" in parameters:
        settings.setdefault("generator", random_generator(memory="lstm" if "lstm" in name else "gml"))
    return mgtta.create(name, model, **{**OPEN.get(name, {}), **settings})


# Every recipe on a ViT and on a net with BatchNorm; a few, one of each kind, on a net with GroupNorm too.
ON_GROUP_NORM = ("noadapt", "cotta", "eata", "lame", "mgtta", "sar", "t3a", "tent")
PAIRS = [
    (name, net)
    for name in RECIPES
    for net in NETS
    if (name, net) not in CANNOT and (net != "groupnorm" or name in ON_GROUP_NORM)
]


@pytest.fixture(params=PAIRS, ids=["-".join(pair) for pair in PAIRS])
def pair(request):
    return request.param


@pytest.fixture
def any_model(pair):
    return mgtta.load_model(NETS[pair[1]]())


@pytest.fixture
def method(pair, any_model):
    return make(pair[0], any_model)


def suitable(name):
    return NETS["batchnorm"]() if name in ("bn", "rotta") else vit()


def prediction(method, x):
    """What the method gives for x as it stands, itself and its random numbers left alone."""
    with torch.no_grad():
        return copy.deepcopy(method).predict(x)


def stream(n=4, batch=4):
    return [images(batch, seed=t) for t in range(n)]


def test_finite_detached_logits_under_no_grad_and_inference_mode(method, any_model):
    expected = any_model(images(4)) if not method.model._uses_batch_statistics else method.model(images(4))
    if isinstance(method, OWN_LOGITS):
        expected = prediction(method, images(4))
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        method.reset()
        with context():
            logits = method(images(4))
        assert logits.shape == (4, CLASSES)
        assert logits.isfinite().all()
        assert not logits.requires_grad
        if not isinstance(method, GRADIENT_FREE):
            torch.testing.assert_close(logits, expected)  # from before the update


def test_only_declared_parameters_move_and_the_users_model_does_not(method, any_model):
    users = copy.deepcopy(any_model.state_dict())
    before = copy.deepcopy(method.model.state_dict())
    for x in stream():
        method(x)
    moved = {name for name, t in method.model.state_dict().items() if not torch.equal(t, before[name])}
    assert moved <= set(method.adapted)
    assert bool(moved) == bool(method.adapted)
    assert all(torch.equal(t, users[name]) for name, t in any_model.state_dict().items())


def test_reset_is_bit_exact(method):
    start = copy.deepcopy(method.model.state_dict())
    first = [method(x) for x in stream()]
    method.reset()
    assert method.updates == method.skipped == 0
    assert all(torch.equal(t, start[name]) for name, t in method.model.state_dict().items())
    assert all(torch.equal(a, method(x)) for a, x in zip(first, stream(), strict=True))


def test_resume_is_bit_exact_through_a_file(method, any_model, tmp_path):
    xs = stream(6)
    straight = [method(x) for x in xs]
    method.reset()
    for x in xs[:3]:
        method(x)
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = copy.deepcopy(method)
    other.reset()
    other(images(4, seed=77))  # somewhere else entirely
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert other.updates == method.updates
    assert all(torch.equal(a, other(x)) for a, x in zip(straight[3:], xs[3:], strict=True))
    other.reset()
    assert torch.equal(other(xs[0]), straight[0])


def test_same_seed_same_logits(method):
    twin = copy.deepcopy(method)
    assert all(torch.equal(method(x), twin(x)) for x in stream())


def test_a_batch_of_one(method):
    for x in stream(3, batch=1):
        assert method(x).isfinite().all()
    assert method.skipped == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_batch_does_not_poison(method, bad):
    x = images(4)
    x[1, 0, 5, 5] = bad
    before = copy.deepcopy(method.state_dict())
    logits = method(x)
    assert logits.shape == (4, CLASSES)
    if method.adapted or isinstance(method, GRADIENT_FREE):
        assert (method.updates, method.skipped) == (0, 1)
    after = method.state_dict()
    assert all(torch.equal(t, before["params"][name]) for name, t in after["params"].items())
    assert method(images(4, seed=5)).isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_class_subset(name):
    method = make(name, mgtta.load_model(suitable(name), classes=[1, 4, 6]))
    assert all(method(x).shape == (4, 3) for x in stream())


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "noadapt"])
def test_budgets(name):
    method = make(name, mgtta.load_model(suitable(name)), max_updates=2)
    for x in stream(5):
        method(x)
    assert method.updates == 2
    params = copy.deepcopy(method.state_dict()["params"])
    expected = prediction(method, images(4))
    if not isinstance(method, GRADIENT_FREE + OWN_LOGITS):
        assert torch.equal(expected, method.model(images(4)))
    assert torch.equal(method(images(4)), expected)
    assert all(torch.equal(t, params[k]) for k, t in method.state_dict()["params"].items())
    method.reset()
    method(images(4))
    assert method.updates == 1
    stopped = make(name, mgtta.load_model(suitable(name)), max_seconds=0.0)
    stopped(images(4))
    assert stopped.updates == 0
    long = make(name, mgtta.load_model(suitable(name)), max_seconds=1e-9)
    for x in stream(3):
        long(x)
    assert long.updates == 1


@pytest.mark.parametrize("name", [name for name in GRADIENT if name != "rotta"])  # it learns from its memory
def test_learning_lowers_the_objective(name):
    """On one batch again and again, with a generator that steps along the gradient's sign."""
    settings = {"generator": sign_generator("lstm" if "lstm" in name else "gml")} if "mgtta" in name else {}
    if name.startswith("spa"):  # its noise learns to raise the loss, and its gate changes what the loss is a mean of
        settings = {"noise_lr": 0.0, "predictor_lr": 0.0}
    method = make(name, mgtta.load_model(confident_vit()), lr=1e-3, **settings)
    if name.startswith("spa"):
        method.surer = lambda target, _twin: torch.ones(len(target), dtype=torch.bool)
    assert method.optimizer is not None
    x = images(8)
    first = objective(method, x)
    for _ in range(40 if name.startswith("spa") else 20):
        method(x)
    assert objective(method, x) < first


def objective(method, x):
    """The loss of x, always with the same random numbers."""
    twin = copy.deepcopy(method)
    if twin.random is not None:
        twin.random.manual_seed(0)
    return twin.loss(x)[1].item()


def sign_generator(memory):
    """update = tanh(something monotone in the momentum): hidden size 2, LN's output is the sign of a difference."""
    generator = mgtta.MetaGradientGenerator(2, memory)
    with torch.no_grad():
        for p in generator.parameters():
            p.zero_()
        generator.q_proj.weight.copy_(torch.tensor([[3.0, 0.0], [-3.0, 0.0]]))
        generator.post_norm.weight.fill_(1.0)
        generator.o_proj.weight.copy_(torch.tensor([[1.0, -1.0]]))
        if memory == "lstm":
            generator.memory.cell.weight_ih[4:6].copy_(torch.eye(2))  # the cell's candidate is tanh(q)
    return generator


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "mgg"])
@pytest.mark.parametrize("name", ["tent", "eata", "sar", "deyo", "cotta", "spa", "roid"])
def test_any_optimizer_under_any_gradient_method(name, optimizer, model, generator, tmp_path):
    method = make(name, model, optimizer=optimizer, generator=generator)
    xs = stream(5)
    straight = [method(x) for x in xs]
    assert (method.updates, method.skipped) == (5, 0)
    method.reset()
    for x in xs[:3]:
        method(x)
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = make(name, model, optimizer=optimizer, generator=generator)
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert all(torch.equal(a, other(x)) for a, x in zip(straight[3:], xs[3:], strict=True))


def test_unknown_names_and_keys_list_the_valid_ones(model, source):
    with pytest.raises(ValueError, match=r"unknown recipe 'mgta'; valid: .*mgtta, .*tent"):
        mgtta.create("mgta", model)
    with pytest.raises(ValueError, match=r"setting of mgtta 'learning_rate'; valid: .*lr"):
        mgtta.create("mgtta", model, source=source, learning_rate=1)
    with pytest.raises(ValueError, match=r"unknown optimizer 'sdg'; valid: adam, mgg, sgd"):
        mgtta.create("tent", model, optimizer="sdg")
    with pytest.raises(ValueError, match=r"needs source=.*source_statistics"):
        mgtta.create("mgtta", model)
    with pytest.raises(ValueError, match="max_updates"):
        mgtta.create("tent", model, max_updates=-1)
    with pytest.raises(ValueError, match="lr must be"):
        mgtta.create("tent", model, lr=-1.0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        mgtta.create("mgtta", model, source=source, generator="nowhere.safetensors")


def test_hyphens_serve_in_names_and_raw_modules_are_wrapped():
    net = NETS["vit"]()
    source = mgtta.source_statistics(mgtta.load_model(net), images(8))
    assert mgtta.create("eq7-sgd", net, source=source)(images(2)).shape == (2, CLASSES)


def same(a, b):
    """Whether two states hold the same, tensors bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_states_that_do_not_fit_change_nothing(model, source, generator):
    mgg = {"source": source, "generator": generator}
    method = mgtta.create("mgtta", model, **mgg)
    method(images(4))
    before = method.state_dict()

    def refused(state, message):
        with pytest.raises(ValueError, match=message):
            method.load_state_dict(state)
        assert same(method.state_dict(), before)

    for other in (
        mgtta.create("tent", model),
        mgtta.create("eq7_sgd", model, source=source),
        mgtta.create("eq7_adam", model, source=source),
        mgtta.create("mgtta_lstm", model, source=source, generator=random_generator(memory="lstm")),
        mgtta.create("mgtta", model, source=source, generator=random_generator(seed=1)),
        mgtta.create("mgtta", model, gather=8, **mgg),
    ):
        refused(other.state_dict(), "another kind")
        other(images(4))
        refused(other.state_dict(), "another kind")
    elsewhere = mgtta.create("tent", vit(seed=1))
    with pytest.raises(ValueError, match="another model "):
        mgtta.create("tent", model).load_state_dict(elsewhere.state_dict())

    def broken(change):
        state = method.state_dict()
        change(state)
        return state

    first = next(iter(before["params"]))
    refused({"kind": method.kind}, "not a state")
    refused(broken(lambda s: s.pop("counters")), "not a state")
    refused(broken(lambda s: s["counters"].clear()), "updates")
    refused(broken(lambda s: s["params"].pop(first)), "other names or shapes")
    refused(broken(lambda s: s["params"].update({first: torch.zeros(3)})), "other names or shapes")
    refused(broken(lambda s: s["params"][first].fill_(float("nan"))), "not finite")
    refused(broken(lambda s: s["optimizer"]["state"][0].update(memory=torch.zeros(3, 72))), "not written by MGG")
    refused(broken(lambda s: s["optimizer"]["param_groups"][0].pop("betas")), "other settings")


def test_moments_of_another_size_are_refused(model, source):
    method = mgtta.create("eq7_adam", model, source=source)
    method(images(4))
    state = method.state_dict()
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="other shapes"):
        method.load_state_dict(state)


def test_half_precision_is_refused_where_updates_would_be_lost(source):
    for dtype in (torch.float16, torch.bfloat16):
        small = mgtta.load_model(vit().to(dtype))
        assert mgtta.create("noadapt", small)(images(2)).dtype == dtype
        with pytest.raises(TypeError, match=r"model.float\(\)"):
            mgtta.create("tent", small)


@pytest.mark.parametrize("name", ["tent", "eq7_adam", "mgtta"])
def test_moving_in_midstream(name):
    method, twin = (make(name, mgtta.load_model(vit())) for _ in range(2))
    for x in stream(3):
        method(x)
        twin(x)
    method.double()
    assert method(images(4, seed=9)).dtype == torch.float64
    method.float()
    twin(images(4, seed=9))
    torch.testing.assert_close(method(images(4, seed=10)), twin(images(4, seed=10)), atol=1e-4, rtol=1e-4)
    method.reset()
    twin.reset()
    assert torch.equal(method(images(4)), twin(images(4)))


def test_all_of_it_under_inference_mode(model, source, generator):
    with torch.inference_mode():
        method = mgtta.create("mgtta", model, source=source, generator=generator)
        method(images(4))
        state = method.state_dict()
        method(images(4, seed=1))
        method.load_state_dict(state)
        method(images(4, seed=2))
    assert method(images(4, seed=3)).isfinite().all()
    assert method.updates == 3


def test_methods_can_be_pickled_copied_and_nested(model, source, generator):
    method = mgtta.create("mgtta", model, source=source, generator=generator)
    method(images(4))
    for twin in (pickle.loads(pickle.dumps(method)), copy.deepcopy(method)):
        assert torch.equal(twin(images(4, seed=1)), copy.deepcopy(method)(images(4, seed=1)))
    assert any(name.endswith("net.head.weight") for name in torch.nn.Sequential(method).state_dict())


def test_bad_images_change_nothing(method):
    method(images(4))
    before = method.state_dict()
    for bad in (
        torch.rand(0, 3, 32, 32),
        torch.rand(2, 5, 32, 32),
        torch.zeros(2, 3, 32, 32, dtype=torch.int32),
    ):
        with pytest.raises((ValueError, TypeError)):
            method(bad)
    after = method.state_dict()
    assert after["counters"]["updates"] == before["counters"]["updates"]
    assert all(torch.equal(t, before["params"][k]) for k, t in after["params"].items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu(method):
    expected = method(images(4))
    method.reset()
    method.to("cuda")
    tolerance = 3e-2 if isinstance(method, CoTTA) else 1e-3  # its views have noise, drawn on the device
    torch.testing.assert_close(method(images(4)).cpu(), expected, atol=tolerance, rtol=tolerance)
    assert method(images(4, seed=1)).is_cuda
