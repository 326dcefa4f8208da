"""The corruption engine: contracts over all 19, slow transcriptions of fast parts, and the reference package.

The reference (imagecorruptions, with scikit-image's photographs) is a development extra; where it is missing,
its tests are skipped.
"""

import importlib
import importlib.util
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mgtta.data import corruptions
from mgtta.data.corruptions import CORRUPTIONS, SEVERITIES, VALIDATION_CORRUPTIONS, corrupt, frost_source
from mgtta.data.corruptions.blur import _shuffle
from mgtta.data.corruptions.filters import exact_weights, gaussian, motion
from mgtta.data.corruptions.noise import _poisson_table
from mgtta.data.corruptions.random import Random
from mgtta.data.corruptions.weather import _distance, plasma
from mgtta.data.images import ImageError

ALL = (*CORRUPTIONS, *VALIDATION_CORRUPTIONS)
DETERMINISTIC = (
    "defocus_blur",
    "zoom_blur",
    "gaussian_blur",
    "brightness",
    "contrast",
    "saturate",
    "pixelate",
    "jpeg_compression",
)
RANDOM = tuple(name for name in ALL if name not in DETERMINISTIC)

_spec = importlib.util.spec_from_file_location(
    "corruptions_benchmark", Path(__file__).parents[1] / "benchmarks" / "corruptions.py"
)
benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)


@pytest.fixture(scope="module")
def scene():
    return benchmark.scene(5, 64)


def test_corruption_names():
    assert len(CORRUPTIONS) == 15
    assert len(VALIDATION_CORRUPTIONS) == 4
    assert CORRUPTIONS[0] == "gaussian_noise"
    assert CORRUPTIONS[-1] == "jpeg_compression"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [(32, 32), (48, 61), (230, 224)])
def test_corrupt_keeps_the_shape_and_does_not_change_its_input(name, size):
    x = F.interpolate(benchmark.scene(2, 64).float(), size=size).byte()
    for severity in (1, 5) if size[0] == 48 else (5,):
        before = x.clone()
        y = corrupt(x, name, severity)
        assert y.shape == x.shape
        assert y.dtype == torch.uint8
        assert y.is_contiguous()
        assert torch.equal(x, before)
        assert severity == 1 or not torch.equal(x, y)
        assert y.float().std() > 1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("severity", [2, 5])
