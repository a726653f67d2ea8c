"""Decodes and resizes a picture or mask with Pillow, and turns pictures upright."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Condition
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core.errors import DataError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MAX_PIXELS = 2**27  # most pixels in memory, which take 512 MB as RGB in Pillow
MAX_BYTES = 2**29  # largest file, since a sparse file can be larger than the disk
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
UNLABELLED = 255  # value of a mask's pixels without a class, as in PASCAL VOC and Cityscapes
_FILTERS = {filter.name.lower(): filter for filter in Image.Resampling}
_CENTRING = {"center": (0.5, 0.5), "top_left": (0.0, 0.0)}  # for Pillow's `pad`


class _Room:
    """Limits the pictures that threads decode at the same time to `MAX_PIXELS` in total."""

    def __init__(self) -> None:
        self.free = MAX_PIXELS
        self._freed = Condition()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Wait until there is room; a picture with more than `MAX_PIXELS` is decoded alone."""
        pixels = min(pixels, MAX_PIXELS)
        with self._freed:
            self._freed.wait_for(lambda: pixels <= self.free)
            self.free -= pixels
        try:
            yield
        finally:
            with self._freed:
                self.free += pixels
                self._freed.notify_all()


_ROOM = _Room()


class CoordinateMap(NamedTuple):
    """How the function `fit` maps pixel coordinates: to `scale * x + offset`, and so for y."""

    scale: tuple[float, float]
    offset: tuple[float, float]


