"""The command line, called as a user calls it: in a process of its own, or through its entry point."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from conftest import CLASSES
from made_up import fake
from PIL import Image
from safetensors.torch import save_file

import mgtta
from mgtta import cli
from mgtta.data.datasets import synsets
from mgtta.data.embedded import EMBEDDED
from mgtta.data.glyphs import CLASSES as CHARACTERS
from mgtta.data.glyphs import Glyphs
from mgtta.data.patterns import Patterns

ARCHITECTURE = "vit_tiny_patch16_224"


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["mgtta", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def options(**named):
    """Options as words: num_classes=5 is --num-classes 5."""
    return [word for name, value in named.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture
def folder(tmp_path):
    """Glyph images in two folders, which are not the embedded model's 30 classes."""
    return write_images(tmp_path / "images", lambda i, label: f"class{i % 2}")


def write_images(root, place, n=12, kind=Glyphs):
    images = kind(n)
    for i in range(n):
        image, label = images[i]
        path = root / place(i, label) / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return root


def test_help_needs_no_torch():
    code = """
import sys
sys.argv = ["mgtta", "--help"]
from mgtta.cli import app
try:
    app()
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("adapt", "train", "source", "list", "doctor", "demo", "corrupt"):
        assert command in done.stdout


def test_without_a_command_it_shows_the_help(run):
    _, out, err = run()
    assert "Adapt an image classifier online" in out + err


def test_a_convnet_adapts_by_the_defaults(run, folder, tmp_path):
    """Its head reads other features than its last norm layer gives."""
    net = mgtta.load_model("test_efficientnet", pretrained=False, num_classes=CLASSES).net
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    model = options(
        model="test_efficientnet", checkpoint=tmp_path / "w.safetensors", num_classes=CLASSES, size=32, device="cpu"
    )
    code, _, err = run("source", folder, *model, "--out", tmp_path / "source.safetensors")
    assert code == 0, err
    adapt = ("adapt", folder, *model, "--source", tmp_path / "source.safetensors", "--out", tmp_path / "p.csv")
    for size in (1, 12):
        code, out, err = run(*adapt, "--batch-size", size, "--set", "gather=6")
        assert code == 0, err
        assert f"12 images; {12 // max(size, 6)} update" in out


def test_adapt_writes_csv_and_state_and_starts_from_the_state(run, folder, tmp_path):
    common = (
        "adapt",
        folder,
        *options(model="glyphs_vit", source="glyphs_vit", batch_size=4, device="cpu", method="mgtta"),
    )
    code, out, err = run(*common, "--out", tmp_path / "p.csv", "--state", tmp_path / "s", "--set", "lr=1e-4")
    assert code == 0, err
    assert "2 class folders, but the model has 30 classes: the labels are not used" in err
    assert "12 images; 3 updates, 0 skipped" in out
    with open(tmp_path / "p.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows][:2] == ["class0/00.png", "class0/02.png"]
    assert all(0 <= int(row["prediction"]) < 30 and 0 < float(row["confidence"]) <= 1 for row in rows)
    code, out, err = run(*common, "--out", tmp_path / "p.jsonl", "--start", tmp_path / "s", "--images", 4)
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert lines[0]["label"] is None


def test_adapt_shows_class_names_and_accuracy_if_the_folders_are_the_classes(run, tmp_path):
    root = write_images(tmp_path / "images", lambda i, label: CHARACTERS[label], n=150)
    assert len(list(root.iterdir())) == 30
    words = options(model="glyphs_vit", method="noadapt", out=tmp_path / "p.jsonl", device="cpu")
    code, out, err = run("adapt", root, *words)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    right = [row["class"] == row["image"].split("/")[0] for row in rows]
    assert sum(right) > 145
    assert f"{100 * sum(right) / 150:.1f} % right" in out


def test_adapt_knows_the_classes_of_a_shipped_model_and_says_that_a_tree_comes_class_by_class(run, tmp_path):
    """The model's first class is stripes, the first folder bricks."""
    root = write_images(tmp_path / "images", lambda i, label: Patterns.classes[label], n=24, kind=Patterns)
    out = tmp_path / "p.csv"
    command = ["adapt", root, *options(model="patterns_vit", method="noadapt", device="cpu", out=out)]
    code, _, err = run(*command)
    assert code == 0, err
    assert "class by class" in err
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {Patterns.classes[int(row["label"])] == row["image"].split("/")[0] for row in rows} == {True}
    assert sum(row["class"] == row["image"].split("/")[0] for row in rows) > 20
    code, _, err = run(*command, "--shuffle", 0)
    assert code == 0, err
    assert "class by class" not in err


