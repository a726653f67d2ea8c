"""CIFAR-10's published Python files (https://www.cs.toronto.edu/~kriz/cifar.html).

Loading looks through them and reads labels alone; the images are read when they are asked for.
"""

import errno
import math
import os
import stat
import tarfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pooch
from numpy.typing import NDArray

from resnet8ptq.core.errors import DataError
from resnet8ptq.data import array_pickle
from resnet8ptq.data.array_pickle import Array, Span
from resnet8ptq.data.arrays import AT_ONCE, LazyImages

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
MD5 = "c58f30108f718f92721af3b95e74349a"
FOLDER = "cifar-10-batches-py"
IMAGE_SHAPE = (32, 32, 3)
CLASS_NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
BATCHES = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}


@dataclass(frozen=True)
class _Batch:
    """One file, and where its `count` images lie in it: each as three planes, R, G and B."""

    path: Path
    offset: int
    count: int
    size: int
    modified_ns: int

    def read(self, places: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the images [n, 32, 32, 3] at `places` [n].

        Raises:
            DataError: the file is gone, or is not the one that was looked through.
        """
        height, width, channels = IMAGE_SHAPE
        planes = np.empty((len(places), channels, height * width), np.uint8)
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1).tolist()  # of runs
        try:
            with self.path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                whole = (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)
                for start, end in pairwise([*starts, len(places)]):
                    run = planes[start:end]
                    file.seek(self.offset + int(places[start]) * planes[0].nbytes)
                    whole = whole and file.readinto(run.data) == run.nbytes
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error
        if not whole:
            raise DataError(f"{self.path}: it changed while it was in use")
        images = np.empty((len(places), height * width, channels), np.uint8)
        for channel in range(channels):  # four times as fast as one transposition
            images[:, :, channel] = planes[:, channel]
        return images.reshape(-1, *IMAGE_SHAPE)


@dataclass(frozen=True)
class StoredImages:
    """The images [N, 32, 32, 3] uint8 of several files, read when they are asked for."""

    batches: tuple[_Batch, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C)."""
        return (sum(batch.count for batch in self.batches), *IMAGE_SHAPE)

    def __getitem__(self, indices: NDArray[np.int64], /) -> NDArray[np.uint8]:
        images = np.empty((len(indices), *IMAGE_SHAPE), np.uint8)
        first = 0
        for batch in self.batches:
            here = np.flatnonzero((first <= indices) & (indices < first + batch.count))
            for start in range(0, len(here), AT_ONCE):
                chosen = here[start : start + AT_ONCE]
                images[chosen] = batch.read(indices[chosen] - first)
            first += batch.count
        return images


class _Untar(pooch.Untar):  # type: ignore[misc]
    """Refuses members outside of the folder, which pooch's own does from Python 3.12 on."""

    def _extract_file(self, fname: str, extract_dir: str) -> None:
        with tarfile.open(fname) as archive:
            archive.extractall(extract_dir, filter="data")


def fetch(folder: Path) -> Path:
    """Download and unpack CIFAR-10 below `folder`, or find it there; return the batches' folder.

    Raises whatever pooch and its downloader raise where it cannot be had.
    """
    members = pooch.retrieve(
        URL,
        known_hash=f"md5:{MD5}",
        path=folder,
        fname="cifar-10-python.tar.gz",
        processor=_Untar(extract_dir="cifar-10"),
        downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
    )
    return next(Path(member).parent for member in members if member.endswith("test_batch"))


def read_split(
    folder: Path, split: Literal["train", "test"]
) -> tuple[LazyImages, NDArray[np.int64]]:
    """Look through a split's files; return images [N, 32, 32, 3] and labels [N].

    A batch may hold any number of images. They stay in the files.

    Raises:
        DataError: a batch is missing, truncated, refused, or inconsistent; names the file.
    """
    batches, labels = zip(*(_read_batch(folder / name) for name in BATCHES[split]), strict=True)
    stored = StoredImages(batches)
    return LazyImages(stored, np.arange(stored.shape[0])), np.concatenate(labels)


def read_class_names(folder: Path) -> tuple[str, ...]:
    """Read the class names from `batches.meta`; without that file, the published ones."""
    path = folder / "batches.meta"
    if not path.exists():
        return CLASS_NAMES
    names = _read_dict(path)[0].get("label_names")
    if not isinstance(names, list) or len(names) != 10 or not all(map(_is_name, names)):
        raise DataError(f"{path}: label_names must be ten names")
    if len(set(names)) != len(names):
        raise DataError(f"{path}: label_names must be ten different names")
    return tuple(names)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= 100 and name.replace("_", "").isalnum()


def _read_batch(path: Path) -> tuple[_Batch, NDArray[np.int64]]:
    content, status = _read_dict(path)
    images, labels = content.get("data"), content.get("labels")
    pixels = math.prod(IMAGE_SHAPE)
    try:
        shape, span = images.locate() if isinstance(images, Array) else ((), Span(0, 0))
    except Exception as error:  # whatever a damaged state makes of itself
        raise DataError(f"{path}: `data` is damaged ({error})") from error
    if len(shape) != 2:
        raise DataError(f"{path}: `data` must be a uint8 array [N, {pixels}]")
    count = shape[0]
    if shape[1] != pixels or count == 0:
        raise DataError(f"{path}: `data` is {list(shape)}, must be [N, {pixels}]")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: `labels` must be a list of integers")
    if len(labels) != count:
        raise DataError(f"{path}: {count} images but {len(labels)} labels")
    if not 0 <= min(labels) <= max(labels) <= 9:
        raise DataError(f"{path}: labels from {min(labels)} to {max(labels)}, must be in 0..9")
    batch = _Batch(path, span.offset, count, status.st_size, status.st_mtime_ns)
    return batch, np.array(labels, dtype=np.int64)


def _read_dict(path: Path) -> tuple[dict[str, Any], os.stat_result]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait, a device has no end
            raise OSError(errno.EINVAL, "it is no regular file")
        content = array_pickle.load(path)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # whatever a damaged or hostile pickle makes of itself
        reason = str(error)[:300]  # it may quote the file
        raise DataError(f"{path}: not a CIFAR-10 batch, or damaged ({reason})") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a batch")
    return content, status
