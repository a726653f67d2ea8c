"""`data=cifar10`: CIFAR-10's Python files (https://www.cs.toronto.edu/~kriz/cifar.html)."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pooch
from numpy.typing import NDArray

from resnet8ptq.config.schema import DataConfig, PreprocessConfig
from resnet8ptq.core import cache, files
from resnet8ptq.core.errors import DataError
from resnet8ptq.core.text import one_line
from resnet8ptq.data.dataset import SIDES, Dataset, Side, load_cached
from resnet8ptq.data.sources import array_pickle
from resnet8ptq.data.sources.array_pickle import Array

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
FOLDER = "cifar-10-batches-py"
PIXELS = 3 * 32 * 32
MAX_BYTES = 2**28  # largest file; the published files have 2**25 bytes
CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
BATCHES: dict[Side, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}


def load(config: DataConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set in the folder `data.root`; the cache keeps its samples.

    Raises:
        DataError: a batch is missing, or a file is damaged or unsuitable; the message names it.
    """
    folder = Path(str(config.root))
    keys: dict[Side, cache.Key] = {side: digests(folder, side, cache_root) for side in SIDES}
    names = read_class_names(folder)
    read = partial(read_split, folder)
    return load_cached("cifar10", names, str(folder), read, keys, __name__, cache_root)


def fetch(folder: Path) -> Path:
    """Return the folder of the batches, downloaded and unpacked below `folder` if necessary.

    Raises:
        Exception: downloading or unpacking failed; pooch and its libraries raise many types.
    """
    members = pooch.retrieve(
        URL,
        known_hash=f"md5:{MD5}",
        path=folder,
        fname="cifar-10-python.tar.gz",
        processor=pooch.Untar(extract_dir="cifar-10"),
        downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
    )
    test_batches = [Path(member) for member in members if member.endswith("test_batch")]
    return test_batches[0].parent


def digests(folder: Path, split: Side, cache_root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a split by name, cached under the states of the files.

    Raises:
        DataError: a batch is missing, or cannot be read; the message names the file.
    """
    states = {str(folder / name): _read_state(folder / name) for name in BATCHES[split]}

    def make(entry: Path) -> None:
        hashes = {name: hashlib.sha256(_read(folder / name)).hexdigest() for name in BATCHES[split]}
        (entry / "sha256.json").write_text(json.dumps(hashes))

    entry = cache.entry(cache_root, "cifar10_sha256", states, make)
    return dict(json.loads((entry / "sha256.json").read_text()))


def read_split(folder: Path, split: Side) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images [N, 32, 32, 3] and labels [N] from a split's files.

    Each batch needs at least one image.

    Raises:
        DataError: a batch is missing, damaged or unsuitable; the message names the file.
    """
    planes, labels = zip(*(_read_batch(folder / name) for name in BATCHES[split]), strict=True)
    images = np.concatenate(planes).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.concatenate(labels)


def read_class_names(folder: Path) -> tuple[str, ...]:
    """Return the class names in `batches.meta`; without that file, the published names.

    Raises:
        DataError: the file is damaged, or does not hold ten different names of letters, digits and
            `_`.
    """
    path = folder / "batches.meta"
    if not path.exists():
        return CLASS_NAMES
    stored: Any = _read_dict(path).get("label_names")
    names = []
    if isinstance(stored, list):
        names = [name for name in stored if _is_name(name)]
    if names != stored or len(names) != 10 or len(set(names)) != 10:
        raise DataError(f"{path}: label_names must be ten different names")
    return tuple(names)


def _is_name(value: object) -> bool:
    """Return whether a value is a text of 1 to 100 letters, digits and `_`, not only of `_`."""
    if not isinstance(value, str):
        return False
    return re.fullmatch(r"(?=.*[^\W_])\w{1,100}", value) is not None


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images of a batch, [N, 3072] in planes R, G and B, and its labels [N].

    Raises:
        DataError: the file is missing or damaged, or is not a batch of CIFAR-10.
    """
    content = _read_dict(path)
    data = content.get("data")
    labels = content.get("labels")
    try:
        planes = cast(Array, data).to_numpy()
    except Exception as error:  # damaged data may raise any type
        reason = f"`data` must be a uint8 array [N, {PIXELS}] ({one_line(error)})"
        raise DataError(f"{path}: {reason}") from error
    if planes.ndim != 2 or planes.shape[1] != PIXELS or len(planes) == 0:
        raise DataError(f"{path}: `data` is {list(planes.shape)}, must be [N, {PIXELS}]")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: `labels` must be a list of integers")
    if len(labels) != len(planes):
        raise DataError(f"{path}: {len(planes)} images but {len(labels)} labels")
    if not 0 <= min(labels) <= max(labels) <= 9:
        raise DataError(f"{path}: labels from {min(labels)} to {max(labels)}, must be in 0..9")
    return planes, np.array(labels, dtype=np.int64)


def _read_dict(path: Path) -> dict[str, Any]:
    content = _read(path)
    try:
        batch = array_pickle.loads(content)
    except Exception as error:  # a damaged or hostile pickle may raise any type
        reason = one_line(error)
        raise DataError(f"{path}: not a CIFAR-10 batch, or damaged ({reason})") from None
    if not isinstance(batch, dict):
        raise DataError(f"{path}: got a {type(batch).__name__}, expected a CIFAR-10 batch, a dict")
    return batch


def _read_state(path: Path) -> str:
    """Return inode, size and times of a file; a change of its content changes some of them."""
    with _named(path):
        state = path.stat()
    return f"{state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}"


def _read(path: Path) -> bytes:
    with _named(path):
        return files.read_bytes(path, MAX_BYTES)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