def test_adapt_a_timm_model_from_a_checkpoint_and_a_tar(run, folder, tmp_path):
    import tarfile

    torch.manual_seed(0)
    net = mgtta.load_model(ARCHITECTURE, pretrained=False, num_classes=CLASSES).net
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for i, path in enumerate(sorted(folder.rglob("*.png"))[:3]):
            (tmp_path / "label").write_text(str(i))
            tar.add(path, f"{i:04}.png")
            tar.add(tmp_path / "label", f"{i:04}.cls")
    model = options(model=ARCHITECTURE, checkpoint=tmp_path / "w.safetensors", num_classes=CLASSES, device="cpu")
    code, out, err = run("adapt", tmp_path / "images.tar", *model, *options(clean=folder, out=tmp_path / "p.csv"))
    assert code == 0, err
    assert "3 images" in out
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 4


def test_adapt_takes_a_model_of_your_own_function(run, folder, tmp_path, monkeypatch):
    lines = ["import mgtta", "def build():", "    return mgtta.load_model('glyphs_vit')"]
    (tmp_path / "own_glyphs.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "p.csv"
    named = options(model="own_glyphs:build", out=out, method="tent", batch_size=6)
    code, _, error = run("adapt", folder, *named)
    assert code == 0, error
    shipped = tmp_path / "shipped.csv"
    run("adapt", folder, *options(model="glyphs_vit", out=shipped, method="tent", batch_size=6))
    assert out.read_text() == shipped.read_text()


def test_adapt_takes_the_parameters_that_adapt(run, folder, tmp_path):
    named = options(model="glyphs_vit", out=tmp_path / "p.csv", method="tent", set="params=blocks.*.norm1, norm")
    code, _, error = run("adapt", folder, *named, "--state", tmp_path / "state")
    assert code == 0, error
    method = mgtta.create("tent", mgtta.load_model("glyphs_vit"), params=["blocks.*.norm1", "norm"])
    mgtta.load_state(method, tmp_path / "state")
    assert method.updates == 1
    named[-1] = "params=blocks.*.nrom1"
    code, _, error = run("adapt", folder, *named)
    assert code == 2
    assert "no parameter is named 'blocks.*.nrom1'" in error


def test_source_then_train_then_adapt(run, folder, tmp_path):
    code, out, err = run("source", folder, "--model", "glyphs_vit", "--out", tmp_path / "src", "--device", "cpu")
    assert code == 0, err
    assert "12 images, 6 layers" in out
    common = options(model="glyphs_vit", source=tmp_path / "src", device="cpu")
    generator = tmp_path / "g.safetensors"
    length = options(images=8, steps=8, resume=tmp_path / "run")
    code, out, err = run("train", folder, *common, *length, "--corrupt", "--out", generator)
    assert code == 0, err
    assert (tmp_path / "run").exists()
    about = mgtta.load_generator(generator).about
    assert about["training"]["steps"] == 8
    assert about["command"].startswith("mgtta train")
    code, out, err = run("adapt", folder, *common, "--out", tmp_path / "p.csv", "--set", f"generator={generator}")
    assert code == 0, err


def test_list_and_doctor(run):
    code, out, _ = run("list")
    assert code == 0
    for word in ("mgtta", "tent", "imagenet", "gaussian_noise", "imagenet-c", "forward only"):
        assert word in out
    code, out, _ = run("doctor")
    assert code == 0
    assert torch.__version__.split("+")[0] in out


@pytest.mark.parametrize("missing", ["torch", "timm", "cma"])
def test_doctor_names_what_is_missing(missing):
    code = f"""
import importlib.metadata, sys
sys.modules[{missing!r}] = None
version = importlib.metadata.version
def hidden(name):
    if name == {missing!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hidden
sys.argv = ["mgtta", "doctor"]
from mgtta.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"pip install {missing}" in done.stdout
    assert "matching" not in done.stdout


def test_adapt_leaves_no_partial_predictions_when_terminated(folder, tmp_path):
    words = ["adapt", str(folder), "--model", "glyphs_vit", "--source", "glyphs_vit", "--device", "cpu"]
    code = f"""
import os, signal, sys
from mgtta import cli
from mgtta.running import predictions
write = predictions.PredictionWriter.write
def stopped(self, batch, logits):
    write(self, batch, logits)
    os.kill(os.getpid(), signal.SIGTERM)
predictions.PredictionWriter.write = stopped
sys.argv = ["mgtta", *{words!r}, "--out", {str(tmp_path / "out" / "p.csv")!r}]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--method", "mgta"], "unknown recipe 'mgta'; valid:"),
        (["--set", "learning_rate=1"], "unknown setting"),
        (["--set", "lr"], "name=value"),
        (["--out", "p.xlsx"], ".csv, .jsonl"),
        (["--model", "glyphs_vti"], "close names: glyphs_vit"),
        (["--source", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--start", "nowhere"], "there is no file nowhere"),
        (["--set", "lr=abc"], "lr must be a number, not 'abc'"),
        (["--set", "max_updates=1.5"], "max_updates must be a whole number"),
        (["--device", "cuda:99"], "--device cpu"),
        (["--num-classes", "5"], "num_classes"),
        (["--checkpoint", "nowhere.pth"], "nowhere.pth"),
        (["--set", "guard=True"], "an option of its own, --guard"),
        (["--set", "source=patterns_vit"], "an option of its own, --source"),
        (["--clean", "images"], "leave out one"),
        (["--start", "state", "--set", "lr=1"], "leave out --set lr"),
        (["--resume", "run", "--shuffle", "0"], "leave out --shuffle"),
        (["--state", "/"], "cannot write /: it is a folder"),
        (["--state", "/proc/state"], "cannot write /proc/state"),
    ],
)
def test_errors_are_one_line_that_names_the_remedy(run, folder, tmp_path, change, message):
    options = {
        "--model": "glyphs_vit",
        "--source": "glyphs_vit",
        "--out": str(tmp_path / "p.csv"),
        "--device": "cpu",
    }
    options |= dict(zip(change[::2], change[1::2], strict=True))
    code, _, err = run("adapt", folder, *(word for pair in options.items() for word in pair))
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "p.csv").exists()


