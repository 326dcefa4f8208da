"""An endless, seeded set of small colour images of patterns, such as stripes, checks and honeycombs.

Image `index` of `seed` is a pure function of the two numbers, in any order and in any process. Each pattern is drawn
with a random period, direction, place and pair of colours, dark on light, under soft light and with a little grain.

Shapes: layers are float32 (SIZE, SIZE); u and v are the coordinates along and across the pattern, in radians of its
period.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.random import Generator, default_rng
from PIL import Image

from mgtta.data.rendered import SIZE, TEST_SEED, Rendered

PERIOD = (6.0, 14.0)  # pixels
DARK = (0.0, 0.4)  # luma of the pattern, as a share of the full range
GAP = (0.35, 0.6)  # how much lighter the ground is
LIGHT = 0.25  # how much soft light adds or takes, at most
GRAIN = 0.08  # standard deviation of the noise, at most
SHARPNESS = 3.0  # of the edges of a pattern

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_Y, _X = (np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2).astype(np.float32)  # pixels from the centre
_RAYS = 16


def _lines(u: np.ndarray, thinness: int) -> np.ndarray:
    """Return lines from -1 to 1 that are thin for a large `thinness`."""
    return 2 * np.abs(np.cos(u / 2)) ** thinness - 1


def _triangle(u: np.ndarray) -> np.ndarray:
    return 2 / math.pi * np.arcsin(np.sin(u))


def _honeycomb(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    across = math.sqrt(3) / 2 * v
    return -(np.cos(u) + np.cos(across - u / 2) + np.cos(across + u / 2))


def _bricks(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    row = np.floor(u / (2 * math.pi) + 0.5)
    return np.maximum(_lines(u, 14), _lines(v / 1.7 + math.pi * row, 18))


# name -> where the pattern is, from about -2 (ground) to 2 (pattern)
KINDS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "stripes": lambda u, v: np.sin(u),
    "lines": lambda u, v: _lines(u, 10),
    "grid": lambda u, v: np.maximum(_lines(u, 14), _lines(v, 14)),
    "checks": lambda u, v: 3 * np.sin(u) * np.sin(v),
    "plaid": lambda u, v: 0.6 * (np.sin(u) + np.sin(v)),
    "dots": lambda u, v: 2 * (np.cos(u) + np.cos(v) - 1),
    "honeycomb": _honeycomb,
    "zigzag": lambda u, v: 2 * np.sin(u + 2.5 * _triangle(v / 1.5)),
    "waves": lambda u, v: 2 * np.sin(u + 2 * np.sin(v / 2.5)),
    "bricks": _bricks,
    "rings": lambda u, v: 1.5 * np.sin(np.hypot(u, v)),
    "rays": lambda u, v: 2 * np.sin(_RAYS * np.arctan2(u, v)),
}
CLASSES = tuple(KINDS)


def _start(seed: int, index: int) -> tuple[Generator, int]:
    """Return the random numbers of an image, and its label, which is the first of them."""
    rng = default_rng((seed, index))
    return rng, int(rng.integers(len(CLASSES)))


def _layer(rng: Generator, kind: str) -> np.ndarray:
    """Return how much of the pattern's colour each pixel has, from 0 to 1."""
    angle = rng.uniform(0, math.pi)
    radians = 2 * math.pi / rng.uniform(*PERIOD)  # per pixel
    dx, dy = rng.uniform(-12, 12, 2)
    x = radians * (_X - dx)
    y = radians * (_Y - dy)
    u = x * math.cos(angle) + y * math.sin(angle)
    v = y * math.cos(angle) - x * math.sin(angle)
    return 1 / (1 + np.exp(-SHARPNESS * KINDS[kind](u, v)))


def _colours(rng: Generator) -> np.ndarray:
    """Return (2, 3): a light ground and a dark pattern."""
    dark = rng.uniform(*DARK)
    light = min(dark + rng.uniform(*GAP), 0.95)
    want = np.array([[light], [dark]])
    colour = rng.uniform(0.2, 0.8, (2, 3))
    have = (colour @ _LUMA)[:, None]
    return np.where(have > want, colour * want / have, 1 - (1 - colour) * (1 - want) / (1 - have))


def _light(rng: Generator) -> np.ndarray:
    coarse = Image.fromarray(rng.uniform(-LIGHT, LIGHT, (3, 3)).astype(np.float32))
    return np.asarray(coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def render(index: int, seed: int = TEST_SEED) -> tuple[np.ndarray, int]:
    """Return image `index` of `seed`, uint8 (3, SIZE, SIZE), and its label."""
    rng, label = _start(seed, index)
    pattern = _layer(rng, CLASSES[label])
    ground, dark = _colours(rng)[:, :, None, None]
    image = ground + (dark - ground) * pattern + _light(rng)
    image = image + rng.uniform(0, GRAIN) * rng.standard_normal(image.shape)
    return (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8), label


class Patterns(Rendered):
    """The first `n` patterns of a seed, rendered on access."""

    classes = CLASSES
    kind = "pattern"
    title = "rendered patterns"
    render = staticmethod(render)

    @staticmethod
    def label_of(index: int, seed: int) -> int:
        return _start(seed, index)[1]
