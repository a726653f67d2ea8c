"""Draws the embedded data set `shapes`: ten classes of 32x32 RGB pictures.

The data set can replace CIFAR-10 if that cannot be downloaded, and has the same picture size and
number of classes. A ResNet8 classifies about nine pictures in ten correctly, because some shapes
are small, faint, occluded or noisy.

The pictures must be the same everywhere, bit for bit. Every random number therefore comes from
`numpy.random.RandomState`, whose stream is frozen, and every operation has an exact definition,
such as those of + - * / sqrt and floor in IEEE 754. The code uses no sin, no exp, no normal deviate
and no sum over an axis, because their last bits depend on the processor and on the library version.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import DataConfig, PreprocessConfig
from resnet8ptq.core import cache
from resnet8ptq.data.dataset import SIDES, Dataset, Side, load_cached

Floats = NDArray[np.floating[Any]]  # always float32
Field = Callable[[Floats, Floats, Floats], Floats]

SIDE = 32  # pixels of a picture's side
# Seed and pictures per class
_SPLITS: dict[Side, tuple[int, int]] = {"train": (1, 1000), "test": (2, 500)}

# Outward normals of a regular triangle and pentagon, without sin and cos for the reason above.
_TRIANGLE = ((0.0, 1.0), (0.8660254, -0.5), (-0.8660254, -0.5))
_PENTAGON = (
    (0.0, 1.0),
    (0.9510565, 0.3090170),
    (0.5877853, -0.8090170),
    (-0.5877853, -0.8090170),
    (-0.9510565, 0.3090170),
)


# Each function of a shape returns the signed distance to its edge, negative inside, in units of the
# shape's radius. All arrays are [n,32,32] except `p` [n,1,1], which varies the proportions and is
# from 0 to 1.


def _circle(u: Floats, v: Floats, p: Floats) -> Floats:
    return np.sqrt(u * u + v * v) - 0.95


def _ring(u: Floats, v: Floats, p: Floats) -> Floats:
    return np.abs(np.sqrt(u * u + v * v) - 0.75) - (0.13 + 0.15 * p)


def _crescent(u: Floats, v: Floats, p: Floats) -> Floats:
    bite = u - (0.35 + 0.3 * p)
    return np.maximum(_circle(u, v, p), 0.8 - np.sqrt(bite * bite + v * v))


def _square(u: Floats, v: Floats, p: Floats) -> Floats:
    return np.maximum(np.abs(u), np.abs(v)) - 0.85


def _sides(normals: Sequence[tuple[float, float]], u: Floats, v: Floats) -> Floats:
    """Return the positions along each side's normal, [sides,n,32,32], in ascending order."""
    return np.sort([a * u + b * v for a, b in normals], axis=0)


def _triangle(u: Floats, v: Floats, p: Floats) -> Floats:
    return _sides(_TRIANGLE, u, v)[-1] - 0.6


def _pentagon(u: Floats, v: Floats, p: Floats) -> Floats:
    return _sides(_PENTAGON, u, v)[-1] - 0.85


def _star(u: Floats, v: Floats, p: Floats) -> Floats:
    # A point of a pentagram is inside at least four of its five lines.
    return _sides(_PENTAGON, u, v)[-2] - (0.34 + 0.08 * p)


def _cross(u: Floats, v: Floats, p: Floats) -> Floats:
    far = np.maximum(np.abs(u), np.abs(v))
    near = np.minimum(np.abs(u), np.abs(v))
    return np.maximum(far - 1.0, near - (0.22 + 0.16 * p))


def _wave(x: Floats, p: Floats) -> Floats:
    """Return the signed distance to bands that alternate along x, with a period of 0.5 to 0.8."""
    period = 0.5 + 0.3 * p
    turns = x / period + p  # p varies the phase as well as the period
    return (np.abs(turns - np.floor(turns) - 0.5) - 0.25) * period


def _stripes(u: Floats, v: Floats, p: Floats) -> Floats:
    return np.maximum(_wave(u, p), _square(u, v, p))


def _checks(u: Floats, v: Floats, p: Floats) -> Floats:
    a = _wave(u, p)
    b = _wave(v, p)
    exclusive_or = np.maximum(np.minimum(a, b), -np.maximum(a, b))
    return np.maximum(exclusive_or, _square(u, v, p))


_FIELDS: dict[str, Field] = {
    field.__name__.removeprefix("_"): field
    for field in (
        _circle,
        _ring,
        _crescent,
        _square,
        _triangle,
        _pentagon,
        _star,
        _cross,
        _stripes,
        _checks,
    )
}
CLASS_NAMES: tuple[str, ...] = tuple(_FIELDS)


