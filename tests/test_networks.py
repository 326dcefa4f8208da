"""One generator for several networks: the script that trains and compares it."""

import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import confident_vit, convnet, images

import mgtta


@pytest.fixture
def networks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    import networks

    return networks


class Small:
    """A small network in the place of `networks.Pupil`."""

    def __init__(self, network, args):
        self.network = network
        net = confident_vit() if network.name == "deit_tiny_patch16_224" else convnet("batch")
        self.model = mgtta.load_model(net)
        self.source = mgtta.source_statistics(self.model, images(8))
        self.images = images(4, seed=1)

    def accuracy(self, generator):
        method = mgtta.create("mgtta", self.model, source=self.source, generator=generator, precision="fp32")
        return 100 * method(images(4)).softmax(1).amax(1).mean().item()


def test_a_generator_is_trained_on_networks_in_turns_and_the_best_is_kept(networks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(networks, "Pupil", Small)
    args = Namespace(
        networks="deit_tiny_patch16_224,cifar_resnet56", tries=2, rounds=2, steps=2, workers=0, out=tmp_path, data=[]
    )
    args.seconds = math.inf
    networks.train(args)
    assert capsys.readouterr().out.count("round 2") == 2
    args.seconds = 0.0
    networks.train(args)
    assert capsys.readouterr().out.count("round 2") == 0
    kept = mgtta.load_generator(tmp_path / networks.CHOSEN)
    assert kept.about["networks"]["scores"].keys() == {"deit_tiny_patch16_224", "cifar_resnet56"}
    first = mgtta.load_generator(tmp_path / "generators" / "seed0.safetensors")
    second = mgtta.load_generator(tmp_path / "generators" / "seed1.safetensors")
    assert not torch.equal(first.q_proj.weight, second.q_proj.weight)


def test_the_table_tells_the_two_generators_apart(networks):
    def record(method, generator, top1, seed, **settings):
        protocol = {"model": "net", "generator": generator}
        return {"method": method, "protocol": protocol, "top1": top1, "seed": seed, "settings": settings}

    records = [record("mgtta", "imagenet", 40.0 + s, s, lr=0.001) for s in (0, 1)]
    records += [record("mgtta", "networks.safetensors", 50.0, 0, lr=0.005), record("noadapt", None, 30.0, 0)]
    lines = networks.page_table(records).splitlines()
    assert lines[0] == "| network | noadapt | mgtta | mgtta, networks |"
    assert lines[2] == "| net | 30.0 | 40.5 ± 0.7 (0.001) | 50.0 (0.005) |"


def test_a_missing_file_is_named(networks, tmp_path):
    with pytest.raises(SystemExit, match=r"imagenet-val5k-00001.tar is in none of"):
        networks.found("imagenet-val5k-0000{1..2}.tar", [tmp_path])


def test_the_page_of_tries_is_its_records(monkeypatch):
    root = Path(__file__).parent.parent
    monkeypatch.syspath_prepend(root / "benchmarks")
    import networks

    folder = root / "results" / "networks"
    tries = json.loads((folder / "tries.json").read_text())
    assert networks.tries_page(tries, 256) == (folder / "tries.md").read_text()
