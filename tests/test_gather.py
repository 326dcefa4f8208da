"""Gather: every call predicts at once, and so many images are learned from together."""

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from conftest import CLASSES, NETS, confident_vit, images, random_generator
from test_methods import GRADIENT, RECIPES, make, same, suitable

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta._lib.ranks import Alone, share
from mgtta.adaptation.normalising import of_stream_and_source
from mgtta.adaptation.scheduled import BURST
from mgtta.adaptation.shift import Arriving
from mgtta.adaptation.turns import FEW_IMAGES
from mgtta.adaptation.wrapper import innermost
from mgtta.cli import options
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import Domain, stream
from mgtta.methods.cotta import CoTTA


def tent(gather=4, net=confident_vit, **settings):
    return mgtta.create("tent", mgtta.load_model(net()), gather=gather, **{"lr": 0.01, **settings})


def singles(n=8, seed=0):
    return list(images(n, seed).split(1))


def with_nan(x):
    x = x.clone()
    x[0, 0, 3, 3] = float("nan")
    return x


def test_gather_learns_from_so_many_images_together():
    method = tent()
    together = tent(gather=None)
    updates = []
    for x in singles(8):
        method(x)
        updates.append(method.updates)
    for x in images(8).split(4):
        together(x)
    assert updates == [0, 0, 0, 1, 1, 1, 1, 2]
    for a, b in zip(method.adapted.values(), together.adapted.values(), strict=True):
        torch.testing.assert_close(a, b)


def test_gather_predicts_every_image_as_the_method_stands():
    method = tent()
    for x in singles(6):
        expected = method.predict(x)
        assert torch.equal(method(x), expected)


def test_a_state_counts_a_last_batch_that_was_not_finite():
    method = tent()
    method(with_nan(images(2)))
    state = method.state_dict()
    assert state["method"]["counters"]["skipped"] == 1
    assert not state["gather"]["kept"]


def test_a_batch_that_is_large_enough_is_learned_from_in_one_pass():
    method = tent()
    plain = tent(gather=None)
    for seed in range(3):
        assert torch.equal(method(images(4, seed)), plain(images(4, seed)))
    assert same(method.state_dict()["method"]["params"], plain.state_dict()["params"])
    method(images(1))
    method(images(4))  # learned from with the one that waited
    assert method.waiting == 0
    assert method.updates == 4


def test_gather_counts_each_image_once_in_running_means():
    model = mgtta.load_model(confident_vit())
    source = mgtta.source_statistics(model, images(16, seed=99))
    made = {"source": source, "generator": random_generator(), "mirror": False}
    method = mgtta.create("mgtta+", model, gather=4, **made)
    for x in singles(10):
        method(x)
    assert method.updates == 2
    assert innermost(method).neighbours.known.sum() == 10


def test_kept_images_are_saved_and_resumed_bit_for_bit(tmp_path):
    xs = singles(12)
    method = tent(gather=5)
    straight = [method(x) for x in xs]
    method.reset()
    assert method.waiting == 0
    for x in xs[:7]:
        method(x)
    assert method.waiting == 2
    write_tree(tmp_path / "state", method.state_dict(), {})
    other = tent(gather=5)
    other(images(3, seed=7))
    other.load_state_dict(read_tree(tmp_path / "state")[0])
    assert other.waiting == 2
    for x, logits in zip(xs[7:], straight[7:], strict=True):
        assert torch.equal(other(x), logits)


def test_kept_images_are_copies():
    method = tent(gather=2)
    other = tent(gather=2)
    x = images(1)
    method(x)
    other(x.clone())
    x.zero_()  # as a loader that fills the same memory again
    method(images(1, seed=1))
    other(images(1, seed=1))
    assert same(method.state_dict()["method"]["params"], other.state_dict()["method"]["params"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"other": []}, "other entries"),
        ({"kept": 3}, "not images"),
        ({"kept": [1]}, "not images"),
        ({"kept": [images(4)]}, "more images than gather=4"),
        ({"kept": [torch.zeros(1, 5, 8, 8)]}, "takes images"),
        ({"kept": [torch.zeros(1, 3, 8, 8, dtype=torch.int64)]}, "must be uint8"),
    ],
)
def test_an_invalid_gather_state_is_rejected(state, message):
    method = mgtta.create("tent", mgtta.load_model(confident_vit(), mean=[0.5] * 3, std=[0.5] * 3), gather=4)
    method(images(2))
    before = method.state_dict()
    with pytest.raises(ValueError, match=message):
        method.load_state_dict({**before, "gather": state})
    assert same(method.state_dict(), before)


