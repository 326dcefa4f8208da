import pytest
import torch
from conftest import random_generator
from transcription import generate, memorise, memory_loss, phi_of

import mgtta
from mgtta.fast.columns import generate as column_wise
from mgtta.learned.generator import MEMORIES


def test_the_published_form_has_164_weights_and_72_numbers_of_memory():
    generator = mgtta.MetaGradientGenerator(hidden_size=8)
    assert sum(p.numel() for p in generator.parameters()) == 164
    assert generator.init_memory(5).shape == (5, 72)


@pytest.mark.parametrize("hidden_size", [1, 2, 8, 16])
def test_memorise_and_generate_agree_with_the_transcription(hidden_size):
    generator = random_generator(hidden_size).double()
    phi = phi_of(generator)
    n, d = 4, hidden_size
    memory = generator.init_memory(n)
    slow = [(phi["W0"], phi["b0"]) for _ in range(n)]
    for _ in range(3):
        z = torch.randn(n, 2, dtype=torch.float64)
        update, memory = generator(z, memory)
        slow = [memorise(z[i].tolist(), *slow[i], phi) for i in range(n)]
        for i, (W, b) in enumerate(slow):
            assert update[i].item() == pytest.approx(generate(z[i].tolist(), W, b, phi), abs=1e-12)
            torch.testing.assert_close(memory[i], torch.tensor(sum(W, []) + b, dtype=torch.float64), atol=1e-12, rtol=0)
    assert memory.shape == (n, d * d + d)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("hidden_size", "n"), [(1, 3), (8, 0), (8, 1), (8, 50)])
def test_the_column_layout_agrees_with_the_plain_generator(memory, hidden_size, n):
    generator = random_generator(hidden_size, memory).double()
    plain = columns = generator.init_memory(n)
    for _ in range(4):
        z = torch.randn(n, 2, dtype=torch.float64)
        update, plain = generator(z, plain)
        same, columns = column_wise(generator, z, columns)
        torch.testing.assert_close(same, update, atol=1e-12, rtol=0)
        torch.testing.assert_close(columns, plain, atol=1e-12, rtol=0)


def test_the_transcribed_write_lowers_its_own_loss():
    """Guards the transcription itself: a small step along Eq. 4 must lower Eq. 3."""
    phi = phi_of(random_generator(4))
    z = [0.7, -1.2]
    k = [sum(w * a for w, a in zip(row, z, strict=True)) for row in phi["K"]]
    v = [sum(w * a for w, a in zip(row, z, strict=True)) for row in phi["V"]]
    W, b = memorise(z, phi["W0"], phi["b0"], {**phi, "tau": -0.99})
    before = memory_loss(k, v, phi["W0"], phi["b0"], phi["gain"], phi["bias"])
    assert memory_loss(k, v, W, b, phi["gain"], phi["bias"]) < before


def test_a_rate_scale_below_minus_one_writes_nothing():
    generator = random_generator()
    with torch.no_grad():
        generator.memory.lr_scale.fill_(-1.5)
    memory = generator.init_memory(3)
    _, after = generator(torch.randn(3, 2), memory)
    assert torch.equal(after, memory)


@pytest.mark.parametrize("memory", MEMORIES)
def test_gradients_with_respect_to_phi_pass_gradcheck(memory):
    generator = random_generator(3, memory).double()
    names, values = zip(*generator.named_parameters(), strict=True)
    z = [torch.randn(2, 2, dtype=torch.float64) for _ in range(2)]

    def two_steps(*weights):
        state = dict(zip(names, weights, strict=True))
        memory = torch.func.functional_call(_Start(generator), {f"generator.{k}": v for k, v in state.items()}, (2,))
        updates = []
        for inputs in z:
            update, memory = torch.func.functional_call(generator, state, (inputs, memory))
            updates.append(update)
        return torch.cat(updates)

    assert torch.autograd.gradcheck(two_steps, tuple(v.detach().requires_grad_() for v in values))


class _Start(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, n):
        return self.generator.init_memory(n)


@pytest.mark.parametrize("memory", MEMORIES)
def test_coordinates_do_not_see_each_other_and_nothing_is_hidden(memory):
    generator = random_generator(memory=memory).double()
    z = torch.randn(6, 2, dtype=torch.float64)
    start = generator.init_memory(6)
    kept = start.clone()
    update, after = generator(z, start)
    again, _ = generator(z, start)
    assert torch.equal(update, again)
    assert torch.equal(start, kept)
    one, one_after = generator(z[2:3], start[2:3])
    torch.testing.assert_close(one, update[2:3], atol=1e-14, rtol=0)
    torch.testing.assert_close(one_after, after[2:3], atol=1e-14, rtol=0)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("hidden_size", "n"), [(1, 1), (1, 7), (8, 0), (8, 1), (32, 3)])
def test_any_size_in_any_dtype(memory, dtype, hidden_size, n):
    generator = mgtta.MetaGradientGenerator(hidden_size, memory=memory).to(dtype)
    update, after = generator(torch.randn(n, 2, dtype=dtype), generator.init_memory(n))
    assert update.shape == (n,)
    assert update.dtype == after.dtype == dtype
    assert update.isfinite().all()
    assert after.shape == generator.init_memory(n).shape


def test_the_memory_is_learned_from_its_start():
    generator = random_generator()
    update, _ = generator(torch.randn(5, 2), generator.init_memory(5))
    update.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in generator.parameters())


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8"])
def test_an_invalid_hidden_size_is_refused(bad):
    with pytest.raises(ValueError, match="hidden_size"):
        mgtta.MetaGradientGenerator(hidden_size=bad)


def test_unknown_memory_lists_the_valid_ones():
    with pytest.raises(ValueError, match="gml, lstm"):
        mgtta.MetaGradientGenerator(memory="gru")


def test_wrong_shapes_name_the_remedy(generator):
    with pytest.raises(ValueError, match=r"inputs must be \(n, 2\)"):
        generator(torch.randn(4, 3), generator.init_memory(4))
    with pytest.raises(ValueError, match="hidden size 8"):
        generator(torch.randn(4, 2), mgtta.MetaGradientGenerator(4).init_memory(4))
    with pytest.raises(ValueError, match="init_memory"):
        generator(torch.randn(4, 2), generator.init_memory(3))
    with pytest.raises(ValueError, match=r"inputs must be \(n, 2\), not \(\)"):
        generator(torch.tensor(1.0), generator.init_memory(1))
    with pytest.raises(TypeError, match="float64"):
        generator(torch.randn(4, 2).double(), generator.init_memory(4))
    with pytest.raises(ValueError, match="-1"):
        generator.init_memory(-1)


def test_hub_round_trip(tmp_path, generator):
    generator.save_pretrained(tmp_path)
    back = mgtta.MetaGradientGenerator.from_pretrained(tmp_path)
    assert back.hidden_size == generator.hidden_size
    for a, b in zip(back.parameters(), generator.parameters(), strict=True):
        assert torch.equal(a, b)
    generator.about = {"training": {"steps": 7}}
    generator.save_pretrained(tmp_path / "about")
    assert mgtta.MetaGradientGenerator.from_pretrained(tmp_path / "about").about == {"training": {"steps": 7}}
    lstm = random_generator(4, "lstm")
    lstm.save_pretrained(tmp_path / "lstm")
    assert mgtta.MetaGradientGenerator.from_pretrained(tmp_path / "lstm").memory_kind == "lstm"
