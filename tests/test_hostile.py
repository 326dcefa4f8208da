"""Hostile input in small numbers; `make fuzz` has the large ones."""

import json
import random
import struct
import tarfile

import fuzz
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mgtta
from mgtta._lib.files import read_tensors, read_weights
from mgtta.data.images import ImageError, decode
from mgtta.data.shards import samples

WORDS = ["adapt", "source", "report", "corrupt", "--model", "--set", "--out", "x=1", "-5", ".", "é"]
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def method():
    fuzz.prepare()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return fuzz.seeds(tmp_path_factory.mktemp("canary") / "canary")


@pytest.mark.parametrize("name", fuzz.TARGETS)
@QUICK
@given(seed=st.integers(0, 2**32))
def test_mutated_files_are_read_or_rejected(name, corpus, tmp_path_factory, seed):
    draw = random.Random(seed)
    data = fuzz.mutated(draw.choice(corpus[name]), corpus[name], draw)
    fuzz.check(name, data, tmp_path_factory.mktemp("case"))


@pytest.mark.parametrize("name", fuzz.READERS)
@QUICK
@given(data=st.binary(max_size=300))
def test_random_bytes_are_rejected(name, tmp_path_factory, data):
    fuzz.check(name, data, tmp_path_factory.mktemp("case"))


@QUICK
@given(words=st.lists(st.sampled_from(WORDS), max_size=6))
def test_random_arguments_are_accepted_or_rejected(tmp_path_factory, words):
    fuzz.check("arguments", " ".join(words).encode(), tmp_path_factory.mktemp("case"))


def test_nothing_is_unpickled(corpus, tmp_path):
    for i, data in enumerate(corpus["weights"][1:3]):
        path = tmp_path / f"{i}.pth"
        path.write_bytes(data)
        with pytest.raises(ValueError, match="never unpickled"):
            read_weights(path)
    assert not (tmp_path / "canary").exists()


def test_false_sizes_in_a_header_are_rejected(tmp_path):
    with pytest.raises(ImageError, match=r"100000 x 100000 pixels|exceeds limit"):
        decode(fuzz._huge_png(), name="huge")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    for length in (len(header), 2**40, 2**64 - 1):
        (tmp_path / "claim").write_bytes(struct.pack("<Q", length) + header)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            read_tensors(tmp_path / "claim")


def test_a_tar_member_that_is_huge_or_outside_is_rejected(tmp_path):
    for i, data in enumerate(fuzz._tars()):
        path = tmp_path / f"{i}.tar"
        path.write_bytes(data)
        try:
            [sample] = samples([str(path)])
        except ValueError:
            continue
        assert sample.image.length in (4, 2**40)
        if sample.image.length > 4:
            with pytest.raises(ImageError, match="more than"):
                sample.image.read()


def test_reading_writes_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tarfile.open("in.tar", "w") as tar:
        tar.add(fuzz.GOLDEN / "0.1" / "expected.json", "a.png")
    with pytest.raises(ImageError):
        list(mgtta.data.datasets.open_dataset("in.tar", size=8))
    assert [p.name for p in tmp_path.iterdir()] == ["in.tar"]


def test_a_false_state_with_a_valid_hash_is_loaded_whole_or_not_at_all(tmp_path):
    """Whatever a state says, it is loaded whole or not at all, and the method still works."""
    data = (fuzz.GOLDEN / "0.1" / "state.safetensors").read_bytes()
    for seed in range(60):
        (tmp_path / "s").write_bytes(fuzz._lying_tree(data, random.Random(seed)))
        before = fuzz.METHOD.state_dict()["method"]["params"]
        try:
            mgtta.load_state(fuzz.METHOD, tmp_path / "s")
        except ValueError:
            after = fuzz.METHOD.state_dict()["method"]["params"]
            assert all(torch.equal(after[name], value) for name, value in before.items())
        assert fuzz.METHOD.model(torch.rand(2, 3, 8, 8)).shape == (2, 3)
