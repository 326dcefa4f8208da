import json

import pytest
import torch
from conftest import random_generator
from safetensors.torch import load_file, save_file
from torch import nn
from transcription import SlowMGG

import mgtta
from mgtta._lib.files import _digest, atomic, read_tensors, read_tree, write_tree
from mgtta._lib.shipped import shipped


@pytest.mark.parametrize("memory", ["gml", "lstm"])
@pytest.mark.parametrize("hidden_size", [1, 8])
def test_round_trip(tmp_path, memory, hidden_size):
    generator = random_generator(hidden_size, memory)
    generator.about = {"training": {"steps": 3}}
    mgtta.save_generator(generator, tmp_path / "g.safetensors", figure=71.3)
    back = mgtta.load_generator(tmp_path / "g.safetensors")
    assert (back.hidden_size, back.memory_kind) == (hidden_size, memory)
    assert back.about["training"] == {"steps": 3}
    assert back.about["figure"] == 71.3
    assert back.about["mgtta"] == mgtta.__version__
    state = generator.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in back.state_dict().items())


def test_shipped_generators_load_and_are_small():
    generators = shipped("generators")
    assert {"imagenet", "imagenet-lstm"} <= generators.keys()
    for name, path in generators.items():
        assert path.stat().st_size < 100_000
        assert mgtta.load_generator(name).about["training"]["images"] == 128


def test_unknown_name_lists_the_shipped_ones():
    with pytest.raises(FileNotFoundError, match="imagenet"):
        mgtta.load_generator("imagnet")


def released(hidden_size=8, seed=0):
    """A checkpoint in the authors' format, with random weights."""
    torch.manual_seed(seed)
    d = hidden_size
    shapes = {
        "W1": (1, d, d),
        "b1": (1, 1, d),
        "learnable_token_idx": (1,),
        "learnable_ttt_lr_weight": (1, 1, 2),
        "learnable_ttt_lr_bias": (1, 1),
        "ttt_norm_weight": (1, d),
        "ttt_norm_bias": (1, d),
        "q_proj.weight": (d, 2),
        "k_proj.weight": (d, 2),
        "v_proj.weight": (d, 2),
        "o_proj.weight": (1, d),
        "post_norm.weight": (d,),
        "post_norm.bias": (d,),
    }
    return {
        "model_state_dict": {f"seq_modeling_block.{k}": torch.randn(s) for k, s in shapes.items()},
        "epoch": 3,
    }


