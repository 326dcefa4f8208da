"""The constants of CIFAR-10-C, and photographs of frost, here and in the records of a benchmark."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from mgtta.bench.cells import Cell, Setup
from mgtta.bench.run import run_cells
from mgtta.bench.store import Store
from mgtta.data.corruptions import CONSTANTS, CORRUPTIONS, SEVERITIES, VALIDATION_CORRUPTIONS, corrupt
from mgtta.data.corruptions.digital import _sheared
from mgtta.data.corruptions.random import Random


def smooth_images(n=4):
    """Return images of 32 pixels with structure, uint8."""
    coarse = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return (F.interpolate(coarse, (32, 32), mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


@pytest.mark.parametrize("name", [*CORRUPTIONS, *VALIDATION_CORRUPTIONS])
def test_every_corruption_has_constants_for_cifar(name):
    assert len(CONSTANTS["cifar"].values[name]) == len(CONSTANTS["imagenet"].values[name]) == len(SEVERITIES)
    x = smooth_images()
    change = [(corrupt(x, name, s, constants="cifar").float() - x.float()).abs().mean().item() for s in (1, 5)]
    assert 0 < change[0] < 60
    assert change[1] > 0.5
    alone = corrupt(x[2:3], name, 5, constants="cifar", index=torch.tensor([2]))
    assert torch.equal(alone, corrupt(x, name, 5, constants="cifar")[2:3])


def test_noise_has_the_published_strength():
    grey = torch.full((8, 3, 32, 32), 128, dtype=torch.uint8)
    noise = corrupt(grey, "gaussian_noise", 5, constants="cifar").float()
    assert noise.std().item() == pytest.approx(25.5, rel=0.05)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_is_a_softened_disc(severity):
    radius, softness = CONSTANTS["cifar"].values["defocus_blur"][severity - 1]
    at = np.arange(-8, 9)
    disc = (at[:, None] ** 2 + at**2 <= radius**2).astype(float)
    disc /= disc.sum()
    taps = np.exp(-(np.arange(-1, 2) ** 2) / (2 * softness**2))
    taps /= taps.sum()
    soft = F.conv2d(torch.tensor(disc)[None, None], torch.tensor(np.outer(taps, taps))[None, None], padding=1)
    x = smooth_images()
    padded = F.pad(x.double(), (8, 8, 8, 8), mode="reflect").reshape(-1, 1, 48, 48)
    expected = F.conv2d(padded, soft).reshape(x.shape)
    found = corrupt(x, "defocus_blur", severity, constants="cifar")
    assert (found.double() - expected.floor()).abs().max() <= 1


def test_the_affine_map_of_elastic_moves_the_corners_of_its_square():
    side = 32
    column = torch.arange(side).float().expand(1, 1, side, side)
    still = _sheared(column, Random(0, "elastic_transform", torch.tensor([0])), 0.0)
    torch.testing.assert_close(still, column, atol=1e-4, rtol=0)
    rng = Random(0, "elastic_transform", torch.tensor([0]))
    moves = 2.0 * (2 * Random(0, "elastic_transform", torch.tensor([0])).uniform(3, 2)[0] - 1)
    found = _sheared(column, rng, 2.0)[0, 0]  # at each pixel, the column that it comes from
    for (dx, dy), (x, y) in zip(moves.tolist(), ((26, 26), (26, 6), (6, 6)), strict=True):
        slope_x = found[16, 17] - found[16, 16]
        slope_y = found[17, 16] - found[16, 16]
        at_moved = found[16, 16] + slope_x * (x + dx - 16) + slope_y * (y + dy - 16)
        assert at_moved.item() == pytest.approx(x, abs=1e-2)


def test_unknown_constants_are_refused():
    with pytest.raises(ValueError, match="unknown set of constants 'mnist'; valid: cifar, imagenet"):
        corrupt(smooth_images(), "fog", constants="mnist")


def test_records_name_the_constants_and_the_photographs_of_frost(tmp_path):
    frost = tmp_path / "frost"
    frost.mkdir()
    for i in range(2):
        Image.effect_noise((300, 200), 60 + i).convert("RGB").save(frost / f"frost{i}.png")
    cell = Cell("corruptions", "noadapt", ("frost",))
    plain = Setup("patterns_vit", images=2)
    published = Setup("patterns_vit", images=2, frost_textures=str(frost), constants="cifar")
    records = [run_cells([cell], setup, Store(tmp_path / "runs"))[0] for setup in (plain, published)]
    texts = [record["protocol"]["corruptions"] for record in records]
    assert texts[0] == "mgtta, on the fly; frost: generated (6 textures)"
    assert texts[1] == "mgtta, on the fly; frost: folder frost (2 images); constants: cifar"
    assert f"--frost-textures {frost}" in records[1]["protocol"]["inputs"]
    assert records[0]["cell"] != records[1]["cell"]