def test_a_missing_source_is_told_before_anything_is_loaded(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(mgtta, "load_model", fail)
    common = (tmp_path, "--model", "vit_base_patch16_224")
    for words, told in (
        (("adapt", *common), "--source FILE"),
        (("train", *common), "--source FILE"),
        (("adapt", *common, "--source", "nowhere.safetensors"), "--source nowhere.safetensors: no such file"),
        (("adapt", *common, "--method", "mgtta++"), "mgtta, mgtta+,"),
        (("adapt", *common, "--method", "eata"), "`mgtta fisher`"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert told in err


def test_adapt_names_the_missing_source_and_data(run, folder, tmp_path):
    code, _, err = run("adapt", folder, "--model", "glyphs_vit", "--device", "cpu", "--out", tmp_path / "p.csv")
    assert code == 2
    assert "--source FILE" in err
    code, _, err = run("adapt", tmp_path / "nothing", "--model", "glyphs_vit", "--source", "glyphs_vit")
    assert code == 2
    assert "nothing" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapt", "images", "--first", "4"], "mgtta adapt has no option --first: its name is now --images"),
        (["train", "images", "--run=file"], "mgtta train has no option --run: its name is now --resume"),
        (["corrupt", "in", "out", "--corruption", "fog"], "has no option --corruption: its name is now --corruptions"),
    ],
)
def test_renamed_options_name_the_new_option(run, words, message):
    code, _, err = run(*words)
    assert code == 2
    assert message in err


def test_the_same_option_has_the_same_name_in_every_command():
    import typer.main

    commands = typer.main.get_command(cli.app).commands
    options = {name: {word for p in command.params for word in p.opts} for name, command in commands.items()}
    for option, having in {
        "--resume": {"adapt", "train"},
        "--images": {"adapt", "tune", "train", "source", "fisher", "bench", "demo"},
        "--corruptions": {"corrupt", "bench"},
    }.items():
        assert {name for name in options if option in options[name]} == having


def test_every_option_and_command_has_a_help_text():
    import typer.main

    for name, command in typer.main.get_command(cli.app).commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help or parameter.name == "help", f"mgtta {name}: {parameter.name}"


def test_errors_speak_the_command_line():
    from mgtta.cli.errors import in_options

    assert in_options("leave out shuffle=..., or resume=...") == "leave out --shuffle, or --resume"
    assert in_options("take precision='fp32', and low_memory=...") == "take --precision fp32, and --low-memory"
    assert in_options("lr=0.1 and batch=... stay") == "lr=0.1 and batch=... stay"
    assert "`mgtta fisher" in in_options("compute it with mgtta.fisher_information(model, clean_images)")


def test_source_statistics_of_other_weights_name_the_source_command(run, folder, tmp_path):
    wrong = options(model="glyphs_vit", source="patterns_vit", device="cpu", out=tmp_path / "p.csv")
    code, _, err = run("adapt", folder, *wrong)
    assert code == 2
    assert "`mgtta source CLEAN_IMAGES --model NAME`" in err
    assert "source_statistics" not in err


@pytest.mark.parametrize("command", ["source", "train"])
def test_out_that_cannot_be_written_is_an_error_before_the_work(run, folder, tmp_path, command):
    code, _, err = run(command, folder, "--model", "none such", "--out", tmp_path)
    assert code == 2
    assert f"cannot write {tmp_path}: it is a folder" in err


def test_data_may_be_a_url(run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("mgtta.data.datasets.open_dataset", lambda path, **_: asked.append(path) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("source", "hf://datasets/a/b/x.tar", "--model", "glyphs_vit", "--out", tmp_path / "s.safetensors")
    assert asked == ["hf://datasets/a/b/x.tar"]


def test_adapt_with_eata_without_fisher_information_is_refused_and_eta_is_not(run, folder, tmp_path):
    command = ["adapt", folder, "--model", "glyphs_vit", "--device", "cpu", "--out", tmp_path / "p.csv", "--method"]
    code, _, err = run(*command, "eata")
    assert code != 0
    assert "eata needs Fisher information of clean images: --set fisher=FILE" in err
    assert "--method eta" in err
    assert not (tmp_path / "p.csv").exists()
    code, _, err = run(*command, "eta")
    assert code == 0, err


def test_adapt_scores_only_the_classes_of_synset_folders_and_says_so(run, tmp_path):
    root = write_images(tmp_path / "images", lambda i, label: ("n01440764", "n01443537")[i % 2])
    save_file(mgtta.load_model(ARCHITECTURE, pretrained=False).net.state_dict(), tmp_path / "w.safetensors")
    model = options(model=ARCHITECTURE, checkpoint=tmp_path / "w.safetensors", device="cpu")
    command = ["adapt", root, *model, *options(method="noadapt", out=tmp_path / "p.csv"), "--compare"]
    code, _, err = run(*command, "--restrict")
    assert code == 0, err
    assert "scored over those 2 of the model's 1000 classes" in err
    rows = csv.DictReader((tmp_path / "p.csv").read_text().splitlines())
    assert {row["class"] for row in rows} <= {"n01440764", "n01443537"}
    code, _, err = run(*command)  # all classes, under ImageNet's numbers
    assert code == 0, err
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    names = sorted(synsets(), key=synsets().get)
    assert {row["label"] for row in rows} == {"0", "1"}
    assert [row["class"] for row in rows] == [names[int(row["prediction"])] for row in rows]
    assert [row["source_class"] for row in rows] == [row["class"] for row in rows]


def test_adapt_takes_a_file_that_says_which_folder_is_which_class(run, tmp_path):
    root = write_images(tmp_path / "images", lambda i, label: ("zebra", "ape")[i % 2])
    last = len(CHARACTERS) - 1
    numbers = [str(i) for i in range(1, last)]
    (tmp_path / "classes.txt").write_text("\n".join(["zebra", *numbers, "ape"]))
    out = tmp_path / "p.csv"
    command = ["adapt", root, *options(model="glyphs_vit", method="noadapt", device="cpu", out=out)]
    code, _, err = run(*command, "--classes", tmp_path / "classes.txt")
    assert code == 0, err
    labels = {(row["image"].split("/")[0], row["label"]) for row in csv.DictReader(out.read_text().splitlines())}
    assert labels == {("zebra", "0"), ("ape", str(last))}
    (tmp_path / "few.txt").write_text("zebra\nape")
    code, _, err = run(*command, "--classes", tmp_path / "few.txt")
    assert code == 2
    assert f"names 2 classes, but the model has {len(CHARACTERS)}: name all" in err


def test_adapt_takes_images_by_name_or_shuffled(run, tmp_path):
    root, orders = write_images(tmp_path / "images", lambda i, label: "."), []
    for words in ([], ["--shuffle", 0], ["--shuffle", 0], ["--shuffle", 1]):
        out = tmp_path / "p.csv"
        code, _, err = run(
            "adapt", root, "--model", "glyphs_vit", "--method", "noadapt", "--device", "cpu", "--out", out, *words
        )
        assert code == 0, err
        orders.append([row["image"] for row in csv.DictReader(out.read_text().splitlines())])
    assert orders[0] == sorted(orders[0])
    assert all(sorted(order) == orders[0] for order in orders)
    assert orders[1] == orders[2]
    assert len({*map(tuple, orders)}) == 3


def test_version(run):
    assert run("--version") == (0, f"{mgtta.__version__}\n", "")


def test_adapt_names_or_skips_an_unreadable_image(run, folder, tmp_path):
    (folder / "class0" / "zz.png").write_bytes(b"not an image")
    common = ("adapt", folder, "--model", "glyphs_vit", "--source", "glyphs_vit", "--device", "cpu")
    code, _, err = run(*common, "--out", tmp_path / "p.csv")
    assert code == 2
    assert "zz.png" in err
    assert "--skip-unreadable" in err
    assert not (tmp_path / "p.csv").exists()
    code, out, err = run(*common, "--out", tmp_path / "p.csv", "--skip-unreadable")
    assert code == 0, err
    assert "1 images unreadable" in out


def test_corrupt_writes_a_tree(run, folder, tmp_path):
    which = ["--corruptions", "contrast,fog", "--severity", 3, "--severity", 5]
    code, _, err = run("corrupt", folder, tmp_path / "c", *which, "--size", 48)
    assert code == 0, err
    assert len(list((tmp_path / "c" / "contrast" / "5" / "class1").iterdir())) == 6
    assert sorted(p.name for p in (tmp_path / "c" / "contrast").iterdir()) == ["3", "5"]
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.is_dir()) == ["contrast", "fog"]


def test_corrupt_takes_tars(run, folder, tmp_path):
    write_tar(folder, tmp_path / "images.tar")
    code, out, err = run(
        "corrupt", tmp_path / "images.tar", tmp_path / "c", *options(corruptions="fog", severity=5, size=48)
    )
    assert code == 0, err
    assert "12 written" in out
    assert sorted(p.name for p in (tmp_path / "c" / "fog" / "5").iterdir()) == ["0", "1", "2"]
    assert len(list((tmp_path / "c" / "fog" / "5" / "1").iterdir())) == 4


def write_tar(folder, path):
    """Write the images of a folder as a WebDataset tar, with labels 0, 1, 2 in turn."""
    import io
    import tarfile

    with tarfile.open(path, "w") as tar:
        for i, image in enumerate(sorted(folder.rglob("*.png"))):
            for name, data in ((f"{i:04}.png", image.read_bytes()), (f"{i:04}.cls", str(i % 3).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def test_fisher_makes_the_file_that_eata_needs(run, folder, tmp_path):
    out = tmp_path / "fisher.safetensors"
    code, said, err = run("fisher", folder, *options(model="glyphs_vit", out=out, images=8, device="cpu"))
    assert code == 0, err
    assert "8 images" in said
    words = options(model="glyphs_vit", method="eata", out=tmp_path / "p.csv", device="cpu")
    code, _, err = run("adapt", folder, *words, "--set", f"fisher={out}")
    assert code == 0, err
    code, _, err = run(
        "adapt", folder, *options(model="patterns_vit", method="eata", device="cpu"), "--set", f"fisher={out}"
    )
    assert code == 2
    assert "`mgtta fisher CLEAN_IMAGES --model NAME`" in err


def test_bench_prints_a_table_and_keeps_records(run, tmp_path, monkeypatch):
    monkeypatch.setattr("mgtta.bench.cells.CORRUPTIONS", ("fog", "contrast"))
    words = ("bench", "corruptions", "--methods", "noadapt,tent", "--images", 4, "--out", tmp_path, "--device", "cpu")
    code, out, err = run(*words)
    assert code == 0, err
    assert "| method | fog | contr | mean |" in out
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4
    assert run(*words)[1] == out
    code, out, err = run(*words, "--json")
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert [e["event"] for e in events] == ["start", *["record"] * 4, "end"]
    assert events[0] == {"event": "start", "experiment": "corruptions", "cells": 4, "finished": 4}
    assert {e["fresh"] for e in events[1:5]} == {False}
    assert events[1]["protocol"]["command"].startswith("mgtta bench corruptions --methods noadapt,tent")
    code, out, err = run(*words, "--json", "--generator", "gone", "--methods", "mgtta")
    assert code != 0
    event = json.loads(out.splitlines()[-1])
    assert event["event"] == "error"
    assert "unknown generator 'gone'" in event["text"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corruption"], "hidden-size, learning-rate"),
        (["corruptions", "--methods", "mgta"], "unknown recipe"),
        (["variants", "--data", "nowhere"], "--variant imagenet-r=FOLDER"),
        (["variants", "--variant", "imagenet-r"], "NAME=IMAGES"),
        (["corruptions", "--data", "nowhere", "--methods", "noadapt"], "nowhere"),
        (["corruptions", "--tf32"], "--tf32 is for a GPU"),
    ],
)
def test_bench_errors_name_the_remedy(run, tmp_path, words, message):
    code, _, err = run("bench", *words, "--out", tmp_path, "--device", "cpu")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert message in err


def test_bench_stopped_by_ctrl_c_says_how_to_resume(run, tmp_path, monkeypatch):
    def stop(lab, cell):
        raise KeyboardInterrupt

    monkeypatch.setattr("mgtta.bench.resources.Lab.run", stop)
    code, out, err = run("bench", "corruptions", "--images", 2, "--out", tmp_path, "--device", "cpu")
    assert code == 130
    assert "0 finished cells" in err
    assert "the same command resumes" in err
    assert out == ""


def test_the_bench_commands_help_names_all_experiments():
    from mgtta.bench.experiments import EXPERIMENTS

    assert set(cli.bench.EXPERIMENTS) == set(EXPERIMENTS)


@pytest.fixture
def demo(run, tmp_path, monkeypatch):
    """Two corruptions."""
    monkeypatch.setattr("mgtta.bench.cells.CORRUPTIONS", ("contrast", "jpeg_compression"))
    return lambda *more: run("demo", "--images", 4, "--device", "cpu", "--out", tmp_path / "demo", *more)


def test_demo_rejects_invalid_options_and_leaves_no_folder(demo, tmp_path):
    assert "at least 1" in demo("--images", 0)[2]
    assert "nothing_like_it" in demo("--methods", "nothing_like_it")[2]
    assert list(tmp_path.iterdir()) == []


def test_demo_prints_a_table_and_writes_the_report(demo, tmp_path):
    code, out, err = demo()
    assert code == 0, err
    assert "jpeg_compression" in out
    assert "mean" in out
    assert f"  open {tmp_path / 'demo' / 'report.html'} in a browser\n" in out
    assert "  mgtta bench continual --model patterns_vit --images 4 --methods noadapt,mgtta+\n" in out
    assert out.splitlines()[-1].startswith("  mgtta adapt IMAGES --model MODEL")
    assert {p.name for p in (tmp_path / "demo").iterdir()} == {
        "records.jsonl",
        "report.html",
        "report.md",
        "report.tex",
    }
    assert "mgtta demo --images 4" in (tmp_path / "demo" / "report.html").read_text()
    records = [json.loads(line) for line in (tmp_path / "demo" / "records.jsonl").read_text().splitlines()]
    assert [(r["method"], r["settings"]) for r in records[:2]] == [("noadapt", {}), ("mgtta_plus", {})]
    assert all(r["batch_size"] == 16 and r["protocol"]["weights"] for r in records)


def test_demo_without_a_terminal_prints_a_line_for_each_corruption(demo):
    code, _, err = demo("--methods", "noadapt")
    assert code == 0, err
    lines = [line for line in err.splitlines() if line.startswith("demo ")]
    assert [line.partition(" %")[0].rpartition(":")[0] for line in lines] == [
        "demo 1/2: noadapt on contrast",
        "demo 2/2: noadapt on jpeg_compression",
    ]


def test_demo_names_gain_and_every_corruption_that_a_method_makes_worse(tmp_path):
    from mgtta.bench.demo import summary
    from mgtta.bench.store import Store

    store = Store(tmp_path)
    right = {"noadapt": {"fog": 50.0, "snow": 60.0, "frost": 40.0}, "tent": {"fog": 49.0, "snow": 72.5, "frost": 37.0}}
    for method, domains in right.items():
        for domain, top1 in domains.items():
            store.add(f"{method} {domain}", [fake(method, domain, top1=top1)])
    assert summary(tmp_path) == [
        "tent: +2.8 points over noadapt on the mean of 3 corruptions",
        "tent makes worse: frost (-3.0), fog (-1.0)",
    ]


def test_a_second_demo_runs_in_a_new_folder(demo, tmp_path, monkeypatch):
    from mgtta.bench.resources import Lab

    demo("--methods", "noadapt")
    first = (tmp_path / "demo" / "records.jsonl").read_text()
    ran, run = [], Lab.run
    monkeypatch.setattr(Lab, "run", lambda lab, cell: (ran.append(cell), run(lab, cell))[1])
    for n in (2, 3):
        code, out, err = demo("--methods", "noadapt")
        assert code == 0, err
        assert f"open {tmp_path / f'demo-{n}' / 'report.html'} in a browser" in out
    assert len(ran) == 4
    assert (tmp_path / "demo" / "records.jsonl").read_text() == first


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_models_that_ship_know_their_images(name):
    model = mgtta.load_model(name)
    x, y = EMBEDDED[name](100).tensors()
    assert (model(x).argmax(1) == y).float().mean() > 0.95
    assert mgtta.load_source(name).fingerprint == model.fingerprint()
