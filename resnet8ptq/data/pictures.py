"""Pictures: decoded, turned upright, resized; by Pillow."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_PIXELS = 2**27  # 512 MB, as Pillow keeps RGB
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_FILTERS = {filter.name.lower(): filter for filter in Image.Resampling}
_CENTRING = {"center": (0.5, 0.5), "top_left": (0.0, 0.0)}  # as Pillow's `pad` takes it


@dataclass(frozen=True)
class Placement:
    """Where `fit` puts a picture: x and y in pixels become `scale * x + offset`.

    Attributes:
        scale, offset: of x and of y.
    """

    scale: tuple[float, float]
    offset: tuple[float, float]


@contextmanager
def bombs_refused() -> Iterator[None]:
    """Let Pillow refuse what unpacks to more than 90 million pixels; not from several threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decode(file: Path | BinaryIO, preprocess: PreprocessConfig) -> NDArray[np.uint8]:
    """Return a picture [H, W, 3], or [H, W, 1] where it is to be grey, resized as set.

    It is turned as its EXIF data say. Palettes and CMYK become RGB, 16 bits become 8, and an alpha
    channel is left out, as torchvision does it.

    Raises:
        Exception: Pillow's own, of a dozen kinds: no picture, truncated, or too large.
    """
    with Image.open(file, formats=FORMATS) as picture:
        picture.load()
        return to_array(fit(_to_8_bits(ImageOps.exif_transpose(picture)), preprocess))


def fit(picture: Image.Image, preprocess: PreprocessConfig) -> Image.Image:
    """Return a picture in RGB or grey, of `preprocess.size` where that is set."""
    found = picture.convert("L" if preprocess.channels == "grey" else "RGB")
    if preprocess.size is None:
        return found
    height, width = _sides(preprocess.size)
    size, how = (width, height), _FILTERS[preprocess.filter]
    if preprocess.resize == "squash":
        return found.resize(size, how)
    if preprocess.resize == "letterbox":
        ground = (preprocess.pad,) * len(found.getbands())
        return ImageOps.pad(found, size, how, ground, _CENTRING[preprocess.align])
    if preprocess.resize == "fit":
        return ImageOps.fit(found, size, how)
    scale = max(width / found.width, height / found.height) / preprocess.crop_fraction
    sides = (round(scale * found.width), round(scale * found.height))
    if math.prod(sides) > MAX_PIXELS:  # a line of pixels would fill the memory
        raise DataError(
            f"preprocess.resize: got 'crop', which makes {sides[0]} x {sides[1]} pixels of a "
            f"picture of {found.width} x {found.height}; try squash, fit or letterbox"
        )
    whole = found.resize(sides, how)
    left, top = (whole.width - width) // 2, (whole.height - height) // 2
    return whole.crop((left, top, left + width, top + height))


def _sides(size: int | list[int]) -> tuple[int, int]:
    """Return height and width."""
    height, width = size if isinstance(size, list) else (size, size)
    return height, width


def placement(width: int, height: int, preprocess: PreprocessConfig) -> Placement:
    """Return where `fit` puts a picture of this size, to the pixel that Pillow rounds to."""
    if preprocess.size is None:
        return Placement((1.0, 1.0), (0.0, 0.0))
    high, wide = _sides(preprocess.size)
    if preprocess.resize == "squash":
        return Placement((wide / width, high / height), (0.0, 0.0))
    if preprocess.resize == "letterbox":  # as `ImageOps.contain` and `pad` round
        inside_wide, inside_high = wide, high
        if width / height > wide / high:
            inside_high = round(height / width * wide)
        elif width / height < wide / high:
            inside_wide = round(width / height * high)
        left, top = _CENTRING[preprocess.align]
        offset = (round((wide - inside_wide) * left), round((high - inside_high) * top))
        return Placement((inside_wide / width, inside_high / height), offset)
    scale = max(wide / width, high / height)
    if preprocess.resize == "fit":  # which crops before it resizes
        middle = ((wide - scale * width) / 2, (high - scale * height) / 2)
        return Placement((scale, scale), middle)
    scale /= preprocess.crop_fraction
    whole = round(scale * width), round(scale * height)
    offset = (-((whole[0] - wide) // 2), -((whole[1] - high) // 2))
    return Placement((whole[0] / width, whole[1] / height), offset)


def to_array(picture: Image.Image) -> NDArray[np.uint8]:
    """Return a picture in RGB or grey as [H, W, channels]."""
    return np.atleast_3d(np.asarray(picture, np.uint8))


def _to_8_bits(picture: Image.Image) -> Image.Image:
    """Return 16-bit greys as 8-bit ones; Pillow itself would cut them off at 255.

    Raises:
        ValueError: pixels of 32 bits, of which no range is known.
    """
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"it has pixels of 32 bits (mode {picture.mode})")
    return picture
