"""K ranks that share every batch are one process that has it all."""

import copy
import csv
import datetime
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from baselines import unsure_vit
from conftest import CLASSES, NETS, images, random_generator, vit
from PIL import Image

import mgtta
from mgtta._lib.files import read_tree, write_tree
from mgtta._lib.ranks import ALONE, RankError, Ranks, share
from mgtta.bench.cells import Cell, Setup
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.cli import app
from mgtta.data.glyphs import Glyphs
from mgtta.data.streams import corrupted, stream
from mgtta.methods.registry import BATCH_NORM, FISHER, SOURCE, recipes

K = 3
SIZES = [8] * 9 + [7, 2, 1]  # 12 steps; of the last two batches some ranks have nothing
CASES = {  # filters that some images pass and some do not
    "tent": {},
    "tent_mgg": {"optimizer": "mgg"},
    "eta": {"margin": 0.65, "redundancy": 0.97, "lr": 1e-3},
    "eata": {"margin": 0.65, "redundancy": 0.97, "fisher_weight": 1.0, "lr": 1e-3},
    "sar": {"margin": 0.65, "lr": 1e-2},
    "sar_recovers": {"margin": 0.65, "recovery": 1.2, "lr": 1e-2},
    "deyo": {"margin": 0.8, "entropy_threshold": 0.75, "plpd_threshold": 0.0, "lr": 1e-3, "all_norms": True},
    "eq7_sgd": {},
    "eq7_adam": {},
    "mgtta": {},
    "mgtta_lstm": {},
    "mgtta_plus": {"gather": 0, "recall": 0},
    "plus_adam": {"gather": 0, "recall": 0},
    "plus_sgd": {"gather": 0, "recall": 0},
    "noadapt": {},
    "actmad": {},
    "eata_come": {"margin": 0.8, "redundancy": 0.97, "fisher_weight": 1.0},
    "rdumb": {"margin": 0.65, "redundancy": 0.97, "every": 5},
    "sar_come": {"margin": 0.8},
    "shot": {},
    "tent_come": {},
}


SMALL = Setup("patterns_vit", images=7)
CELLS = [Cell("corruptions", m, ("fog",), batch_size=3) for m in ("noadapt", "eq7_sgd")]  # batches of 3, 3 and 1


def create(case, **more):
    name = case.removesuffix("_mgg").removesuffix("_recovers")
    model = unsure_vit()
    settings = {**CASES[case], **more}
    if SOURCE in recipes()[name].needs:
        settings["source"] = mgtta.source_statistics(model, images(32, seed=99).double())
    if name.startswith("mgtta") or "optimizer" in settings:
        settings["generator"] = random_generator(memory="lstm" if "lstm" in name else "gml")
    if FISHER in recipes()[name].needs:
        settings["fisher"] = mgtta.fisher_information(model, images(8, seed=5).double())
    return mgtta.create(name, model, **settings)


def batches():
    return [images(n, seed=t).double() for t, n in enumerate(SIZES)]


def adapted(method, xs):
    """The logits of every batch, and the state after them."""
    logits = [method(x) for x in xs]
    state = method.state_dict()
    state["counters"].pop("seconds")
    return {"logits": logits, "state": state}


# --- ranks


