"""Many pictures, decoded in threads, once, into the cache."""

import hashlib
import io
import json
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core import cache, code, files, machine
from resnet8ptq.core.console import track
from resnet8ptq.core.errors import DataError, SizesDifferError
from resnet8ptq.core.text import one_line
from resnet8ptq.data import pictures
from resnet8ptq.data.lazy import Images, LazyImages

log = logging.getLogger(__name__)

AT_ONCE = 64  # pictures that are held until they are written
LISTED = 10  # unreadable pictures that are named


@dataclass(frozen=True)
class Picture:
    """A picture that is not decoded yet.

    Attributes:
        name: what a message calls it.
        content: its file, or what returns its bytes.
    """

    name: str
    content: Path | Callable[[], bytes]


def decode(
    found: Sequence[Picture], preprocess: PreprocessConfig, on_bad: str, cache_root: Path
) -> tuple[Images, NDArray[np.int64]]:
    """Return the readable pictures [N, H, W, C], and their places in `found`.

    Args:
        on_bad: `error`, or `skip`: the others are counted, listed and left out.

    Raises:
        SizesDifferError: they differ in size, and `preprocess.size` is not set.
        DataError: one cannot be read, or with `skip` none.
    """
    threads = machine.threads(None)
    with ThreadPoolExecutor(threads) as pool:
        hashes = list(pool.map(_hash, found))
    shaping = ("size", "resize", "crop_fraction", "filter", "pad")
    settings = {key: value for key, value in asdict(preprocess).items() if key in shaping}
    key: cache.Key = {
        "pictures": json.dumps(hashes),
        "settings": json.dumps([settings, preprocess.channels == "grey"]),
        "code": code.behind(__name__),
        "pillow": version("pillow"),
    }

    def make(entry: Path) -> None:
        bad = _write(found, preprocess, entry / "images.npy", threads)
        (entry / "bad.json").write_text(json.dumps(bad))

    entry = cache.entry(cache_root, "pictures", key, make)
    bad = json.loads((entry / "bad.json").read_text())
    _report([(found[int(place)].name, reason) for place, reason in bad.items()], on_bad, len(found))
    whole = np.load(entry / "images.npy", mmap_mode="r")
    good = np.array([place for place in range(len(found)) if str(place) not in bad], np.int64)
    return (LazyImages(whole, good) if bad else whole), good


def _hash(picture: Picture) -> str:
    """Return the SHA-256 of its content; empty where there is no such file."""
    if not isinstance(picture.content, Path):
        return hashlib.sha256(picture.content()).hexdigest()
    try:
        return files.sha256(picture.content) if picture.content.is_file() else ""
    except OSError:
        return ""


def _write(
    found: Sequence[Picture], preprocess: PreprocessConfig, to: Path, threads: int
) -> dict[str, str]:
    """Decode into one array file; return what is wrong, by place."""
    bad: dict[str, str] = {}
    whole: NDArray[np.uint8] | None = None
    first = ""
    decode_one = partial(_try_decode, preprocess=preprocess)
    at_once = threads if preprocess.size is None else AT_ONCE  # each may have 90 million pixels
    with pictures.bombs_refused(), ThreadPoolExecutor(threads) as pool:
        for start in track(range(0, len(found), at_once), f"Decoding {len(found)} pictures"):
            some = found[start : start + at_once]
            for place, image in enumerate(pool.map(decode_one, some), start):
                if isinstance(image, str):
                    bad[str(place)] = image
                    continue
                if whole is None:
                    shape = (len(found), *image.shape)
                    _check_room(shape, preprocess.size, to.parent)
                    whole = np.lib.format.open_memmap(to, "w+", np.uint8, shape)
                    first = found[place].name
                if image.shape != whole.shape[1:]:
                    sizes = [
                        f"{height}x{width}" for height, width, _ in (whole[0].shape, image.shape)
                    ]
                    raise sizes_differ(f"{first} is {sizes[0]}, {found[place].name} {sizes[1]}")
                whole[place] = image
    if whole is None:
        raise DataError(f"{found[0].name}: cannot be read ({bad['0']}), and neither can any other")
    whole.flush()  # type: ignore[attr-defined]
    return bad


def _check_room(shape: tuple[int, ...], size: object, folder: Path) -> None:
    try:
        files.check_room(math.prod(shape), folder)
    except ValueError as error:
        got = "null" if size is None else size
        raise DataError(
            f"preprocess.size: got {got}, which makes {shape[0]:,} pictures of "
            f"{shape[1]}x{shape[2]}: {error}; takes a smaller size"
        ) from None


def _try_decode(picture: Picture, preprocess: PreprocessConfig) -> NDArray[np.uint8] | str:
    """Return the picture, or what is wrong with it."""
    content = picture.content
    try:
        if isinstance(content, Path):
            if not content.is_file():
                return "no such file"
            if content.stat().st_size == 0:
                return "it is empty"
            return pictures.decode(content, preprocess)
        packed = content()
        return pictures.decode(io.BytesIO(packed), preprocess) if packed else "it is empty"
    except Exception as error:  # Pillow's own, of a dozen kinds
        return one_line(error).replace(f" {str(content)!r}", "")


def sizes_differ(what: str) -> SizesDifferError:
    """Return the error for pictures of several sizes."""
    return SizesDifferError(
        f"preprocess.size: got null, but the pictures differ in size ({what}); "
        "takes [height, width], or one number for both"
    )


def _report(bad: Sequence[tuple[str, str]], on_bad: str, total: int) -> None:
    if not bad:
        return
    if on_bad == "error":
        (name, reason), more = bad[0], f", and {len(bad) - 1} others" if len(bad) > 1 else ""
        raise DataError(f"{name}: cannot be read ({reason}){more}; data.on_bad=skip leaves it out")
    listed = "; ".join(f"{name} ({reason})" for name, reason in bad[:LISTED])
    more = "; ..." if len(bad) > LISTED else ""
    log.warning("%d of %d pictures cannot be read: %s%s", len(bad), total, listed, more)