def test_a_batch_that_is_not_finite_is_not_kept_and_counts_as_skipped():
    method = tent(gather=2)
    for x in singles(2):
        assert method(with_nan(x)).shape == (1, CLASSES)
    assert method.waiting == 0
    assert (method.updates, method.skipped) == (0, 2)
    for x in singles(2):
        method(x)
    assert (method.updates, method.skipped) == (1, 2)


def test_a_gpu_learns_before_it_is_known_whether_the_last_batch_is_finite(monkeypatch):
    """As on a GPU, where the answer comes later: if it is not finite, the others are learned from with the next."""
    model = mgtta.load_model(confident_vit())
    waiting, trying = (mgtta.create("tent", model, gather=3, lr=1e-3, precision="bf16") for _ in range(2))
    bad = images(1)
    bad[0, 0, 0, 0] = float("nan")
    given = [*images(2).split(1), bad, *images(8, seed=1).split(1)]
    expected = [waiting(x) for x in given]
    assert (waiting.updates, waiting.skipped, waiting.waiting) == (3, 1, 1)
    monkeypatch.setattr(Arriving, "comes_later", True)
    for x, logits in zip(given, expected, strict=True):
        assert torch.equal(trying(x), logits) or x is bad
    assert (trying.updates, trying.skipped, trying.waiting) == (3, 1, 1)
    states = [method.state_dict()["method"] for method in (trying, waiting)]
    assert all(same(states[0][key], states[1][key]) for key in ("params", "optimizer"))


def test_gather_learns_from_the_most_frequent_size():
    method = tent(gather=4, net=NETS["groupnorm"])
    plain = tent(gather=None, net=NETS["groupnorm"])
    small = images(3)[:, :, :24, :24]
    for x in (small[:1], images(1), small[1:2], small[2:]):
        assert method(x).shape == (1, CLASSES)
    plain(small)
    assert method.waiting == 0
    assert method.updates == 1
    for a, b in zip(method.adapted.values(), plain.adapted.values(), strict=True):
        torch.testing.assert_close(a, b)


def test_gather_takes_bytes_and_floats():
    method = tent(gather=3)
    for x in ((images(1) * 255).byte(), images(1), (images(1, seed=1) * 255).byte()):
        method(x)
    assert method.updates == 1


def test_a_budget_counts_updates_and_then_nothing_is_kept():
    method = tent(gather=2, max_updates=1)
    for x in singles(5):
        method(x)
    assert method.updates == 1
    assert method.waiting == 0
    assert method.spent


def test_a_paused_method_keeps_nothing():
    method = tent()
    with method.frozen():
        method(images(1))
    assert method.waiting == 0
    method(images(1))
    assert method.waiting == 1


@pytest.mark.parametrize("name", GRADIENT)
def test_gather_under_every_gradient_method(name, tmp_path):
    own = {"frequency": 3} if name == "rotta" else {}  # it has a memory, from which it learns after so many images
    method = make(name, mgtta.load_model(suitable(name)), gather=3, **own)
    xs = singles(8)
    straight = [method(x) for x in xs]
    assert all(logits.isfinite().all() for logits in straight)
    assert (method.updates, method.skipped, method.waiting) == (2, 0, 2)
    method.reset()
    for x in xs[:4]:
        method(x)
    write_tree(tmp_path / "state", method.state_dict(), {})
    method.load_state_dict(read_tree(tmp_path / "state")[0])
    assert all(torch.equal(method(x), logits) for x, logits in zip(xs[4:], straight[4:], strict=True))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in GRADIENT])
def test_gather_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}.* gather"):
        make(name, mgtta.load_model(suitable(name)), gather=3)


