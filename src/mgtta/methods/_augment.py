"""Random views of a batch of images, as CoTTA takes them (Wang et al., CVPR 2022), and SPA's masked ones."""

from typing import cast

import torch
from torch import Tensor

from mgtta._lib.timm import transforms


def check_images(x: Tensor) -> Tensor:
    """x itself, where it is a batch of images (N, channels, H, W)."""
    if x.ndim != 4:
        raise ValueError(f"this method changes images, of shape (N, channels, H, W), not {tuple(x.shape)}")
    return x


def random_view(x: Tensor, random: torch.Generator, *, noise: bool = True, padding: str = "edge") -> Tensor:
    """Colours, position, size and orientation changed a little: (N, channels, H, W) in [0, 1], and so the result.

    One draw serves the whole batch. All of it depends on `random`, a generator on the CPU; torch's own is left as
    it was.

    Args:
        noise: blur the view and add Gaussian noise to it too.
        padding: what is seen beyond the border: "edge", CoTTA's, repeats its pixels; "reflect", ROID's, mirrors.
    """
    n_channels, height, width = check_images(x).shape[1:]
    seed = int(torch.randint(2**62, (), generator=random))
    with torch.random.fork_rng(devices=[]):  # torchvision draws on the CPU, from torch's default generator
        torch.default_generator.manual_seed(seed)
        x = x.clamp(0, 1)
        if n_channels in (1, 3):
            x = transforms.ColorJitter((0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (-0.06, 0.06))(x)
        gamma = float(torch.empty(()).uniform_(0.7, 1.3))
        x = x.clamp(min=1e-8) ** gamma
        x = transforms.functional.pad(x, [width // 2, height // 2], padding_mode=padding)
        x = transforms.RandomAffine(
            15, (1 / 16, 1 / 16), (0.9, 1.1), interpolation=transforms.InterpolationMode.BILINEAR
        )(x)
        if noise and min(height, width) > 2:
            x = transforms.GaussianBlur(5, (0.001, 0.5))(x)
        x = transforms.functional.center_crop(x, [height, width])
        x = transforms.RandomHorizontalFlip()(x)
    if noise:
        generator = torch.Generator(x.device).manual_seed(seed)
        x = x + 0.005 * torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    return x.clamp(0, 1)


def mask_low_frequencies(x: Tensor, ratio: float, side: float, random: torch.Generator) -> Tensor:
    """A share `ratio` of the amplitudes of low frequencies set to 0, phases and all else kept: (N, c, H, W).

    Low are those in the middle square of the shifted spectrum whose side is `side` of the image's. A frequency and
    its conjugate go together, so the result is real.
    """
    height, width = x.shape[2:]
    spectrum = torch.fft.rfft2(x if x.dtype == torch.float64 else x.float())  # (N, c, H, W // 2 + 1)
    r_h, r_w = (min(round(side * n / 2), (n - 1) // 2) for n in (height, width))
    kept = (torch.rand(*x.shape[:2], 2 * r_h + 1, r_w + 1, generator=random) >= ratio).to(x.device)
    kept[:, :, r_h + 1 :, 0] = kept[:, :, :r_h, 0].flip(2)  # rows are frequencies -r_h ... r_h
    rows = torch.arange(-r_h, r_h + 1, device=x.device) % height
    spectrum[:, :, rows, : r_w + 1] *= kept
    return cast(Tensor, torch.fft.irfft2(spectrum, s=(height, width))).to(x.dtype)