@pytest.mark.parametrize("hidden_size", [2, 8])
def test_released_weights_give_the_same_trajectory(tmp_path, hidden_size):
    """The transcription reads the released names itself, so a mix-up in the import would show."""
    checkpoint = released(hidden_size)
    torch.save(checkpoint, tmp_path / "released.pth")
    generator = mgtta.import_released(tmp_path / "released.pth").double()
    w = {k.removeprefix("seq_modeling_block."): v.double() for k, v in checkpoint["model_state_dict"].items()}
    phi = {
        "Q": w["q_proj.weight"].tolist(),
        "K": w["k_proj.weight"].tolist(),
        "V": w["v_proj.weight"].tolist(),
        "O": w["o_proj.weight"][0].tolist(),
        "gain": w["ttt_norm_weight"][0].tolist(),
        "bias": w["ttt_norm_bias"][0].tolist(),
        "post_gain": w["post_norm.weight"].tolist(),
        "post_bias": w["post_norm.bias"].tolist(),
        "W0": w["W1"][0].tolist(),
        "b0": w["b1"][0, 0].tolist(),
        "w_lr": w["learnable_ttt_lr_weight"][0, 0].tolist(),
        "b_lr": w["learnable_ttt_lr_bias"].item(),
        "tau": w["learnable_token_idx"].item(),
    }
    p = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = mgtta.MGG([p], generator, lr=0.01)
    slow = [SlowMGG(0.0, phi, 0.01) for _ in range(5)]
    for t in range(20):
        grad = torch.randn(5, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        p.grad = grad
        optimizer.step()
        for s, g in zip(slow, grad.tolist(), strict=True):
            s.step(g)
    expected = torch.tensor([s.theta for s in slow], dtype=torch.float64)
    torch.testing.assert_close(p.detach(), expected, atol=1e-10, rtol=0)


def test_bad_released_files(tmp_path):
    path = tmp_path / "r.pth"
    torch.save({"weights": {}}, path)
    with pytest.raises(ValueError, match="model_state_dict"):
        mgtta.import_released(path)
    broken = released()
    del broken["model_state_dict"]["seq_modeling_block.W1"]
    torch.save(broken, path)
    with pytest.raises(ValueError, match="W1"):
        mgtta.import_released(path)
    wrong = released()
    wrong["model_state_dict"]["seq_modeling_block.b1"] = torch.zeros(1, 1, 3)
    torch.save(wrong, path)
    with pytest.raises(ValueError, match=r"b1 is \(1, 1, 3\)"):
        mgtta.import_released(path)
    for value in (3, torch.zeros(())):
        odd = released()
        odd["model_state_dict"]["seq_modeling_block.q_proj.weight"] = value
        torch.save(odd, path)
        with pytest.raises(ValueError, match=r"tensors|q_proj"):
            mgtta.import_released(path)
    torch.save(released(), path)
    with pytest.raises(ValueError, match="import_released"):
        mgtta.load_generator(path)
    torch.save({**released(), "hook": print}, path)
    with pytest.raises(ValueError, match="never unpickled"):
        mgtta.import_released(path)


def test_bad_generator_files(tmp_path, source):
    good = tmp_path / "g.safetensors"
    mgtta.save_generator(random_generator(), good)
    data = good.read_bytes()
    for name, content in {"cut": data[:-8], "head": data[:20], "empty": b"", "junk": b"junk" * 100}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"):
            mgtta.load_generator(tmp_path / name)
    mgtta.save_source(source, tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="not a file of mgtta generator"):
        mgtta.load_generator(tmp_path / "s.safetensors")
    tensors, metadata = read_tensors(good)
    for change, message in (
        ({"hidden_size": "4"}, "do not fit"),
        ({"hidden_size": "x"}, "damaged metadata"),
        ({"memory": "gru"}, "damaged metadata"),
        ({"version": "99"}, "newer"),
    ):
        save_file(tensors, good, metadata={**metadata, **change})
        with pytest.raises(ValueError, match=message):
            mgtta.load_generator(good)
    tensors["o_proj.weight"][0, 0] = float("nan")
    save_file(tensors, good, metadata=metadata)
    with pytest.raises(ValueError, match="not finite"):
        mgtta.load_generator(good)


def test_nothing_is_half_written(tmp_path):
    path = tmp_path / "g.safetensors"
    mgtta.save_generator(random_generator(), path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["g.safetensors"]
    assert load_file(path).keys() == random_generator().state_dict().keys()


def test_trees_come_back_as_they_were(tmp_path):
    tree = {
        "a": [1, (2.5, None)],
        3: {"t": torch.arange(4)},
        "s": "x",
        "b": True,
        "e": {},
        "z": torch.zeros(()),
    }
    write_tree(tmp_path / "t", tree, {"kind": "test"})
    back, metadata = read_tree(tmp_path / "t")
    assert metadata["kind"] == "test"
    assert torch.equal(back[3]["t"], torch.arange(4))
    assert back["a"] == [1, (2.5, None)]
    assert back["z"].shape == ()
    assert list(back) == list(tree)
    save_file({"x": torch.zeros(1)}, tmp_path / "n", metadata={"kind": "test"})
    with pytest.raises(ValueError, match="no saved state"):
        read_tree(tmp_path / "n")
    for tree in ({"tensor": "7"}, {"dict": 3}, []):
        about = {"tree": json.dumps(tree)}
        save_file({"x": torch.zeros(1)}, tmp_path / "d", metadata=about)
        with pytest.raises(ValueError, match="has changed since it was written"):
            read_tree(tmp_path / "d")
        save_file({"x": torch.zeros(1)}, tmp_path / "d", {**about, "sha256": _digest({"x": torch.zeros(1)}, about)})
        with pytest.raises(ValueError, match="damaged"):
            read_tree(tmp_path / "d")