def test_gather_must_be_a_whole_number(model):
    with pytest.raises(TypeError, match="gather must be a whole number"):
        mgtta.create("tent", model, gather=1.5)
    with pytest.raises(ValueError, match="gather"):
        mgtta.create("tent", model, gather=-1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gather_and_schedule_count_updates_and_not_calls(precision):
    method = tent(gather=4, schedule="auto", precision=precision, lr=1e-4)
    for x in images(4 * BURST + 8).split(1):
        method(x)
    assert method.updates == BURST
    assert method.schedule.learned == BURST
    assert method.schedule.left > 0
    assert method.waiting == 0  # while it rests nothing is kept


def test_gather_under_a_guard():
    method = tent(gather=4, guard=True)
    before = method.state_dict()
    for x in singles(10):
        method(x)
    assert method.updates == 2
    assert method.waiting == 2
    method.load_state_dict(before)
    assert method.waiting == 0


def test_gather_under_inference_mode_and_in_copies():
    method = tent(gather=3)
    with torch.inference_mode():
        for x in singles(4):
            method(x)
    twin = copy.deepcopy(method)
    for x in singles(4, seed=1):
        assert torch.equal(method(x), twin(x))
    assert method.updates == 2


def test_gather_warms_up_for_a_call_and_for_a_window():
    method = tent(gather=5, precision="bf16")
    before = method.state_dict()
    method.warm_up(images(2))
    shapes = {(part.learn, len(torch.empty(shape))) for part, shape, _ in method.engine.seen}
    assert {(False, 2), (True, 6)} <= shapes
    assert same(method.state_dict(), before)


class Two(Alone):
    """This rank, and another one with as many images."""

    size = 2

    def total(self, numbers):
        return [2 * number for number in numbers]


def test_ranks_decide_together_when_there_are_enough_images():
    method = tent(gather=4)
    method.method.ranks = Two()
    method(images(1))
    assert method.updates == 0
    method(images(1, seed=1))
    assert method.updates == 1


SIZES = (2, 1, 3, 1, 1, 2, 7, 1)  # of batches; of some of them a rank has no images


def shared_run(rank, folder):
    """Adapt with a share of every batch, and write what comes of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    method = tent(gather=5, process_group=dist.group.WORLD)
    logits = [method(share(images(n, seed), rank, 2)) for seed, n in enumerate(SIZES)]
    write_tree(folder / f"{rank}", {"logits": logits, "state": method.method.state_dict()}, {})
    dist.destroy_process_group()


def test_ranks_that_gather_are_one_process_that_gathers(tmp_path):
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=shared_run, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    found = [read_tree(tmp_path / f"{rank}")[0] for rank in range(2)]
    method = tent(gather=5)
    for seed, n in enumerate(SIZES):
        expected = method(images(n, seed))
        torch.testing.assert_close(torch.cat([f["logits"][seed] for f in found]), expected, atol=1e-3, rtol=1e-3)
    for f in found:
        assert f["state"]["counters"]["updates"] == method.updates == 2
        for name, p in method.adapted.items():
            torch.testing.assert_close(f["state"]["params"][name], p.detach(), atol=1e-4, rtol=1e-4)


# --- BatchNorm


def batchnorm(gather=4, **settings):
    return tent(gather, NETS["batchnorm"], **settings)


def test_single_images_are_predicted_with_the_statistics_of_the_stream():
    method = batchnorm(gather=16, lr=0.0)
    x = images(FEW_IMAGES - 1)
    source = method.predict(x[:1])
    for one in singles(20, seed=3):
        assert method(one).isfinite().all()
    each = torch.cat([method.predict(one) for one in x.split(1)])
    torch.testing.assert_close(method.predict(x), each)  # an image does not change the logits of another one
    assert not torch.allclose(each[:1], source)  # the stream does
    large = images(FEW_IMAGES)
    assert torch.equal(method.predict(large), method.method.predict(large))  # by its own statistics
    assert not torch.allclose(method.method.predict(x), each)


def test_statistics_of_small_batches_are_those_of_the_gathered_images():
    """Layer by layer, each behind layers that normalise by the same images: as one batch of all of them gives."""
    method = batchnorm(gather=16, lr=0.0)
    plain = batchnorm(gather=None, lr=0.0)
    for x in singles(16):
        method(x)
    plain(images(16))
    mine = dict(method.method.statistics.named_buffers())
    theirs = dict(plain.statistics.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name])


def test_the_first_image_is_predicted_with_the_statistics_of_the_source():
    net = NETS["batchnorm"]()
    for layer in (net[1], net[4]):
        layer.running_mean.fill_(0.1)
        layer.running_var.fill_(0.7)
    method = mgtta.create("tent", mgtta.load_model(net), gather=4)
    expected = mgtta.create("noadapt", mgtta.load_model(net))(images(1))
    torch.testing.assert_close(method(images(1)), expected)


def test_the_statistics_of_the_source_fade():
    method = batchnorm(gather=1000).method
    layer = method.model.net[1]
    layer.running_mean.fill_(100.0)
    x = torch.randn(64, 8, 5, 5) + 3
    for one in x.split(1):
        method.statistics.update(0, one)
    mean, var = of_stream_and_source(method.statistics, 0, layer)
    torch.testing.assert_close(mean, 0.2 * 100 + 0.8 * method.statistics.mean_0)
    torch.testing.assert_close(var, 0.2 * layer.running_var + 0.8 * method.statistics.var_0)


def test_gathered_batchnorm_learns_by_the_statistics_of_the_window():
    method = batchnorm(gather=4)
    plain = batchnorm(gather=None)
    for x in singles(4):
        method(x)
    plain(images(4))
    for a, b in zip(method.adapted.values(), plain.adapted.values(), strict=True):
        torch.testing.assert_close(a, b)
    running = dict(method.model.net.named_buffers())
    source = dict(NETS["batchnorm"]().named_buffers())
    assert all(torch.equal(value, source[name]) for name, value in running.items())  # they stay the source's


def test_the_teacher_of_cotta_normalises_by_the_stream_too():
    model = mgtta.load_model(NETS["batchnorm"]())
    method = make("cotta", model, gather=8, confidence=0.0)
    for x in singles(20):
        assert method(x).isfinite().all()
    assert isinstance(method.method, CoTTA)
    assert (method.method.statistics.images == 16).all()  # those that were learned from
    x = images(5, seed=9)
    torch.testing.assert_close(method.predict(x)[:1], method.predict(x[:1]))


def test_gather_with_batchnorm_on_the_fast_path_keeps_the_streams_statistics():
    exact, quick = batchnorm(gather=16), batchnorm(gather=16, precision="bf16")
    for x in [*singles(20), images(FEW_IMAGES, seed=5)]:
        torch.testing.assert_close(quick(x), exact(x), atol=0.02, rtol=0.02)
    assert quick.updates == exact.updates == 2
    theirs = dict(exact.method.statistics.named_buffers())
    for name, value in quick.method.statistics.named_buffers():
        torch.testing.assert_close(value, theirs[name], atol=0.02, rtol=0.02)
    x = images(4, seed=9)
    torch.testing.assert_close(quick.export()(x), exact.export()(x), atol=0.02, rtol=0.02)


def test_single_images_keep_their_accuracy_on_characters():
    """The net has a BatchNorm layer in its stem, and learns from 16 single images at a time."""
    model = mgtta.load_model("glyphs_vit")
    [batch] = stream(Domain("brightness", Glyphs(128, seed=5), "brightness", 5), batch_size=128)

    def right(name, size, **settings):
        method = mgtta.create(name, model, **settings)
        logits = torch.cat([method(x) for x in batch.x.split(size)])
        return int((logits.argmax(1) == batch.y).sum())

    gathered = right("tent", 1, lr=1e-3, gather=16)
    assert gathered > 1.1 * right("tent", 1, lr=1e-3)  # which normalises by one image
    assert gathered > 0.97 * right("tent", 64, lr=1e-3)
    assert gathered > right("noadapt", 64)


def test_gather_from_the_command_line():
    chosen = options.settings(["gather=16", "recall=4", "pull=0.05"])
    method = mgtta.create("tent", mgtta.load_model(confident_vit()), **chosen)
    assert method.most == 4
    assert method.method.images == 16
    assert innermost(method).pull == 0.05
