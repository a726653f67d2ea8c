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


@dataclass(frozen=True)
class Picture:
    """A picture before decoding.

    Attributes:
        name: its name in messages.
        content: the path of its file, or a function that returns its bytes.
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
        DataError: a picture cannot be read; with `skip`, no picture can.
    """
    threads = machine.threads(None)
    with ThreadPoolExecutor(threads) as pool:
        hashes = list(pool.map(_hash, packed))
    shaping = ("size", "resize", "crop_fraction", "filter", "pad")
    settings = {key: value for key, value in asdict(preprocess).items() if key in shaping}
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

    # Leave out those that cannot be read
    bad = json.loads((entry / "bad.json").read_text())
    _report([(packed[int(i)].name, reason) for i, reason in bad.items()], on_bad, len(packed))
    whole = np.load(entry / "images.npy", mmap_mode="r")
    good = np.array([i for i in range(len(packed)) if str(i) not in bad], np.int64)
    return (LazySamples(whole, good) if bad else whole), good


def differ_in_size(packed: Sequence[Picture]) -> bool:
    """Return whether readable pictures differ in size, by the headers of their files.

    Nothing is decoded, and the first other size ends it. `decode` reports unreadable pictures.
    """
    threads = machine.threads(None)
    sizes: set[tuple[int, int]] = set()
    with pictures.bombs_refused(), ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(packed), HEADERS_AT_ONCE):
            read = pool.map(_read_size, packed[start : start + HEADERS_AT_ONCE])
            sizes.update(size for size in read if size is not None)
            if len(sizes) > 1:
                return True
    return False


def _read_size(picture: Picture) -> tuple[int, int] | None:
    content = picture.content
    with suppress(Exception):  # Pillow raises a dozen types
        if not isinstance(content, Path):
            return pictures.read_size(io.BytesIO(content()))
        return pictures.read_size(content) if content.is_file() else None
    return None


def _versions() -> dict[str, str]:
    return {"code": code.behind(__name__), "pillow": version("pillow")}


def _hash(picture: Picture) -> str:
    """Return the SHA-256 of a picture's content; empty for a missing file."""
    if not isinstance(picture.content, Path):
        return hashlib.sha256(picture.content()).hexdigest()
    try:
        is_read = picture.content.is_file() and not _is_too_large(picture.content)
        return files.sha256(picture.content) if is_read else ""
    except OSError:
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
    """Decode into one array file; return the reason for each unreadable picture, by index."""
    bad: dict[str, str] = {}
    whole: NDArray[np.uint8] | None = None
    first = ""
    # Without a size, each picture may have 90 million pixels.
    at_once = threads if preprocess.size is None else DECODED_AT_ONCE
    with pictures.bombs_refused(), ThreadPoolExecutor(threads) as pool:
        for start in track(range(0, len(packed), at_once), f"Decoding {len(packed)} pictures"):
            some = packed[start : start + at_once]
            for index, image in enumerate(pool.map(decode_one, some), start):
                if isinstance(image, str):
                    bad[str(index)] = image
                    continue
                if whole is None:
                    shape = (len(packed), *image.shape)
                    _check_room(shape, preprocess.size, to.parent)
                    whole = np.lib.format.open_memmap(to, "w+", np.uint8, shape)
                    first = packed[index].name
                if image.shape != whole.shape[1:]:
                    sizes = [f"{high}x{wide}" for high, wide, _ in (whole[0].shape, image.shape)]
                    raise ConfigError(
                        f"preprocess.size: got null, but the pictures differ in size ({first} is "
                        f"{sizes[0]}, {packed[index].name} {sizes[1]}); expected [height, width], "
                        "or one number for both"
                    )
                whole[index] = image
    if whole is None:
        raise DataError(f"{packed[0].name}: cannot be read ({bad['0']}), and neither can any other")
    whole.flush()  # type: ignore[attr-defined]
    return bad


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
        return read(io.BytesIO(packed), preprocess) if packed else "it is empty"
    except Exception as error:  # Pillow raises a dozen types
        return one_line(error).replace(f" {str(content)!r}", "")


def _report(bad: Sequence[tuple[str, str]], on_bad: str, total: int) -> None:
    if not bad:
        return
    if on_bad == "error":
        (name, reason), more = bad[0], f", and {len(bad) - 1} others" if len(bad) > 1 else ""
        raise DataError(f"{name}: cannot be read ({reason}){more}; data.on_bad=skip leaves it out")
    listed = "; ".join(f"{name} ({reason})" for name, reason in bad[:LISTED])
    more = "; ..." if len(bad) > LISTED else ""
    log.warning("%d of %d pictures cannot be read: %s%s", len(bad), total, listed, more)


def resize_all(data: Dataset, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set with its pictures resized or converted to grey, as `preprocess` sets.

    Raises:
        ConfigError: the samples are not pictures.
    """
    if not data.test.has_pictures or data.image_shape[2] not in (1, 3):
        sized = preprocess.size is not None
        key, got = ("size", preprocess.size) if sized else ("channels", preprocess.channels)
        raise ConfigError(
            f"preprocess.{key}: got {got}, expected pictures [N, height, width, 1 or 3] of uint8; "
            f"the samples are {data.test.stored.dtype} {data.image_shape}"
        )
    train, test = (resize(split, preprocess, cache_root) for split in (data.train, data.test))
    return replace(data, train=train, test=test)


def resize(split: Split, preprocess: PreprocessConfig, cache_root: Path) -> Split:
    """Return a split of uint8 pictures [N, H, W, 1 or 3], resized or grey as set."""
    settings = str(sorted(asdict(preprocess).items()))
    key: cache.Key = {"images": split.digest, "settings": settings, **_versions()}
    if split.stored.shape[3] == 1:
        preprocess = replace(preprocess, channels="grey")

    def resize_one(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        squeezed = image[..., 0] if image.shape[2] == 1 else image
        return pictures.to_array(pictures.fit(Image.fromarray(squeezed), preprocess))

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
    labels = split.labels
    if labels is not None and labels.dtype == np.uint8:  # masks, or pictures
        fit = partial(pictures.fit_mask, preprocess=preprocess) if labels.ndim == 3 else resize_one
        labels = np.stack([fit(label) for label in labels])
    images = np.load(folder / "images.npy", mmap_mode="r")
    return replace(split, stored=images, labels=labels, hashes=None)