def load(config: DataConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set, which the cache keeps after the first drawing."""
    keys: dict[Side, cache.Key] = {side: {"split": side} for side in SIDES}
    return load_cached(
        "shapes", CLASS_NAMES, "resnet8ptq.data.shapes", draw, keys, __name__, cache_root
    )


def draw(split: Side) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw one split of the data set: 10,000 training or 5,000 test pictures; see `draw_seeded`."""
    return draw_seeded(*_SPLITS[split])


def draw_seeded(seed: int, per_class: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw `per_class` pictures of each class from a seed.

    Returns:
        Pictures, uint8 [N,32,32,3] RGB, and labels, int64 [N], which index CLASS_NAMES. The classes
        are balanced and in shuffled order.
    """
    rng = np.random.RandomState(seed)
    labels = rng.permutation(np.repeat(np.arange(len(CLASS_NAMES), dtype=np.int64), per_class))
    images = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    for label, field in enumerate(_FIELDS.values()):
        images[labels == label] = _draw_class(rng, field, per_class)
    return images, labels


def _uniform(rng: np.random.RandomState, low: float, high: float, *shape: int) -> Floats:
    # rng.uniform is avoided: a compiler may fuse its multiplication and addition.
    return (low + (high - low) * rng.random_sample(shape)).astype(np.float32)


def _axes(rng: np.random.RandomState, n: int, reach: float) -> tuple[Floats, Floats]:
    """Return the coordinates of all pixels in n randomly moved and turned frames [n,32,32].

    The unit is a pixel. The origin is at most `reach` pixels from the picture's centre in x and y.
    """
    grid = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
    x = grid[None, None, :] - _uniform(rng, -reach, reach, n, 1, 1)
    y = grid[None, :, None] - _uniform(rng, -reach, reach, n, 1, 1)
    t = _uniform(rng, -1, 1, n, 1, 1)  # tangent of half the angle, for -90 to 90 degrees
    flip = np.where(_uniform(rng, 0, 1, n, 1, 1) < 0.5, np.float32(-1), np.float32(1))
    cos = flip * (1 - t * t) / (1 + t * t)
    sin = flip * 2 * t / (1 + t * t)
    return cos * x + sin * y, cos * y - sin * x


def _offset(rng: np.random.RandomState, low: float, high: float, n: int) -> Floats:
    """Return colour differences [3,n,1,1], whose largest absolute value is from `low` to `high`."""
    direction = _uniform(rng, -1, 1, 3, n, 1, 1)
    share = _uniform(rng, 0, 1, n, 1, 1)
    size = low + (high - low) * share * share  # squared, so that faint colours are more frequent
    return direction / np.max(np.abs(direction), axis=0) * size


def _paint(canvas: Floats, colour: Floats, distance: Floats) -> None:
    """Paint a colour [3,n,1,1] on canvases [3,n,32,32], inside the edge of a shape.

    Args:
        distance: the distance to the edge [n,32,32] in pixels, negative inside.
    """
    cover = np.clip(0.5 - distance, 0, 1)  # the anti-aliased edge is one pixel wide
    canvas += cover * (colour - canvas)


def _draw_class(rng: np.random.RandomState, field: Field, n: int) -> NDArray[np.uint8]:
    """Draw n pictures of one shape, uint8 [n,32,32,3]."""
    # A background with a gradient
    base = _uniform(rng, 70, 185, 3, n, 1, 1)
    x, y = _axes(rng, n, 0)
    canvas = base + _offset(rng, 0, 50, n) * (x / SIDE)

    # Clutter behind the shape: small ellipses
    for _ in range(2):
        x, y = _axes(rng, n, 15)
        a = _uniform(rng, 1, 3.5, n, 1, 1)
        b = _uniform(rng, 1, 3.5, n, 1, 1)
        ellipse = (np.sqrt((x / a) * (x / a) + (y / b) * (y / b)) - 1) * np.minimum(a, b)
        _paint(canvas, base + _offset(rng, 15, 70, n), ellipse)

    # The shape
    x, y = _axes(rng, n, 6)
    radius = _uniform(rng, 6.5, 12, n, 1, 1)
    aspect = _uniform(rng, 0.85, 1.2, n, 1, 1)
    proportions = _uniform(rng, 0, 1, n, 1, 1)
    distance = field(x / radius, y / radius * aspect, proportions) * radius
    _paint(canvas, base + _offset(rng, 28, 112, n), distance)

    # A bar in front of the shape, in about six of ten pictures
    x, y = _axes(rng, n, 10)
    bar = np.maximum(np.abs(y) - _uniform(rng, -2, 2, n, 1, 1), np.abs(x) - 12)
    _paint(canvas, base + _offset(rng, 15, 70, n), bar)

    noise = rng.randint(-127, 128, canvas.shape, dtype=np.int8)
    canvas += noise * (_uniform(rng, 2, 26, n, 1, 1) / 127)
    return np.rint(np.clip(canvas, 0, 255)).astype(np.uint8).transpose(1, 2, 3, 0)
