"""Changes of images that methods make: random views, masked low frequencies, AugMix."""

import pytest
import torch
from baselines import close
from conftest import images

from mgtta.methods._augment import mask_low_frequencies, random_view
from mgtta.methods._augmix import OPERATIONS, augmix, operate


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_views_differ_stay_in_range_and_leave_torchs_random_numbers_alone(channels):
    x = torch.rand(2, channels, 24, 20)
    random = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    views = [random_view(x, random) for _ in range(4)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(v.shape == x.shape and v.min() >= 0 and v.max() <= 1 for v in views)
    assert not any(torch.equal(views[0], v) for v in views[1:])
    assert torch.equal(views[0], random_view(x, torch.Generator().manual_seed(0)))
    assert random_view(x.double(), random, noise=False).dtype == torch.float64


def test_views_are_padded_by_their_edge_or_by_reflection():
    """A view moved by up to 1/16 of the image shows what lies beyond the border."""
    x = images(2).double()
    edge, reflect = (
        random_view(x, torch.Generator().manual_seed(3), noise=False, padding=mode) for mode in ("edge", "reflect")
    )
    default = random_view(x, torch.Generator().manual_seed(3), noise=False)
    assert torch.equal(default, edge)
    assert not torch.equal(edge, reflect)
    close(edge[:, :, 12:20, 12:20], reflect[:, :, 12:20, 12:20])  # far from the border they are the same


@pytest.mark.parametrize("size", [(32, 32), (15, 20), (1, 1)])
def test_low_frequencies_are_masked_in_pairs(size):
    x = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    height, width = size
    y = mask_low_frequencies(x, 0.5, 0.4, torch.Generator().manual_seed(1))
    before, after = torch.fft.fft2(x), torch.fft.fft2(y)
    r_h, r_w = (min(round(0.2 * n), (n - 1) // 2) for n in size)
    gone = 0
    for k in range(height):
        for j in range(width):
            low = min(k, height - k) <= r_h and min(j, width - j) <= r_w
            for a, b in zip(before[:, :, k, j].flatten(), after[:, :, k, j].flatten(), strict=True):
                kept = abs(a - b) < 1e-9
                assert kept or (low and abs(b) < 1e-9)
                gone += not kept
    total = 12 * min(2 * r_h + 1, height) * min(2 * r_w + 1, width)
    assert 0.25 < gone / total < 0.75
    close(mask_low_frequencies(x, 0.0, 0.4, torch.Generator()), x)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 40, 60)])
def test_augmix_draws_only_from_its_generator(shape):
    image = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    views = [augmix(image, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])
    assert all(view.shape == shape and view.min() >= 0 and view.max() <= 1 for view in views)
    eight_bits = (40 + image * 200).to(torch.uint8)
    changed = {
        name
        for name in OPERATIONS
        for seed in range(40)
        if not torch.equal(operate(eight_bits, name, torch.Generator().manual_seed(seed)), eight_bits)
    }
    assert changed == set(OPERATIONS)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        augmix(torch.rand(4, 8, 8), torch.Generator())
