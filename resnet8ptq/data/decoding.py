"""Decodes or resizes many pictures in threads, once, into the cache."""

import hashlib
import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core import cache, code, files, machine
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.core.text import one_line
from resnet8ptq.data import pictures
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.lazy import AT_ONCE, LazySamples, Stored

log = logging.getLogger(__name__)

Read = Callable[[Path | io.BytesIO, PreprocessConfig], NDArray[np.uint8]]

DECODED_AT_ONCE = 64  # pictures in memory
HEADERS_AT_ONCE = 1024  # pictures whose sizes are compared
LISTED = 10  # unreadable pictures that a warning names
_SHAPING = {"size", "resize", "crop_fraction", "filter", "pad"}  # keys that change stored pixels


@dataclass(frozen=True)
class Picture:
    """A picture before decoding.

    Attributes:
        name: the picture's name in messages.
        content: the path of the picture's file, or a function that returns the file's bytes.
    """

    name: str
    content: Path | Callable[[], bytes]


def decode(
    packed: Sequence[Picture],
    preprocess: PreprocessConfig,
    on_bad: str,
    cache_root: Path,
    read: Read = pictures.decode,
) -> tuple[Stored, NDArray[np.int64]]:
    """Return the readable pictures [N, H, W, C], and their indices in `packed`.

    Args:
        on_bad: `error`, or `skip` to leave out unreadable pictures with a warning.
        read: decodes one picture.

    Raises:
        ConfigError: the pictures differ in size, and `preprocess.size` is null.
        DataError: a picture cannot be read (with `skip`, no picture can), or the pictures exceed
            the free disk space.
    """
    # The cache entry depends on the pictures and on all that changes their pixels
    threads = machine.threads(None)
    with ThreadPoolExecutor(threads) as pool:
        hashes = list(pool.map(_hash, packed))
    settings = asdict(preprocess)
    for name in settings.keys() - _SHAPING:
        del settings[name]
    key: cache.Key = {
        "pictures": json.dumps(hashes),
        "settings": json.dumps([settings, preprocess.channels == "grey", read.__name__]),
        **_versions(),
    }

    def make(entry: Path) -> None:
        bad = _write(
            packed,
            partial(_try_decode, preprocess=preprocess, read=read),
            preprocess,
            entry / "images.npy",
            threads,
        )
        (entry / "bad.json").write_text(json.dumps(bad))

    entry = cache.entry(cache_root, "pictures", key, make)

    # Leave out the pictures that cannot be read
    is_good = np.ones(len(packed), np.bool_)
    bad = []
    for index, reason in json.loads((entry / "bad.json").read_text()).items():
        is_good[int(index)] = False
        bad.append((packed[int(index)].name, reason))
    _report(bad, on_bad, len(packed))
    whole = np.load(entry / "images.npy", mmap_mode="r")
    good = np.flatnonzero(is_good)
    if not bad:
        return whole, good
    return LazySamples(whole, good), good


def list_sizes(packed: Sequence[Picture]) -> frozenset[tuple[int, int]]:
    """Return heights and widths of readable pictures, by the headers of their files.

    No picture is decoded, and the search stops soon after two sizes are known. `decode` reports
    unreadable pictures.
    """
    threads = machine.threads(None)
    sizes: set[tuple[int, int]] = set()
    with pictures.bombs_refused(), ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(packed), HEADERS_AT_ONCE):
            for size in pool.map(_read_size, packed[start : start + HEADERS_AT_ONCE]):
                if size is not None:
                    width, height = size
                    sizes.add((height, width))
            if len(sizes) > 1:
                break
    return frozenset(sizes)


def _read_size(picture: Picture) -> tuple[int, int] | None:
    content = picture.content
    with suppress(Exception):  # Pillow raises a dozen types
        if not isinstance(content, Path):
            return pictures.read_size(io.BytesIO(content()))
        if content.is_file():
            return pictures.read_size(content)
    return None


def _versions() -> dict[str, str]:
    return {"code": code.behind(__name__), "pillow": version("pillow")}


def _hash(picture: Picture) -> str:
    """Return the SHA-256 of a picture's content; empty if a file is unreadable or too large."""
    if not isinstance(picture.content, Path):
        return hashlib.sha256(picture.content()).hexdigest()
    with suppress(OSError):
        if picture.content.is_file() and not _is_too_large(picture.content):
            return files.sha256(picture.content)
    return ""


def _is_too_large(path: Path) -> bool:
    return path.stat().st_size > pictures.MAX_BYTES


