"""Images without content: plain ones, and random pixels. They teach nothing."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

PATCHES = 16  # along a side of a small image; on a large one a patch has MOST_PIXELS
MOST_PIXELS = 4  # along a side of a patch: noise on a picture averages out, the picture does not
SEEN_PIXELS = 2  # along a side of a patch: of larger patches every other pixel, to save time
PLAIN = 0.25 / 255  # standard deviation of the patches, where an image spans [0, 1], below which it is plain
DEVIATIONS = 3.0  # by which the correlation of neighbouring patches is above that of random pixels, in a picture


@torch.no_grad()
def has_content(x: Tensor) -> Tensor:
    """Return which of the images (n, c, H, W) show something: (n,) of bool; True for what is not an image.

    In a picture neighbouring patches are alike, also under heavy noise; among random pixels they are not.
    """
    if x.ndim != 4 or min(x.shape[-2:]) < PATCHES:
        return torch.ones(len(x), dtype=torch.bool, device=x.device)
    plain = PLAIN
    if x.dtype == torch.uint8:
        plain = 255 * PLAIN
    pixels = min(min(x.shape[-2:]) // PATCHES, MOST_PIXELS)
    step = max(pixels // SEEN_PIXELS, 1)
    patches = avg_pool2d(x[..., ::step, ::step].float(), pixels // step).mean(1)  # (n, h, w)
    centred = patches - patches.mean((1, 2), keepdim=True)
    variance = centred.square().mean((1, 2))
    across = (centred[:, :, 1:] * centred[:, :, :-1]).mean((1, 2))
    down = (centred[:, 1:] * centred[:, :-1]).mean((1, 2))
    enough = 2 * DEVIATIONS / patches[0].numel() ** 0.5
    return ~((variance < plain**2) | (across + down <= enough * variance))
