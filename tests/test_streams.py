"""What comes when: order, settings, workers and corruption on the fly."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from mgtta.data.corruptions import CORRUPTIONS
from mgtta.data.datasets import open_dataset
from mgtta.data.images import ImageError
from mgtta.data.streams import Batch, Domain, corrupted, gradual, label_shift, stream

SIZE, CLASSES, EACH = 32, 5, 8
N = CLASSES * EACH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for c in range(CLASSES):
        (root / f"class{c}").mkdir()
        for j in range(EACH):
            pixels = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / f"class{c}" / f"{j}.png")
    return root


@pytest.fixture
def dataset(folder):
    return open_dataset(folder, size=SIZE)


def joined(batches):
    """All batches as one, the domains as a list."""
    batches = list(batches)
    domains = [b.domain for b in batches for _ in b.x]
    return Batch(
        torch.cat([b.x for b in batches]),
        None if batches[0].y is None else torch.cat([b.y for b in batches]),
        domains,
        torch.cat([b.index for b in batches]),
    )


def assert_same(one, two):
    one, two = joined(one), joined(two)
    assert one.domain == two.domain
    for a, b in ((one.index, two.index), (one.y, two.y), (one.x, two.x)):
        assert torch.equal(a, b)


def test_every_image_comes_once_with_its_label(dataset):
    batches = list(stream(dataset, batch_size=16, domain="clean"))
    assert [len(b.x) for b in batches] == [16, 16, 8]  # the partial batch is kept
    everything = joined(batches)
    assert everything.index.sort().values.tolist() == list(range(N))
    assert everything.index.tolist() != list(range(N))
    assert set(everything.domain) == {"clean"}
    assert everything.x.dtype == torch.uint8
    for x, y, i in zip(everything.x, everything.y, everything.index.tolist(), strict=True):
        assert torch.equal(x, dataset[i][0])
        assert y == dataset.labels[i]


def test_same_seed_same_order(dataset):
    one = stream(dataset, batch_size=16, seed=3)
    assert_same(one, one)
    assert_same(one, stream(dataset, batch_size=1, seed=3))
    other = joined(stream(dataset, batch_size=16, seed=4))
    assert not torch.equal(other.index, joined(one).index)
    assert joined(stream(dataset, shuffle=False)).index.tolist() == list(range(N))


def test_batch_size_one_and_length(dataset):
    batches = stream(dataset, batch_size=1, first=3)
    assert len(batches) == 3
    assert [b.x.shape for b in batches] == [(1, 3, SIZE, SIZE)] * 3


def test_one_domain_after_another_with_the_same_first_images(dataset):
    everything = joined(stream([Domain("a", dataset), Domain("b", dataset)], first=10, batch_size=4))
    assert everything.domain == ["a"] * 10 + ["b"] * 10
    assert torch.equal(everything.index[:10], everything.index[10:])
    batches = stream([Domain("a", dataset), Domain("b", dataset)], first=10, batch_size=4)
    assert [len(b.x) for b in batches] == [4, 4, 2, 4, 4, 2]  # no batch holds two domains


def test_mixed_domains(dataset):
    black = TensorDataset(torch.zeros(N, 3, SIZE, SIZE, dtype=torch.uint8), dataset.labels)
    domains = [Domain("a", dataset), Domain("black", black)]
    batches = list(stream(domains, mixed=True, batch_size=20))
    assert {b.domain for b in batches} == {"mixed"}
    dark = torch.tensor([(b.x.flatten(1).amax(1) == 0).sum() for b in batches])
    assert dark.sum() == N
    assert ((dark > 0) & (dark < 20)).all()
    assert next(iter(stream(domains, mixed=True, batch_size=1))).domain == "mixed"


def test_infinite_imbalance_gives_one_class_after_another(dataset):
    y = joined(stream(dataset, imbalance=math.inf)).y
    assert len(torch.unique_consecutive(y)) == CLASSES
    assert sorted(y.tolist()) == sorted(dataset.labels.tolist())
    mixed = joined(stream([Domain("a", dataset), Domain("b", dataset)], mixed=True, imbalance=math.inf)).y
    assert len(torch.unique_consecutive(mixed)) == CLASSES


def test_label_shift_draws_classes_at_the_imbalance_ratio():
    labels = torch.arange(10).repeat(1000)
    order = label_shift(labels, imbalance=9.0)  # 9 : 1 for each of 9 others: half of the draws
    assert torch.equal(order.sort().values, torch.arange(len(labels)))
    assert torch.equal(order, label_shift(labels, imbalance=9.0))
    first = labels[order[:900]].bincount(minlength=10).sort(descending=True).values / 900
    assert first[0] == pytest.approx(0.5, abs=0.05)
    assert first[1:].tolist() == pytest.approx([1 / 18] * 9, abs=0.03)
    even = labels[label_shift(labels, imbalance=1.0)[:1000]].bincount(minlength=10)
    assert even.max() < 150


@pytest.mark.parametrize("ratio", [1.0, 2.0, 100.0, math.inf])
def test_label_shift_keeps_every_image_of_uneven_classes(ratio):
    labels = torch.tensor([3] * 50 + [1] + [7] * 5)
    assert label_shift(labels, ratio, seed=1).sort().values.tolist() == list(range(len(labels)))


def test_label_shift_needs_labels(dataset):
    with pytest.raises(ValueError, match="c has none"):
        stream([Domain("c", [(torch.zeros(3, 8, 8), -1)])], imbalance=2.0)


def test_unlabelled_images_have_no_y(folder):
    batch = next(iter(stream(open_dataset(folder / "class0", size=SIZE))))
    assert batch.y is None


def test_workers_do_not_change_the_batches(dataset):
    domains = corrupted(dataset, ["gaussian_noise", "contrast"], severity=3)
    one = stream(domains, batch_size=16, first=20)
    assert_same(one, stream(domains, batch_size=16, first=20, workers=2))


def test_batch_size_and_order_do_not_change_the_corruption(dataset):
    domains = corrupted(dataset, ["gaussian_noise"])
    one = joined(stream(domains, batch_size=16, first=20))
    assert_same(stream(domains, batch_size=16, first=20), stream(domains, batch_size=3, first=20))
    ordered = joined(stream(domains, shuffle=False))
    assert torch.equal(ordered.x[one.index], one.x)
    other = joined(stream(domains, shuffle=False, seed=1))
    assert not torch.equal(other.x, ordered.x)


def test_a_mixed_batch_corrupts_each_image_by_its_own_domain(dataset):
    domains = [Domain("clean", dataset), *corrupted(dataset, ["gaussian_noise", "contrast"])]
    apart = joined(stream(domains, shuffle=False)).x.view(3, N, 3, SIZE, SIZE)
    mixed = stream(domains, mixed=True, shuffle=False, batch_size=16)
    rows = torch.cat([planned.rows for planned in mixed.plan])
    assert torch.equal(joined(mixed).x, apart[rows[:, 0], rows[:, 1]])


def test_images_are_corrupted_on_the_device(dataset):
    domains = corrupted(dataset, ["gaussian_noise"])
    assert_same(stream(domains, first=10), stream(domains, first=10, device="cpu", workers=1))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """JPEGs of several sizes, one of them cut off and one in CMYK, and a PNG; smooth, as photographs are."""
    root = tmp_path_factory.mktemp("photographs")
    for k, (h, w) in enumerate([(48, 64), (60, 40), (SIZE, SIZE), (50, 50), (45, 90), (70, 70)]):
        rows, columns = np.mgrid[0:h, 0:w]
        waves = [127 + 100 * np.sin((rows + c * columns) / (9 + k)) for c in (0, 1, 2)]
        picture = Image.fromarray(np.stack(waves, -1).astype(np.uint8))
        if k == 4:
            picture = picture.convert("CMYK")
        picture.save(root / f"{k}.{'png' if k == 3 else 'jpg'}", quality=95)
    cut = (root / "0.jpg").read_bytes()
    (root / "6.jpg").write_bytes(cut[: len(cut) // 3])
    return root


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1])
def test_files_are_decoded_on_the_device(photographs, device, workers):
    """The same images up to some levels, in the same order; other formats and bad files as always."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here, there = (open_dataset(photographs, size=SIZE, on_error="skip") for _ in range(2))
    expected = joined(stream(here, batch_size=4, device=device))
    found = joined(stream(there, batch_size=4, device=device, decode="device", workers=workers))
    assert found.x.device.type == device
    assert torch.equal(found.index, expected.index)
    assert found.x.dtype == torch.uint8
    assert found.x.shape == (6, 3, SIZE, SIZE)
    assert (found.x.float() - expected.x.float()).abs().mean() < 4
    png = found.index.tolist().index(3)
    assert torch.equal(found.x[png], expected.x[png])
    assert [name for name, _ in there.skipped] == [name for name, _ in here.skipped]
    assert len(there.skipped) == 1
    noisy = corrupted(there, ["contrast"])
    dull = joined(stream(noisy, device=device, decode="device"))
    assert dull.x.float().std() < 0.5 * found.x.float().std()


