import pytest
import torch
from conftest import convnet, images, vit
from safetensors.torch import save_file

import mgtta


def test_statistics_are_mean_and_unbiased_std_of_each_layer(any_model):
    x = images(20)
    source = mgtta.source_statistics(any_model, x, batch_size=7)
    _, features = any_model.features(x)
    assert source.images == 20
    for f, mean, std in zip(features, source.mean, source.std, strict=True):
        torch.testing.assert_close(mean, f.mean(0))
        torch.testing.assert_close(std, f.std(0))


def test_the_mean_of_what_the_head_reads_and_the_share_of_images_alike_when_mirrored(any_model):
    x = images(20)
    source = mgtta.source_statistics(any_model, x, batch_size=7)
    logits, read = any_model.embed(x)
    torch.testing.assert_close(source.head, read.mean(0))
    alike = any_model(x.flip(-1)).argmax(1) == logits.argmax(1)
    assert source.mirrored == float(alike.double().mean())
    assert any_model.net.get_submodule(source.head_layer) is any_model.head
    assert not any_model.reads_head  # the user's model stays as it is


def test_batches_of_any_kind_count_the_same(model):
    x = images(10)
    whole = mgtta.source_statistics(model, x)
    for batches in (x.split(3), [(b, torch.zeros(len(b))) for b in x.split(3)], iter(x.split(4))):
        parts = mgtta.source_statistics(model, batches)
        for a, b in zip(whole.mean + whole.std, parts.mean + parts.std, strict=True):
            torch.testing.assert_close(a, b)


def test_a_plain_module_serves(model):
    plain = mgtta.source_statistics(vit(), images(8))
    assert plain.fingerprint == model.fingerprint()


def test_round_trip(tmp_path, model, source):
    mgtta.save_source(source, tmp_path / "s.safetensors")
    back = mgtta.load_source(tmp_path / "s.safetensors")
    assert (back.images, back.model, back.fingerprint) == (source.images, source.model, source.fingerprint)
    assert all(torch.equal(a, b) for a, b in zip(back.mean + back.std, source.mean + source.std, strict=True))
    assert torch.equal(back.head, source.head)
    assert (back.head_layer, back.mirrored) == (source.head_layer, source.mirrored)
    mgtta.create("eq7_sgd", model, source=tmp_path / "s.safetensors")


def test_statistics_move_with_a_tensor(source):
    assert source.to(source.mean[0]) is source
    moved = source.to(torch.zeros(1, dtype=torch.float64))
    assert all(t.dtype == torch.float64 for t in moved.mean + moved.std)
    assert (moved.images, moved.model, moved.fingerprint) == (source.images, source.model, source.fingerprint)
    assert all(
        torch.equal(a.double(), b) for a, b in zip(source.mean + source.std, moved.mean + moved.std, strict=True)
    )
    back = moved.to(source.mean[0])
    assert all(torch.equal(a, b) for a, b in zip(source.mean + source.std, back.mean + back.std, strict=True))
    mixed = mgtta.SourceStatistics([source.mean[0], moved.mean[1]], moved.std[:2], 1, "", "")
    assert all(t.dtype == torch.float32 for t in mixed.to(source.mean[0]).mean)
    meta = source.to(torch.zeros(1, device="meta"))
    assert all(t.device.type == "meta" for t in meta.mean + meta.std)


@pytest.mark.parametrize("other", [vit(seed=1), convnet("group")], ids=["weights", "kind"])
def test_statistics_of_another_model_are_refused(source, other):
    with pytest.raises(ValueError, match=r"other weights.*source_statistics"):
        mgtta.create("eq7_sgd", other, source=source)


def test_bad_images(model):
    with pytest.raises(ValueError, match="at least 2"):
        mgtta.source_statistics(model, images(1))
    for nothing in ([], torch.rand(0, 3, 32, 32)):
        with pytest.raises(ValueError, match="0 clean images"):
            mgtta.source_statistics(model, nothing)
    with pytest.raises(ValueError, match=r"floats in \[0, 1\]"):
        mgtta.source_statistics(model, images(4) * 255)
    with pytest.raises(ValueError, match="finite"):
        mgtta.source_statistics(model, images(4) * float("nan"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (None, TypeError, "a tensor, or batches of tensors such as a DataLoader, not NoneType"),
        (images(4).numpy(), TypeError, "a batch of images is a tensor .*, not ndarray"),
        ([{"pixels": images(4)}], TypeError, "a batch of images is a tensor .*, not dict"),
        (list(images(4)), ValueError, "a DataLoader batches of many"),
        (torch.utils.data.TensorDataset(images(4), torch.zeros(4)), ValueError, "a DataLoader batches of many"),
    ],
)
def test_what_is_not_a_batch_of_images_is_named(model, given, error, message):
    with pytest.raises(error, match=message):
        mgtta.source_statistics(model, given)


def test_bad_files(tmp_path, source, generator):
    mgtta.save_generator(generator, tmp_path / "g.safetensors")
    with pytest.raises(ValueError, match="not a file of mgtta source statistics"):
        mgtta.load_source(tmp_path / "g.safetensors")
    good = tmp_path / "s.safetensors"
    mgtta.save_source(source, good)
    (tmp_path / "cut.safetensors").write_bytes(good.read_bytes()[:-10])
    with pytest.raises(ValueError, match="truncated"):
        mgtta.load_source(tmp_path / "cut.safetensors")
    save_file({"mean.0": torch.zeros(2)}, good, metadata={"kind": "mgtta source statistics", "version": "1"})
    with pytest.raises(ValueError, match="damaged"):
        mgtta.load_source(good)
    save_file({"mean.0": torch.zeros(2)}, good, metadata={"kind": "mgtta source statistics", "version": "999"})
    with pytest.raises(ValueError, match="newer"):
        mgtta.load_source(good)