@pytest.fixture(scope="module")
def ran(tmp_path_factory, worker_id):
    """What each rank found. One start of the ranks serves all tests, since starting takes longer than running."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "ranks"  # the same for all of xdist's processes
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _start_ranks(folder)
            (folder / "done").touch()
    return [{**read_tree(folder / f"{rank}")[0], "runs": Store(folder / f"runs{rank}")} for rank in range(K)]


def _start_ranks(folder):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["baselines"])
    processes = [context.Process(target=_member, args=(rank, folder), daemon=True) for rank in range(K)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 7]  # the last is killed, see _lost


def _member(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=K)
    found = _everything(rank, dist.group.WORLD)
    found["records"] = run_cells(CELLS, SMALL, Store(folder / f"runs{rank}"), process_group=dist.group.WORLD)
    found["refused cells"] = _refused_cells(folder, dist.group.WORLD)
    found["hangs"], found["lost"] = _lost(rank, lambda: time.sleep(3)), ""
    write_tree(folder / f"{rank}", found, {})
    found["lost"] = _lost(rank, lambda: os._exit(7))
    write_tree(folder / f"{rank}", found, {})


def _everything(rank, group):
    mine = [share(x, rank, K) for x in batches()]
    found = {"cases": {}, "messages": {}}
    for case in CASES:
        method = create(case, process_group=group)
        found["cases"][case] = adapted(method, mine)
        method.reset()
        before = method.ranks.messages, method.ranks.bytes
        method(mine[0])
        found["messages"][case] = [method.ranks.messages - before[0], method.ranks.bytes - before[1]]
    found["resumed"] = _resumed(group, mine)
    found["bad"] = _bad(rank, group)
    found["seconds"] = _stops_together(rank, group)
    found["errors"] = _errors(rank, group)
    found["refused"] = _refused(group)
    found["same"] = _same_images(rank, group)
    pair = dist.new_group([0, 1])
    if rank < 2:
        found["pair"] = adapted(create("mgtta", process_group=pair), [share(x, rank, 2) for x in batches()])
    return found


def _resumed(group, mine):
    method = create("mgtta", process_group=group)
    for x in mine[:6]:
        method(x)
    other = create("mgtta", process_group=group)
    other.load_state_dict(method.state_dict())
    assert copy.deepcopy(other).ranks is other.ranks
    return adapted(other, mine[6:])


def _bad(rank, group):
    """One rank alone has an image that is not finite."""
    found = {}
    for case in ("eata", "sar", "deyo", "mgtta"):
        method = create(case, process_group=group)
        x = share(images(6).double(), rank, K)
        if rank == 1:
            x[0, 0, 3, 3] = float("nan")
        method(x)
        found[case] = [method.updates, method.skipped]
    return found


def _stops_together(rank, group):
    """A budget in seconds, which pass more slowly on one rank than on the others."""
    method = create("tent", process_group=group, max_seconds=0.3)
    if rank == 2:
        method.model.net.register_forward_hook(lambda *_: time.sleep(0.1))
    for _ in range(6):
        method(share(images(6).double(), rank, K))
    return [method.updates, method.spent]


def _errors(rank, group):
    found = []
    for settings in ({"lr": 1e-3 * (1 + (rank == 2))}, {"max_updates": 3 + rank}):
        try:
            mgtta.create("tent", vit(), process_group=group, **settings)
        except ValueError as error:
            found.append(str(error))
    return found


def _refused_cells(folder, group):
    found = []
    for cells, workers in (([Cell("runtime", "tent", ("fog",), alone=True)], 0), (CELLS, 2)):
        try:
            run_cells(cells, SMALL, Store(folder / "none"), workers, process_group=group)
        except ValueError as error:
            found.append(str(error))
    return found


def _same_images(rank, group):
    """Features without a spread: the gradient of a standard deviation of 0 is nothing, and no NaN."""
    f = share(torch.full((5, 4), 0.3, dtype=torch.float64), rank, K).requires_grad_()
    _, (mean, std) = Ranks(group).moments(f[:, 0], f, torch.zeros(4, dtype=torch.float64))
    (grad,) = torch.autograd.grad((std - 1).square().sum(), f)
    return [mean, std, grad]


def _refused(group):
    """Recipe -> why it cannot share a batch, "" where it can."""
    found = {}
    for name in [*recipes(), "batchnorm"]:
        recipe = "tent" if name == "batchnorm" else name
        needs = recipes()[recipe].needs
        net = NETS["batchnorm"]() if name == "batchnorm" or BATCH_NORM in needs else vit()
        settings = {}
        if SOURCE in needs:
            settings["source"] = mgtta.source_statistics(mgtta.load_model(net), images(4))
        if FISHER in needs:
            settings["fisher"] = mgtta.fisher_information(mgtta.load_model(net), images(4))
        try:
            mgtta.create(recipe, net, process_group=group, **settings)(images(2))
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def _lost(rank, leave):
    """What the others are told when the last rank leaves them in mid-run."""
    method = mgtta.create("tent", vit(), process_group=dist.new_group(timeout=datetime.timedelta(seconds=2)))
    method(images(2))
    if rank == K - 1:
        leave()
    try:
        method(images(2))
    except RankError as error:
        return str(error)
    return "nothing"


def leaves(node):
    if isinstance(node, dict):
        for key in sorted(node, key=str):
            yield from leaves(node[key])
    elif isinstance(node, list | tuple):
        for value in node:
            yield from leaves(value)
    elif node is not None:
        yield node


def compare(a, b, atol):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            torch.testing.assert_close(x, y, rtol=0, atol=atol)
        elif isinstance(x, float):
            assert x == pytest.approx(y, rel=0, abs=atol)
        else:
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_process(ran, case):
    alone = adapted(create(case), batches())
    assert alone["state"]["counters"]["updates"] >= (0 if case == "noadapt" else 6)
    for rank in range(K):
        found = ran[rank]["cases"][case]
        compare(found["state"], alone["state"], 1e-10)  # parameters, moments, memory, averages, random numbers
        compare(found["logits"], [share(y, rank, K) for y in alone["logits"]], 1e-9)
        compare(found["state"], ran[0]["cases"][case]["state"], 0.0)  # on all ranks alike, bit for bit


def test_the_cases_exercise_what_they_should():
    """Filters let some images through and not others; SAR goes back to the source in one case alone."""
    x = batches()[0]
    assert 0 < create("eata").kept(create("eata").model(x)).sum() < len(x)
    assert 0 < create("sar").reliable(create("sar").model(x)).sum() < len(x)
    for case, recovers in (("sar", False), ("sar_recovers", True)):
        method = create(case)
        adapted(method, batches())
        assert bool(method.recoveries) == recovers


def test_a_group_of_some_ranks_and_a_resumed_one(ran):
    alone = adapted(create("mgtta"), batches())
    for rank in range(2):
        compare(ran[rank]["pair"]["state"], alone["state"], 1e-10)
    for rank in range(K):
        assert ran[rank]["resumed"]["state"]["counters"]["updates"] == len(SIZES)
        compare(ran[rank]["resumed"]["state"]["params"], alone["state"]["params"], 1e-10)


def test_what_is_sent_for_each_step(ran):
    """As docs/scale.md has it: the statistics, whether all is finite, the gradients."""
    method = create("mgtta")
    n = sum(p.numel() for p in method.adapted.values())
    statistics = 2 + 2 * sum(len(mu) for mu in method.source.mean)
    sent = ran[0]["messages"]
    assert sent["mgtta"] == sent["eq7_adam"] == [3, 8 * (n + statistics + 1)]
    assert sent["tent"] == [3, 8 * (n + 2 + 1)]
    assert sent["eata"] == [5, 8 * (n + 1 + 3 + 1 + CLASSES + 2)]  # first whether an image is chosen on any rank
    assert sent["deyo"] == [4, 8 * (n + K + 2 + 1)]
    assert sent["sar"] == [6, 8 * 2 * (sum(p.numel() for p in create("sar").adapted.values()) + 2 + 1)]
    assert sent["noadapt"] == [0, 0]


def test_images_without_a_spread(ran):
    for found in ran:
        mean, std, grad = found["same"]
        torch.testing.assert_close(mean, torch.full_like(mean, 0.3))
        assert not std.any()
        assert not grad.any()


def test_one_ranks_bad_image_is_skipped_by_all(ran):
    assert all(found["bad"] == {case: [0, 1] for case in ("eata", "sar", "deyo", "mgtta")} for found in ran)


def test_a_budget_of_seconds_ends_for_all_at_once(ran):
    assert ran[0]["seconds"] == ran[1]["seconds"] == ran[2]["seconds"]
    assert 1 <= ran[0]["seconds"][0] < 6
    assert ran[0]["seconds"][1]


def test_ranks_that_differ_are_named(ran):
    for found in ran:
        assert found["errors"][0].startswith("rank 2: not the model, method and settings of rank 0")
        assert found["errors"][1].startswith("rank 1, 2: not the model, method and settings of rank 0")


def test_who_can_share_a_batch_and_who_says_that_it_cannot(ran):
    refused = ran[0]["refused"]
    can = {name for name, why in refused.items() if not why}
    assert can == {case for case in CASES if case in recipes()}
    for name in recipes().keys() - can:
        assert f"{name} looks at a batch as a whole" in refused[name]
    assert "BatchNorm layers" in refused["batchnorm"]


@pytest.mark.parametrize("how", ["hangs", "lost"])
def test_a_rank_that_dies_or_hangs_ends_the_run_within_the_timeout(ran, how):
    for rank in range(K - 1):
        assert ran[rank][how].startswith(f"rank {rank} of 3 got no answer: another rank has died, hangs")
        assert "start all ranks again" in ran[rank][how]


# --- experiments


def test_ranks_give_the_records_of_one_process_and_the_first_keeps_them(ran, tmp_path):
    alone = run_cells(CELLS, SMALL, Store(tmp_path))
    for rank, found in enumerate(ran):
        for a, b in zip(found["records"], alone, strict=True):
            assert a["protocol"]["ranks"] == K
            assert a.keys() == b.keys()
            for key in ("cell", "method", "images", "labelled", "sizes", "curve", "updates", "top1", "top5"):
                assert a[key] == b[key]
            assert a["ece"] == pytest.approx(b["ece"], abs=1e-3)
        assert len(found["runs"].records()) == (2 if rank == 0 else 0)


def test_what_ranks_cannot_run_is_told_first(ran):
    for found in ran:
        alone, workers = found["refused cells"]
        assert "tent on fog (runtime) is measured in a process of its own: run it without torchrun" in alone
        assert "run cells separately" in workers


@pytest.mark.slow
def test_torchrun_resumes_after_a_kill_and_writes_the_predictions_of_one_process(tmp_path, monkeypatch):
    glyphs = Glyphs(13)
    (tmp_path / "images").mkdir()
    for i in range(13):
        Image.fromarray(glyphs[i][0].permute(1, 2, 0).numpy()).save(tmp_path / "images" / f"{i:02}.png")
    monkeypatch.chdir(tmp_path)
    words = [
        "adapt",
        "images",
        "--method",
        "mgtta",
        "--model",
        "patterns_vit",
        "--source",
        "patterns_vit",
        "--batch-size",
        "6",
    ]
    words += ["--device", "cpu", "--state", "state", "--out"]
    app([*words, "one.csv"], standalone_mode=False)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mgtta"]
    kept = [*ranks, *words, "two.csv", "--resume", "run", "--save-every", "1"]
    killed = subprocess.Popen(kept, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while killed.poll() is None and not Path("run").exists():
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    done = subprocess.run(kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("13 images; 3 updates, 0 skipped -> two.csv") == 1
    assert not Path("run").exists()
    one, two = (list(csv.DictReader(Path(f"{run}.csv").read_text().splitlines())) for run in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert (a["image"], a["prediction"]) == (b["image"], b["prediction"])
        assert float(a["confidence"]) == pytest.approx(float(b["confidence"]), abs=1e-5)


# --- shares


def test_a_streams_parts_are_the_stream():
    def batches(part=None, workers=0):
        return list(stream(corrupted(Glyphs(11), ["contrast", "fog"]), batch_size=4, part=part, workers=workers))

    whole = batches()
    for size in (2, 3, 5):
        parts = [batches((rank, size), workers=rank % 2) for rank in range(size)]
        for batch, *shares in zip(whole, *parts, strict=True):
            assert {s.domain for s in shares} == {batch.domain}
            for field in ("x", "y", "index"):
                assert torch.equal(torch.cat([getattr(s, field) for s in shares]), getattr(batch, field))


def test_shares_are_the_batch_in_order():
    for n in (0, 1, 2, 7, 64):
        for size in (1, 2, 3, 5, 8):
            parts = [share(torch.arange(n), rank, size) for rank in range(size)]
            assert torch.equal(torch.cat(parts), torch.arange(n))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_process_needs_no_group():
    assert ALONE.first
    assert mgtta.create("tent", vit()).ranks is ALONE
    with pytest.raises(ValueError, match="the batch is empty"):
        mgtta.create("tent", vit())(images(0))
    with pytest.raises((ValueError, RuntimeError), match=r"[Dd]efault process group"):
        Ranks(dist.group.WORLD)
