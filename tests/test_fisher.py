"""Fisher information of a source model: its equation, its limit and its files."""

import copy

import pytest
import torch
from baselines import close, unsure_vit
from conftest import images, vit

import mgtta
from mgtta.models.norms import norm_layers


def test_fisher_against_the_squared_gradient_of_each_image():
    model = unsure_vit()
    x = images(6).double()
    fisher = mgtta.fisher_information(model, x, batch_size=1)
    twin = copy.deepcopy(model).requires_grad_(True)
    for name, value in fisher.values.items():
        total = 0
        for i in range(6):
            logits = twin(x[i : i + 1])
            loss = -logits.log_softmax(-1)[0, logits.argmax()]
            total = total + torch.autograd.grad(loss, twin.get_parameter(name))[0] ** 2
        close(value, total / 6)  # Eq. 9
    assert set(fisher.values) == {f"net.{n}.{w}" for n in norm_layers(model.net) for w in ("weight", "bias")}


def test_fisher_of_batches_stops_at_its_limit():
    model = mgtta.load_model(vit())
    x = images(20)
    one = mgtta.fisher_information(model, x, batch_size=4, max_images=10)
    other = mgtta.fisher_information(model, [(x[:7], None), x[7:]], batch_size=4, max_images=10)
    assert one.images == other.images == 10
    by_hand = mgtta.fisher_information(model, [x[:4], x[4:8], x[8:10]])
    assert all(torch.equal(value, by_hand.values[name]) for name, value in one.values.items())
    with pytest.raises(ValueError, match="no clean images"):
        mgtta.fisher_information(model, [])
    with pytest.raises(ValueError, match="finite"):
        mgtta.fisher_information(model, x * float("nan"))


def test_fisher_file_and_fingerprint(tmp_path, model):
    fisher = mgtta.fisher_information(model, images(8))
    mgtta.save_fisher(fisher, tmp_path / "f.safetensors")
    again = mgtta.load_fisher(tmp_path / "f.safetensors")
    assert (again.images, again.model, again.fingerprint) == (8, model.name, model.fingerprint())
    assert all(torch.equal(value, again.values[name]) for name, value in fisher.values.items())
    mgtta.create("eata", model, fisher=tmp_path / "f.safetensors")(images(4))
    with pytest.raises(ValueError, match="Fisher information of other weights"):
        mgtta.create("eata", vit(seed=1), fisher=fisher)
    mgtta.save_source(mgtta.source_statistics(model, images(8)), tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match="not a file of mgtta fisher"):
        mgtta.load_fisher(tmp_path / "s.safetensors")