def test_decoding_on_a_device_needs_one(dataset):
    with pytest.raises(ValueError, match='decode="device" needs a device'):
        stream(dataset, decode="device")
    with pytest.raises(ValueError, match="unknown decode 'gpu'; valid: cpu, device"):
        stream(dataset, decode="gpu")
    plain = TensorDataset(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.arange(2))
    [batch] = stream(plain, device="cpu", decode="device")
    assert batch.x.shape == (2, 3, 8, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_on_the_gpu(dataset):
    batch = next(iter(stream(corrupted(dataset, ["contrast"]), device="cuda", workers=1)))
    assert batch.x.is_cuda
    assert batch.y.is_cuda


def test_gradual_severity_rises_and_falls(dataset):
    domains = gradual(dataset, ["contrast"])
    assert [d.severity for d in domains] == [1, 2, 3, 4, 5, 4, 3, 2, 1]
    spread = [b.x.float().std().item() for b in stream(domains, first=4)]
    assert spread[:5] == sorted(spread[:5], reverse=True)
    assert spread[5:] == spread[:4][::-1]
    assert [b.domain for b in stream(domains, first=1)][3:6] == ["contrast/4", "contrast/5", "contrast/4"]


def test_corrupted_gives_the_fifteen_corruptions_by_default(dataset):
    assert [d.name for d in corrupted(dataset)] == list(CORRUPTIONS)


def test_frost_takes_the_textures_that_it_is_given(dataset, tmp_path):
    brightness = []
    for level in (0, 255):
        folder = tmp_path / str(level)
        folder.mkdir()
        Image.fromarray(np.full((300, 300, 3), level, dtype=np.uint8)).save(folder / "a.png")
        [batch] = stream(corrupted(dataset, ["frost"], frost_textures=folder))
        brightness.append(batch.x.float().mean())
    assert brightness[0] + 50 < brightness[1]


def test_published_files_are_not_corrupted_again(tmp_path):
    root = tmp_path / "fog" / "2" / "n01440764"
    root.mkdir(parents=True)
    Image.fromarray(np.full((SIZE, SIZE, 3), 7, dtype=np.uint8)).save(root / "a.png")
    [batch] = stream(corrupted(tmp_path, ["fog"], severity=2, size=SIZE))
    assert batch.domain == "fog"
    assert (batch.x == 7).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_in_a_stream_raise_or_are_skipped(dataset, folder, tmp_path, workers):
    root = tmp_path / "images"
    root.mkdir()
    for j in range(4):
        data = (folder / "class0" / f"{j}.png").read_bytes()
        (root / f"{j}.png").write_bytes(data[:99] if j in (1, 2) else data)
    with pytest.raises(ImageError, match=r"^cannot read image .*1\.png"):
        list(stream(open_dataset(root, size=SIZE), shuffle=False, workers=workers))
    broken = open_dataset(root, size=SIZE, on_error="skip")
    for batch_size in (1, 2):
        batches = stream(broken, shuffle=False, batch_size=batch_size, workers=workers)
        assert [b.index.tolist() for b in batches] == [[0], [3]]
    assert [name for name, _ in broken.skipped] == ["1.png", "2.png"]


def test_invalid_stream_settings_say_what_is_valid(dataset):
    with pytest.raises(ValueError, match=r"unknown corruption 'rain'; valid: .*fog"):
        corrupted(dataset, ["rain"])
    with pytest.raises(ValueError, match="severity 6; valid: 1, 2, 3, 4, 5"):
        corrupted(dataset, ["fog"], severity=6)
    with pytest.raises(ValueError, match="at least 1"):
        stream(dataset, batch_size=0)
    with pytest.raises(ValueError, match="at least 1"):
        stream(dataset, imbalance=0.5)
    with pytest.raises(TypeError, match="Domain"):
        stream([])
    with pytest.raises(TypeError, match="Domain"):
        stream([dataset])
    other = open_dataset(dataset.root, size=SIZE)
    other.class_indices = [1, 5]
    with pytest.raises(ValueError, match="different classes"):
        stream([Domain("a", dataset), Domain("b", other)])
