"""CIFAR-10's published Python files (https://www.cs.toronto.edu/~kriz/cifar.html).

The files are pickles. They are read by an unpickler that knows the parts of a uint8 array and
nothing else, so that a file made to run code is refused before it runs.
"""

import pickle
import pickletools
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pooch
from numpy.typing import NDArray

from resnet8ptq.errors import DataError

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


class _Dtype:
    """Stands for numpy.dtype, and keeps its arguments: `u1`, 0, 1 for uint8."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Byte order and flags, of which one byte has nothing to say."""


class _Array:
    """Stands for a numpy array, and keeps what it would be made of."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def build(self) -> NDArray[np.uint8]:
        """Return the array, if it is what the published files hold; raise if it is not."""
        _, shape, dtype, fortran_order, content = self.state
        if not isinstance(dtype, _Dtype) or dtype.args[0] != "u1" or fortran_order:
            raise ValueError("it is no uint8 array in C order")
        if isinstance(content, str):  # Python 2's bytes
            content = content.encode("latin1")
        return np.frombuffer(content, np.uint8).reshape(shape)


def _ndarray(*args: Any) -> Any:
    """Stands for the class itself, which the files name and never call."""
    raise pickle.UnpicklingError("it builds an array by itself")


# What the published files ask for, under numpy 1's and numpy 2's module names. None of it is
# numpy's own, whose array and dtype take whatever state a pickle gives them, and crash on some.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Admits the parts of a uint8 array; refuses every other global."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def fetch(folder: Path) -> Path:
    """Download and unpack CIFAR-10 below `folder`, or find it there; return the batches' folder.

    Raises whatever pooch and its downloader raise where it cannot be had.
    """
    members = pooch.retrieve(
        URL,
        known_hash=f"md5:{MD5}",
        path=folder,
        fname="cifar-10-python.tar.gz",
        processor=pooch.Untar(extract_dir="cifar-10"),
        downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
    )
    return next(Path(member).parent for member in members if member.endswith("test_batch"))


def read_split(
    folder: Path, split: Literal["train", "test"]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read images [N, 32, 32, 3] and labels [N]; a batch may hold any number of images.

    Raises:
        DataError: a batch is missing, truncated, refused, or inconsistent; names the file.
    """
    batches = [_read_batch(folder / name) for name in BATCHES[split]]
    images, labels = zip(*batches, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def read_class_names(folder: Path) -> tuple[str, ...]:
    """Read the class names from `batches.meta`; without that file, the published ones."""
    path = folder / "batches.meta"
    if not path.exists():
        return CLASS_NAMES
    names = _read_dict(path).get("label_names")
    if not isinstance(names, list) or len(names) != 10 or not all(map(_is_name, names)):
        raise DataError(f"{path}: label_names must be ten names")
    if len(set(names)) != len(names):
        raise DataError(f"{path}: label_names must be ten different names")
    return tuple(names)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.replace("_", "").isalnum()


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    batch = _read_dict(path)
    images, labels = batch.get("data"), batch.get("labels")
    width = int(np.prod(IMAGE_SHAPE))
    try:
        images = images.build() if isinstance(images, _Array) else None
    except Exception as error:  # whatever a damaged state makes of itself
        raise DataError(f"{path}: `data` is damaged ({error})") from error
    if images is None or images.ndim != 2:
        raise DataError(f"{path}: `data` must be a uint8 array [N, {width}]")
    if images.shape[1] != width or len(images) == 0:
        raise DataError(f"{path}: `data` is {list(images.shape)}, must be [N, {width}]")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(f"{path}: `labels` must be a list of integers")
    if len(labels) != len(images):
        raise DataError(f"{path}: {len(images)} images but {len(labels)} labels")
    if not 0 <= min(labels) <= max(labels) <= 9:
        raise DataError(f"{path}: labels from {min(labels)} to {max(labels)}, must be in 0..9")
    channels, height, columns = IMAGE_SHAPE[2], IMAGE_SHAPE[0], IMAGE_SHAPE[1]
    planes = images.reshape(-1, channels, height, columns)  # stored as planes: R, G, B
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), np.array(labels, dtype=np.int64)


def _check_memo(file: BinaryIO, size: int) -> None:
    """Refuse a memo index beyond the file's size: the unpickler makes a table of that length."""
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("LONG_BINPUT", "PUT") and int(argument or 0) > size:
            raise pickle.UnpicklingError("its memo is larger than the file")
    file.seek(0)


def _read_dict(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            _check_memo(file, path.stat().st_size)
            content = _ArrayUnpickler(file, encoding="latin1").load()
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # whatever a damaged or hostile pickle makes of itself
        raise DataError(f"{path}: not a CIFAR-10 batch, or damaged ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: holds a {type(content).__name__}, not a batch")
    return content