@contextmanager
def bombs_refused() -> Iterator[None]:
    """Make Pillow raise for pictures of more than 89,478,485 pixels, and hide all other warnings.

    Only one thread may enter the block at a time, because warnings are global.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def decode(file: Path | BinaryIO, preprocess: PreprocessConfig) -> NDArray[np.uint8]:
    """Return a picture [H, W, 3], or [H, W, 1] if `channels` is grey, resized by `fit`.

    The picture is turned upright by its EXIF data. Palettes and CMYK are converted, and an alpha
    channel is dropped. 16 bits become 8.

    Raises:
        Exception: the file is not in one of `FORMATS`, is truncated or too large, or has pixels of
            32 bits; or `fit` refuses the picture. Pillow raises many types.
    """
    with (
        _open(file, FORMATS) as picture,
        _ROOM.hold(math.prod(picture.size)),
    ):
        picture.load()
        return to_array(fit(_to_8_bits(ImageOps.exif_transpose(picture)), preprocess))


def _open(file: Path | BinaryIO, formats: tuple[str, ...]) -> Image.Image:
    try:
        return Image.open(file, formats=formats)
    except UnidentifiedImageError:  # the error's text names a Python object
        raise ValueError(f"it is no {' or '.join(formats)} file") from None


def decode_mask(file: Path | BinaryIO, preprocess: PreprocessConfig) -> NDArray[np.uint8]:
    """Return a mask of labels [H, W, 1], resized by `fit_mask`.

    Labels are the indices of a palette, or grey values.

    Raises:
        Exception: the file is neither PNG nor BMP, is damaged, has several channels or floats, has
            labels that are not from 0 to 255, or `fit` refuses it.
    """
    with (
        _open(file, ("PNG", "BMP")) as picture,
        _ROOM.hold(math.prod(picture.size)),
    ):
        picture.load()
        labels = np.asarray(picture)
        if labels.ndim != 2 or picture.mode == "F" or not 0 <= labels.min() <= labels.max() < 256:
            raise ValueError(
                f"it is no mask (mode {picture.mode}); expected a palette, or grey up to 255"
            )
        return fit_mask(labels.astype(np.uint8), preprocess)[..., np.newaxis]


def fit_mask(labels: NDArray[np.uint8], preprocess: PreprocessConfig) -> NDArray[np.uint8]:
    """Return labels [H, W], resized as their picture is, by nearest neighbour.

    Padding is `UNLABELLED`.
    """
    nearest = replace(preprocess, channels="grey", filter="nearest", pad=UNLABELLED)
    return np.asarray(fit(Image.fromarray(labels), nearest), np.uint8)


def read_size(file: Path | BinaryIO) -> tuple[int, int]:
    """Return width and height of a picture, after its rotation by EXIF data, from its header.

    Raises:
        Exception: the file is not a picture, or is too large; Pillow raises a dozen types.
    """
    with Image.open(file, formats=FORMATS) as picture:
        # Avoid PNG's own `getexif`, which decodes the whole picture, since EXIF data may follow it.
        return turn_upright(picture.size, Image.Image.getexif(picture))


def turn_upright(size: tuple[int, int], exif: Image.Exif) -> tuple[int, int]:
    """Return the width and height of a picture after its rotation by EXIF data."""
    width, height = size
    if exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8):  # the picture lies on its side
        return height, width
    return width, height


def fit(picture: Image.Image, preprocess: PreprocessConfig) -> Image.Image:
    """Return a picture in RGB or grey, resized to `preprocess.size` unless that is null.

    Raises:
        DataError: `preprocess.resize=crop` would make more than `MAX_PIXELS` pixels.
    """
    mode = "L" if preprocess.channels == "grey" else "RGB"
    picture = picture.convert(mode)
    if preprocess.size is None:
        return picture
    height, width = _sides(preprocess.size)
    size = (width, height)
    method = _FILTERS[preprocess.filter]
    if preprocess.resize == "squash":
        return picture.resize(size, method)
    if preprocess.resize == "letterbox":
        ground = (preprocess.pad,) * len(picture.getbands())
        return ImageOps.pad(picture, size, method, ground, _CENTRING[preprocess.align])
    if preprocess.resize == "fit":
        return ImageOps.fit(picture, size, method)

    # Crop from the middle
    scale = max(width / picture.width, height / picture.height) / preprocess.crop_fraction
    sides = (round(scale * picture.width), round(scale * picture.height))
    if math.prod(sides) > MAX_PIXELS:  # a picture of one line would become too large
        raise DataError(
            f"preprocess.resize: got 'crop', which makes {sides[0]} x {sides[1]} pixels of a "
            f"picture of {picture.width} x {picture.height}; try squash, fit or letterbox"
        )
    whole = picture.resize(sides, method)
    left = (whole.width - width) // 2
    top = (whole.height - height) // 2
    return whole.crop((left, top, left + width, top + height))


def _sides(size: int | list[int]) -> tuple[int, int]:
    """Return height and width from `preprocess.size`, where one number stands for both."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def placement(width: int, height: int, preprocess: PreprocessConfig) -> CoordinateMap:
    """Return how the function `fit` maps the coordinates of a picture of this size."""
    if preprocess.size is None:
        return CoordinateMap((1.0, 1.0), (0.0, 0.0))
    high, wide = _sides(preprocess.size)
    if preprocess.resize == "squash":
        return CoordinateMap((wide / width, high / height), (0.0, 0.0))
    if preprocess.resize == "letterbox":  # rounded like `ImageOps.contain` and `pad`
        inside_wide = wide
        inside_high = high
        if width / height > wide / high:
            inside_high = round(height / width * wide)
        elif width / height < wide / high:
            inside_wide = round(width / height * high)
        left, top = _CENTRING[preprocess.align]
        offset = (round((wide - inside_wide) * left), round((high - inside_high) * top))
        return CoordinateMap((inside_wide / width, inside_high / height), offset)

    # `fit` and `crop` fill the whole size, and cut off what is outside of it
    scale = max(wide / width, high / height)
    if preprocess.resize == "fit":  # `fit` crops before it resizes
        middle = ((wide - scale * width) / 2, (high - scale * height) / 2)
        return CoordinateMap((scale, scale), middle)
    scale /= preprocess.crop_fraction
    whole = round(scale * width), round(scale * height)
    offset = (-((whole[0] - wide) // 2), -((whole[1] - high) // 2))
    return CoordinateMap((whole[0] / width, whole[1] / height), offset)


def to_array(picture: Image.Image) -> NDArray[np.uint8]:
    """Return a picture in RGB or grey as [H, W, channels]."""
    return np.atleast_3d(np.asarray(picture, np.uint8))


def _to_8_bits(picture: Image.Image) -> Image.Image:
    """Return a picture of 16-bit greys with 8 bits, and others unchanged.

    Pillow itself would clip 16-bit greys at 255.

    Raises:
        ValueError: the pixels have 32 bits.
    """
    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):  # the range of 32-bit pixels is unknown
        raise ValueError(f"it has pixels of 32 bits (mode {picture.mode})")
    return picture
