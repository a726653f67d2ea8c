"""Pictures: decoded, turned upright, resized; by Pillow."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from resnet8ptq.config.schema import PreprocessConfig

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_FILTERS = {filter.name.lower(): filter for filter in Image.Resampling}


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
    given = preprocess.size
    height, width = given if isinstance(given, list) else (given, given)
    size, how = (width, height), _FILTERS[preprocess.filter]
    if preprocess.resize == "squash":
        return found.resize(size, how)
    if preprocess.resize == "letterbox":
        return ImageOps.pad(found, size, how, color=(preprocess.pad,) * len(found.getbands()))
    if preprocess.resize == "fit":
        return ImageOps.fit(found, size, how)
    scale = max(width / found.width, height / found.height) / preprocess.crop_fraction
    whole = found.resize((round(scale * found.width), round(scale * found.height)), how)
    left, top = (whole.width - width) // 2, (whole.height - height) // 2
    return whole.crop((left, top, left + width, top + height))


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
