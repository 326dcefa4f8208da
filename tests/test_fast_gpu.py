"""The fast path on a GPU: compiled and captured."""

import copy

import pytest
import torch
from conftest import CLASSES, NETS, images, vit
from fast_path import CHOOSING, FOLLOWING, NAMES, ROUNDED, batches, close, followed, make

import mgtta
from mgtta._lib.timm import timm
from mgtta.fast import engine as fast
from mgtta.fast import graphed

CPU = torch.device("cpu")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own; ours is looked for by hand
]


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
    @pytest.mark.parametrize("net", ["resnet10t", "convnext_atto", "convnext_tiny", "vit_tiny_patch16_224"])
    def test_other_networks_are_captured(self, net, name, monkeypatch):
        monkeypatch.setattr(fast, "CAPTURE_BATCHES", 1)
        monkeypatch.setattr(fast, "is_remembered", lambda step: False)
        torch.manual_seed(0)
        more = {"global_pool": "avg", "depth": 2, "img_size": 32} if "vit" in net else {}
        built = timm.create_model(net, num_classes=CLASSES, **more)
        side = 32 if "vit" in net else 64
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