def test_an_image_gets_the_same_corruption_in_any_batch(name, severity, scene):
    index = torch.tensor([5, 2**40, 7, 0, 123_456])
    together = corrupt(scene, name, severity, index=index, seed=3)
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(corrupt(scene[order], name, severity, index=index[order], seed=3), together[order])
    alone = [corrupt(scene[i : i + 1], name, severity, index=index[i : i + 1], seed=3) for i in range(5)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("name", ALL)
def test_large_images_are_corrupted_in_parts(name):
    x = benchmark.scene(3, 224)  # more than the CPU takes at once
    y = corrupt(x, name, 3)
    assert torch.equal(corrupt(x[2:], name, 3, index=torch.tensor([2])), y[2:])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_float_images_get_the_same_pixels(name, dtype, scene):
    y = corrupt((scene / 255).to(dtype), name, 4)
    assert y.dtype == dtype
    assert torch.equal((y.float() * 255).round().byte(), corrupt(scene, name, 4))


@pytest.mark.parametrize("name", ALL)
def test_randomness_belongs_to_seed_and_index(name, scene):
    same = scene[:1].expand(3, -1, -1, -1)
    a, b, again = corrupt(same, name, 5, index=torch.tensor([1, 2, 1]))
    assert torch.equal(a, again)
    other = corrupt(same[:1], name, 5, index=torch.tensor([1]), seed=1)[0]
    if name in DETERMINISTIC:
        assert torch.equal(a, b)
        assert torch.equal(a, other)
    else:
        assert not torch.equal(a, b)
        assert not torch.equal(a, other)


@pytest.mark.parametrize("name", [name for name in ALL if name != "saturate"])
def test_severity_grows(name):
    x = benchmark.scene(4, 224)
    least, most = ((corrupt(x, name, s).float() - x.float()).square().mean() for s in (1, 5))
    assert most > 1.2 * least


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"])
@pytest.mark.parametrize("level", [0, 77, 255])
def test_blurs_leave_flat_images_flat(name, level):
    x = torch.full((1, 3, 64, 64), level, dtype=torch.uint8)
    y = corrupt(x, name, 3)
    assert torch.equal(x, y)


@pytest.mark.parametrize("name", [name for name in ALL if name != "jpeg_compression"])
def test_corrupt_stays_on_its_device(name):
    """The meta device refuses to mix with the CPU, and to be read: no copies, nothing waits for a GPU."""
    x = torch.empty(2, 3, 64, 64, dtype=torch.uint8, device="meta")
    for severity in SEVERITIES:
        y = corrupt(x, name, severity)
        assert (y.device.type, y.dtype, y.shape) == ("meta", torch.uint8, x.shape)


def test_corrupt_takes_any_strides_and_an_empty_batch():
    assert corrupt(torch.empty(0, 3, 64, 64), "fog").shape == (0, 3, 64, 64)
    x = benchmark.scene(2, 64)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    for name in ALL:
        assert torch.equal(corrupt(channels_last, name), corrupt(x, name))
    strided = x[:, :, ::2, ::2]
    assert torch.equal(corrupt(strided, "fog"), corrupt(strided.contiguous(), "fog"))


# Errors


def test_corrupt_rejects_invalid_arguments_and_names_the_remedy(scene):
    with pytest.raises(ValueError, match=r"unknown corruption 'fogg'; choose one of: gaussian_noise, .*saturate"):
        corrupt(scene, "fogg")
    with pytest.raises(ValueError, match="unknown severity 6; choose one of: 1, 2, 3, 4, 5"):
        corrupt(scene, "fog", 6)
    with pytest.raises(TypeError, match=r"uint8 or float in \[0, 1\], not torch.int64"):
        corrupt(scene.long(), "fog")
    with pytest.raises(ValueError, match=r"not \(3, 64, 64\).*images\[None\]"):
        corrupt(scene[0], "fog")
    with pytest.raises(ValueError, match="from 32 up"):
        corrupt(scene[..., :31], "fog")
    with pytest.raises(ValueError, match="one integer for each of the 5 images"):
        corrupt(scene, "fog", index=torch.arange(4))
    with pytest.raises(ValueError, match="one integer for each"):
        corrupt(scene, "fog", index=torch.rand(5))


@pytest.mark.parametrize("bad", [255.0, -0.1, float("nan")])
def test_float_images_outside_the_unit_interval_are_rejected(bad, scene):
    x = scene / 255
    x[0, 0, 0, 0] = bad
    with pytest.raises(ValueError, match=r"must be in \[0, 1\].*Divide by 255"):
        corrupt(x, "fog")


# The random numbers


def test_random_bits_are_splitmix64():
    """Against Python's integers."""
    mask = (1 << 64) - 1

    def mix(z):
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix((9 * golden + mix((7 << 32) + zlib.crc32(b"fog"))) & mask)
    rng = Random(7, "fog", torch.tensor([9]))
    for draw in (1, 2):
        words = rng.bits(12).view(torch.int64)[0]
        expected = [mix((key + (draw * (1 << 32) + i) * golden) & mask) for i in range(3)]
        assert [int(word) & mask for word in words] == expected


def test_random_uniforms_are_uniform_and_independent():
    rng = Random(0, "test", torch.arange(64))
    u = rng.uniform(4096)  # (64, 4096)
    counts = torch.histc(u, 256, 0, 1)
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 170 < chi2 < 350  # 255 ± 4.2 standard deviations
    centred = (u - 0.5) * 12**0.5
    images = centred @ centred.T / 4096 - torch.eye(64)
    assert images.abs().max() < 5.5 / 64  # between images
    for lag in (1, 2, 3, 4, 64):
        assert (centred[:, lag:] * centred[:, :-lag]).mean().abs() < 5 / (64 * 4096) ** 0.5
    assert (centred * (rng.uniform(4096) - 0.5) * 12**0.5).mean().abs() < 5 / (64 * 4096) ** 0.5


def test_random_numbers_differ_by_name_seed_and_index():
    keys = [Random(seed, name, torch.arange(100)).key for seed in range(5) for name in ALL]
    assert torch.cat(keys).unique().numel() == 5 * 19 * 100
    assert Random(-1, "fog", torch.tensor([-5, 2**62])).uniform(8).isfinite().all()


def test_random_normals_have_the_moments_of_a_normal():
    z = Random(0, "test", torch.arange(16)).normal(20_000, mean=0.5, std=1000).double() / 1000
    assert z.mean().abs() < 0.01
    assert (z.std() - 1).abs() < 0.01
    assert (z**3).mean().abs() < 0.03
    assert ((z**4).mean() - 3).abs() < 0.06


@pytest.mark.parametrize("photons", [60, 25, 12, 5, 3])
def test_poisson_table(photons):
    values = _poisson_table(photons, torch.device("cpu")).view(256, -1).double() / 255
    mean = torch.arange(256) / 255
    low = slice(0, 100)  # levels that clipping to white hardly touches
    counts = (values * photons).ceil()
    if photons >= 12:
        torch.testing.assert_close(counts.mean(1)[low], photons * mean[low].double(), atol=0.02, rtol=0.005)
        torch.testing.assert_close(counts.var(1)[low], photons * mean[low].double(), atol=0.02, rtol=0.02)
    assert values[0].max() == 0
    torch.testing.assert_close((values == 0).double().mean(1), torch.exp(-photons * mean).double(), atol=1e-4, rtol=0)


# Fast parts against slow transcriptions


def test_glass_blur_equals_the_sequential_walk():
    H = W = 34
    for delta in (1, 2, 4):
        fast = _shuffle(Random(0, "glass_blur", torch.tensor([3])), delta, H, W)[0].view(H, W)
        rng = Random(0, "glass_blur", torch.tensor([3]))
        dy, dx = (rng.integers(2 * delta, H - 2 * delta, W - 2 * delta)[0] - delta for _ in range(2))
        slow = torch.arange(H * W).view(H, W)
        for h in range(H - delta, delta, -1):
            for w in range(W - delta, delta, -1):
                i, j = h - delta - 1, w - delta - 1
                slow[h, w] = slow[h + dy[i, j], w + dx[i, j]]
        assert torch.equal(fast, slow)


def test_fog_plasma_equals_diamond_square():
    S, decay = 16, 1.7
    fast = plasma(Random(0, "fog", torch.tensor([1])), 13, decay)[0].double()
    noise = (Random(0, "fog", torch.tensor([1])).uniform(S, S)[0] * 2 - 1).double()
    slow = torch.zeros(S, S, dtype=torch.float64)
    step, wibble = S, 100.0
    while step > 1:
        half = step // 2
        for i in range(half, S, step):
            for j in range(half, S, step):
                around = [slow[(i + a) % S, (j + b) % S] for a in (-half, half) for b in (-half, half)]
                slow[i, j] = sum(around) / 4 + wibble**2 * noise[i, j]
        for i in range(0, S, half):
            for j in range(half if i % step == 0 else 0, S, step):
                around = [slow[(i + a) % S, (j + b) % S] for a, b in ((half, 0), (-half, 0), (0, half), (0, -half))]
                slow[i, j] = sum(around) / 4 + wibble**2 * noise[i, j]
        step, wibble = half, wibble / decay
    slow = slow - slow.min()
    torch.testing.assert_close(fast, slow / slow.max(), atol=1e-5, rtol=0)


def test_motion_blur_equals_a_sum_of_shifts():
    x = benchmark.scene(3, 40).float()
    angle = torch.tensor([-45.0, 10.0, 44.0])
    fast = motion(x, 5, 3, angle)
    weights = exact_weights(torch.exp(-(torch.arange(11.0).double() ** 2) / 18), 1 << 13) / (1 << 13)
    for i, theta in enumerate(torch.deg2rad(angle.double())):
        slow = torch.zeros(3, 40, 40)
        for tap, weight in enumerate(weights):
            rows = torch.arange(40) + torch.ceil(tap * theta.sin() - 0.5).long()
            columns = torch.arange(40) + torch.ceil(tap * theta.cos() - 0.5).long()
            slow += weight * x[i][:, rows.clamp(0, 39)][:, :, columns.clamp(0, 39)]
        assert torch.equal(fast[i], slow)


def test_filter_weights_are_exact():
    weights = torch.rand(41, dtype=torch.float64)
    units = exact_weights(weights, 1 << 14)
    assert units.sum() == 1 << 14
    torch.testing.assert_close(units / (1 << 14), (weights / weights.sum()).float(), atol=5e-4, rtol=0)


@pytest.mark.parametrize("mirror", [False, True])
def test_gaussian_blur_equals_a_convolution(mirror):
    x = benchmark.scene(1, 40).float()
    taps = torch.arange(-8, 9).double()
    kernel = torch.exp(-(taps**2) / 8)
    kernel = kernel / kernel.sum()
    padded = np.pad(x[0].double().numpy(), ((0, 0), (8, 8), (8, 8)), mode="symmetric" if mirror else "edge")
    slow = F.conv2d(torch.from_numpy(padded)[:, None], torch.outer(kernel, kernel)[None, None])[:, 0]
    torch.testing.assert_close(gaussian(x, 2, mirror=mirror)[0].double(), slow, atol=0.2, rtol=0)


def test_spatter_distance_equals_the_euclidean_distance():
    edges = torch.rand(2, 1, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.004
    fast = _distance(edges, 20)
    rows, columns = torch.meshgrid(torch.arange(40.0), torch.arange(50.0), indexing="ij")
    for i in range(2):
        slow = torch.full((40, 50), 20.0)
        for y, x in edges[i, 0].nonzero():
            slow = torch.minimum(slow, torch.hypot(rows - y, columns - x))
        torch.testing.assert_close(fast[i, 0], slow)


# Frost


def test_frost_takes_textures_from_a_folder(tmp_path, scene):
    for i, side in enumerate((40, 90)):  # smaller and larger than the window
        Image.new("RGB", (side, 50), (200, 100, 40 * i)).save(tmp_path / f"{i}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    y = corrupt(scene, "frost", 5, frost_textures=tmp_path)
    expected = 0.6 * scene[:, :2].float() + 0.75 * torch.tensor([200.0, 100.0]).view(2, 1, 1)
    assert torch.equal(y[:, :2], (expected + 1e-3).clamp(0, 255).byte())
    assert frost_source(tmp_path) == f"folder {tmp_path.name} (2 images)"
    assert frost_source() == "generated (6 textures)"


def test_frost_folder_without_images_is_an_error(tmp_path, scene):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"no frost textures in .*: name a folder of images"):
            corrupt(scene, "frost", frost_textures=folder)


def test_frost_textures_of_other_formats_are_rejected(tmp_path, scene):
    Image.new("RGB", (300, 300)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"no frost textures .*left out 1 image file\(s\) of other formats \(a\.tif"):
        corrupt(scene, "frost", frost_textures=tmp_path)
    Image.new("RGB", (300, 300)).save(tmp_path / "b.png", "TIFF")
    with (
        pytest.warns(UserWarning, match=r"left out 1 image file\(s\) of other formats \(a\.tif"),
        pytest.raises(ImageError, match=r"b\.png: not an image of a format that is read"),
    ):
        corrupt(scene, "frost", frost_textures=tmp_path)


def test_frost_textures_are_all_shown():
    x = torch.zeros(60, 3, 32, 32, dtype=torch.uint8)
    y = corrupt(x, "frost", 1).float().mean((2, 3))
    tint = y[:, 2] - y[:, 0]
    assert (tint > 20).sum() in range(3, 20)  # the teal one, a sixth of the time
    assert y.max() < 102


# The reference package


@pytest.fixture(scope="module")
def reference():
    for package in ("imagecorruptions", "skimage", "cv2", "scipy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the reference needs {package}: pip install -e .[dev]")
    try:
        return benchmark.load_reference()
    except ImportError as error:
        pytest.skip(f"the reference cannot be loaded: {error}")


@pytest.fixture(scope="module")
def photographs():
    data = pytest.importorskip("skimage.data")
    whole = data.astronaut(), data.chelsea(), data.coffee(), data.rocket()
    return np.stack([image[40 : 40 + 224, 120 : 120 + 224] for image in whole])


def _ours(pixels, name, severity, **kwargs):
    y = corrupt(torch.from_numpy(pixels).permute(0, 3, 1, 2), name, severity, **kwargs)
    return y.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_corruptions_without_randomness_equal_the_reference(name, severity, reference, photographs):
    theirs = np.stack([reference(image, severity, name) for image in photographs])
    error = np.abs(_ours(photographs, name, severity).astype(float) - theirs).mean((1, 2, 3))
    assert error.max() <= 0.5  # levels; two are allowed


def test_motion_blur_equals_the_reference_at_the_same_angle(reference, photographs):
    smear = importlib.import_module("imagecorruptions.corruptions")._motion_blur
    angles = (-45.0, -7.0, 20.0, 45.0)
    x = torch.from_numpy(photographs).permute(0, 3, 1, 2).float()
    ours = motion(x, 20, 15, torch.tensor(angles)).permute(0, 2, 3, 1).numpy()
    theirs = np.stack([smear(x, 20, 15, angle) for x, angle in zip(photographs, angles, strict=True)])
    assert np.abs(ours - theirs).mean() < 0.2


def _statistics(pixels):
    """Mean, standard deviation and energy in four frequency bands, averaged over the images (N, H, W, 3)."""
    x = torch.from_numpy(pixels).double()
    grey = x.mean(-1)
    energy = torch.fft.fft2(grey - grey.mean((1, 2), keepdim=True)).abs().square()
    frequency = torch.fft.fftfreq(224, dtype=torch.float64)
    radius = torch.hypot(frequency[:, None], frequency)
    edges = (0, 1 / 32, 1 / 16, 1 / 8, 1)
    bands = [energy[:, (radius >= a) & (radius < b)].sum(1).mean() for a, b in pairwise(edges)]
    return torch.stack([x.mean(), x.std((1, 2)).mean(), *bands])


# How often each photograph is corrupted, for the statistics to settle; the reference needs seconds for these.
REPEATS = {"glass_blur": 1, "fog": 60, "motion_blur": 20, "snow": 20}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "severity"),
    [
        (name, severity)
        for name in RANDOM
        if name != "frost"
        for severity in ((1, 5) if name in REPEATS else SEVERITIES)
    ],
)
def test_random_corruptions_have_the_statistics_of_the_reference(name, severity, reference, photographs):
    np.random.seed(severity)
    pixels = np.concatenate([photographs] * REPEATS.get(name, 5))
    theirs = _statistics(np.stack([reference(image, severity, name) for image in pixels]))
    ratio = _statistics(_ours(pixels, name, severity)) / theirs
    assert (ratio - 1).abs().max() < 0.1, ratio


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_gpu_gives_the_same_pixels(name):
    x = benchmark.scene(4, 224)
    here, there = corrupt(x, name, 5), corrupt(x.cuda(), name, 5)
    assert there.device.type == "cuda"
    different = (here != there.cpu()).float().mean()
    assert different < 1e-3


def test_corruptions_public_names():
    assert set(corruptions.__all__) <= set(vars(corruptions))