def _write(
    packed: Sequence[Picture],
    decode_one: Callable[[Picture], NDArray[np.uint8] | str],
    preprocess: PreprocessConfig,
    to: Path,
    threads: int,
) -> dict[str, str]:
    """Decode pictures into one array file; return why pictures are unreadable, by their index.

    Args:
        packed: the pictures; an unreadable one is all 0 in the array.
        decode_one: returns a decoded picture, or the reason why it cannot be read.
        to: the array file.

    Raises:
        ConfigError: the pictures differ in size.
        DataError: no picture can be read, or the array exceeds the free disk space.
    """
    bad: dict[str, str] = {}
    whole: NDArray[np.uint8] | None = None
    first = ""
    at_once = DECODED_AT_ONCE
    if preprocess.size is None:  # a picture may have 90 million pixels
        at_once = threads

    # Decode some pictures in parallel, then write them in order
    starts = range(0, len(packed), at_once)
    with pictures.bombs_refused(), ThreadPoolExecutor(threads) as pool:
        for start in track(starts, f"Decoding {len(packed)} pictures"):
            some = packed[start : start + at_once]
            for index, image in enumerate(pool.map(decode_one, some), start):
                if isinstance(image, str):
                    bad[str(index)] = image
                    continue
                if whole is None:  # the first readable picture gives the shape of the array
                    shape = (len(packed), *image.shape)
                    _check_room(shape, preprocess.size, to.parent)
                    whole = np.lib.format.open_memmap(to, "w+", np.uint8, shape)
                    first = packed[index].name
                if image.shape != whole.shape[1:]:
                    raise ConfigError(
                        f"preprocess.size: got null, but the pictures differ in size ({first} is "
                        f"{_show_size(whole[0])}, {packed[index].name} {_show_size(image)}); "
                        "expected [height, width], or one number for both"
                    )
                whole[index] = image
    if whole is None:
        raise DataError(f"{packed[0].name}: cannot be read ({bad['0']}), like all others")
    whole.flush()  # type: ignore[attr-defined]
    return bad


def _show_size(image: NDArray[np.uint8]) -> str:
    height, width, _ = image.shape
    return f"{height}x{width}"


def _check_room(shape: tuple[int, ...], size: object, folder: Path) -> None:
    try:
        files.check_room(math.prod(shape), folder)
    except ValueError as error:
        got = "null" if size is None else size
        raise DataError(
            f"preprocess.size: got {got}, which makes {shape[0]:,} pictures of "
            f"{shape[1]}x{shape[2]}: {error}; expected a smaller size"
        ) from None


def _try_decode(
    picture: Picture, preprocess: PreprocessConfig, read: Read
) -> NDArray[np.uint8] | str:
    """Return the decoded picture, or the reason why it cannot be read."""
    content = picture.content
    try:
        if isinstance(content, Path):
            if not content.is_file():
                return "no such file"
            if content.stat().st_size == 0:
                return "it is empty"
            if _is_too_large(content):
                return f"it is larger than {pictures.MAX_BYTES:,} bytes"
            return read(content, preprocess)
        packed = content()
        if not packed:
            return "it is empty"
        return read(io.BytesIO(packed), preprocess)
    except Exception as error:  # Pillow raises a dozen types
        return one_line(error).replace(f" {str(content)!r}", "")


def _report(bad: Sequence[tuple[str, str]], on_bad: str, total: int) -> None:
    if not bad:
        return
    if on_bad == "error":
        name, reason = bad[0]
        others = f", and {len(bad) - 1} others" if len(bad) > 1 else ""
        raise DataError(
            f"{name}: cannot be read ({reason}){others}; data.on_bad=skip leaves it out"
        )
    listed = [f"{name} ({reason})" for name, reason in bad[:LISTED]]
    if len(bad) > LISTED:
        listed.append("...")
    log.warning("%d of %d pictures cannot be read: %s", len(bad), total, "; ".join(listed))


def resize_all(data: Dataset, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set with both splits resized or converted to grey, following `preprocess`.

    Raises:
        ConfigError: the samples are not pictures [N, H, W, 1 or 3] of uint8.
        DataError: see `pictures.fit`.
    """
    if not data.test.has_pictures or data.image_shape[2] not in (1, 3):
        setting = f"size: got {preprocess.size}"
        if preprocess.size is None:
            setting = f"channels: got {preprocess.channels}"
        raise ConfigError(
            f"preprocess.{setting}, expected pictures [N, height, width, 1 or 3] of uint8; "
            f"the samples are {data.test.stored.dtype} {data.image_shape}"
        )
    train = resize(data.train, preprocess, cache_root)
    test = resize(data.test, preprocess, cache_root)
    return replace(data, train=train, test=test)


def resize(split: Split, preprocess: PreprocessConfig, cache_root: Path) -> Split:
    """Return a split of uint8 pictures [N, H, W, 1 or 3], resized or converted to grey.

    Labels that are masks or target pictures are resized too.
    """
    settings = str(sorted(asdict(preprocess).items()))
    key: cache.Key = {"images": split.digest, "settings": settings, **_versions()}

    def resize_one(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        fitted = preprocess
        if image.shape[2] == 1:  # Pillow takes grey pictures without a channel axis
            image = image[..., 0]
            fitted = replace(preprocess, channels="grey")
        return pictures.to_array(pictures.fit(Image.fromarray(image), fitted))

    def make(folder: Path) -> None:
        shape = (len(split), *resize_one(split.stored[0]).shape)
        whole = np.lib.format.open_memmap(folder / "images.npy", "w+", np.uint8, shape)
        starts = range(0, len(split), AT_ONCE)
        with ThreadPoolExecutor(machine.threads(None)) as pool:
            for start in track(starts, f"Resizing {len(split)} pictures"):
                images = split.stored[start : start + AT_ONCE]
                whole[start : start + AT_ONCE] = list(pool.map(resize_one, images))
        whole.flush()

    folder = cache.entry(cache_root, "pictures", key, make)

    # Resize masks and targets in the same way as their pictures
    labels = split.labels
    if labels is not None and labels.dtype == np.uint8:
        if labels.ndim == 3:
            labels = np.stack([pictures.fit_mask(mask, preprocess) for mask in labels])
        else:
            labels = np.stack([resize_one(picture) for picture in labels])
    images = np.load(folder / "images.npy", mmap_mode="r")
    return replace(split, stored=images, labels=labels, hashes=None)
